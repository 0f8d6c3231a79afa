"""``kvtierd events tail`` on a real stream."""

import json
import threading
import time
from contextlib import contextmanager

import pytest
import zmq

from kvtierd.cli.main import main
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
    assert "BlockStored  STORAGE LOCAL f100000000000001 parent_block_hash=f100000000000000" in stored
    assert "token_ids=11,12,13,14 …(6)" in stored
    assert stored.split()[0] == "0"
    assert "dp=3 BlockRemoved CPU" in removed


def test_all_tokens_on_demand_and_heartbeats_too(capsys):
    with stream([STORED], []) as (pub, router):
        arguments = ["--endpoint", pub, "--replay", router, "--count", "2", "--tokens", "--empty"]
        assert main(["events", "tail", *arguments]) == 0
    stored, empty = capsys.readouterr().out.splitlines()
    assert "token_ids=11,12,13,14,15,16 " in stored
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
    assert "replay dp=3 BlockStored" in captured.out
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
