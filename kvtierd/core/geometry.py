"""How a layout's blocks lie in pool slots.

A slot is addressed by its *unit number*: byte offset in the pool = number * ``UNIT``. Slots start on a unit,
so that direct I/O, page protection and DMA all see aligned memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtierd.core.model import Layout

UNIT = 4096
RANK_ALIGN = 512


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True, slots=True)
class Geometry:
    """Slot size, per-group payload sizes and rank offsets, all in bytes.

    ``rank_offsets[g][r]`` is where rank r's part of a block of group g starts in its slot.
    ``payload_bytes[g]`` covers all ranks' parts, padding between them included.
    """

    slot_bytes: int
    payload_bytes: tuple[int, ...]
    block_bytes: tuple[int, ...]
    rank_offsets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layout: Layout) -> Geometry:
        """Compute the geometry; the largest group's sum of aligned rank parts is the slot."""
        offsets, payloads = [], []
        for group in layout.groups:
            step = _align(group.block_bytes, RANK_ALIGN)
            offsets.append(tuple(rank * step for rank in range(layout.ranks)))
            payloads.append((layout.ranks - 1) * step + group.block_bytes)
        return cls(
            slot_bytes=_align(max(payloads), UNIT),
            payload_bytes=tuple(payloads),
            block_bytes=tuple(group.block_bytes for group in layout.groups),
            rank_offsets=tuple(offsets),
        )

    @property
    def units(self) -> int:
        """Slot size in units."""
        return self.slot_bytes // UNIT

    def waste(self, group: int) -> int:
        """Bytes of a slot that a block of this group leaves unused."""
        return self.slot_bytes - self.payload_bytes[group]
