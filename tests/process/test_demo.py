"""``kvtierd demo`` as a user runs it: a real daemon, real bytes, and a verdict."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.testing.clock import wait_for
from kvtierd.testing.local_daemon import short_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SHORT = ["--seconds", "1", "--requests", "240"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvtierd", "demo", *arguments]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """An environment whose temporary folder is ours to look into."""
    with short_folder("test") as folder:
        yield {**os.environ, "TMPDIR": str(folder), "TERM": "xterm-256color", "NO_COLOR": ""}


def left_behind(environment: dict[str, str]) -> list[str]:
    """Folders that remain, and processes that still run on one of them."""
    folder = environment["TMPDIR"]
    running = [
        line
        for entry in Path("/proc").glob("[0-9]*/cmdline")
        if folder in (line := _read(entry)) and "serve" in line
    ]
    return [*map(str, Path(folder).iterdir()), *running]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_the_demo_proves_bytes_tiers_and_events(environment: dict[str, str]) -> None:
    done = subprocess.run(
        command("--json", *SHORT), env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["ok"]
    assert summary["requests"] == 240
    assert summary["blocks"]["wrong"] == 0
    assert summary["bytes"]["verified"] == sum(summary["blocks"]["loaded"].values()) * (64 << 10)
    for tier in ("cpu", "disk"):
        assert summary["blocks"]["loaded"][tier] > 0
        assert summary["tiers"][tier]["equal"]
        assert summary["tiers"][tier]["router"] == summary["tiers"][tier]["daemon"] > 0
        assert summary["tiers"][tier]["evicted"] > 0
    assert left_behind(environment) == []


def test_piped_it_prints_plain_lines(environment: dict[str, str]) -> None:
    done = subprocess.run(
        command(*SHORT), env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert done.stdout.count("equal") == 2
    *progress, last = done.stdout.splitlines()
    assert any("240 of 240 requests" in line for line in progress)
    assert max(map(len, progress)) <= 110
    assert re.fullmatch(
        r"OK: [0-9.]+ MiB loaded, every byte right; a router knows exactly what the daemon holds", last
    )


def test_a_run_that_proves_nothing_fails_and_says_why(environment: dict[str, str]) -> None:
    done = subprocess.run(
        command("--json", "--seconds", "0", "--requests", "2"),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "evicted nothing" in done.stderr
    assert not json.loads(done.stdout)["ok"]


def test_what_failed_is_the_last_line(environment: dict[str, str]) -> None:
    done = subprocess.run(
        command("--seconds", "0", "--requests", "2"),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1].startswith("FAILED: cpu: ")


def test_ended_by_a_signal_it_leaves_no_daemon_and_no_files(environment: dict[str, str]) -> None:
    demo = subprocess.Popen(
        command("--seconds", "60"), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert demo.stdout is not None
        assert b"requests" in demo.stdout.readline()
        demo.send_signal(signal.SIGTERM)
        rest, errors = demo.communicate(timeout=30)
    finally:
        demo.kill()
    assert demo.returncode == 130
    assert errors == b""
    assert rest.splitlines()[-1] == b"interrupted"
    assert b" of 600 requests" in rest.splitlines()[-2]
    assert left_behind(environment) == []


def test_on_a_terminal_it_draws_and_gives_the_screen_back(environment: dict[str, str]) -> None:
    master, slave = pty.openpty()
    with subprocess.Popen(command(*SHORT), env=environment, stdout=slave, stderr=slave) as demo:
        os.close(slave)
        drawn = bytearray()

        def ended() -> bool:
            try:
                drawn.extend(os.read(master, 65536))
            except OSError:  # the terminal's other end is closed
                return True
            return False

        wait_for(ended, "the demo to end", timeout=100, poll=0)
    os.close(master)
    assert demo.returncode == 0, bytes(drawn)
    assert drawn.count(b"\x1b[?1049h") == drawn.count(b"\x1b[?1049l") == 1
    assert b"\x1b[36m" in drawn
    assert drawn.rfind(b"a router knows") > drawn.rfind(b"\x1b[?1049l")
    assert b"every byte right; a router knows exactly" in drawn.splitlines()[-1]
