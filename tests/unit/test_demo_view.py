"""The demo's picture: fits any width, colours only where wanted, tells a wrong byte loudly."""

from __future__ import annotations

import io
import re

import pytest

from kvtierd.cli.demo_view import (
    Frame,
    Gauge,
    Ink,
    PlainView,
    Rate,
    SilentView,
    bar,
    human_bytes,
    picture,
    plain_line,
    shares,
    sparkline,
    stacked,
)


def frame(**changes: object) -> Frame:
    values: dict[str, object] = {
        "title": "600 requests of chat, 64 KiB blocks, seed 0",
        "done": 300,
        "total": 600,
        "elapsed": 6.0,
        "gauges": (Gauge("cpu", 96, 6 << 20, 24 << 20, "CPU"), Gauge("disk", 1008, 64, 64, "STORAGE LOCAL")),
        "served": (("cpu", 20), ("disk", 10), ("computed", 70)),
        "rates": (Rate("load", "84.1 MiB/s", (1.0, 2.0, 4.0)), Rate("events", "1,812 /s", ())),
        "verified_bytes": 3 << 30,
        "wrong_blocks": 0,
    }
    return Frame(**(values | changes))  # type: ignore[arg-type]


def visible(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


@pytest.mark.parametrize("width", [1, 20, 43, 80, 200])
@pytest.mark.parametrize("colour", [True, False])
def test_no_line_is_wider_than_the_terminal(width: int, colour: bool) -> None:
    lines = picture(frame(), width, Ink(enabled=colour))
    assert max(len(visible(line)) for line in lines) <= width
    for line in lines:
        assert line.count("\x1b[0m") * 2 == line.count("\x1b["), "a colour that is never ended"


def test_at_eighty_cells_the_bars_give_way_and_no_word_is_cut() -> None:
    gauges = (
        Gauge("cpu", 384, 24 << 20, 24 << 20, "CPU"),
        Gauge("disk", 98304, 1023 << 20, 1023 << 20, "STORAGE LOCAL"),
    )
    lines = picture(frame(gauges=gauges), 80, Ink(enabled=False))
    assert next(line for line in lines if "disk" in line).endswith("1023.0 MiB of 1023.0 MiB  STORAGE LOCAL")
    assert lines[-2].endswith("300 of 600  6.0 s")


@pytest.mark.parametrize("counts", [(1, 1, 1), (0, 0, 7), (1, 2, 997), (333, 333, 334), (5, 1, 0)])
def test_percentages_sum_to_a_hundred(counts: tuple[int, ...]) -> None:
    parts = shares(tuple(zip(("cpu", "disk", "computed"), counts, strict=True)))
    assert sum(share for _, share in parts) == 100
    assert all(
        abs(share - count * 100 / sum(counts)) < 1 for (_, share), count in zip(parts, counts, strict=True)
    )


def test_nothing_served_is_nothing_of_everything() -> None:
    assert shares((("cpu", 0), ("computed", 0))) == [("cpu", 0), ("computed", 0)]


def test_a_logs_line_is_of_readable_length() -> None:
    busy = frame(
        elapsed=119.9,
        rates=(
            Rate("load", "1023.9 MiB/s", ()),
            Rate("store", "1023.9 MiB/s", ()),
            Rate("events", "9,999 /s", ()),
        ),
    )
    assert len(plain_line(busy)) <= 110


def test_the_picture_is_the_same_with_and_without_colour() -> None:
    plain = picture(frame(), 100, Ink(enabled=False))
    assert [visible(line) for line in picture(frame(), 100, Ink(enabled=True))] == plain
    assert "\x1b" not in "".join(plain)


def test_no_color_and_pipes_get_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Ink.for_stream(Terminal())("good", "x") == "\x1b[32mx\x1b[0m"
    assert Ink.for_stream(io.StringIO())("good", "x") == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Ink.for_stream(Terminal())("good", "x") == "x"


def test_wrong_bytes_are_told() -> None:
    text = "\n".join(picture(frame(wrong_blocks=2), 100, Ink(enabled=False)))
    assert "2 blocks WRONG" in text
    assert "all right" not in text


def test_bars_are_exact_and_never_overflow() -> None:
    assert bar(0, 4) == "····"
    assert bar(0.5, 4) == "██··"
    assert bar(1 / 16, 2) == "▏·"
    assert bar(7, 3) == "███"
    assert sparkline([], 3) == "   "
    assert sparkline([0, 1, 2], 2) == "▄█"
    assert stacked([("cpu", 1), ("disk", 1), ("computed", 2)], 8, Ink(enabled=False)) == "████····"
    assert stacked([("cpu", 0), ("computed", 0)], 4, Ink(enabled=False)) == "····"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1.0 MiB"), (5 << 40, "5120.0 GiB")]
)
def test_sizes_are_readable(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_a_pipe_gets_a_line_every_two_seconds_and_json_none() -> None:
    out = io.StringIO()
    with PlainView(out) as view:
        assert not view.due(1.9)
        assert view.due(2.0)
        view.show(frame(), 2.0)
        assert not view.due(3.9)
    assert out.getvalue() == plain_line(frame()) + "\n"
    assert "cpu 96, disk 1008 blocks" in out.getvalue()
    with SilentView(out) as silent:
        assert not silent.due(1e9)
