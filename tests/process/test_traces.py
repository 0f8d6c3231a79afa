"""Spans of a running daemon, as a collector gets them; and a collector that is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvtierd.client import Client
from kvtierd.testing.daemon_rig import LAYOUT, DaemonRig, chain, keys_of
from kvtierd.testing.local_daemon import LocalDaemon, free_port, short_folder
from kvtierd.testing.workload import payload

pytest.importorskip("opentelemetry.sdk", reason="NO TRACES TESTED: install kvtierd[traces]")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

Make = Callable[..., DaemonRig]
TRACE = "0af7651916cd43dd8448eb211c80319c"
ON = {"traces": {"enabled": True}}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A collector on loopback; the list fills with the spans that come."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            for resource in body.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    yield spans
    server.shutdown()
    thread.join(10)
    server.server_close()


def work(client: Client) -> int:
    """Store and load a chain under a span of the caller's; return the job's number."""
    made = chain(2)
    with client.attach(LAYOUT, engine_id="e0") as session:
        job = session.prepare_store(keys_of(made), traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
        for key, view in zip(job.keys, job.views(), strict=True):
            view[:] = payload(key, len(view))
        assert len(job.commit()) == 2
        with session.load(keys_of(made), traceparent=f"00-{TRACE}-b7ad6b7169203331-01") as got:
            assert len(got.keys) == 2
        return int(job.job)


def test_a_collector_gets_a_span_for_each_store_and_load_of_an_engines_trace(
    make: Make, collector: list[Any]
) -> None:
    rig = make(changes=ON).start()
    job = work(rig.client)
    rig.layouts.add(rig.layout)
    rig.agree()
    assert rig.daemon.stop() == 0, "the end of the daemon sends what is left"
    ours = {span.name: span for span in collector if span.trace_id.hex() == TRACE}
    assert set(ours) == {"kvtierd.store", "kvtierd.load"}
    told = {item.key: item.value.int_value for item in ours["kvtierd.store"].attributes}
    assert told["kvtierd.job"] == job
    assert told["kvtierd.stored"] == 2


def test_a_collector_that_is_not_there_costs_spans_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with short_folder("traces") as folder, daemon(folder) as running:
        with Client(running.socket, deadline=10.0) as client:
            work(client)
        assert running.stop() == 0


def daemon(folder: Path) -> LocalDaemon:
    return LocalDaemon(folder, pool_bytes=16 * 4096, disk_bytes=1 << 20, changes=ON)
