"""When a secondary tier gets work: a breaker for faults, a window for slowness, both without a clock.

*Breaker* (one for reads, one for writes): after ``FAULTS`` failed operations in a row nothing is tried for a
while that doubles up to a minute; then one block is tried, and its outcome closes or reopens the breaker.

*Window*: how many bytes one write may take, so that it lasts about ``TARGET`` seconds: halved when a write
took more than twice that, grown when it took less (between the two it stays, which is the hysteresis).

*Backlog*: while what waits would take longer than ``BACKLOG_HIGH`` seconds at the tier's pace, further blocks
are refused, until it is below ``BACKLOG_LOW``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FAULTS = 4
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
TARGET = 0.25
BACKLOG_HIGH = 10.0
BACKLOG_LOW = 5.0
PACE_WEIGHT = 0.3


@dataclass(slots=True)
class Breaker:
    """Open means: try nothing before ``until``. ``reason`` is the fault that opened it."""

    faults: int = 0
    pause: float = FIRST_PAUSE
    until: float | None = None
    trying: bool = False
    reason: str = ""

    @property
    def closed(self) -> bool:
        """Whether work flows freely."""
        return self.until is None

    def allows(self, now: float) -> bool:
        """Whether an operation may start; with the breaker half open that is one operation."""
        return self.until is None or (now >= self.until and not self.trying)

    def started(self) -> None:
        """Note that an operation started."""
        if self.until is not None:
            self.trying = True

    def ended(self, now: float, fault: str | None) -> None:
        """Note how an operation ended; ``fault`` is ``None`` when some block of it went well."""
        self.trying = False
        if fault is None:
            self.faults, self.pause, self.until, self.reason = 0, FIRST_PAUSE, None, ""
            return
        self.faults += 1
        self.reason = fault
        if self.until is not None:
            self.pause = min(self.pause * 2, LONGEST_PAUSE)
        if self.until is not None or self.faults >= FAULTS:
            self.until = now + self.pause


@dataclass(slots=True)
class Gate:
    """What a tier may be asked now. ``budget``: the most bytes of one write."""

    budget: int
    reads: Breaker = field(default_factory=Breaker)
    writes: Breaker = field(default_factory=Breaker)
    stalled: set[int] = field(default_factory=set)
    """Operations past their deadline; while there is one nothing is asked of the tier."""
    window: float = 0.0
    pace: float = 0.0
    """Bytes per second of writes, smoothed; 0 while unknown."""
    refusing: bool = False
    outage: str = ""
    """Why the storage cannot be used at all; empty when it can."""
    hangs: bool = False
    """Whether that is because it does not answer."""

    def __post_init__(self) -> None:
        self.window = float(self.budget)

    def may_read(self, now: float) -> bool:
        """Whether a read may start."""
        return not self.outage and not self.stalled and self.reads.allows(now)

    def may_write(self, now: float) -> bool:
        """Whether a write may start."""
        return not self.outage and not self.stalled and self.writes.allows(now)

    def write_limit(self) -> int:
        """Return the most bytes that the next write may take; one block is always allowed."""
        return 1 if not self.writes.closed else int(min(self.window, self.budget))

    def wrote(self, size: int, seconds: float) -> None:
        """Adapt window and pace to a write of ``size`` bytes that went well."""
        if seconds > 2 * TARGET:
            self.window = max(1.0, min(self.window, size) / 2)
        elif seconds < TARGET:
            self.window = min(float(self.budget), max(self.window, size) * 1.5)
        if seconds > 0:
            # Averaged as seconds per byte: a tier that turns slow shows at once, not after many writes.
            now = seconds / size
            before = now if not self.pace else 1 / self.pace
            self.pace = 1 / (before + PACE_WEIGHT * (now - before))

    def takes_more(self, backlog: int) -> bool:
        """Whether further blocks may queue behind a backlog of so many bytes."""
        if not self.pace:
            return True
        seconds = backlog / self.pace
        self.refusing = seconds > (BACKLOG_LOW if self.refusing else BACKLOG_HIGH)
        return not self.refusing

    @property
    def condition(self) -> str:
        """``ok``, ``slow``, ``degraded`` or ``stalled``."""
        if self.stalled or (self.outage and self.hangs):
            return "stalled"
        if self.outage or not (self.reads.closed and self.writes.closed):
            return "degraded"
        return "slow" if self.refusing else "ok"

    @property
    def reason(self) -> str:
        """Why the condition is not ``ok``."""
        if self.outage:
            return self.outage
        if self.stalled:
            return f"{len(self.stalled)} operations are past their deadline"
        return self.writes.reason or self.reads.reason or ("writes cannot keep up" if self.refusing else "")
