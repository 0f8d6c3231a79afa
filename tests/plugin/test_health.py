"""What a probe sees of a daemon in which something hangs."""

from __future__ import annotations

import errno
import json
import os
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, chain, load, loose, store
from kvtierd.testing.local_daemon import free_port, short_folder

BACKEND = '''
from kvtierd.edges.backends.memory import MemoryBackend

class Hanging(MemoryBackend):
    """One verb opens a FIFO, which blocks in the kernel until somebody opens its other end."""

    def __init__(self, name, fifo, verb):
        super().__init__(name)
        self.fifo, self.verb = fifo, verb

    def write(self, transfers):
        if self.verb == "write":
            open(self.fifo, "rb").close()
        return super().write(transfers)

    def estimate(self, block):  # the core asks for this: in the loop's thread
        if self.verb == "estimate" and block.meta is not None:
            open(self.fifo, "rb").close()
        return super().estimate(block)

def make(name, options):
    return Hanging(name, options["fifo"], options["verb"])
'''


class Probed:
    """A daemon whose tier can hang, and its probes."""

    def __init__(self, folder: Path, verb: str) -> None:
        os.mkfifo(folder / "fifo")
        self.fifo = folder / "fifo"
        self.port = free_port()
        tier = {"name": "tape", "type": "hanging", "deadline": "30s"}
        tier["options"] = {"fifo": str(self.fifo), "verb": verb}
        self.rig = DaemonRig(folder, tiers=[tier], changes={"admin": {"listen": f"127.0.0.1:{self.port}"}})

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return the code and body of a probe."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except TimeoutError:  # the loop had accepted it before it hung
            return 0, {}

    def let_go(self) -> bool:
        """End the hang, once; whether there was one."""
        try:
            os.close(os.open(self.fifo, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return False
        return True


@pytest.fixture
def hanging(distribution, request):
    site = distribution("hanging-tiers", {"hanging": "hanging_tiers:make"})
    (site / "hanging_tiers.py").write_text(BACKEND)
    with short_folder("health") as folder:
        probed = Probed(folder, request.param)
        probed.rig.start()
        yield probed
        probed.rig.close()


@pytest.mark.parametrize("hanging", ["write"], indirect=True)
def test_a_tier_that_hangs_is_shown_within_a_second_and_engines_are_served(hanging):
    """Readiness is for what engines need: the pool."""
    made = chain(2)
    session = hanging.rig.attach()
    store(session, made)
    _, health = wait_for(
        lambda: (found := hanging.get("/readyz"))[1]["hanging"] and found, "the hang to be seen", timeout=5
    )
    assert 1.0 < health["hanging"]["tier tape"] < 3.0
    assert hanging.get("/readyz")[0] == hanging.get("/livez")[0] == 200
    assert hanging.get("/statusz")[1]["hanging"].keys() == {"tier tape"}
    assert hanging.rig.status()["movers"]["tape"]["oldest_seconds"] > 1.0
    assert load(session, made) == ["cpu"] * 2

    def over() -> bool:
        hanging.let_go()
        return hanging.get("/readyz")[1]["hanging"] == {}

    wait_for(over, "the hang to be over")


@pytest.mark.parametrize("hanging", ["estimate"], indirect=True)
def test_a_loop_that_hangs_is_not_ready_and_probes_hear_so(hanging):
    """An engine would get no answer; the probe gets one, and the log has the place."""
    session = hanging.rig.attach()
    store(session, loose(1, "plain"), rich=False)
    storing = threading.Thread(target=store, args=(session, loose(1, "stuck")))
    storing.start()
    try:
        _, body = wait_for(
            lambda: (found := hanging.get("/readyz"))[0] == 503 and found, "the stall to be told", timeout=15
        )
        assert body["state"] == "stalled"
        assert 1.0 < body["loop_age_seconds"] < 10.0
        assert hanging.get("/livez")[0] == 200
    finally:
        wait_for(hanging.let_go, "the hang to end")
        storing.join(20)
    wait_for(lambda: hanging.get("/readyz")[0] == 200, "the daemon to go on")
    # The stand-in may still answer the first one; what it knows has no such part.
    watch = wait_for(lambda: hanging.get("/statusz")[1].get("watch"), "the whole status")
    assert watch["loop_stalls"] == 1
    assert watch["loop_longest_stall_seconds"] > 1.0
    log = hanging.rig.daemon.log.read_text()
    assert log.count("the loop has not gone round") == 1
    assert "hanging_tiers.py" in log
    assert load(session, loose(1, "stuck")) == ["cpu"]
