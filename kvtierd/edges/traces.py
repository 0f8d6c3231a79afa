"""OpenTelemetry: one span for each store, from its reservation to its end, and one for each load.

A span is a child of the engine's own where the request brings a ``traceparent``. Nothing here waits: spans go
through the SDK's bounded queue and a thread of its own, and a collector that is not there costs spans only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvtierd import __version__
from kvtierd.core.effects import Committed, Loaded, Prepared, Refused, Reply
from kvtierd.core.stimuli import Abort, Asked, Commit, Load, PrepareStore, SessionClosed, Stimulus
from kvtierd.logs.events import event

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)

MAX_OPEN = 4096
"""Spans; beyond it the oldest, whose job must have run out, is ended."""
CLOSE_SECONDS = 2.0

Attributes = Mapping[str, str | int | tuple[str, ...]]


class Traces:
    """The open spans, in the loop's thread. ``shut_down`` sends what is left; it may take long."""

    def __init__(self, tracer: Tracer, shut_down: Callable[[], None]) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._shut_down = shut_down
        self._kind = SpanKind.SERVER
        self._context = TraceContextTextMapPropagator()
        self._asked: dict[tuple[int, int], Span] = {}
        self._jobs: dict[int, tuple[int, Span]] = {}
        self._ending: dict[tuple[int, int], int] = {}

    def before(self, stimulus: Stimulus) -> None:
        """Take in what is about to happen."""
        match stimulus:
            case Asked(session, PrepareStore() as request):
                self._begin("kvtierd.store", session, request)
            case Asked(session, Load() as request):
                self._begin("kvtierd.load", session, request)
            case Asked(session, Commit(id=number, job=job) | Abort(id=number, job=job)):
                self._ending[session, number] = job
            case SessionClosed(session):
                self._close(session)

    def answered(self, session: int, reply: Reply) -> None:
        """Take in an answer."""
        if (job := self._ending.pop((session, reply.id), None)) is not None:
            stored = len(reply.stored) if isinstance(reply, Committed) else 0
            if job in self._jobs:
                self._end(self._jobs.pop(job)[1], reply, {"kvtierd.stored": stored})
            return
        span = self._asked.pop((session, reply.id), None)
        if span is None:
            return
        if isinstance(reply, Prepared) and reply.job:
            span.set_attributes({"kvtierd.job": reply.job, "kvtierd.skipped": len(reply.skipped)})
            self._jobs[reply.job] = session, span
        elif isinstance(reply, Loaded):
            tiers = tuple(sorted(set(reply.sources)))
            self._end(span, reply, {"kvtierd.loaded": len(reply.keys), "kvtierd.tiers": tiers})
        else:
            self._end(span, reply, {})

    def close(self) -> None:
        """End what is open and send what is left, unless that takes too long."""
        for session in {session for session, _ in self._jobs.values()} | {key[0] for key in self._asked}:
            self._close(session)
        sending = threading.Thread(target=self._shut_down, name="traces-end", daemon=True)
        sending.start()
        sending.join(CLOSE_SECONDS)

    def _begin(self, name: str, session: int, request: PrepareStore | Load) -> None:
        carrier = {} if request.traceparent is None else {"traceparent": request.traceparent}
        attributes: Attributes = {
            "kvtierd.session": session,
            "kvtierd.request": request.id,
            "kvtierd.blocks": len(request.keys),
        }
        self._asked[session, request.id] = self._tracer.start_span(
            name, context=self._context.extract(carrier), kind=self._kind, attributes=attributes
        )
        if len(self._asked) > MAX_OPEN:
            self._asked.pop(next(iter(self._asked))).end()
        if len(self._jobs) > MAX_OPEN:
            self._jobs.pop(next(iter(self._jobs)))[1].end()

    @staticmethod
    def _end(span: Span, reply: Reply, attributes: Attributes) -> None:
        span.set_attributes(dict(attributes))
        if isinstance(reply, Refused):
            span.set_attribute("error.type", reply.code)
            span.set_status(_error(reply.message))
        span.end()

    def _close(self, session: int) -> None:
        """End the spans of a session that is gone."""
        gone = [self._asked.pop(key) for key in [key for key in self._asked if key[0] == session]]
        jobs = [job for job, (owner, _) in self._jobs.items() if owner == session]
        gone += [self._jobs.pop(job)[1] for job in jobs]
        for key in [key for key in self._ending if key[0] == session]:
            del self._ending[key]
        for span in gone:
            span.set_status(_error("the session ended"))
            span.end()


def _error(text: str) -> Any:
    from opentelemetry.trace import Status, StatusCode

    return Status(StatusCode.ERROR, text)


def open_traces() -> Traces | None:
    """Return spans that go to the collector that OpenTelemetry's variables name, ``None`` without the SDK."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning(
            "traces are off: %s; install kvtierd[traces] or write traces.enabled: false",
            error,
            extra=event("traces_unavailable", reason=str(error)),
        )
        return None
    resource = Resource({SERVICE_NAME: "kvtierd"}).merge(Resource.create())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider.get_tracer("kvtierd", __version__), provider.shutdown)
