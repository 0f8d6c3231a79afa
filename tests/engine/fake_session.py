"""In-memory stand-ins for a client's session and pipeline, scripted by the checks of the vLLM glue."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from kvtierd.core.effects import Skipped
from kvtierd.core.model import KeyState, SkipReason

UNIT = 4096


class Answer:
    """A lookup's answer, a load or a job: values, and what was done with it."""

    def __init__(self, **values):
        self.committed = None
        self.aborted = False
        self.__dict__.update(values)


class FakeSession:
    """``states`` says what each key is; slots are given out in rising order, ``stride`` units apart."""

    def __init__(self, *, pool_id="pool-1", units=64, stride=4, ranks=1, groups=1, rank_bytes=0):
        self.pool_id, self.epoch, self.connected = pool_id, 1, True
        self.attached = SimpleNamespace(tiers=("cpu", "disk"))
        self.memory = bytearray(units * UNIT)
        self.pool = memoryview(self.memory)
        self.rank_offsets = tuple(tuple(r * rank_bytes for r in range(ranks)) for _ in range(groups))
        self.states = {}
        self.slots = {}
        self.calls = Counter()
        self.asked = []
        self.scopes = []
        self.traces = []
        self.leases = 0
        self.fence = None
        self.acknowledged = []
        self.failed = []
        self.jobs = []
        self.refuse = None
        self.broken = None
        self.sources = {}
        self.shows_absence = False
        self._stride, self._next = stride, 0

    def count(self, verb):
        self.calls[verb] += 1
        if self.broken is not None:
            raise self.broken

    def may_hold(self, keys):
        """As a daemon that shows what it has (or one that shows nothing)."""
        return not self.shows_absence or any(key in self.states for key in keys)

    def place(self, key):
        if key not in self.slots:
            self.slots[key] = self._next * self._stride
            self._next += 1
        return self.slots[key]

    def fail(self, job, keys):
        self.count("fail")
        self.failed.append((job, tuple(keys)))
        return True

    def close(self):
        self.count("close")

    def poll(self):
        self.count("poll")
        return self.fence

    def acknowledge(self):
        self.count("acknowledge")
        self.acknowledged.append(self.fence)
        self.fence = None


class FakeCall:
    """One verb on its way: answered at once, or when the pipeline is told to."""

    def __init__(self, answer):
        self._answer = answer
        self.done, self.miss, self.result = False, "", None

    def arrive(self):
        if not self.done:
            self.done, self.result = True, self._answer()
            self._answer = None

    def end(self, reason, result):
        self.done, self.miss, self.result, self._answer = True, reason, result, None


class FakePipeline:
    """Verbs are carried out when their answer arrives: at the next wait or poll, or never while ``silent``.

    ``waits`` counts the calls of ``wait`` that found something unanswered: socket round trips.
    """

    def __init__(self, session):
        self.session = session
        self.silent = False
        self.waits = 0
        self.flushes = 0
        self.round_trips, self.waited, self.misses = 0, 0.0, Counter()
        self._calls = []

    def flush(self):
        self.flushes += 1

    def poll(self):
        if not self.silent:
            for call in self._calls:
                call.arrive()
            self._calls.clear()

    def notices(self):
        self.poll()
        return self.session.poll()

    def wait(self, calls, seconds=None):
        late = [call for call in calls if not call.done]
        if late:
            self.waits += 1
            self.round_trips += 1
            self.poll()
        return all(call.done for call in calls)

    def drop(self, call, *, late=True):
        if not call.done:
            self._calls.remove(call)
            call.end(
                "late",
                Answer(
                    reason="late", states=(), prefix=0, leased=0, lease=None, sources=(), keys=(), skipped=()
                ),
            )
            self.misses["late"] += late

    def _begin(self, verb, answer, missing):
        call = FakeCall(answer)
        self.session.count(verb)
        if self.session.connected:
            self._calls.append(call)
        else:
            call.end("away", missing)
            self.misses["away"] += 1
        return call

    def lookup(self, keys, promote=False, lease=None, *, everywhere=False, touch=False, scope=None):
        session, keys = self.session, tuple(keys)
        session.asked.append((keys, promote))
        session.scopes.append(scope)
        session.calls["touch"] += touch

        def answer():
            states = tuple(session.states.get(key, KeyState.MISS) for key in keys)
            prefix = next((i for i, s in enumerate(states) if s is KeyState.MISS), len(states))
            leased = next((i for i, s in enumerate(states) if s is not KeyState.HIT), len(states))
            if everywhere:
                leased = states.count(KeyState.HIT)
            held = 1 if lease and leased else 0
            session.leases += held
            sources = tuple(session.sources.get(key, "") for key in keys[:prefix]) if promote else ()
            return Answer(
                states=states,
                prefix=prefix,
                leased=leased if held else 0,
                lease=1 if held else None,
                sources=sources,
                reason="",
            )

        missing = Answer(
            states=(KeyState.MISS,) * len(keys), prefix=0, leased=0, lease=None, sources=(), reason="away"
        )
        return self._begin("lookup", answer, missing)

    def load(self, keys, deadline=0.0, scope=None, *, traceparent=None):
        session, keys = self.session, tuple(keys)
        session.traces.append(("load", traceparent))

        def answer():
            got = []
            for key in keys:
                if session.states.get(key) is not KeyState.HIT:
                    break
                got.append(key)
            session.leases += bool(got)
            return Answer(
                keys=tuple(got),
                slots=tuple(session.place(key) for key in got),
                generations=(1,) * len(got),
                sources=("cpu",) * len(got),
                pool_id=session.pool_id,
                lease=2 if got else 0,
            )

        return self._begin("load", answer, Answer(keys=(), lease=0))

    def prepare_store(self, keys, meta=None, scope=None, *, traceparent=None):
        session, keys = self.session, tuple(keys)
        session.traces.append(("prepare_store", traceparent))
        session.scopes.append(scope)

        def answer():
            taken = [] if session.refuse else [key for key in keys if key not in session.states]
            reason = session.refuse or SkipReason.RESIDENT
            job = Answer(
                keys=tuple(taken),
                slots=tuple(session.place(key) for key in taken),
                meta=tuple(meta or ()),
                skipped=tuple(Skipped(key, reason) for key in keys if key not in taken),
                pool_id=session.pool_id,
                generation=len(session.jobs) + 1,
                job=len(session.jobs) + 1 if taken else 0,
            )
            session.jobs.append(job)
            return job

        return self._begin("prepare_store", answer, Answer(keys=(), skipped=()))

    def commit(self, job, failed=()):
        def answer():
            job.committed = [key for key in job.keys if key not in set(failed)]
            self.session.states.update(dict.fromkeys(job.committed, KeyState.HIT))
            return tuple(job.committed)

        call = self._begin("commit", answer, ())
        call.arrive()
        return call

    def abort(self, job):
        def answer():
            job.aborted = True

        call = self._begin("abort", answer, None)
        call.arrive()
        return call

    def release(self, held):
        def answer():
            if held.lease:
                self.session.leases -= 1
                held.lease = None

        call = self._begin("release", answer, None)
        call.arrive()
        return call

    def reset(self, tiers=None):
        def answer():
            self.session.states.clear()
            return 0

        return self._begin("reset", answer, 0)


def spec(**settings):
    """What a manager needs of its spec."""
    from kvtierd.engines.vllm.settings import Settings

    return SimpleNamespace(settings=Settings(socket="unused", **settings))
