"""The watch: what hangs is known, and probes are answered when the loop is what hangs."""

import json
import logging
import socket
import threading
import urllib.error
import urllib.request

import pytest

from kvtierd.edges.watch import DEAD_AFTER, HANGS_AFTER, Watch
from kvtierd.testing.clock import ManualClock, wait_for


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def get(listener, path):
    """What a probe gets: the code and the body."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{listener.getsockname()[1]}{path}", timeout=5
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_only_what_makes_no_progress_for_a_second_hangs():
    ages = {"tier near": 0.2, "tier far": HANGS_AFTER + 0.5}
    watch = Watch(lambda: ages, clock=ManualClock())
    assert watch.hanging() == {"tier far": HANGS_AFTER + 0.5}
    ages["tier far"] = 0.0
    assert watch.hanging() == {}


def test_the_age_of_the_loop_counts_from_its_last_beat():
    clock = ManualClock()
    watch = Watch(dict, clock=clock)
    clock.advance(3.0)
    assert watch.loop_age == 3.0
    watch.beat()
    assert watch.loop_age == 0.0


def test_while_the_loop_hangs_probes_are_answered_and_the_log_says_where(listener, caplog):
    """The loop's thread is this one; it beats no more."""
    watch = Watch(dict)
    with caplog.at_level(logging.WARNING):
        watch.start(listener.fileno())
        try:
            code, body = get(listener, "/readyz")
            assert code == 503
            assert body["state"] == "stalled"
            assert body["loop_age_seconds"] > HANGS_AFTER
            assert get(listener, "/statusz")[0] == 503
            assert get(listener, "/livez")[0] == 200, "not for a restart yet"
            watch.beat()
            wait_for(lambda: "goes on after" in caplog.text, "the end of the stall to be told")
        finally:
            watch.stop()
    assert caplog.text.count("has not gone round") == 1
    stack = next(record.fields["stack"] for record in caplog.records if record.event == "loop_stalled")
    assert "test_while_the_loop_hangs" in stack, "that of the loop's thread"
    report = watch.report()
    assert report["loop_stalls"] == 1
    assert report["loop_longest_stall_seconds"] > HANGS_AFTER


def test_a_loop_that_hangs_for_long_is_not_alive(listener):
    clock = ManualClock()
    watch = Watch(dict, clock=clock)
    clock.advance(DEAD_AFTER + 1)
    assert watch._answer("/livez")[0] == 503


def test_a_loop_that_beats_is_left_alone(listener):
    """Nobody but the loop accepts its connections then."""
    watch = Watch(dict)
    watch.start(listener.fileno())
    beating = threading.Event()
    try:
        with socket.create_connection(listener.getsockname()) as client:
            client.setblocking(False)
            for _ in range(20):
                watch.beat()
                beating.wait(0.1)
            accepted, _ = listener.accept()
            accepted.close()
    finally:
        watch.stop()
    assert watch.report()["loop_stalls"] == 0


def test_strangers_do_not_keep_the_stand_in_from_others(listener):
    watch = Watch(dict)
    watch.start(listener.fileno())
    try:
        for said in (b"", b"\xff" * 100, b"GET / HTTP/1.1\r\n", b"PUT / HTTP/1.1\r\nHost: x\r\n\r\n"):
            with socket.create_connection(listener.getsockname()) as stranger:
                stranger.sendall(said)
                assert get(listener, "/readyz")[0] == 503
    finally:
        watch.stop()
