"""The requests that an object tier makes: each tried within its call's deadline, each counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvtierd.edges.backends import fs_format
from kvtierd.edges.backends.fs_format import Flaw, FormatError, Header
from kvtierd.edges.backends.object_errors import Meaning, StoreFailed
from kvtierd.edges.backends.object_patience import Budget, Patience
from kvtierd.edges.backends.object_store import require_obstore
from kvtierd.errors import TierError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PARALLEL = 8
LIST_BATCH = 1000

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing: its key, its size in bytes, its age as seconds since the epoch."""

    key: str
    size: int
    modified: float


class Requests:
    """One tier's client; safe to use from several threads. ``place`` is what people are told of it."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], ObjectStore],
        *,
        place: str,
        deadline: float,
        request_timeout: float,
        retries: int,
    ) -> None:
        self.name = name
        self.place = place
        self._connect = connect
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._patience = Patience(
            deadline=deadline, request_timeout=request_timeout, retries=retries, count=self.count
        )
        self.begin = self._patience.begin
        self.stop = self._patience.stop
        self._obstore: Any = None
        self._store: Any = None

    def open(self) -> None:
        """Make the client; nothing is sent.

        Raises:
            TierRefused: the package, a file or a variable that the settings name is missing.
        """
        self._obstore = require_obstore(self.name)
        self._store = self._connect()

    def count(self, what: str, by: int = 1) -> None:
        """Count what happened."""
        if by:
            with self._lock:
                self._counts[what] += by

    def statistics(self) -> dict[str, int]:
        """Return a copy of the counters."""
        with self._lock:
            return dict(self._counts)

    def put(self, key: str, parts: Sequence[bytes | memoryview], mode: str, budget: Budget) -> None:
        """Store an object made of ``parts``, whose memory is borrowed until this returns.

        ``mode``: ``create`` (``StoreFailed(PRESENT)`` when there is one) or ``overwrite``.
        """
        self._patience.request(
            lambda: self._obstore.put(self._store, key, parts, mode=mode, use_multipart=False), budget
        )

    def get(self, key: str, limit: int, budget: Budget) -> memoryview:
        """Return a whole object in the client's memory; ``FormatError`` when it is longer than ``limit``."""
        return memoryview(self._patience.request(lambda: self._get(key, limit), budget))

    def _get(self, key: str, limit: int) -> Any:
        result = self._obstore.get(self._store, key)
        if result.meta["size"] > limit:
            raise FormatError(Flaw.LONG)
        return result.bytes()

    def head(self, key: str, guess: int, budget: Budget) -> tuple[Header, int]:
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

    def delete(self, keys: Sequence[str], budget: Budget) -> None:
        """Delete objects in one request where the store can (at most a thousand)."""
        if keys:
            self._patience.request(lambda: self._obstore.delete(self._store, keys), budget)

    def pages(self, prefix: str) -> Iterator[list[Entry]]:
        """Yield what lies below a prefix, in the order of keys, a thousand at most at once.

        Raises:
            TierError: it cannot be listed.
        """
        last: str | None = None
        while True:
            try:
                page = self._patience.request(partial(self._page, prefix, last), self.begin())
            except StoreFailed as failed:
                raise self.failed("cannot be listed", failed) from None
            if not page:
                return
            yield page
            last = page[-1].key

    def _page(self, prefix: str, offset: str | None) -> list[Entry]:
        stream = self._obstore.list(self._store, prefix, offset=offset, chunk_size=LIST_BATCH)
        return [
            Entry(entry["path"], entry["size"], entry["last_modified"].timestamp())
            for entry in next(iter(stream), ())
        ]

    def failed(self, what: str, failed: StoreFailed) -> TierError:
        """Return the error that says what could not be done, and why."""
        return TierError(self.name, f"{self.place}: {what}: {failed.fault.reason}")


def parallel(act: Callable[[T], U], items: Sequence[T]) -> list[U]:
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
