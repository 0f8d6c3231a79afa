"""What ships and is made from the code: completions, man pages, the tier file's JSON Schema.

``python -m kvtierd.testing.generated`` writes them; a test holds the shipped ones against the code. Making
them takes the libraries shtab and argparse-manpage (the ``test`` extra), using them takes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtierd import __version__
from kvtierd.cli.completion import SHELLS
from kvtierd.cli.main import COMMANDS, make_parser
from kvtierd.cli.schema import schema_of_the_tier_file
from kvtierd.errors import ExitCode

ROOT = Path(__file__).parents[2]
PYTHON = (3, 11)
"""argparse words its usage a little differently in each version: the files are made with this one."""
WIDTH = "100"
"""Columns that argparse is told of, so that what is made does not depend on a terminal."""


RELEASED = "November 29, 2026"
"""Of the pages: the day of the release, not that of the build."""


def every_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands with all their arguments."""
    os.environ["COLUMNS"] = WIDTH
    return make_parser(COMMANDS)[0]


def completion(shell: str) -> str:
    """Return the completion script for a shell."""
    import shtab

    return str(shtab.complete(every_parser(), shell)).rstrip() + "\n"


def command_page() -> str:
    """Return kvtierd(8): every command and argument."""
    from argparse_manpage.manpage import Manpage

    page = Manpage(every_parser())
    page.section, page.manual, page.source = "8", "kvtierd", f"kvtierd {__version__}"
    page.description = "KV-cache tier daemon for LLM inference engines"
    page.date = RELEASED
    # A line that a wrap lets begin with a quote would be taken for a command.
    text = re.sub(r"^'", r"\\&'", str(page).rstrip(), flags=re.MULTILINE)
    return "\n".join([text, *_exit_status(), *_environment(), *_see_also()]) + "\n"


def _exit_status() -> Iterator[str]:
    yield ".SH EXIT STATUS"
    for code in ExitCode:
        yield f".TP\n.B {int(code)}\n{code.meaning}"


def _environment() -> Iterator[str]:
    yield (
        ".SH ENVIRONMENT\n.TP\n.BI KVTIERD__ PATH__TO__KEY\n"
        "sets one key of the tier file, as in KVTIERD__POOL__BYTES=16GiB\n"
        ".TP\n.B NO_COLOR\nno colours, whatever its value"
    )


def _see_also() -> Iterator[str]:
    yield ".SH SEE ALSO\n.BR kvtierd.yaml (5)"


def file_page() -> str:
    """Return kvtierd.yaml(5): the commented tier file as it ships in ``config/full.yaml``."""
    lines = (ROOT / "config" / "full.yaml").read_text(encoding="utf-8").splitlines()
    escaped = [line.replace("\\", "\\e").replace("-", "\\-") for line in lines]
    body = "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in escaped)
    return (
        f'.TH KVTIERD.YAML 5 "{RELEASED}" "kvtierd {__version__}" "kvtierd"\n'
        ".SH NAME\nkvtierd.yaml \\- the tier file of kvtierd(8)\n"
        ".SH DESCRIPTION\nEvery key with its default and what it does. "
        "A file needs few of them: version, pool.bytes and tiers.\n.PP\n.nf\n"
        f"{body}\n.fi\n"
        ".SH SEE ALSO\n.BR kvtierd (8)\n"
    )


def schema() -> str:
    """Return the JSON Schema of the tier file, for editors."""
    return json.dumps(schema_of_the_tier_file(), indent=2) + "\n"


FILES: dict[str, Callable[[], str]] = {
    **{f"kvtierd/shipped/completion.{shell}": lambda shell=shell: completion(shell) for shell in SHELLS},  # type: ignore[misc]
    "kvtierd/shipped/kvtierd.8": command_page,
    "kvtierd/shipped/kvtierd.yaml.5": file_page,
    "config/tiers.schema.json": schema,
}
"""By the path from the repository's root: what makes the file."""


def main() -> None:
    """Write every file."""
    for name, make in FILES.items():
        path = ROOT / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
