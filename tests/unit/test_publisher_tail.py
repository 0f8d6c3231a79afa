"""``kvtierd events tail`` on a real stream."""

import json
import threading
import time
from contextlib import contextmanager

import pytest
import zmq

from kvtierd.cli.events import Patience
from kvtierd.cli.events_line import HEADER, Message, human_line
from kvtierd.cli.main import main
from kvtierd.testing.clock import ManualClock
from kvtierd.wire.kvevents import BlockRemoved, BlockStored, Form, encode_batch
from kvtierd.wire.stream import END, encode_sequence

H = 0xF100000000000000
STORED = BlockStored(
    (H + 1,),
    H,
    (11, 12, 13, 14, 15, 16),
    6,
    None,
    "STORAGE",
    None,
    group_idx=0,
    kv_cache_spec_kind="full_attention",
    locality="LOCAL",
)
REMOVED = BlockRemoved((b"\xab" * 32,), "CPU")


@contextmanager
def stream(*batches, topic=b"kv@pod@m", form=Form.MAP):
    """A publisher that repeats the last batch under rising numbers, and answers replays with all batches."""
    context = zmq.Context()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    ends = [f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}" for socket in (pub, router)]
    payloads = [encode_batch(1700000000.25, events, 3, form) for events in batches]
    stop = threading.Event()

    def serve():
        number = len(payloads)
        while not stop.is_set():
            if router.poll(5):
                client, _, start = router.recv_multipart()
                for at in range(int.from_bytes(start, "big"), len(payloads)):
                    router.send_multipart([client, b"", topic, encode_sequence(at), payloads[at]])
                router.send_multipart([client, b"", b"", END, b""])
            pub.send_multipart([topic, encode_sequence(number), payloads[-1]])
            number += 1

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ends
    finally:
        stop.set()
        thread.join()
        context.destroy(linger=0)


@pytest.mark.parametrize("form", list(Form))
def test_json_lines_of_a_replay_and_then_the_live_stream(capsys, form):
    with stream([STORED, REMOVED], [REMOVED], form=form) as (pub, router):
        code = main(["events", "tail", "--endpoint", pub, "--replay", router, "--json", "--count", "4"])
    assert code == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["seq"], line["replayed"]) for line in lines[:3]] == [(0, True), (0, True), (1, True)]
    assert lines[3]["replayed"] is False
    assert lines[3]["seq"] >= 2
    first = lines[0]["event"]
    assert (first["type"], first["block_hashes"], first["medium"]) == ("BlockStored", [H + 1], "STORAGE")
    assert (first["token_ids"], first["token_count"]) == ([11, 12, 13, 14], 6)
    assert first.get("locality") == ("LOCAL" if form is Form.MAP else None)
    assert lines[1]["event"]["block_hashes"] == ["ab" * 32]
    assert {(line["dp_rank"], line["topic"], line["ts"]) for line in lines} == {
        (3, "kv@pod@m", 1700000000.25)
    }


def test_human_lines_name_the_tier_and_shorten_tokens(capsys):
    with stream([STORED], [REMOVED]) as (pub, router):
        assert main(["events", "tail", "--endpoint", pub, "--replay", router, "--count", "2"]) == 0
    stored, removed = capsys.readouterr().out.splitlines()
    assert stored[:10] == "       0r "
    assert stored.endswith("  3 BlockStored  STORAGE LOCAL f100000000000001 6 tokens parent=f100000000000000")
    assert removed.endswith("  3 BlockRemoved CPU           abababababababab…")
    assert removed.index("CPU") == stored.index("STORAGE") == HEADER.index("where")


def message(number=12, *, replayed=False):
    return Message("", number, b"", replayed)


def test_a_row_says_nothing_of_placeholders_and_of_the_only_group():
    placeholder = BlockStored((H,), None, (), 0, None, "CPU", None, group_idx=0)
    assert human_line(message(), 0.5, 0, placeholder, tokens=False).endswith("CPU           f100000000000000")
    other = BlockStored((H,), None, (), 0, 7, "CPU", "adapter", group_idx=2)
    row = human_line(message(), 0.5, 0, other, tokens=False)
    assert "group_idx=2" in row
    assert "lora_id=7 " in row


def test_a_row_fits_the_terminal():
    row = human_line(message(replayed=True), 0.5, 0, STORED, tokens=False, width=80)
    assert len(row) == 80
    assert "STORAGE LOCAL f100000000000001 6 tok" in row
    assert len(HEADER) <= 80


def test_a_terminal_gets_a_header(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with stream([STORED]) as (pub, router):
        assert main(["events", "tail", "--endpoint", pub, "--replay", router, "--count", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == HEADER


def test_a_silent_stream_is_said_to_be_one_once(capsys):
    clock = ManualClock()
    patience = Patience("tcp://x:1", None, clock)
    patience.check()
    assert capsys.readouterr() == ("", "")
    for _ in range(3):
        clock.advance(2.0)
        patience.check()
    assert capsys.readouterr() == ("", "listening on tcp://x:1; nothing yet\n")
    beating = Patience("tcp://x:1", None, clock)
    beating.heard(events=False)
    clock.advance(2.0)
    beating.check()
    assert capsys.readouterr().err == "listening on tcp://x:1; only heartbeats so far\n"
    spoken = Patience("tcp://x:1", None, clock)
    spoken.heard(events=True)
    clock.advance(60.0)
    spoken.check()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("empty", [[], ["--empty"]])
def test_heartbeats_do_not_hold_off_the_timeout(capsys, empty):
    with stream([]) as (pub, _):
        assert main(["events", "tail", "--endpoint", pub, "--timeout", "0.3", *empty]) == 69
    captured = capsys.readouterr()
    assert f"no event from {pub} for 0.3 s" in captured.err
    assert bool(captured.out) is bool(empty)


def test_all_tokens_on_demand_and_heartbeats_too(capsys):
    with stream([STORED], []) as (pub, router):
        arguments = ["--endpoint", pub, "--replay", router, "--count", "2", "--tokens", "--empty"]
        assert main(["events", "tail", *arguments]) == 0
    stored, empty = capsys.readouterr().out.splitlines()
    assert stored.endswith("token_ids=11,12,13,14,15,16")
    assert empty.endswith("(empty)")


def test_endpoints_come_from_the_tier_file(tmp_path, capsys):
    with stream([STORED]) as (pub, router):
        config = tmp_path / "tiers.yaml"
        config.write_text(
            "version: 1\npool: { bytes: 64MiB }\ntiers: [{ name: cpu, type: cpu }]\n"
            f"events: {{ audiences: [{{ name: a, bind: '{pub}', replay: '{router}', topic: kv@ }}] }}\n"
        )
        assert main(["events", "tail", "--config", str(config), "--since", "0", "--count", "1"]) == 0
        assert main(["events", "tail", "--config", str(config), "--audience", "b"]) == 78
    captured = capsys.readouterr()
    assert "  3 BlockStored " in captured.out
    assert "no audience 'b'; there are: a" in captured.err


def test_silence_ends_with_unavailable_after_the_timeout(capsys):
    begin = time.monotonic()
    assert main(["events", "tail", "--endpoint", "tcp://127.0.0.1:1", "--timeout", "0.1"]) == 69
    assert time.monotonic() - begin < 5
    assert "no message from tcp://127.0.0.1:1 for 0.1 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--since", "3"], 78), (["--endpoint", "nonsense"], 78), (["--count", "-1"], 64), (["--endpoint"], 64)],
)
def test_wrong_arguments_are_refused(arguments, code, capsys):
    assert main(["events", "tail", *arguments]) == code
    assert capsys.readouterr().err


def test_an_interrupt_is_an_orderly_end(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtierd.cli.events._messages", interrupt)
    assert main(["events", "tail"]) == 0
