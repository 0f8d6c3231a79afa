"""What a blocking and an asyncio session have in common: parameters, properties, pool and fences."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from functools import partial
from zlib import crc32

from kvtierd import __version__
from kvtierd.client._channel import Channel
from kvtierd.client._link import PASSING, Link
from kvtierd.client._mapping import Region, process_token
from kvtierd.core.effects import Attached
from kvtierd.core.geometry import UNIT, Geometry
from kvtierd.core.model import BlockKey, Layout
from kvtierd.core.stimuli import Attach, Role
from kvtierd.errors import LocalProtocolError, RequestRefused, Unavailable

# What Hello says about this side.
CLIENT_NAME = f"kvtierd-python/{__version__}"


class SessionBase:
    """One attach to the daemon's pool, made anew by itself whenever the connection is lost.

    ``epoch`` counts the connections; jobs and leases live on the one that gave them.
    """

    def __init__(self, channel: Channel, layout: Layout) -> None:
        self.layout = layout
        self._channel = channel
        self._link: Link = channel.link
        self._geometry = Geometry.of(layout)

    @property
    def connected(self) -> bool:
        """Whether the daemon answered the attach of the present connection."""
        return self._link.ready

    @property
    def epoch(self) -> int:
        """Number of the present or last connection; 0 while never connected."""
        return self._link.epoch

    @property
    def refused(self) -> RequestRefused | None:
        """Why the daemon refused the last attempt to come back; None when it did not."""
        return self._link.refused

    @property
    def region(self) -> Region | None:
        """The mapping in use with its geometry; the last one while the daemon is away."""
        return self._channel.region

    @property
    def attached(self) -> Attached | None:
        """The daemon's answer to the attach: namespace, tiers and geometry."""
        return None if self.region is None else self.region.attached

    @property
    def pool(self) -> memoryview | None:
        """The whole pool, writable; None while never connected."""
        return None if self.region is None else self.region.pool

    @property
    def pool_id(self) -> str | None:
        """The name of the mapping in :attr:`pool`."""
        return None if self.region is None else self.region.pool_id

    @property
    def unit_bytes(self) -> int:
        """A slot starts at its number times this many bytes."""
        return UNIT if self.attached is None else self.attached.unit_bytes

    @property
    def slot_bytes(self) -> int:
        """Size of one slot in bytes."""
        return self._geometry.slot_bytes if self.attached is None else self.attached.slot_bytes

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """For each group, how many bytes of a slot a block uses, over all ranks."""
        return self._geometry.payload_bytes if self.attached is None else self.attached.payload_bytes

    @property
    def rank_offsets(self) -> tuple[tuple[int, ...], ...]:
        """For each group and rank, where the rank's part starts in a slot, in bytes."""
        return self._geometry.rank_offsets if self.attached is None else self.attached.rank_offsets

    def may_hold(self, keys: Iterable[BlockKey]) -> bool:
        """Whether any of the blocks may be in some tier; a system call or a wait is never made for it.

        ``False`` is sure, as of now; ``True`` means that one has to ask (also where one cannot know). What a
        shared tier has of others and this daemon has not found yet does not count.
        """
        cells = self._channel.presence
        if cells is None:
            return True
        mask = len(cells) - 1
        return any([cells[crc32(key) & mask] for key in keys])  # noqa: C419 - twice as fast

    def slot(self, number: int, pool_id: str | None = None) -> memoryview:
        """Return one slot (``slot_bytes`` long) of the pool by its unit number.

        Pass the ``pool_id`` that came with the number wherever the two may have parted, as in a worker: a
        slot of another mapping holds other blocks.

        Raises:
            LocalProtocolError: there is no pool, or it is not the named one.
            IndexError: the slot is not inside the pool.
        """
        if self.region is None:
            raise LocalProtocolError("no pool is mapped: the session was never connected")
        if pool_id is not None and pool_id != self.region.pool_id:
            raise LocalProtocolError(f"the slot belongs to pool {pool_id}, mapped is {self.region.pool_id}")
        return self.region.slot(number)


def attach_request(
    layout: Layout, engine_id: str, dp_rank: int, role: str | Role, rank: int
) -> Callable[..., Attach]:
    """Return what builds the attach request, with the token of the process that sends it.

    Raises:
        ValueError: the role is none.
    """
    fixed = partial(Attach, layout=layout, engine_id=engine_id, dp_rank=dp_rank, role=Role(role), rank=rank)

    def build(*, id: int) -> Attach:  # noqa: A002 - the wire's name
        return fixed(id=id, process=process_token())

    return build


def must_raise(refused: RequestRefused | None) -> bool:
    """Whether a refused attach is the caller's mistake and not a state that passes."""
    return refused is not None and refused.code not in PASSING


def unanswered(path: str) -> Unavailable:
    """Return the error for a socket where no daemon answered: where, why as far as it shows, what to do."""
    return Unavailable(f"no daemon answers at {path}: {_why_not(path)}")


def _why_not(path: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return (
            "no such socket; start a daemon with kvtierd serve, or say where it is with --config or --socket"
        )
    except OSError as error:
        return f"{error.strerror}; ask as a user who may enter its folder"
    if not stat.S_ISSOCK(mode):
        return "it is no socket; say where it is with --config or --socket"
    if not os.access(path, os.R_OK | os.W_OK):
        return "permission denied; ask as a user whom access.mode and access.group of the tier file let in"
    return "the daemon ended, or did not answer within the deadline; see its log, start it or wait longer"
