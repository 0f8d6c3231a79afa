"""Engines with real bytes under everything that may happen at once, and at each quiet point one truth.

A minute in the ordinary run; ``make soak`` lets it go on for half an hour (``KVTIERD_SOAK_SECONDS``).
"""

from __future__ import annotations

import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvtierd.client import Client
from kvtierd.edges.outlet import HANDSHAKE
from kvtierd.errors import Unavailable
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import FILE, DaemonRig, Router, chain, fs_tier, keys_of, load, store
from kvtierd.testing.fuzz import Mutator, client_seeds

Make = Callable[..., DaemonRig]

SECONDS = float(os.environ.get("KVTIERD_SOAK_SECONDS", "60"))
PARANOID = os.environ.get("KVTIERD_SOAK_PARANOID", "1") == "1"
ROUND_SECONDS = 3.0
SCRIPT = Path(__file__).with_name("chaos_engine.py")
ROLES = ("scheduler", "scheduler", "scheduler", "worker")
"""The last two are of one engine: both have to speak before its slots are free."""
PROBES = 8
OPENED = 3
"""Descriptors more than when it was warm that are no growth."""


class Zoo:
    """The engines. One that dies is replaced by another of its name."""

    def __init__(self, path: str, rng: random.Random) -> None:
        self._path, self._rng = path, rng
        self._living: dict[int, subprocess.Popen[str]] = {}
        self._before: dict[int, Counter[str]] = {}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._fill()

    def _fill(self) -> None:
        for place, role in enumerate(ROLES):
            process = self._living.get(place)
            if process is not None and process.poll() is None:
                continue
            if process is not None:
                self.counts["deaths"] += 1
                self._close(process)
            engine = f"e{min(place, len(ROLES) - 2)}"
            command = [sys.executable, str(SCRIPT), self._path, engine, role, str(self._rng.getrandbits(32))]
            self._living[place] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._before[place] = Counter()
            self._answer(place)

    def _tell(self, what: str) -> None:
        for process in self._living.values():
            assert process.stdin is not None
            try:
                process.stdin.write(what + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it has died

    def _answer(self, place: int) -> None:
        """Take what an engine says when it paused; nothing if it is dead."""
        stream = self._living[place].stdout
        assert stream is not None
        ready, _, _ = select.select([stream], [], [], 30)
        assert ready, f"engine {place} hangs"
        line = stream.readline()
        if not line:
            return
        said = json.loads(line)
        now = Counter(said["counts"])
        self.counts.update(now - self._before[place])
        self._before[place] = now
        self.wrong += said["wrong"]

    def go(self) -> None:
        """Let all of them live."""
        self._fill()
        self._tell("go")

    def pause(self) -> None:
        """Wait until all of them hold nothing, or are dead."""
        self._tell("pause")
        for place in self._living:
            self._answer(place)

    def kill_one(self) -> None:
        """End one without a word."""
        self._rng.choice(list(self._living.values())).kill()

    def close(self) -> None:
        """End them."""
        for process in self._living.values():
            process.kill()
            self._close(process)

    @staticmethod
    def _close(process: subprocess.Popen[str]) -> None:
        process.wait(10)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


class Stage:
    """The daemon, its tiers, its readers, and what can befall them."""

    def __init__(self, rig: DaemonRig, mount: Any, zoo: Zoo, rng: random.Random) -> None:
        self.rig, self.mount, self.zoo, self.rng = rig, mount, zoo, rng
        self.events: Counter[str] = Counter()
        self.born = time.monotonic()
        self.sizes: list[tuple[float, float, int, int]] = []
        """(birth of the daemon, time, bytes of its own memory, descriptors) at quiet points."""
        self.held: dict[str, Any] = {}
        """What was held when last looked, though nobody should."""
        self.kinds: Counter[str] = Counter()
        self.kinds_at_first: Counter[str] = Counter()
        self._mutator = Mutator(rng, client_seeds())

    # -- what befalls them --------------------------------------------------------------------------

    def nothing(self) -> None:
        self.live(ROUND_SECONDS)

    def crash(self) -> None:
        """The daemon is killed and started again; engines and readers stay."""
        self.live(ROUND_SECONDS / 2)
        self.rig.daemon.kill()
        self._start()
        self.live(ROUND_SECONDS / 2)

    def restart(self) -> None:
        """A clean stop in the middle of it all."""
        self.live(ROUND_SECONDS / 2)
        assert self.rig.daemon.stop() == 0, self.rig.daemon.log_tail()
        self._start()
        self.live(ROUND_SECONDS / 2)

    def takeover(self) -> None:
        """Another process takes over; or is refused, as long as a tier has not ended what it is at."""
        self.live(ROUND_SECONDS / 2)
        try:
            assert self.rig.daemon.take_over() == 0, self.rig.daemon.log_tail()
        except Unavailable as error:
            if "did not end within" not in str(error):
                raise
            self.events["takeovers refused"] += 1
        else:
            self.born = time.monotonic()
        self.live(ROUND_SECONDS / 2)

    def death(self) -> None:
        self.live(ROUND_SECONDS / 3)
        self.zoo.kill_one()
        self.live(ROUND_SECONDS * 2 / 3)

    def full_disk(self) -> None:
        """Somebody else takes all room of a tier's filesystem."""
        filler = self.rig.folder / "near" / "somebody-else"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        self.live(ROUND_SECONDS)
        filler.unlink(missing_ok=True)

    def lost_mount(self) -> None:
        self.mount.detach()
        self.live(ROUND_SECONDS / 2)
        self.mount.attach()
        self.live(ROUND_SECONDS / 2)

    def read_only(self) -> None:
        self.mount.detach()
        self.mount.attach(writable=False)
        self.live(ROUND_SECONDS / 2)
        self.mount.detach()
        self.mount.attach()
        self.live(ROUND_SECONDS / 2)

    def rot(self) -> None:
        """Bytes on the disk change, files are cut and vanish."""
        files = [path for path in (self.rig.folder / "far" / "v1").rglob("*") if path.is_file()]
        for path in self.rng.sample(files, min(4, len(files))):
            with path.open("r+b") as file:
                size = path.stat().st_size
                for _ in range(8):
                    file.seek(self.rng.randrange(max(1, size)))
                    file.write(os.urandom(16))
        self.live(ROUND_SECONDS)

    def rubbish(self) -> None:
        """Strangers on every port, some of them half-way through the protocol."""
        until = time.monotonic() + ROUND_SECONDS
        ports = [
            int(where.rpartition(":")[2]) for where in (self.rig.daemon.endpoint, self.rig.daemon.replay)
        ]
        while time.monotonic() < until:
            for name in ("engine.sock", "control.sock"):
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.settimeout(1.0)
                    try:
                        stranger.connect(str(self.rig.folder / "run" / name))
                        stranger.sendall(self._mutator.conversation())
                        self.events["rubbish"] += 1
                        stranger.recv(1 << 16)
                    except OSError:
                        pass
            with socket.create_connection(("127.0.0.1", self.rng.choice(ports)), timeout=1.0) as stranger:
                stranger.sendall(self._mutator.bytes())
            self.live(0.01)

    def live(self, seconds: float) -> None:
        """Read the stream for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.rig.router.poll(0.02)

    def _start(self) -> None:
        self.rig.daemon.start()
        self.born = time.monotonic()
        self.rig.client.close()
        self.rig.client = Client(self.rig.daemon.socket, deadline=10.0)

    # -- quiet points -------------------------------------------------------------------------------

    def check(self) -> None:
        """All of it at a point where nothing is under way."""
        rig = self.rig
        assert self.zoo.wrong == [], "wrong bytes were loaded"
        assert rig.daemon.pid is not None
        status = wait_for(self._nothing_held, "nothing to be held by anybody", timeout=20)
        assert status is not None
        assert status["watch"]["loop_stalls"] == 0, rig.daemon.log_tail()
        self._agree()
        self._probe()
        self._agree()
        anonymous = int(
            next(
                line.split()[1]
                for line in Path(f"/proc/{rig.daemon.pid}/status").read_text().splitlines()
                if line.startswith("RssAnon:")
            )
        )
        kinds = descriptors(rig.daemon.pid)
        if not self.sizes or self.sizes[-1][0] != self.born:
            self.kinds_at_first = kinds
        self.kinds = kinds
        self.sizes.append((self.born, time.monotonic(), anonymous << 10, counted(kinds)))

    def opened_at_rest(self, few: int) -> int:
        """Return how many descriptors are open once ZeroMQ let the last strangers go, or so few are."""
        assert self.rig.daemon.pid is not None
        until = time.monotonic() + 4 * HANDSHAKE / 1000
        while True:
            self.kinds = descriptors(self.rig.daemon.pid)
            if counted(self.kinds) <= few or time.monotonic() > until:
                return counted(self.kinds)
            self.live(0.2)

    def _nothing_held(self) -> dict[str, Any] | None:
        self.rig.router.poll(0.005)
        status = self.rig.status()
        held = ("jobs", "leases", "loads_waiting", "quarantined_slots", "promotions_unread")
        self.held = {name: status[name] for name in held if status[name]}
        return None if self.held else status

    def _agree(self) -> None:
        """Compare the reader that heard it all, and one that comes now, with the inventory."""
        rig = self.rig

        def back() -> bool:
            rig.router.poll(0.005)
            return not rig.status()["events"]["journal"]["holding"]

        wait_for(back, "readers to be back")
        rig.catch_up(rig.router, rig.settle())
        rig.router.counts.pop("unknown_removals", None)  # after a crash the last moment is taken back twice
        with Router() as late:
            rig.follow(late)
            rig.agree(late)
        rig.router.batches.clear()

    def heals(self) -> None:
        """Every tier is used again; a breaker tries one whose faults have ended when there is work for it."""

        ill: list[dict[str, Any]] = []

        def well() -> bool:
            made = chain(2, f"heal{time.monotonic_ns()}")
            with self.rig.attach(engine_id="healer") as session:
                store(session, made)
                self.rig.settle()
                for above in ((), ("near",), ("near", "far")):  # reads have a breaker of their own
                    session.evict(keys_of(made), ["cpu", *above])
                    self.rig.settle()
                    load(session, made)
                tiers = self.rig.settle()["tiers"]
                ill[:] = [tier for tier in tiers[1:] if tier["condition"] not in ("ok", "slow")]
                return not ill

        try:
            wait_for(well, "all tiers to be used again", timeout=40, poll=0.2)
        except TimeoutError:
            raise AssertionError(f"not used again: {ill}\n{self.rig.daemon.log_tail(60)}") from None

    def _probe(self) -> None:
        """What is stored is hit, from the pool and from below: as on the first day (L50)."""
        made = chain(PROBES, "probe")
        with self.rig.attach(engine_id="prober") as session:
            session.evict(keys_of(made))
            self.rig.settle()
            assert len(store(session, made)) == PROBES
            assert load(session, made) == ["cpu"] * PROBES
            self.rig.settle()
            session.evict(keys_of(made), ["cpu"])
            sources = load(session, made)
            assert len(sources) == PROBES, sources
            assert "cpu" not in sources
            self.events["probe hits"] += 2 * PROBES


def descriptors(pid: int) -> Counter[str]:
    """Return what a process has open, by kind."""
    kinds: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(entry)
            kind = target.partition(":")[0] if ":[" in target else Path(target).parent.name
            kinds["segment" if "/v1/" in target else kind] += 1
    return kinds


def counted(kinds: Counter[str]) -> int:
    """Return how many there are but for segments: a packed tier opens as many as its blocks need."""
    return kinds.total() - kinds["segment"]


@contextmanager
def slow_reader(endpoint: str) -> Iterator[None]:
    """A subscriber that takes one message and then no more."""
    with zmq.Context() as context, context.socket(zmq.SUB) as stalled:
        stalled.setsockopt(zmq.RCVHWM, 1)
        stalled.setsockopt(zmq.LINGER, 0)
        stalled.subscribe(b"")
        stalled.connect(endpoint)
        stalled.poll(2000)
        yield


def growth(sizes: list[tuple[float, float, int, int]]) -> tuple[int, int, float]:
    """Return the last daemon's growth in bytes after it was warm, its descriptors then, and the time."""
    last = [size for size in sizes if size[0] == sizes[-1][0]]
    warm = last[len(last) // 3 :]
    # ZeroMQ keeps strangers for a moment, so one quiet point alone says little.
    return warm[-1][2] - warm[0][2], min(size[3] for size in warm[:3]), warm[-1][1] - warm[0][1]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 2 + 120)
def test_whatever_happens_no_wrong_byte_and_one_truth(
    make: Make, mounted: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """L44, L50, L98, L101, L105, L107, L124, L130: invariants after every turn, and nothing grows."""
    seed = int(os.environ.get("KVTIERD_SOAK_SEED", random.SystemRandom().getrandbits(32)))
    rng = random.Random(seed)
    limits = {"job_ttl": "1s", "lease_ttl": "1s", "shutdown_grace": "4s", "hello_timeout": "500ms"}
    rig = make(slots=48, changes={"engine": limits}, paranoid=PARANOID)
    backing = os.environ.get("KVTIERD_SOAK_BACKING") or rng.choice(("memfd", "file"))
    rig.edit(lambda body: body["pool"].update(backing=backing))
    # A ring that is full early: its growth is meant, and would hide one that is not.
    rig.edit(lambda body: body["events"].update(ring_batches=256))
    below = [
        fs_tier(rig.folder, "near", locality="LOCAL", max_bytes=150 * FILE),
        fs_tier(rig.folder, "far", max_bytes=150 * FILE),
        {"name": "lake", "type": "object", "url": "memory://chaos", "max_bytes": 100 * FILE},
    ]
    rig.edit(lambda body: body.update(tiers=[body["tiers"][0], *below]))
    rig.layouts.add(rig.layout)
    (rig.folder / "near").mkdir()
    begin = time.monotonic()
    with mounted(rig.folder / "device", rig.folder / "near", "2m") as mount:
        rig.start()
        zoo = Zoo(rig.daemon.socket, rng)
        stage = Stage(rig, mount, zoo, rng)
        # The daemon that lives last lives long enough for its size to be judged.
        wild = [stage.crash, stage.restart, stage.takeover]
        tame = [stage.nothing, stage.death, stage.full_disk, stage.lost_mount, stage.read_only, stage.rot]
        tame.append(stage.rubbish)
        try:
            with slow_reader(rig.daemon.endpoint):
                while (spent := time.monotonic() - begin) < SECONDS:
                    event = rng.choice(wild + tame if spent < SECONDS / 2 else tame)
                    stage.events[event.__name__] += 1
                    zoo.go()
                    event()
                    zoo.pause()
                    stage.check()
        except BaseException:
            with capsys.disabled():
                print(
                    f"\nseed {seed}, {backing}: {dict(stage.events)}, held {stage.held}",
                    f"\n{rig.daemon.log_tail(40)}",
                )
            raise
        finally:
            zoo.close()
        grown, before, seconds = growth(stage.sizes)
        opened = stage.opened_at_rest(before + OPENED) - before
        with capsys.disabled():
            print(
                f"\nseed {seed}, {backing}, {spent:.0f} s, {len(stage.sizes)} quiet points: "
                f"{dict(stage.events)}; "
                f"engines {dict(sorted(zoo.counts.items()))}; in {seconds:.0f} s "
                f"memory {grown / 1024:+.0f} KiB, descriptors {opened:+d} ({dict(stage.kinds)}); "
                f"wrong bytes: {len(zoo.wrong)}",
                end="",
            )
        assert min(zoo.counts[what] for what in ("stored", "loaded", "aborted", "silences", "fences")) > 0
        assert grown < 8 << 20
        assert opened <= OPENED, (stage.kinds_at_first, stage.kinds)
        stage.heals()
        rig.agree()
        assert rig.daemon.stop() == 0, rig.daemon.log_tail()
