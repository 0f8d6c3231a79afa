"""An in-memory stand-in for a client session: the verbs that the vLLM glue uses, scripted by the checks."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from kvtierd.core.effects import Skipped
from kvtierd.core.model import KeyState, SkipReason

UNIT = 4096


class Answer:
    """A lookup's answer, a load or a job: values, and what was done with it."""

    def __init__(self, session, **values):
        self._session = session
        self.committed = None
        self.aborted = False
        self.__dict__.update(values)

    def release(self):
        self._session.calls["release"] += 1
        self._session.leases -= self.__dict__.pop("held", 0)

    def commit(self, failed=()):
        self._session.calls["commit"] += 1
        self.committed = [key for key in self.keys if key not in set(failed)]
        self._session.states.update(dict.fromkeys(self.committed, KeyState.HIT))
        return tuple(self.committed)

    def abort(self):
        self._session.calls["abort"] += 1
        self.aborted = True


class FakeSession:
    """``states`` says what each key is; slots are given out in rising order, ``stride`` units apart."""

    def __init__(self, *, pool_id="pool-1", units=64, stride=4, ranks=1, groups=1, rank_bytes=0):
        self.pool_id, self.epoch, self.connected = pool_id, 1, True
        self.memory = bytearray(units * UNIT)
        self.pool = memoryview(self.memory)
        self.rank_offsets = tuple(tuple(r * rank_bytes for r in range(ranks)) for _ in range(groups))
        self.states = {}
        self.slots = {}
        self.calls = Counter()
        self.asked = []
        self.leases = 0
        self.fence = None
        self.acknowledged = []
        self.failed = []
        self.jobs = []
        self.refuse = None
        self.broken = None
        self._stride, self._next = stride, 0

    def _count(self, verb):
        self.calls[verb] += 1
        if self.broken is not None:
            raise self.broken

    def _place(self, key):
        if key not in self.slots:
            self.slots[key] = self._next * self._stride
            self._next += 1
        return self.slots[key]

    def lookup(self, keys, promote=False, lease=None):
        self._count("lookup")
        self.asked.append((tuple(keys), promote))
        states = tuple(self.states.get(key, KeyState.MISS) for key in keys)
        prefix = next((i for i, s in enumerate(states) if s is KeyState.MISS), len(states))
        leased = next((i for i, s in enumerate(states) if s is not KeyState.HIT), len(states))
        held = 1 if lease and leased else 0
        self.leases += held
        return Answer(self, states=states, prefix=prefix, leased=leased, held=held)

    def load(self, keys, deadline=0.5, scope=None):
        self._count("load")
        got = []
        for key in keys:
            if self.states.get(key) is not KeyState.HIT:
                break
            got.append(key)
        self.leases += 1
        return Answer(
            self,
            keys=tuple(got),
            slots=tuple(self._place(key) for key in got),
            generations=(1,) * len(got),
            sources=("cpu",) * len(got),
            pool_id=self.pool_id,
            held=1,
        )

    def prepare_store(self, keys, meta=None, scope=None):
        self._count("prepare_store")
        taken = [] if self.refuse else [key for key in keys if key not in self.states]
        reason = self.refuse or SkipReason.RESIDENT
        job = Answer(
            self,
            keys=tuple(taken),
            slots=tuple(self._place(key) for key in taken),
            meta=tuple(meta or ()),
            skipped=tuple(Skipped(key, reason) for key in keys if key not in taken),
            pool_id=self.pool_id,
            generation=len(self.jobs) + 1,
            job=len(self.jobs) + 1 if taken else 0,
        )
        self.jobs.append(job)
        return job

    def fail(self, job, keys):
        self._count("fail")
        self.failed.append((job, tuple(keys)))
        return True

    def touch(self, keys):
        self._count("touch")
        return len(keys)

    def reset(self, tiers=None):
        self._count("reset")
        self.states.clear()
        return 0

    def close(self):
        self._count("close")

    def poll(self):
        self._count("poll")
        return self.fence

    def acknowledge(self):
        self._count("acknowledge")
        self.acknowledged.append(self.fence)
        self.fence = None


def spec(**settings):
    """What a manager needs of its spec."""
    from kvtierd.engines.vllm.settings import Settings

    return SimpleNamespace(settings=Settings(socket="unused", **settings))
