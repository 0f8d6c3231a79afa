"""The command line: exit codes, where messages go, and what is not imported."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import kvtierd
from kvtierd.cli import main as main_module
from kvtierd.cli.main import COMMANDS, main
from kvtierd.config.load import load_tier_file
from kvtierd.config.schema import TierFile
from kvtierd.errors import ExitCode

EXAMPLES = Path(__file__).parents[2] / "config"
BAD = "version: 1\npool: { byte: 1GiB }\ntiers:\n  - { name: cpu, type: cpu }\n"


def imported_by(*arguments):
    """The modules that a fresh interpreter holds after a command."""
    code = (
        "import sys, contextlib, io\n"
        "from kvtierd.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    main({list(arguments)!r})\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    return set(done.stdout.split())


@pytest.fixture
def fake_command(monkeypatch, tmp_path):
    """Installs a command whose ``run`` has the given body."""

    def install(body):
        (tmp_path / "fake_kvtierd_command.py").write_text(
            "def add_parser(subparsers):\n    subparsers.add_parser('fake')\n"
            f"def run(args):\n    from kvtierd import errors\n    {body}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "fake_kvtierd_command", raising=False)
        monkeypatch.setattr(main_module, "COMMANDS", {**COMMANDS, "fake": ("fake_kvtierd_command", "a fake")})

    return install


def test_help_names_every_command_and_imports_nothing_heavy(capsys):
    assert main(["--help"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert all(re.search(rf"^ +{name} ", out, re.MULTILINE) for name in COMMANDS)
    loaded = imported_by("--help")
    assert not loaded & {"pydantic", "yaml", "zmq", "uvloop", "msgspec", "torch", "numpy", "asyncio"}


@pytest.mark.parametrize(
    "arguments", [[], ["nosuch"], ["--nosuch"], ["check"], ["version", "--nosuch"], ["check", "--config"]]
)
def test_wrong_usage_exits_64_and_says_so_on_stderr(capsys, arguments):
    assert main(arguments) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert (out, err[:14]) == ("", "usage: kvtierd")


def test_the_version_is_the_packages(capsys):
    assert main(["version"]) == main(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out == f"kvtierd {kvtierd.__version__}\n" * 2
    assert main(["version", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["kvtierd"] == kvtierd.__version__


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "kvtierd", "version"], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == f"kvtierd {kvtierd.__version__}\n"


def test_a_command_that_is_missing_breaks_no_other(monkeypatch, capsys):
    monkeypatch.setattr(main_module, "COMMANDS", {**COMMANDS, "bench": ("kvtierd.cli.not_there", "x")})
    assert main(["version"]) == ExitCode.OK
    assert main(["bench"]) == ExitCode.GENERIC
    assert "not part of this build" in capsys.readouterr().err


def test_a_command_that_lacks_a_package_names_it(fake_command, monkeypatch, capsys, tmp_path):
    fake_command("pass")
    (tmp_path / "fake_kvtierd_command.py").write_text("import no_such_package\n")
    assert main(["fake"]) == ExitCode.GENERIC
    assert "needs the package 'no_such_package'" in capsys.readouterr().err


def test_an_error_of_ours_is_one_message_and_its_own_exit_code(fake_command, capsys):
    fake_command("raise errors.TierError('disk', 'no room')")
    assert main(["fake"]) == ExitCode.IO
    assert capsys.readouterr() == ("", "kvtierd: tier 'disk': no room\n")


def test_a_bug_shows_its_traceback_and_exits_70(fake_command, capsys):
    fake_command("raise KeyError('bug')")
    assert main(["fake"]) == ExitCode.INTERNAL
    assert "Traceback" in capsys.readouterr().err


def test_the_commands_own_exit_code_is_passed_on(fake_command):
    fake_command("return errors.ExitCode.TEMPORARY")
    assert main(["fake"]) == 75


def test_a_reader_that_goes_away_is_no_failure():
    command = f"{sys.executable} -m kvtierd schema | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == ("{0\n", "")


@pytest.mark.parametrize("name", ["quickstart.yaml", "full.yaml"])
def test_check_accepts_the_examples(capsys, name):
    assert main(["check", "--config", str(EXAMPLES / name)]) == ExitCode.OK
    out, err = capsys.readouterr()
    assert (out.splitlines()[0], err) == (f"{EXAMPLES / name}: ok", "")


def test_check_says_what_it_read_and_what_it_did_not_try(capsys):
    assert main(["check", "--config", str(EXAMPLES / "quickstart.yaml")]) == ExitCode.OK
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  pool: 256MiB; tiers: cpu (cpu), disk (fs, at most 1GiB)",
        "  ports, memory and paths are tried at start, not here",
    ]


def test_check_exits_78_with_the_place_of_the_mistake_on_stderr(capsys, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(BAD)
    assert main(["check", "--config", str(path)]) == ExitCode.CONFIG
    assert capsys.readouterr() == (
        "",
        f"{path}:2: pool.byte: unknown key; did you mean 'bytes'?\n",
    )
    assert main(["check", "--config", str(path), "--json"]) == ExitCode.CONFIG
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], len(answer["errors"])) == (False, 1)


def test_check_refuses_an_unknown_variable(capsys, monkeypatch):
    """L89."""
    monkeypatch.setenv("KVTIERD__POOL__BITES", "1GiB")
    assert main(["check", "--config", str(EXAMPLES / "quickstart.yaml")]) == ExitCode.CONFIG
    assert "env KVTIERD__POOL__BITES: pool.bites: unknown key" in capsys.readouterr().err


def test_check_prints_every_value_with_its_origin(capsys, monkeypatch):
    """L89."""
    monkeypatch.setenv("KVTIERD__POOL__BYTES", "64MiB")
    path = str(EXAMPLES / "quickstart.yaml")
    assert main(["check", "--config", path, "--print-effective"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert re.search(r"^  bytes: 64MiB +# env KVTIERD__POOL__BYTES$", out, re.MULTILINE)
    assert re.search(r"^    max_bytes: 1GiB +# .*quickstart\.yaml:\d+$", out, re.MULTILINE)
    assert re.search(r"^  heartbeat: 5s +# default$", out, re.MULTILINE)
    assert main(["check", "--config", path, "--print-effective", "--json"]) == ExitCode.OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["effective"] == yaml.safe_load(out)
    assert answer["origins"]["pool.bytes"] == "env KVTIERD__POOL__BYTES"


def test_check_warns_on_stderr_and_still_accepts(capsys, monkeypatch):
    monkeypatch.setenv("KVTIERD__TIERS__1__MAX_BYTES", "unlimited")
    assert main(["check", "--config", str(EXAMPLES / "quickstart.yaml")]) == ExitCode.OK
    assert "warning: tier 'disk': max_bytes is unlimited" in capsys.readouterr().err


def test_the_json_schema_names_every_key_and_refuses_others(capsys):
    assert main(["schema"]) == ExitCode.OK
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"].keys() == TierFile.model_fields.keys()
    assert schema["additionalProperties"] is False
    fs = schema["$defs"]["FsTier"]
    assert fs["additionalProperties"] is False
    assert {"name", "path", "max_bytes"} <= set(fs["required"])
    assert schema["$defs"]["CpuTier"]["properties"].keys() == {"name", "type", "policy", "events"}


def test_the_patterns_of_the_json_schema_agree_with_the_examples(capsys):
    """A schema for editors must not mark a right file as wrong."""
    assert main(["schema"]) == ExitCode.OK
    size = json.loads(capsys.readouterr().out)["$defs"]["Pool"]["properties"]["bytes"]
    pattern = next(option["pattern"] for option in size["anyOf"] if "pattern" in option)
    for name in ("quickstart.yaml", "full.yaml"):
        assert re.search(pattern, yaml.safe_load((EXAMPLES / name).read_text())["pool"]["bytes"])
        assert load_tier_file(EXAMPLES / name, {})


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["inventry"], "did you mean 'inventory'?"),
        (["status", "--jsno"], "did you mean '--json'?"),
        (["bench", "tires"], "did you mean 'tiers'?"),
        (["bench", "rpc", "--jsonn"], "did you mean '--json'?"),
        (["log-level", "infoo"], "did you mean 'info'?"),
        (["xyzzy"], "see kvtierd --help"),
    ],
)
def test_a_command_option_or_choice_that_is_misspelt_is_answered_with_the_nearest(capsys, arguments, meant):
    assert main(arguments) == ExitCode.USAGE
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["log-level"],
        ["drain"],
        ["reload"],
        ["reset", "--all", "--dry-run"],
        ["evict", "--tier", "cpu", "--blocks", "1"],
        ["inventory"],
    ],
)
def test_what_asks_a_daemon_imports_no_more_than_the_client_needs(command, tmp_path):
    """So that it starts within 150 ms where nothing else runs (pydantic alone would take 200)."""
    code = (
        "import sys, contextlib, io\n"
        "from kvtierd.cli.main import main\n"
        "with contextlib.redirect_stderr(io.StringIO()):\n"
        f"    assert main({[*command, '--socket', str(tmp_path / 'none')]!r}) == {ExitCode.UNAVAILABLE:d}\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    heavy = {"pydantic", "zmq", "yaml", "asyncio", "torch", "numpy", "prometheus_client", "uvloop", "rich"}
    assert not heavy & set(done.stdout.split())
