"""What ships and is made from the code: completions, man pages, the tier file's JSON Schema, lists.

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
from kvtierd.testing import reference

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


METRICS = """# Metrics

`GET /metrics` on `admin.listen`. Names, types and labels are a promise
(`tests/golden/metrics_v1.json`). Every series is there from the start, at 0; no label grows with
what engines store or ask. Tenants are those of the tier file, or else the first 32 that come, and
`other`; ranks are those that attached a worker, from 64 on `other`. Beside these come the
`process_*` metrics of every Prometheus client.

`sum(kvtierd_tier_hits_total) + kvtierd_lookup_missed_blocks_total` is
`kvtierd_lookup_blocks_total`: each question of an engine counts once, and a promoted block counts
for the tier that it came from.

| name | type | labels | what |
|---|---|---|---|
"""
LOG = """# Log events

Lines on standard error; `log.format` in the tier file chooses JSON or text. A JSON line has `ts`
(UTC), `level`, `event`, `logger`, `message`, and the event's own fields. Names and fields are
stable, texts may change. `session` and `request` name what an engine was answered, `job` and
`generation` a store, `lease` a load, `op` an operation of a tier, whose `generations` lead back to
the stores. A warning that repeats is written 5 times in 30 seconds for each event and tier, then
counted (`left_out`).

| event | what |
|---|---|
"""


def metrics_page() -> str:
    """Return the list of all metrics."""
    from kvtierd.edges.metrics.exporter import FAMILIES

    rows = (
        f"| `{family.series}` | {family.kind.value} | {', '.join(family.labels)} | {family.help} |\n"
        for family in FAMILIES
    )
    return METRICS + "".join(rows)


def log_page() -> str:
    """Return the list of all events of the log."""
    from kvtierd.logs.events import EVENTS

    return LOG + "".join(f"| `{name}` | {text} |\n" for name, text in EVENTS.items())


FILES: dict[str, Callable[[], str]] = {
    **{f"kvtierd/shipped/completion.{shell}": lambda shell=shell: completion(shell) for shell in SHELLS},  # type: ignore[misc]
    "kvtierd/shipped/kvtierd.8": command_page,
    "kvtierd/shipped/kvtierd.yaml.5": file_page,
    "config/tiers.schema.json": schema,
    "kvtierd/edges/metrics/METRICS.md": metrics_page,
    "kvtierd/logs/EVENTS.md": log_page,
    "kvtierd/REFERENCE.md": lambda: reference.page(ROOT / "config" / "full.yaml"),
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
