"""Frames: any cut gives the same payloads, and strangers are named at once."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.errors import LocalProtocolError, RemoteProtocolError
from kvtierd.wire.framing import HEADER_BYTES, Deframer, frame
from kvtierd.wire.messages import MAX_FRAME_BYTES


@given(
    st.lists(st.binary(min_size=1, max_size=300), max_size=8),
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
)
def test_any_cut_of_a_stream_gives_the_same_payloads(payloads, cuts):
    stream, deframer, got, turn = b"".join(map(frame, payloads)), Deframer(), [], 0
    while stream:
        size = cuts[turn % len(cuts)]
        got += deframer.feed(stream[:size])
        stream, turn = stream[size:], turn + 1
    assert got == payloads
    assert deframer.pending == 0


def test_byte_by_byte_gives_a_payload_with_its_last_byte():
    deframer = Deframer()
    data = frame(b"payload")
    assert [deframer.feed(data[i : i + 1]) for i in range(len(data))] == [[]] * (len(data) - 1) + [
        [b"payload"]
    ]


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP text"),
        (b"POST /v1/completions HTTP/1.1\r\n", "HTTP text"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "a TLS hello"),
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", "a ZeroMQ greeting"),
        (b"\x80\x04\x95\x10\x00", "a pickle"),
        (b"\x82\xa4type\xa5hello", "a msgpack map without a length"),
        (b"hello there", "text"),
        (b"\xff\xff\xff\xff", "another protocol, random bytes or a frame that is too long"),
        (b"\x9f\x01\xfe\x02", "another protocol"),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "frame length of 16777217 is over 16777216"),
        (b"\0\0\0\0", "length 0"),
    ],
)
def test_a_stranger_is_named_and_nothing_is_kept_for_it(data, name):
    """L39, L124."""
    deframer = Deframer()
    with pytest.raises(RemoteProtocolError, match=name):
        deframer.feed(data)
    assert deframer.pending == 0
    with pytest.raises(RemoteProtocolError, match=name):
        deframer.feed(frame(b"fine"))


def test_random_bytes_give_payloads_or_the_protocol_error_only():
    for _ in range(300):
        deframer = Deframer()
        try:
            deframer.feed(os.urandom(64))
        except RemoteProtocolError:
            continue
        assert deframer.pending <= 64


def test_the_bound_may_be_lowered_and_raised_between_frames():
    deframer = Deframer(max_bytes=8)
    assert deframer.feed(frame(b"12345678")) == [b"12345678"]
    deframer.max_bytes = 9
    assert deframer.feed(frame(b"123456789")) == [b"123456789"]
    with pytest.raises(RemoteProtocolError, match="over 9"):
        deframer.feed(frame(b"1234567890"))


def test_only_what_a_peer_accepts_is_framed():
    assert frame(b"x" * 5)[:HEADER_BYTES] == b"\0\0\0\5"
    for payload in (b"", bytes(MAX_FRAME_BYTES + 1)):
        with pytest.raises(LocalProtocolError):
            frame(payload)
