"""The admin port of a running daemon: metrics that agree with what happened, and probes."""

from __future__ import annotations

import http.client
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvtierd.client import Client, Group, KeyState, Layout
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig, Router, chain, keys_of, load, loose, store
from kvtierd.testing.local_daemon import free_port

Make = Callable[..., DaemonRig]
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Port:
    """The admin port of a rig."""

    def __init__(self, make: Make, **options: Any) -> None:
        self.number = free_port()
        self.rig = make(changes={"admin": {"listen": f"127.0.0.1:{self.number}"}}, **options)

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.number, timeout=5)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        finally:
            connection.close()

    def scrape(self) -> Series:
        code, body = self.get("/metrics")
        assert code == 200, body
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(body)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self.scrape()[f"kvtierd_{name}", tuple(sorted(labels.items()))]


def test_hits_and_misses_add_up_and_a_promoted_block_counts_once_for_its_tier(make: Make) -> None:
    """L133: credited to the tier that had it, not to the pool that it was promoted into."""
    port = Port(make, slots=8)
    session = port.rig.start().attach()
    made = chain(3)
    store(session, made)
    port.rig.settle()
    session.evict(keys_of(made), ["cpu"])
    asked = [*keys_of(made), *keys_of(loose(1, "absent"))]

    def promoted() -> bool:
        return session.lookup(asked, promote=True).states == (*[KeyState.HIT] * 3, KeyState.MISS)

    wait_for(promoted, "the promotion")
    now = port.scrape()
    value = {name: now[f"kvtierd_{name}_total", ()] for name in ("lookup_blocks", "lookup_missed_blocks")}
    hits = {tier: now["kvtierd_tier_hits_total", (("tier", tier),)] for tier in ("cpu", "disk")}
    misses = {tier: now["kvtierd_tier_misses_total", (("tier", tier),)] for tier in ("cpu", "disk")}
    assert (hits, misses, value["lookup_blocks"]) == ({"cpu": 0, "disk": 3}, {"cpu": 4, "disk": 1}, 4)
    assert load(session, made) == ["cpu"] * 3
    assert session.lookup(keys_of(made)).prefix == 3
    assert port.value("tier_hits_total", tier="cpu") == 3
    assert port.value("tier_hits_total", tier="disk") == 3
    assert port.value("lookup_blocks_total") == sum(hits.values()) + 3 + port.value(
        "lookup_missed_blocks_total"
    )


def test_what_metrics_say_is_what_happened(make: Make) -> None:
    port = Port(make, slots=4)
    rig = port.rig.start()
    session = rig.attach()
    made = chain(4)
    store(session, made)
    store(session, made)
    rig.settle()  # what is being written stays in the pool
    store(session, loose(4))
    rig.settle()
    now = port.scrape()

    def value(name: str, **labels: str) -> float:
        return now[f"kvtierd_{name}", tuple(sorted(labels.items()))]

    assert value("tier_stores_skipped_total", tier="cpu", reason="resident") == 4
    assert value("tier_evictions_total", tier="cpu", reason="capacity") == 4
    assert value("tier_stored_blocks_total", tier="disk") == 8
    assert value("tier_operation_blocks_total", tier="disk", op="write", outcome="ok") == 8
    assert value("tier_transfer_bytes_total", tier="disk", op="write") == 8 * 4096
    assert value("tier_operation_seconds_count", tier="disk", op="write") >= 1
    assert value("tier_used_bytes", tier="cpu") == value("tier_capacity_bytes", tier="cpu") == 4 * 4096
    assert value("tier_state", tier="disk", state="ok") == 1
    assert value("requests_total", verb="prepare_store", outcome="ok") == 3
    assert value("request_seconds_count", verb="commit") == value(
        "requests_total", verb="commit", outcome="ok"
    )
    assert value("engine_sessions", role="scheduler") == 1
    assert value("events_total", audience="default", medium="CPU", kind="removed") == 4
    assert value("events_total", audience="default", medium="STORAGE", kind="stored") == 8
    assert value("event_unmatched_removals_total", audience="default") == 0
    assert value("turn_seconds_count") > 0
    wait_for(lambda: port.value("loop_lag_seconds_count") > 0, "a tick")
    assert value("pool_prefaulted_bytes") == value("pool_bytes") > 0
    assert value("requests_unanswered") == 0


def test_readiness_waits_for_the_whole_pool_and_every_series_is_there_meanwhile(make: Make) -> None:
    """L106, L135: alive while the pool is pre-faulted, ready when all of it is; metrics tell how far."""
    port = Port(make, slots=1)
    port.rig.edit(lambda body: body["pool"].update(bytes="768MiB", prefault_threads=1))
    seen: dict[str, set[int]] = {"/startupz": set(), "/readyz": set(), "/livez": set()}
    names: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    filled: list[float] = []

    def look() -> bool:
        try:
            early = port.scrape()
            codes = {path: port.get(path)[0] for path in seen}
        except ConnectionRefusedError:
            return False
        if codes["/readyz"] == 503:
            names.update(early)
            filled.append(early["kvtierd_pool_prefaulted_bytes", ()])
        for path, code in codes.items():
            seen[path].add(code)
        return set(codes.values()) == {200}  # the start may be over between two of the questions

    starting = threading.Thread(target=port.rig.start)
    starting.start()
    try:
        wait_for(look, "readiness", timeout=30, poll=0.005)
    finally:
        starting.join(30)
    assert seen == {"/startupz": {200, 503}, "/readyz": {200, 503}, "/livez": {200}}
    assert filled == sorted(filled)
    assert filled[0] < 768 << 20
    ready = port.scrape()
    assert ready["kvtierd_pool_prefaulted_bytes", ()] == 768 << 20
    assert {key for key in ready if key[0].startswith("kvtierd_")} == {
        key for key in names if key[0].startswith("kvtierd_")
    }


def test_a_layout_shows_what_each_rank_and_group_takes_and_ranks_do_not_multiply_the_pool(make: Make) -> None:
    """L92: pool.bytes is the total, whatever the number of ranks."""
    port = Port(make, slots=64)
    port.rig.start()
    groups = (Group(tokens_per_block=4, block_bytes=4096), Group(tokens_per_block=4, block_bytes=1024))
    layout = Layout(model="wide", dtype="float16", layout="test", groups=groups, ranks=4)
    with port.rig.attach(layout):
        status = port.rig.status()
        (shown,) = status["layouts"]
        assert status["pool"]["bytes"] == 64 * 4096
        assert (shown["ranks"], shown["rank_bytes_per_block"]) == (4, [4096, 1024])
        assert shown["bytes_per_block"][0] == shown["slot_bytes"] == 4 * 4096
        assert shown["waste_bytes_per_slot"][0] == 0
        assert shown["waste_bytes_per_slot"][1] == 4 * 4096 - shown["bytes_per_block"][1]
        assert port.value("pool_bytes") == port.value("tier_capacity_bytes", tier="cpu") == 64 * 4096


def test_subscribers_are_counted_as_they_come_and_go(make: Make) -> None:
    port = Port(make)
    port.rig.start()
    assert port.value("event_subscribers", audience="default") == 1
    other = Router()
    port.rig.follow(other)
    assert port.value("event_subscribers", audience="default") == 2
    other.close()
    wait_for(lambda: port.value("event_subscribers", audience="default") == 1, "the subscriber to be gone")


def test_probes_of_a_loaded_daemon_answer_in_milliseconds(make: Make) -> None:
    """Probes share the loop with the engines' work: a daemon under load must not look dead."""
    port = Port(make, slots=64)
    port.rig.start().layouts.add(port.rig.layout)
    stop = threading.Event()
    before = port.value("requests_total", verb="lookup", outcome="ok")

    def engine(number: int) -> None:
        client = Client(port.rig.daemon.socket, deadline=30.0)
        session = client.attach(port.rig.layout, engine_id=f"load-{number}")
        asked = keys_of(loose(256, f"e{number}"))
        turn = 0
        while not stop.is_set():
            turn += 1
            session.lookup(asked)
            store(session, chain(8, f"{number}-{turn % 50}"))
        client.close()

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    took = []
    try:
        wait_for(lambda: port.value("requests_total", verb="lookup", outcome="ok") > before + 20, "load")
        for path in ("/livez", "/readyz", "/startupz", "/statusz") * 10:
            began = time.monotonic()
            code, _ = port.get(path)
            took.append(time.monotonic() - began)
            assert code == 200
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert statistics.median(took) < 0.05, sorted(took)


def test_counters_never_fall_while_engines_come_go_and_fail(make: Make) -> None:
    """L134: and the exporter is up all the time, through a reset and a quarantine."""
    port = Port(make, slots=8)
    rig = port.rig.start()
    seen: Series = {}

    def scrape() -> None:
        now = port.scrape()
        for key, value in seen.items():
            if key[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert now[key] >= value, key
        seen.update(now)

    for turn in range(4):
        client = Client(rig.daemon.socket, deadline=10.0)
        session = client.attach(rig.layout, engine_id=f"e{turn}")
        store(session, chain(6, str(turn)))
        scrape()
        session.prepare_store(keys_of(loose(2, str(turn))))
        session.lookup(keys_of(chain(6, str(turn))), lease=5.0)
        scrape()
        if turn % 2:
            session.reset()
        client.close()
        scrape()
    rig.layouts.add(rig.layout)
    wait_for(lambda: port.value("store_jobs") == 0, "the jobs to end")
    assert port.value("given_up_total", what="jobs_revoked") == 4
    scrape()
