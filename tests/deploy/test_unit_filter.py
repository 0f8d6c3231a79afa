"""The daemon does all its work under the system calls that the systemd unit lets it make."""

from __future__ import annotations

import ctypes.util
import errno
import json
import sys
from pathlib import Path

import pytest

from kvtierd.testing.daemon_rig import DaemonRig, chain, load, store
from kvtierd.testing.local_daemon import short_folder

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "kvtierd.service"
WRAPPER = """#!{python}
import ctypes, json, os, sys
allowed, refusal = json.loads({filter!r})
lib = ctypes.CDLL({library!r})
lib.seccomp_init.restype = ctypes.c_void_p
lib.seccomp_rule_add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint]
lib.seccomp_load.argtypes = [ctypes.c_void_p]
context = lib.seccomp_init(refusal)
for name in allowed:
    number = lib.seccomp_syscall_resolve_name(name.encode())
    if number >= 0:
        assert lib.seccomp_rule_add(context, 0x7fff0000, number, 0) == 0, name
assert lib.seccomp_load(context) == 0
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""
KILL = 0x80000000
"""What systemd does with a call that is not allowed, unless the unit names an error."""


def groups(listing: str) -> dict[str, set[str]]:
    """Return the groups of ``systemd-analyze syscall-filter`` with their direct members."""
    found: dict[str, set[str]] = {}
    members: set[str] = set()
    for line in listing.splitlines():
        if line.startswith("@"):
            members = found.setdefault(line.strip(), set())
        elif line.startswith("    ") and not line.strip().startswith("#"):
            members.add(line.strip())
    return found


def allowed(unit: str, known: dict[str, set[str]]) -> set[str]:
    """Return the calls that a unit's allow-list leaves; ``@default`` is in every one."""

    def expand(name: str) -> set[str]:
        return set().union(*map(expand, known[name])) if name.startswith("@") else {name}

    calls = expand("@default")
    for line in unit.splitlines():
        if line.startswith("SystemCallFilter="):
            words = line.partition("=")[2]
            named = set().union(*map(expand, words.removeprefix("~").split()))
            calls = calls - named if words.startswith("~") else calls | named
    return calls


def refusal(unit: str) -> int:
    """Return libseccomp's action for all other calls."""
    names = [
        line.partition("=")[2] for line in unit.splitlines() if line.startswith("SystemCallErrorNumber=")
    ]
    return 0x00050000 | getattr(errno, names[-1]) if names else KILL


def test_a_daemon_stores_restarts_and_loads_under_the_units_system_call_filter(need, run, tmp_path):
    listing = run(need("systemd-analyze", "systemd"), "syscall-filter")
    library = ctypes.util.find_library("seccomp")
    if library is None:
        pytest.skip("libseccomp is not installed: apt-get install libseccomp2")
    unit = UNIT.read_text()
    calls = allowed(unit, groups(listing))
    assert "mount" not in calls
    wrapper = tmp_path / "python"
    rules = json.dumps([sorted(calls), refusal(unit)])
    wrapper.write_text(WRAPPER.format(python=sys.executable, filter=rules, library=library))
    wrapper.chmod(0o755)
    with short_folder("unit") as folder:
        rig = DaemonRig(folder, python=str(wrapper))
        try:
            rig.start()
            with rig.attach() as session:
                assert len(store(session, chain(32))) == 32
            rig.restart()
            with rig.attach() as session:
                assert load(session, chain(32)) == ["disk"] * 32
        finally:
            rig.close()
