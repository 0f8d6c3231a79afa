"""Progress for people, on stderr: a bar on a terminal, elsewhere a plain line now and then."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from kvtierd.config.units import human_size

REDRAW_SECONDS = 0.1
LINE_SECONDS = 5.0
BAR = 24


class Progress:
    """Counts blocks and bytes towards ``total`` blocks (0: unknown). Prints nothing when ``quiet``.

    A context manager: at its end a terminal's line is cleared, so that the result stands alone.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        quiet: bool = False,
    ) -> None:
        self.what = what
        self.total = total
        self.blocks = 0
        self.bytes = 0
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._quiet = quiet
        self._clock = clock
        self._start = self._next = clock()
        if not self._terminal:
            self._next += LINE_SECONDS

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def advance(self, blocks: int, size: int = 0) -> None:
        """Count what was done and show it if it is time to."""
        self.blocks += blocks
        self.bytes += size
        now = self._clock()
        if self._quiet or now < self._next:
            return
        if self._terminal:
            self._next = now + REDRAW_SECONDS
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r{self.line(bar=True)[:width]:<{width}}")
        else:
            self._next = now + LINE_SECONDS
            self._write(self.line(bar=False) + "\n")

    def line(self, *, bar: bool) -> str:
        """Return the state in one line."""
        took = self.seconds
        parts = [self.what]
        if self.total:
            share = min(1.0, self.blocks / self.total)
            if bar:
                full = round(share * BAR)
                parts.append(f"[{'#' * full}{'.' * (BAR - full)}]")
            parts.append(f"{share:4.0%} {self.blocks:,} of {self.total:,} blocks")
        else:
            parts.append(f"{self.blocks:,} blocks")
        if self.bytes:
            parts.append(human_size(self.bytes))
            if took > 0:
                parts.append(f"{human_size(self.bytes / took)}/s")
        if self.total and self.blocks and took > 1:
            left = took / self.blocks * max(0, self.total - self.blocks)
            parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
        return "  ".join(parts)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and not self._quiet:
            self._write(f"\r{'':{shutil.get_terminal_size().columns - 1}}\r")
