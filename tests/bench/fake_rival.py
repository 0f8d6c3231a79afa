"""A rival whose figures are known: what it is asked for takes as long as its argument says, in seconds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("adapters")))

import lines


class Fake:
    def __init__(self, seconds: float, fault: str) -> None:
        self.seconds, self.fault = seconds, fault

    def open(self, **_: object) -> list[int]:
        print("a library that prints")  # must not be taken for an answer
        return [os.getpid()]

    def pins(self, pin: bool) -> bool:
        return True

    def lookup(self, times: int, pin: bool) -> list[float]:
        return [self.seconds] * times

    def lookups(self, seconds: float, lanes: int, pin: bool) -> float:
        return 1 / self.seconds

    def store(self, times: int = 0) -> list[float]:
        if self.fault == "raises":
            raise RuntimeError("no room")
        if self.fault == "ends":
            os._exit(3)
        return [self.seconds] * (times or 2)  # of so many calls, or wall and processor time

    load = store

    def grow(self, blocks: int, at_once: int) -> None:
        self.ballast = b"\1" * (blocks * 1000)

    def wrong(self) -> int:
        return int(self.fault == "wrong bytes")

    def wipe(self) -> None: ...

    def close(self) -> None: ...


if __name__ == "__main__":
    lines.serve(Fake(float(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
