"""Spans: one for each store and load, under the engine's own, ended whatever becomes of it."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("opentelemetry.sdk", reason="NO TRACES TESTED: install kvtierd[traces]")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvtierd.core.effects import Answer
from kvtierd.core.stimuli import Abort, Asked, Commit, Load, PrepareStore, SessionClosed
from kvtierd.edges import traces as module
from kvtierd.edges.traces import Traces
from kvtierd.edges.trail import Trail
from kvtierd.testing.rig import LadderRig, fs_spec, key

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Scene:
    """A rig whose turns are traced as the daemon's are."""

    def __init__(self):
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.traces = Traces(provider.get_tracer("test"), provider.shutdown)
        self.trail = Trail(self.traces)
        self.rig = LadderRig(4, [fs_spec()])
        handle = self.rig.ladder.handle

        def traced(stimulus, now):
            self.trail.before(self.rig.ladder.stack, stimulus)
            effects = handle(stimulus, now)
            for effect in effects:
                if isinstance(effect, Answer):
                    self.trail.answered(self.rig.ladder.sessions, effect.session, [effect.reply])
            return effects

        self.rig.ladder.handle = traced

    @property
    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}

    @property
    def open(self):
        return len(self.traces._asked) + len(self.traces._jobs) + len(self.traces._ending)


@pytest.fixture
def scene():
    made = Scene()
    yield made
    made.rig.run_held()
    made.rig.check()
    made.traces.close()
    assert made.open == 0


def test_a_store_is_one_span_from_its_reservation_to_its_commit_under_the_engines_own(scene):
    job = scene.rig.prepare([key(1), key(2)], traceparent=PARENT)
    assert scene.spans == {}
    scene.rig.commit(job)
    (span,) = scene.spans.values()
    assert span.name == "kvtierd.store"
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    told = dict(span.attributes)
    assert (told["kvtierd.blocks"], told["kvtierd.stored"], told["kvtierd.skipped"]) == (2, 2, 0)
    assert told["kvtierd.job"] == job.job
    assert span.status.status_code is StatusCode.UNSET


def test_a_load_names_the_tiers_that_served_it(scene):
    scene.rig.store(1)
    scene.rig.evict(1, tiers=("cpu",))
    scene.rig.load(1, traceparent=PARENT)
    span = scene.spans["kvtierd.load"]
    assert (span.attributes["kvtierd.loaded"], span.attributes["kvtierd.tiers"]) == (1, ("disk",))


@pytest.mark.parametrize("parent", [None, "", "garbage", "00-0-0-00", "ff" * 60])
def test_without_a_parent_that_can_be_read_a_span_is_a_root(scene, parent):
    scene.rig.load(1, traceparent=parent)
    assert scene.spans["kvtierd.load"].parent is None


def test_a_store_that_is_given_up_or_finds_nothing_to_do_ends_its_span(scene):
    job = scene.rig.prepare([key(1)])
    scene.rig.ask(Abort, job=job.job)
    assert scene.spans["kvtierd.store"].attributes["kvtierd.stored"] == 0
    scene.rig.store(2)
    scene.rig.store(2)
    assert len(scene.exporter.get_finished_spans()) == 3


def test_what_is_refused_is_an_error_that_names_the_code(scene):
    job = scene.rig.prepare([key(1)])
    scene.rig.ask(Commit, job=job.job, generation=job.generation + 1, pool_id=job.pool_id)
    span = scene.spans["kvtierd.store"]
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "stale_pool"


def test_a_session_that_goes_takes_its_spans_along(scene):
    scene.rig.prepare([key(1)])
    scene.rig.feed(SessionClosed(scene.rig.session))
    assert scene.spans["kvtierd.store"].status.status_code is StatusCode.ERROR
    assert scene.open == 0
    scene.rig.session = scene.rig.attach()


def test_open_spans_are_bounded(scene, monkeypatch):
    monkeypatch.setattr(module, "MAX_OPEN", 3)
    for number in range(10):
        scene.traces.before(Asked(1, PrepareStore(id=number, keys=())))
        scene.traces.before(Asked(1, Load(id=100 + number, keys=())))
    assert len(scene.traces._asked) == 3
    assert len(scene.exporter.get_finished_spans()) == 17


def test_a_collector_that_never_answers_does_not_hold_up_the_end(scene, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    hang = threading.Event()
    traces = Traces(scene.traces._tracer, hang.wait)
    traces.before(Asked(1, Load(id=1, keys=())))
    traces.close()
    hang.set()
    assert len(scene.exporter.get_finished_spans()) == 1


def test_without_the_packages_the_daemon_says_so_and_goes_on(monkeypatch, caplog):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    assert module.open_traces() is None
    assert "kvtierd[traces]" in caplog.text
