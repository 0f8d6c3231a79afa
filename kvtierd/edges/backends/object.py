"""One object per block in a bucket, with the header and the checks of a file (``OBJECT.md``).

Calls are synchronous and made by the tier's threads, so its ``readers`` and ``writers`` are the requests in
flight. A put borrows the pool's memory until the call returns; a get is copied once, from the client's buffer
into the pool. Listing is for tools and for a start with ``shared: false``, never for an engine's request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvtierd.core.geometry import Geometry
from kvtierd.core.model import Block, BlockId, Layout
from kvtierd.core.stimuli import FoundBlock, Outcome, Status
from kvtierd.edges.backends import fs_format
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs_format import FormatError
from kvtierd.edges.backends.object_copy import copy_into
from kvtierd.edges.backends.object_errors import Fault, Meaning, StoreFailed
from kvtierd.edges.backends.object_keys import Keys
from kvtierd.edges.backends.object_patience import Budget
from kvtierd.edges.backends.object_requests import Requests, parallel
from kvtierd.edges.backends.object_upkeep import ObjectUpkeep
from kvtierd.errors import TierError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

DELETE_BATCH = 1000  # the most that S3 deletes in one request


class ObjectBackend(ObjectUpkeep):
    """Storage of an object tier; safe to call from several threads and to share by several daemons.

    The first good object of a key stays: its bytes are as right as those of whoever comes second. ``connect``
    gives the client when the tier is opened; ``place`` is what people are told of it. Times are seconds.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], ObjectStore],
        *,
        place: str,
        prefix: str = "",
        deadline: float = 30.0,
        request_timeout: float = 10.0,
        retries: int = 4,
        list_at_start: bool = False,
    ) -> None:
        requests = Requests(
            name,
            connect,
            place=place,
            deadline=deadline,
            request_timeout=request_timeout,
            retries=retries,
        )
        super().__init__(requests, Keys(prefix))
        self.name = name
        self.place = place
        self._list_at_start = list_at_start
        self._conditional = True

    def __repr__(self) -> str:
        return f"ObjectBackend({self.name!r}, {self.place!r})"

    def open(self) -> None:
        """Make the client. Nothing is sent: a store that is down or refuses is a matter of each call.

        Raises:
            TierRefused: the package, a file or a variable that the settings name is missing.
        """
        self._requests.open()

    def close(self) -> None:
        """End all waits; requests that run end by their timeouts."""
        self._requests.stop()

    def estimate(self, block: Block) -> int:
        """Return exactly the object's size in bytes."""
        return fs_format.header_bytes(block) + block.payload_bytes

    def statistics(self) -> dict[str, int]:
        """Return a copy of the counters: requests, retries, and one per kind of failure."""
        return self._requests.statistics()

    def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store blocks; one whose key has a good object already is OK and not sent again."""
        return self._each(
            [transfer.block.id for transfer in transfers], lambda i, b: self._write(transfers[i], b)
        )

    def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Get whole objects, prove header, identity, length and payload, then copy the payload."""
        return self._each(
            [transfer.block.id for transfer in transfers], lambda i, b: self._read(transfers[i], b)
        )

    def delete(self, ids: Sequence[BlockId], *, corrupt: bool = False) -> list[Outcome]:
        """Delete blocks, many in one request; a corrupt one is not kept aside."""
        budget = self._requests.begin()
        outcomes: list[Outcome] = []
        for start in range(0, len(ids), DELETE_BATCH):
            outcomes += self._delete_batch(ids[start : start + DELETE_BATCH], budget)
        if corrupt:
            self._requests.count("deleted_corrupt", len(ids))
        return outcomes

    def probe(self, ids: Sequence[BlockId]) -> list[FoundBlock]:
        """Return those of the blocks whose objects are there with right headers; one small get each.

        Raises:
            TierError: none was found and some could not be asked about.
        """
        budget = self._requests.begin()
        answers = parallel(partial(self._prove, budget=budget), ids)
        found = [answer for answer in answers if isinstance(answer, FoundBlock)]
        unknown = [answer for answer in answers if isinstance(answer, Fault)]
        if unknown and not found:
            raise TierError(self.name, f"{self.place}: {unknown[0].reason}")
        return found

    def scan(self) -> Iterator[list[FoundBlock]]:
        """Yield nothing, since lookups probe; all blocks where the tier is not shared with others."""
        if self._list_at_start:
            yield from self.list_blocks()

    def describe(self, namespace: str, layout: Layout) -> None:
        """Write the namespace's readable record, best effort."""
        geometry = Geometry.of(layout)
        record = {
            "format": fs_format.VERSION,
            "namespace": namespace,
            "layout": msgspec.to_builtins(layout),
            "slot_bytes": geometry.slot_bytes,
            "payload_bytes": geometry.payload_bytes,
        }
        text = json.dumps(record, indent=2, ensure_ascii=True).encode("ascii") + b"\n"
        try:
            self._requests.put(self._keys.record(namespace), [text], "overwrite", self._requests.begin())
        except (StoreFailed, ValueError):
            self._requests.count("describe_failed")

    def _each(self, ids: Sequence[BlockId], act: Callable[[int, Budget], Outcome]) -> list[Outcome]:
        """Run ``act`` per block within one deadline; failures become outcomes."""
        budget = self._requests.begin()
        return [self._guarded(i, block_id, act, budget) for i, block_id in enumerate(ids)]

    def _guarded(
        self, i: int, block_id: BlockId, act: Callable[[int, Budget], Outcome], budget: Budget
    ) -> Outcome:
        try:
            return act(i, budget)
        except StoreFailed as failed:
            return self._outcome(block_id, failed.fault.status, failed.fault.reason)
        except (FormatError, ValueError) as error:
            return self._outcome(block_id, Status.FAILED, str(error))

    def _outcome(self, block_id: BlockId, status: Status, reason: str) -> Outcome:
        self._requests.count(f"{status.value}: {reason}")
        return Outcome(block_id, status, reason=reason)

    def _write(self, transfer: Transfer, budget: Budget) -> Outcome:
        block, data = transfer.block, transfer.data
        if len(data) != block.payload_bytes:
            return self._outcome(block.id, Status.FAILED, "payload length differs")
        header = fs_format.encode(block, fs_format.digest(data))
        key = self._keys.block(block.id)
        parts: list[bytes | memoryview] = [header, data]
        if self._conditional:
            try:
                self._requests.put(key, parts, "create", budget)
                return Outcome(block.id, Status.OK, len(header) + len(data))
            except StoreFailed as failed:
                if failed.fault.meaning is Meaning.UNSUPPORTED:
                    self._conditional = False  # the last writer wins there, which is as good
                elif failed.fault.meaning is not Meaning.PRESENT:
                    raise
                elif (stored := self._stored(block, budget)) is not None:
                    self._requests.count("was_there")
                    return Outcome(block.id, Status.OK, stored)
        self._requests.put(key, parts, "overwrite", budget)
        return Outcome(block.id, Status.OK, len(header) + len(data))

    def _stored(self, block: Block, budget: Budget) -> int | None:
        """Return the size of the object that is there for a block, None if it is not a good one."""
        try:
            header, size = self._requests.head(
                self._keys.block(block.id), fs_format.header_bytes(block), budget
            )
            header.check(block, size)
        except FormatError as error:
            self._requests.count(f"replaced: {error}")
            return None
        return size

    def _read(self, transfer: Transfer, budget: Budget) -> Outcome:
        """Read a block. Only what is wrong twice is called corrupt: a bad line is no bad object."""
        block = transfer.block
        if len(transfer.data) != block.payload_bytes:
            return self._outcome(block.id, Status.FAILED, "payload length differs")
        key = self._keys.block(block.id)
        try:
            self._load(key, transfer, budget)
        except FormatError as first:
            self._requests.count(f"reread: {first}")
            try:
                self._load(key, transfer, budget)
            except FormatError as error:
                return self._outcome(block.id, Status.CORRUPT, str(error))
        return Outcome(block.id, Status.OK)

    def _load(self, key: str, transfer: Transfer, budget: Budget) -> None:
        """Get, prove and copy one object; raises :class:`FormatError` or :class:`StoreFailed`."""
        limit = fs_format.MAX_HEADER_BYTES + transfer.block.payload_bytes
        content = self._requests.get(key, limit, budget)
        offset, expected = fs_format.prove(content, transfer.block, len(content))
        payload = content[offset:]
        fs_format.check_digest(fs_format.digest(payload), expected)
        copy_into(transfer.data, payload)

    def _delete_batch(self, ids: Sequence[BlockId], budget: Budget) -> list[Outcome]:
        """Delete in one request; one by one where that says only that something was amiss."""
        try:
            self._requests.delete([self._keys.block(block_id) for block_id in ids], budget)
        except StoreFailed as failed:
            if failed.fault.transient or (len(ids) == 1 and failed.fault.meaning is not Meaning.ABSENT):
                return [self._outcome(one, Status.FAILED, failed.fault.reason) for one in ids]
            if len(ids) > 1:
                return [outcome for one in ids for outcome in self._delete_batch([one], budget)]
        except ValueError as error:
            if len(ids) == 1:
                return [self._outcome(ids[0], Status.FAILED, str(error))]
            return [outcome for one in ids for outcome in self._delete_batch([one], budget)]
        return [Outcome(block_id, Status.OK) for block_id in ids]
