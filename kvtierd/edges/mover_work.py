"""What a mover works on: operations, the chunks they are cut into, and the figures about both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvtierd.core.effects import Delete, Probe, Read, Write
from kvtierd.core.model import BlockId
from kvtierd.core.stimuli import FoundBlock, Outcome, Status
from kvtierd.edges.histogram import Histogram

Work = Write | Read | Delete | Probe
Kind = Literal["write", "read", "delete", "probe"]

_KINDS: dict[type, Kind] = {Write: "write", Read: "read", Delete: "delete", Probe: "probe"}


def kind_of(effect: Work) -> Kind:
    """Return the name that an effect has in figures and messages."""
    return _KINDS[type(effect)]


def ids_of(effect: Work) -> list[BlockId]:
    """Return the blocks of an effect, in its order."""
    if isinstance(effect, (Delete, Probe)):
        return list(effect.ids)
    return [at.block.id for at in effect.blocks]


def _payload(effect: Work) -> int:
    """Return the bytes that an effect moves."""
    return 0 if isinstance(effect, Delete | Probe) else sum(at.block.payload_bytes for at in effect.blocks)


def most_of(effect: Work, size: int) -> int:
    """Return how many of an effect's blocks make up so many bytes, at least one; all of what moves none."""
    moved = _payload(effect)
    return max(1, size * len(ids_of(effect)) // moved) if moved else len(ids_of(effect))


def failed(ids: Sequence[BlockId], reason: str) -> list[Outcome]:
    """Return a FAILED outcome for each block."""
    return [Outcome(block_id, Status.FAILED, reason=reason) for block_id in ids]


@dataclass(slots=True, eq=False)
class Operation:
    """One effect in flight; owned by the loop's thread, but for ``effect`` and ``ids``.

    ``began`` and ``ended`` span its jobs so far, on the mover's clock. A probe fills ``found`` and
    ``unknown``, everything else ``results``.
    """

    effect: Work
    ids: list[BlockId]
    results: list[Outcome | None]
    chunks_left: int
    began: float | None = None
    ended: float = 0.0
    stalled: bool = False
    found: list[FoundBlock] = field(default_factory=list)
    unknown: bool = False

    @property
    def seconds(self) -> float:
        """Seconds from the start of its first job to the end of its last; 0 if none began."""
        return self.ended - self.began if self.began is not None else 0.0


@dataclass(slots=True, eq=False)
class Chunk:
    """Blocks ``start`` to ``stop`` of an operation: one job of one thread.

    ``began`` and ``ended`` are set by the thread that does it.
    """

    operation: Operation
    start: int
    stop: int
    queued: float
    began: float | None = None
    ended: float | None = None

    @property
    def ids(self) -> list[BlockId]:
        """The chunk's blocks."""
        return self.operation.ids[self.start : self.stop]

    @property
    def is_background(self) -> bool:
        """Whether everything else goes first."""
        return isinstance(self.operation.effect, Probe)

    @property
    def may_be_dropped(self) -> bool:
        """Whether it may end without being done; a deletion that is dropped would leave bytes uncounted."""
        return not isinstance(self.operation.effect, Delete)


@dataclass(slots=True)
class Ended:
    """What a thread hands back of one chunk; ``found`` is a probe's, ``outcomes`` everything else's."""

    chunk: Chunk
    outcomes: list[Outcome] = field(default_factory=list)
    found: list[FoundBlock] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(slots=True)
class Figures:
    """Counters of one kind of operation; owned by the loop's thread. ``seconds`` are those of threads."""

    names: tuple[str, ...]
    in_flight: int = 0
    in_flight_blocks: int = 0
    in_flight_bytes: int = 0
    bytes: int = 0
    seconds: float = 0.0
    refused: int = 0
    errors: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    durations: Histogram = field(default_factory=Histogram)
    """Of operations, from the start of the first job to the end of the last."""

    @classmethod
    def of(cls, kind: Kind) -> Figures:
        """Return zeros for a kind of operation."""
        probe = ("found", "absent", "unknown")
        return cls(probe if kind == "probe" else tuple(status.value for status in Status))

    def begin(self, operation: Operation) -> None:
        """Count an operation's beginning."""
        self.in_flight += 1
        self.in_flight_blocks += len(operation.ids)
        self.in_flight_bytes += _payload(operation.effect)

    def take(self, operation: Operation) -> None:
        """Count an operation's end."""
        effect = operation.effect
        self.in_flight -= 1
        self.in_flight_blocks -= len(operation.ids)
        self.in_flight_bytes -= _payload(effect)
        if operation.began is not None:
            self.durations.note(operation.seconds)
        if isinstance(effect, Probe):
            found = 0 if operation.unknown else len({found.block.id for found in operation.found})
            self.outcomes["found"] += found
            self.outcomes["unknown" if operation.unknown else "absent"] += len(operation.ids) - found
            return
        outcomes = [outcome for outcome in operation.results if outcome is not None]
        self.outcomes.update(outcome.status.value for outcome in outcomes)
        if not isinstance(effect, Delete):
            self.bytes += sum(
                at.block.payload_bytes
                for at, outcome in zip(effect.blocks, outcomes, strict=True)
                if outcome.status is Status.OK
            )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "in_flight": self.in_flight,
            "in_flight_blocks": self.in_flight_blocks,
            "in_flight_bytes": self.in_flight_bytes,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "refused": self.refused,
            "errors": self.errors,
            "outcomes": {name: self.outcomes[name] for name in self.names},
        }
