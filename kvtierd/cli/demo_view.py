"""How the demo looks: a live picture for a terminal, quiet lines for a pipe. Draws, counts nothing.

:func:`picture` is pure (a frame and a width in, lines out); :class:`LiveView` puts it on the terminal's
alternate screen, so that resizing never leaves torn lines, and gives the screen back when it ends.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

COLOURS = {
    "cpu": "36",
    "disk": "34",
    "computed": "90",
    "good": "32",
    "bad": "31;1",
    "dim": "2",
    "strong": "1",
}
_OTHER_TIER = "35"
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_EIGHTHS = " ▏▎▍▌▋▊▉"
_SPARKS = "▁▂▃▄▅▆▇█"
NAME = 12
MIN_BAR = 8
MAX_BAR = 46
"""Cells: of the names on the left with their margin, and of bars."""
_REDRAW_SECONDS = 0.125
_PLAIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Gauge:
    """One tier's occupancy, as the daemon's status has it. ``label``: what its events call the place."""

    name: str
    blocks: int
    used_bytes: int
    capacity_bytes: int
    label: str


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate's last value as text, and its recent course."""

    name: str
    text: str
    course: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """One moment of the demo. ``served``: prompt blocks by where they came from, ``computed`` the last."""

    title: str
    done: int
    total: int
    elapsed: float
    gauges: tuple[Gauge, ...]
    served: tuple[tuple[str, int], ...]
    rates: tuple[Rate, ...]
    verified_bytes: int
    wrong_blocks: int


class Ink:
    """Puts colour on words, or leaves them as they are."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    @classmethod
    def for_stream(cls, stream: TextIO) -> Ink:
        """Colour for a terminal, unless NO_COLOR is set (no-color.org) or the terminal is dumb."""
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return cls(enabled=stream.isatty() and not plain)

    def __call__(self, name: str, text: str) -> str:
        """Return ``text`` in the colour of a name of ``COLOURS``; any other name is a further tier."""
        return f"\x1b[{COLOURS.get(name, _OTHER_TIER)}m{text}\x1b[0m" if self._enabled else text


def human_bytes(count: float) -> str:
    """Return a size with a binary unit, as ``12.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def bar(share: float, width: int) -> str:
    """Return ``width`` cells filled to ``share`` (0 to 1) in steps of an eighth, and a dotted rest."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    filled = "█" * full + (_EIGHTHS[part] if part else "")
    return filled + "·" * (width - len(filled))


def sparkline(course: Sequence[float], width: int) -> str:
    """Return the last ``width`` values as little columns, scaled to the largest."""
    values = list(course)[-width:]
    top = max(values, default=0) or 1
    return "".join(_SPARKS[min(7, int(value / top * 7.999))] for value in values).rjust(width)


def stacked(parts: Sequence[tuple[str, int]], width: int, ink: Ink) -> str:
    """Return one bar of ``width`` cells divided in proportion; the last part is the dotted rest."""
    total = sum(count for _, count in parts) or 1
    drawn, cells, edge = [], 0, 0
    for name, count in parts[:-1]:
        edge += count
        run = round(edge / total * width) - cells
        drawn.append(ink(name, "█" * run))
        cells += run
    return "".join(drawn) + ink(parts[-1][0], "·" * (width - cells))


def picture(frame: Frame, width: int, ink: Ink) -> list[str]:
    """Return the lines of a frame, none wider than ``width`` cells; bars give way before words do."""
    rooms = [_room(gauge) for gauge in frame.gauges]
    counts = f"{frame.done} of {frame.total}  {frame.elapsed:.1f} s"
    widest = max(map(len, (*rooms, *(rate.text for rate in frame.rates), counts)))
    cells = max(MIN_BAR, min(MAX_BAR, width - NAME - len("  ") - widest))
    lines = [
        "",
        f"  {ink('strong', 'kvtierd demo')}  {ink('dim', frame.title)}",
        "",
        *(_gauge_line(*pair, cells, ink) for pair in zip(frame.gauges, rooms, strict=True)),
        "",
        f"  {'served':<10}{stacked(frame.served, cells, ink)}",
        f"  {'':<10}" + "   ".join(f"{ink(n, n)} {share:>3}%" for n, share in shares(frame.served)),
        "",
        *(
            f"  {rate.name:<10}{ink('dim', sparkline(rate.course, cells))}  {rate.text}"
            for rate in frame.rates
        ),
        "",
        f"  {'bytes':<10}{_verdict(frame, ink)}",
        f"  {'requests':<10}{bar(frame.done / frame.total, cells)}  {frame.done} of {frame.total}"
        f"  {ink('dim', f'{frame.elapsed:.1f} s')}",
        "",
    ]
    return [_clip(line, width) for line in lines]


def plain_line(frame: Frame) -> str:
    """Return a frame as one line for a log, of about 100 characters."""
    tiers = ", ".join(f"{gauge.name} {gauge.blocks}" for gauge in frame.gauges)
    served = ", ".join(f"{share}% {name}" for name, share in shares(frame.served))
    rates = ", ".join(f"{rate.name} {rate.text}" for rate in frame.rates if rate.name == "load")
    return (
        f"{frame.elapsed:5.1f} s  {frame.done:>4} of {frame.total} requests | {tiers} blocks | "
        f"{served} | {rates}"
    )


def shares(served: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return each part in whole percent; together they are 100 (largest remainders), or 0 of nothing."""
    total = sum(count for _, count in served)
    if not total:
        return [(name, 0) for name, _ in served]
    percent = [count * 100 // total for _, count in served]
    by_remainder = sorted(range(len(served)), key=lambda at: -(served[at][1] * 100 % total))
    for at in by_remainder[: 100 - sum(percent)]:
        percent[at] += 1
    return [(name, share) for (name, _), share in zip(served, percent, strict=True)]


def _room(gauge: Gauge) -> str:
    used, capacity = human_bytes(gauge.used_bytes), human_bytes(gauge.capacity_bytes)
    return f"{gauge.blocks:>5} blocks  {used} of {capacity}  {gauge.label}"


def _gauge_line(gauge: Gauge, room: str, cells: int, ink: Ink) -> str:
    filled = ink(gauge.name, bar(gauge.used_bytes / gauge.capacity_bytes, cells))
    blocks = len(f"{gauge.blocks:>5} blocks")
    return f"  {gauge.name:<10}{filled}  {room[:blocks]}{ink('dim', room[blocks:])}"


def _verdict(frame: Frame, ink: Ink) -> str:
    verified = f"{human_bytes(frame.verified_bytes)} loaded and verified"
    if frame.wrong_blocks:
        return f"{verified}, {ink('bad', f'{frame.wrong_blocks} blocks WRONG')}"
    return f"{verified}, {ink('good', 'all right')}"


def _clip(line: str, width: int) -> str:
    """Cut a line to ``width`` visible cells without cutting an escape sequence."""
    room, kept, at = width, [], 0
    for escape in [*_ESCAPE.finditer(line), None]:
        text = line[at : escape.start() if escape else len(line)]
        kept.append(text[:room])
        room -= min(room, len(text))
        if escape:
            kept.append(escape.group())
            at = escape.end()
    return "".join(kept)


class LiveView:
    """Draws frames over each other while it is entered; at most eight times a second."""

    def __init__(self, stream: TextIO = sys.stdout) -> None:
        self._stream = stream
        self._ink = Ink.for_stream(stream)
        self._next = 0.0

    def due(self, now: float) -> bool:
        """Is it time for another frame?"""
        return now >= self._next

    def show(self, frame: Frame, now: float) -> None:
        """Draw a frame in one write, so that the terminal never shows half of it."""
        self._next = now + _REDRAW_SECONDS
        size = shutil.get_terminal_size()
        lines = picture(frame, size.columns, self._ink)[: size.lines]
        self._write("\x1b[?2026h\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in lines[:-1]))
        self._write(f"{lines[-1]}\x1b[K\x1b[J\x1b[?2026l")
        self._stream.flush()

    def keep(self, frame: Frame) -> None:
        """Print the last frame on the ordinary screen, where it stays."""
        self._write("\n".join(picture(frame, shutil.get_terminal_size().columns, self._ink)) + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)

    def __enter__(self) -> LiveView:
        self._write("\x1b[?1049h\x1b[?25l\x1b[2J")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write("\x1b[?25h\x1b[?1049l")
        self._stream.flush()


class PlainView:
    """Prints a line every two seconds."""

    def __init__(self, stream: TextIO = sys.stdout) -> None:
        self._stream = stream
        self._next = _PLAIN_SECONDS

    def due(self, now: float) -> bool:
        """Is it time for another line?"""
        return now >= self._next

    def show(self, frame: Frame, now: float) -> None:
        """Print a frame as one line."""
        self._next = now + _PLAIN_SECONDS
        print(plain_line(frame), file=self._stream, flush=True)

    def keep(self, frame: Frame) -> None:
        """Print the last frame."""
        print(plain_line(frame), file=self._stream, flush=True)

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()


class SilentView(PlainView):
    """Shows nothing: for ``--json``."""

    def due(self, now: float) -> bool:
        """Never."""
        return False

    def keep(self, frame: Frame) -> None:
        """Print nothing."""
