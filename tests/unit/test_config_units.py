"""Sizes, durations and endpoints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.config.endpoints import parse_endpoint, parse_listen
from kvtierd.config.units import format_duration, format_size, human_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("64MiB", 67_108_864),
        (67_108_864, 67_108_864),
        ("64MB", 64_000_000),
        ("1 TiB", 1 << 40),
        ("512B", 512),
    ],
)
def test_a_size_means_exactly_its_bytes(text, size):
    """L90."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        1.5,
        8e9,
        "yes",
        "8",
        "8G",
        "8gib",
        "-1GiB",
        "1.5GiB",
        "",
        None,
        0,
        "0B",
        -4,
        "٣GiB",
        "9PiB" * 9,
        "99999PiB",
    ],
)
def test_what_is_no_size_is_refused(value):
    with pytest.raises(ValueError, match="size"):
        parse_size(value)


@given(st.integers(1, 1 << 61))
def test_a_formatted_size_reads_back_as_itself(size):
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5.0), ("500ms", 0.5), ("2m", 120.0), ("1h", 3600.0), ("0.5s", 0.5)]
)
def test_a_duration_is_seconds(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("value", [5, 5.0, True, "5", "s", "-5s", "0s", "5 s", "5d", "1h30m", None, "99999h"])
def test_a_duration_without_a_sound_unit_is_refused(value):
    with pytest.raises(ValueError, match="duration"):
        parse_duration(value)


@given(st.integers(1, 10**9))
def test_a_formatted_duration_reads_back_as_itself(milliseconds):
    assert parse_duration(format_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000)


def test_sizes_are_rounded_for_people():
    assert [human_size(size) for size in (12, 1536, 8 << 30)] == ["12 B", "1.5 KiB", "8.0 GiB"]


@pytest.mark.parametrize(
    ("endpoint", "loopback"),
    [
        ("tcp://127.0.0.1:5557", True),
        ("tcp://127.9.9.9:0", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///run/kvtierd/events.sock", True),
        ("tcp://*:5557", False),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://[::]:5557", False),
        ("tcp://eth0:5557", False),
        ("tcp://10.0.0.1:5557", False),
    ],
)
def test_only_loopback_and_ipc_count_as_inside_the_pod(endpoint, loopback):
    assert parse_endpoint(endpoint).is_loopback is loopback


@pytest.mark.parametrize(
    "endpoint",
    ["", "5557", "127.0.0.1:5557", "tcp://127.0.0.1", "tcp://:5557", "tcp://127.0.0.1:70000", "tcp://127.0.0.1:*",
     "tcp://a b:1", "tcp://[zz]:1", "tcp://[:::]:1", "udp://127.0.0.1:1", "ipc://relative", "ipc:///", "inproc://x",
     "ipc:///" + "x" * 107],
)  # fmt: skip
def test_a_malformed_endpoint_is_refused(endpoint):
    """L94."""
    with pytest.raises(ValueError, match=r"write|needs|at most|not an IPv6"):
        parse_endpoint(endpoint)


def test_addresses_collide_when_both_cannot_be_bound():
    def collide(one, other):
        return parse_listen(one).collides(parse_listen(other))

    assert collide("127.0.0.1:5557", "127.0.0.1:5557")
    assert collide("*:5557", "127.0.0.1:5557")
    assert not collide("127.0.0.1:0", "127.0.0.1:0")
    assert not collide("127.0.0.1:5557", "127.0.0.2:5557")
    assert not parse_endpoint("ipc:///a").collides(parse_endpoint("tcp://*:1"))
