"""What is made from the code and ships with it is current and what its readers can take."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import get_args

import pytest

from kvtierd.cli.completion import SHELLS
from kvtierd.cli.main import main
from kvtierd.config.fields import Section
from kvtierd.config.schema import TierFile
from kvtierd.errors import ExitCode
from kvtierd.testing.generated import FILES, PYTHON, ROOT
from kvtierd.testing.reference import keys

PAGES = [name for name in FILES if name.endswith((".8", ".5"))]


@pytest.mark.skipif(sys.version_info[:2] != PYTHON, reason="argparse words its help in another way")
@pytest.mark.parametrize("name", FILES)
def test_a_generated_file_is_what_the_code_would_make(name):
    made = FILES[name]()
    assert (ROOT / name).read_text() == made, "run: make generated"


@pytest.mark.parametrize("name", PAGES)
def test_mandoc_finds_nothing_wrong_in_a_page(name):
    if shutil.which("mandoc") is None:
        pytest.skip("mandoc is not installed: apt-get install mandoc")
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", ROOT / name], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_takes_its_completion(shell, capsys):
    assert main(["completion", shell]) == ExitCode.OK
    script = capsys.readouterr().out
    assert "events" in script
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([program, "-n"], input=script, text=True, check=True, timeout=20)


def test_the_manual_has_every_exit_code_with_its_meaning():
    page = (ROOT / "kvtierd" / "shipped" / "kvtierd.8").read_text()
    assert all(code.meaning in page for code in ExitCode)


def test_the_reference_has_every_key_of_the_tier_file():
    """What the schema has and the commented example has not would be missing without a word."""
    listed = {re.sub(r"\[\w*\]", "", key.path) for key in keys(ROOT / "config" / "full.yaml")}
    wanted = set(_fields(TierFile, ()))
    missing = {path for path in wanted if path not in listed}
    assert not missing - {"tiers.options"}, "options are what an added type takes"


def _fields(model, path):
    for name, field in model.model_fields.items():
        yield ".".join((*path, name))
        for section in _sections(field.annotation):
            yield from _fields(section, (*path, name))


def _sections(annotation):
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)
