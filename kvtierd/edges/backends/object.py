"""One object per block in a bucket, with the header and the checks of a file (``FORMAT.md``).

Calls are synchronous and made by the tier's threads, so its ``readers`` and ``writers`` are the requests in
flight. A put borrows the pool's memory until the call returns; a get is copied once, from the client's buffer
into the pool. Listing is for tools and for a start with ``shared: false``, never for an engine's request.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvtierd.core.geometry import Geometry
from kvtierd.core.model import Block, BlockId, Layout
from kvtierd.core.stimuli import FoundBlock, Outcome, Status
from kvtierd.edges.backends import fs_format
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs_format import Flaw, FormatError, Header
from kvtierd.edges.backends.object_copy import copy_into
from kvtierd.edges.backends.object_errors import Fault, Meaning, StoreFailed
from kvtierd.edges.backends.object_keys import Keys
from kvtierd.edges.backends.object_patience import Budget, Patience
from kvtierd.edges.backends.object_store import require_obstore
from kvtierd.errors import TierError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PARALLEL = 8
PROVE_BATCH = 128
LIST_BATCH = 1000
DELETE_BATCH = 1000  # the most that S3 deletes in one request

T = TypeVar("T")
U = TypeVar("U")


class ObjectBackend:
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
        self.name = name
        self.place = place
        self._connect = connect
        self._keys = Keys(prefix)
        self._list_at_start = list_at_start
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._patience = Patience(
            deadline=deadline, request_timeout=request_timeout, retries=retries, count=self._count
        )
        self._obstore: Any = None
        self._store: Any = None
        self._conditional = True

    def __repr__(self) -> str:
        return f"ObjectBackend({self.name!r}, {self.place!r})"

    def open(self) -> None:
        """Make the client. Nothing is sent: a store that is down or refuses is a matter of each call.

        Raises:
            TierError: the package, a file or a variable that the settings name is missing.
        """
        self._obstore = require_obstore(self.name)
        self._store = self._connect()

    def close(self) -> None:
        """End all waits; requests that run end by their timeouts."""
        self._patience.stop()

    def estimate(self, block: Block) -> int:
        """Return exactly the object's size in bytes."""
        return fs_format.header_bytes(block) + block.payload_bytes

    def statistics(self) -> dict[str, int]:
        """Return a copy of the counters: requests, retries, and one per kind of failure."""
        with self._lock:
            return dict(self._counts)

    # -- blocks ---------------------------------------------------------------------------------------

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
        budget = self._patience.begin()
        outcomes: list[Outcome] = []
        for start in range(0, len(ids), DELETE_BATCH):
            outcomes += self._delete_batch(ids[start : start + DELETE_BATCH], budget)
        if corrupt:
            self._count("deleted_corrupt", len(ids))
        return outcomes

    def probe(self, ids: Sequence[BlockId]) -> list[FoundBlock]:
        """Return those of the blocks whose objects are there with right headers; one small get each.

        Raises:
            TierError: none was found and some could not be asked about.
        """
        budget = self._patience.begin()
        answers = _parallel(partial(self._prove, budget=budget), ids)
        found = [answer for answer in answers if isinstance(answer, FoundBlock)]
        unknown = [answer for answer in answers if isinstance(answer, Fault)]
        if unknown and not found:
            raise TierError(self.name, f"{self.place}: {unknown[0].reason}")
        return found

    # -- what is there --------------------------------------------------------------------------------

    def scan(self) -> Iterator[list[FoundBlock]]:
        """Yield nothing, since lookups probe; all blocks where the tier is not shared with others."""
        if self._list_at_start:
            yield from self.list_blocks()

    def list_blocks(self) -> Iterator[list[FoundBlock]]:
        """Yield all blocks with right headers in batches, in the order of their names (for tools).

        One list request per thousand objects and one small get for each.

        Raises:
            TierError: the bucket cannot be listed.
        """
        for names in self._list():
            ids = [block_id for name in names if (block_id := self._keys.parse(name)) is not None]
            for start in range(0, len(ids), PROVE_BATCH):
                budget = self._patience.begin()
                answers = _parallel(partial(self._prove, budget=budget), ids[start : start + PROVE_BATCH])
                self._count("unproved", sum(isinstance(answer, Fault) for answer in answers))
                yield [answer for answer in answers if isinstance(answer, FoundBlock)]

    def _list(self) -> Iterator[list[str]]:
        """Yield names below the root, a page at a time; a page that fails is asked for again."""
        last: str | None = None
        while True:
            try:
                page = self._patience.request(partial(self._page, last), self._patience.begin())
            except StoreFailed as failed:
                raise TierError(self.name, f"{self.place}: cannot be listed: {failed.fault.reason}") from None
            if not page:
                return
            yield page
            last = page[-1]

    def _page(self, offset: str | None) -> list[str]:
        stream = self._obstore.list(self._store, self._keys.root, offset=offset, chunk_size=LIST_BATCH)
        return [entry["path"] for entry in next(iter(stream), ())]

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
            self._put(self._keys.record(namespace), [text], "overwrite", self._patience.begin())
        except (StoreFailed, ValueError):
            self._count("describe_failed")

    # -- one block ------------------------------------------------------------------------------------

    def _each(self, ids: Sequence[BlockId], act: Callable[[int, Budget], Outcome]) -> list[Outcome]:
        """Run ``act`` per block within one deadline; failures become outcomes."""
        budget = self._patience.begin()
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
        self._count(f"{status.value}: {reason}")
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
                self._put(key, parts, "create", budget)
                return Outcome(block.id, Status.OK, len(header) + len(data))
            except StoreFailed as failed:
                if failed.fault.meaning is Meaning.UNSUPPORTED:
                    self._conditional = False  # the last writer wins there, which is as good
                elif failed.fault.meaning is not Meaning.PRESENT:
                    raise
                elif (stored := self._stored(block, budget)) is not None:
                    self._count("was_there")
                    return Outcome(block.id, Status.OK, stored)
        self._put(key, parts, "overwrite", budget)
        return Outcome(block.id, Status.OK, len(header) + len(data))

    def _stored(self, block: Block, budget: Budget) -> int | None:
        """Return the size of the object that is there for a block, None if it is not a good one."""
        try:
            header, size = self._head(self._keys.block(block.id), fs_format.header_bytes(block), budget)
            header.check(block, size)
        except FormatError as error:
            self._count(f"replaced: {error}")
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
            self._count(f"reread: {first}")
            try:
                self._load(key, transfer, budget)
            except FormatError as error:
                return self._outcome(block.id, Status.CORRUPT, str(error))
        return Outcome(block.id, Status.OK)

    def _load(self, key: str, transfer: Transfer, budget: Budget) -> None:
        """Get, prove and copy one object; raises :class:`FormatError` or :class:`StoreFailed`."""
        limit = fs_format.MAX_HEADER_BYTES + transfer.block.payload_bytes
        content = memoryview(self._patience.request(lambda: self._get(key, limit), budget))
        header = fs_format.decode(content)
        header.check(transfer.block, len(content))
        payload = content[header.data_offset :]
        header.check_payload(payload)
        copy_into(transfer.data, payload)

    def _get(self, key: str, limit: int) -> Any:
        """Return an object's bytes as a buffer of the client's."""
        result = self._obstore.get(self._store, key)
        if result.meta["size"] > limit:
            raise FormatError(Flaw.LONG)
        return result.bytes()

    def _head(self, key: str, guess: int, budget: Budget) -> tuple[Header, int]:
        """Return an object's proved header and the object's size; one get when ``guess`` is enough.

        Raises:
            FormatError: no good header is there.
            StoreFailed: it cannot be got.
        """
        try:
            start, size = self._patience.request(lambda: self._get_start(key, guess), budget)
            if (offset := fs_format.data_offset(start)) > len(start):
                start, size = self._patience.request(lambda: self._get_start(key, offset), budget)
        except StoreFailed as failed:
            if failed.fault.meaning is Meaning.EMPTY_RANGE:
                raise FormatError(Flaw.SHORT) from None
            raise
        return fs_format.decode(start), size

    def _get_start(self, key: str, length: int) -> tuple[memoryview, int]:
        result = self._obstore.get(self._store, key, options={"range": (0, length)})
        return memoryview(result.bytes()), result.meta["size"]

    def _prove(self, block_id: BlockId, budget: Budget) -> FoundBlock | Fault | None:
        """Look for one block: it, None when no good object of it is there, or why that is not known."""
        try:
            header, size = self._head(self._keys.block(block_id), fs_format.ALIGN, budget)
            if header.block.id != block_id:
                raise FormatError(Flaw.OTHER_BLOCK)
            header.check_size(size)
        except StoreFailed as failed:
            return None if failed.fault.meaning is Meaning.ABSENT else failed.fault
        except (FormatError, ValueError) as error:
            self._count(f"not a block: {error}")
            return None
        return FoundBlock(header.block, size)

    def _delete_batch(self, ids: Sequence[BlockId], budget: Budget) -> list[Outcome]:
        """Delete in one request; one by one where that says only that something was amiss."""
        try:
            keys = [self._keys.block(block_id) for block_id in ids]
            if keys:
                self._patience.request(lambda: self._obstore.delete(self._store, keys), budget)
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

    def _put(self, key: str, parts: Sequence[bytes | memoryview], mode: str, budget: Budget) -> None:
        self._patience.request(
            lambda: self._obstore.put(self._store, key, parts, mode=mode, use_multipart=False), budget
        )

    def _count(self, what: str, by: int = 1) -> None:
        if by:
            with self._lock:
                self._counts[what] += by


def _parallel(act: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """Return ``act`` of each item, in order, a few at a time; ``act`` ends by itself and does not raise."""
    results: dict[int, U] = {}
    numbers, lock = iter(range(len(items))), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            results[number] = act(items[number])

    threads = [
        threading.Thread(target=work, name="object-probe", daemon=True)
        for _ in range(min(PARALLEL, len(items)) - 1)
    ]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(items))]
