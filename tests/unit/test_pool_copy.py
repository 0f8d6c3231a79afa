"""A pool is copied for the next daemon while turns run: the copy and what changed since say what there is."""

import random
from pathlib import Path

import msgspec
import pytest

from kvtierd.config.schema import Pool as Settings
from kvtierd.core import ledger, stimuli
from kvtierd.core.effects import Attached
from kvtierd.core.geometry import UNIT
from kvtierd.core.handover import pool_state
from kvtierd.edges import kept_pool
from kvtierd.edges.kept_pool import KeptPool
from kvtierd.errors import PoolError
from kvtierd.testing.rig import LAYOUT, LadderRig, key, meta

SLOTS = 64


class Daemon(LadderRig):
    """A ladder on a pool, recorded as the daemon's turns are."""

    def __init__(self, folder: Path, backing: str) -> None:
        self.settings = Settings(bytes=SLOTS * UNIT, backing=backing, path=folder / "pool", lock="off")
        self.kept = KeptPool.open(self.settings, folder)
        super().__init__(SLOTS, attach=False)
        self.kept.restore(self.ladder, self.now)
        self.sessions = []
        self.join("e0")

    def feed(self, stimulus):
        super().feed(stimulus)
        self.kept.record()

    def join(self, name, **fields):
        fields = {"layout": LAYOUT, "engine_id": name, "process": name.encode(), **fields}
        self._session += 1
        if isinstance(self.answers[self.ask(stimuli.Attach, session=self._session, **fields)], Attached):
            self.session = self._session
            self.sessions.append(self.session)

    def live(self, rng):
        """Do one thing that changes what a slot table says."""
        numbers = rng.sample(range(100), 4)
        self.session = rng.choice(self.sessions)
        match rng.randrange(7):
            case 0 | 1 | 2:
                self.store(*numbers)
            case 3:
                self.evict(*numbers)
            case 4:
                self.prepare([key(n) for n in numbers], [meta(n) for n in numbers])
            case 5:
                self.ask(stimuli.Load, keys=tuple(map(key, numbers)), deadline=1.0)
            case 6 if len(self.sessions) > 1 and rng.random() < 0.5:
                self.sessions.remove(self.session)
                self.feed(stimuli.SessionClosed(self.session))
            case 6:
                model = rng.choice("abcd")
                self.join(f"e{rng.randrange(99)}", layout=msgspec.structs.replace(LAYOUT, model=model))


@pytest.fixture(params=["memfd", "file"])
def daemon(tmp_path, request):
    daemon = Daemon(tmp_path, request.param)
    yield daemon
    daemon.kept.close(keep=False)


def heir(daemon):
    """Return a pool that knows nothing yet, of a daemon that takes over."""
    found = kept_pool.Found(daemon.kept.pool.owner(), daemon.kept.pool.pool_id)
    return KeptPool.take(daemon.settings, daemon.settings.path.parent, found, recorded=False)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_copied_and_what_changed_meanwhile_say_what_there_is(daemon, seed, monkeypatch):
    monkeypatch.setattr(kept_pool, "COPY_SLICE", 4)
    rng = random.Random(seed)
    for _ in range(rng.randrange(80)):
        daemon.live(rng)
    parts = []
    for part in daemon.kept.copy(daemon.ladder):
        parts.append(part)
        for _ in range(rng.randrange(4)):
            daemon.live(rng)
    other = heir(daemon)
    other.know(b"".join(parts))
    for _ in range(rng.randrange(80)):
        daemon.live(rng)
    changed = daemon.kept.changed(daemon.ladder)
    other.know(changed, whole=False)
    assert other._state == pool_state(daemon.ladder)
    other.know(daemon.kept.table(daemon.ladder))
    assert other._state == pool_state(daemon.ladder)
    other.close(keep=True)


def test_too_many_changes_for_a_copy_are_no_copy_and_one_that_failed_leaves_nothing(daemon, monkeypatch):
    monkeypatch.setattr(ledger, "COPY_LIMIT", 10)
    rng = random.Random(1)
    for _ in daemon.kept.copy(daemon.ladder):
        for _ in range(40):
            daemon.live(rng)
    assert daemon.kept.changed(daemon.ladder) is None
    for _ in daemon.kept.copy(daemon.ladder):
        daemon.live(rng)
    daemon.kept.stop_copy(daemon.ladder)
    on = daemon.ladder.stack.primary.ledger.on
    assert on is (daemon.settings.backing == "file"), "without a record nothing is noted"
    daemon.live(rng)
    assert daemon.ladder.stack.primary.ledger.take() == []


def test_a_table_that_cannot_be_read_is_refused(daemon):
    other = heir(daemon)
    with pytest.raises(PoolError, match="takeover: the table of the pool"):
        other.know(b"rubbish")
    other.close(keep=True)
