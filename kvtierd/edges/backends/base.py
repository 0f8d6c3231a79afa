"""The interface between a mover and the storage of a secondary tier.

A backend stores, reads and deletes blocks; it decides nothing, keeps no LRU and announces nothing. Calls are
blocking and come from the tier's worker threads, several at a time; they release the GIL where bytes move.
Per-block faults are outcomes, never exceptions: a backend maps its own exceptions here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvtierd.core.model import Block, BlockId, Layout
from kvtierd.core.stimuli import FoundBlock, Outcome


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block and the pool memory it is copied from or to; ``len(data) == block.payload_bytes``."""

    block: Block
    data: memoryview


class Backend(Protocol):
    """Storage of one tier. One outcome per block, in the order of the call."""

    def open(self) -> None:
        """Make the storage usable; may be called again after it could not, and may hang as storage does.

        Raises:
            TierRefused: it is not, and people have to change something; a start ends with that.
            TierError: it is not, now. The message says what to do.
        """

    def scan(self) -> Iterator[list[FoundBlock]]:
        """Yield what is stored and proves itself, in batches, least recently used first.

        Never stops on a bad entry. What a scan does not yield is taken for lost once it ended.

        Raises:
            TierError: the storage cannot be read now, so the scan has to be made again.
        """

    def describe(self, namespace: str, layout: Layout) -> None:
        """Remember, best effort and readable for people, what a namespace's layout is."""

    def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store blocks; a stored block replaces an older one of its id atomically."""

    def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read blocks into their memory and verify them; not OK leaves the memory undefined."""

    def delete(self, ids: Sequence[BlockId], *, corrupt: bool = False) -> list[Outcome]:
        """Delete blocks (``corrupt``: may keep them aside). A block that is not there is OK."""

    def estimate(self, block: Block) -> int:
        """Return the bytes that storing the block will take, as ``max_bytes`` counts them."""

    def close(self) -> None:
        """Free everything; no call comes after it."""


@runtime_checkable
class Probing(Protocol):
    """What a backend adds that can share its storage with other daemons."""

    def probe(self, ids: Sequence[BlockId]) -> list[FoundBlock]:
        """Return those of the blocks that are stored, proved by their headers as a scan would.

        Raises:
            TierError: the storage does not answer, so nothing is known.
        """


@runtime_checkable
class Owned(Protocol):
    """What a backend adds that keeps records of layouts: whose what a scan is about to find is."""

    def tenants(self) -> Mapping[str, str | None]:
        """Return the tenants of stored namespaces, as far as sound records say so. Raises nothing."""


@runtime_checkable
class Reserving(Protocol):
    """What a backend adds that occupies more than its blocks: temporaries, quarantine, spare space."""

    def reserve(self, max_bytes: int) -> int:
        """Return how many of ``max_bytes`` must stay free of blocks for that; it never takes more.

        Called before :meth:`open`, and touches nothing.
        """


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """One namespace in a tier's storage. ``model`` is empty where nothing describes it.

    ``bytes`` is what its blocks occupy; ``used_at``: the latest use of one, in seconds since the epoch, 0.0
    where unknown.
    """

    namespace: str
    model: str
    blocks: int
    bytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something in a tier's storage that is no block: where it is, for people, and what it occupies."""

    place: str
    bytes: int


@runtime_checkable
class Maintained(Protocol):
    """What a backend adds whose storage ``kvtierd gc`` and ``kvtierd verify`` can look after.

    Called from one thread; daemons may use the storage. Every verb may raise TierError: the storage does not
    answer, or is a living daemon's and nothing can be removed. What cannot be removed is left out of the
    answer and stays.
    """

    def namespaces(self) -> list[StoredNamespace]:
        """Return what there is of each namespace, changing nothing."""

    def remove_namespace(self, namespace: str) -> None:
        """Remove a namespace's blocks and its record."""

    def stale_temporaries(self, *, remove: bool = False) -> list[Leftover]:
        """Return, or remove and return, the temporaries of writers that are provably dead."""

    def quarantined(self, *, remove: bool = False) -> list[Leftover]:
        """Return, or remove and return, the corrupt blocks that were kept aside."""

    def verify(self) -> Iterator[list[Outcome]]:
        """Prove every stored block, payload included, changing nothing; yield batches of outcomes.

        ``OK`` with its ``stored_bytes``, ``CORRUPT`` or ``FAILED`` (unreadable) with a reason. A key with an
        empty hash stands for a block that does not say whose it is. Blocks that leave meanwhile are left out.
        """
