"""A backend wrapper that holds, fails or breaks calls on request, and a death in a write; it never sleeps."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from kvtierd.core.model import Block, BlockId, Layout
from kvtierd.core.stimuli import FoundBlock, Outcome, Status
from kvtierd.edges.backends.base import Backend, Transfer

Operation = Literal["open", "scan", "write", "read", "delete"]
HOLD_LIMIT = 30.0


class Hold:
    """Calls of one operation stop here until :meth:`release`; a context manager that releases at its end.

    A held call raises ``TimeoutError`` after ``limit`` seconds, so that a broken test ends.
    """

    def __init__(self, limit: float = HOLD_LIMIT) -> None:
        self._limit = limit
        self._open = threading.Event()
        self._changed = threading.Condition()
        self._entered = 0

    @property
    def entered(self) -> int:
        """How many calls have come here so far."""
        with self._changed:
            return self._entered

    def wait_entered(self, count: int = 1, timeout: float = HOLD_LIMIT) -> None:
        """Block the test until ``count`` calls have come here.

        Raises:
            TimeoutError: they did not.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._entered >= count, timeout):
                raise TimeoutError(f"{self._entered} of {count} calls entered")

    def release(self) -> None:
        """Let all calls go on, now and later."""
        self._open.set()

    def pass_through(self) -> None:
        """Called by the wrapper: count the call and wait for the release."""
        with self._changed:
            self._entered += 1
            self._changed.notify_all()
        if not self._open.wait(self._limit):
            raise TimeoutError("a held call was never released")

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True)
class _Fault:
    operation: Operation
    status: Status | None
    error: Exception | None
    ids: frozenset[BlockId] | None
    times: int | None
    reason: str
    perform: bool

    def hits(self, block_id: BlockId) -> bool:
        return self.times != 0 and (self.ids is None or block_id in self.ids)

    def spend(self) -> None:
        if self.times is not None:
            self.times -= 1


class FaultyBackend:
    """Passes everything on to ``inner`` but for what was scripted.

    Faults are tried in the order in which they were added; a hold comes before all of them.
    ``calls`` records every call and its blocks, in order.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.calls: list[tuple[Operation, tuple[BlockId, ...]]] = []
        self._faults: list[_Fault] = []
        self._holds: dict[Operation, Hold] = {}
        self._lock = threading.Lock()

    def fail(
        self,
        operation: Operation,
        status: Status = Status.FAILED,
        *,
        ids: Collection[BlockId] | None = None,
        times: int | None = None,
        reason: str = "scripted",
        perform: bool = False,
    ) -> None:
        """Make blocks of an operation end with ``status``, the next ``times`` ones (None: all).

        ``perform``: the inner backend does it all the same and only the answer is lost.
        """
        chosen = None if ids is None else frozenset(ids)
        with self._lock:
            self._faults.append(_Fault(operation, status, None, chosen, times, reason, perform))

    def raises(self, operation: Operation, error: Exception, *, times: int | None = None) -> None:
        """Make the next ``times`` calls (None: all) of an operation raise, which no backend should."""
        with self._lock:
            self._faults.append(_Fault(operation, None, error, None, times, "", False))

    def hold(self, operation: Operation, limit: float = HOLD_LIMIT) -> Hold:
        """Stop all further calls of an operation until the hold is released."""
        hold = Hold(limit)
        with self._lock:
            self._holds[operation] = hold
        return hold

    def heal(self) -> None:
        """Forget all faults and release all holds."""
        with self._lock:
            self._faults.clear()
            holds = list(self._holds.values())
            self._holds.clear()
        for hold in holds:
            hold.release()

    def open(self) -> None:
        """Open the inner backend."""
        self._enter("open", ())
        self.inner.open()

    def scan(self) -> Iterator[list[FoundBlock]]:
        """Scan the inner backend; holds and raises apply before each batch, ``fail`` leaves blocks out."""
        self._enter("scan", ())
        for batch in self.inner.scan():
            yield [found for found in batch if self._fault("scan", found.block.id) is None]
            self._enter("scan", ())

    def describe(self, namespace: str, layout: Layout) -> None:
        """Describe to the inner backend."""
        self.inner.describe(namespace, layout)

    def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Write but for scripted faults."""
        ids = tuple(transfer.block.id for transfer in transfers)
        faults = self._begin("write", ids)
        kept = [transfer for transfer, fault in zip(transfers, faults, strict=True) if _performs(fault)]
        return _merge(ids, faults, self.inner.write(kept))

    def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read but for scripted faults; without ``perform`` these leave their memory untouched."""
        ids = tuple(transfer.block.id for transfer in transfers)
        faults = self._begin("read", ids)
        kept = [transfer for transfer, fault in zip(transfers, faults, strict=True) if _performs(fault)]
        return _merge(ids, faults, self.inner.read(kept))

    def delete(self, ids: Sequence[BlockId], *, corrupt: bool = False) -> list[Outcome]:
        """Delete but for scripted faults."""
        faults = self._begin("delete", tuple(ids))
        kept = [block_id for block_id, fault in zip(ids, faults, strict=True) if _performs(fault)]
        return _merge(ids, faults, self.inner.delete(kept, corrupt=corrupt))

    def estimate(self, block: Block) -> int:
        """Ask the inner backend."""
        return self.inner.estimate(block)

    def close(self) -> None:
        """Release what is held and close the inner backend."""
        self.heal()
        self.inner.close()

    def _enter(self, operation: Operation, ids: tuple[BlockId, ...]) -> None:
        """Record the call, wait at its hold and raise a scripted exception."""
        with self._lock:
            self.calls.append((operation, ids))
            hold = self._holds.get(operation)
        if hold is not None:
            hold.pass_through()
        with self._lock:
            for fault in self._faults:
                if fault.operation == operation and fault.error is not None and fault.times != 0:
                    fault.spend()
                    raise fault.error

    def _begin(self, operation: Operation, ids: tuple[BlockId, ...]) -> list[_Fault | None]:
        self._enter(operation, ids)
        return [self._fault(operation, block_id) for block_id in ids]

    def _fault(self, operation: Operation, block_id: BlockId) -> _Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.operation == operation and fault.status is not None and fault.hits(block_id):
                    fault.spend()
                    return fault
        return None


def _performs(fault: _Fault | None) -> bool:
    return fault is None or fault.perform


def _merge(
    ids: Sequence[BlockId], faults: Sequence[_Fault | None], inner: Sequence[Outcome]
) -> list[Outcome]:
    """Put scripted outcomes and the inner backend's together, in the order of the call."""
    rest = iter(inner)
    merged = []
    for block_id, fault in zip(ids, faults, strict=True):
        real = next(rest) if _performs(fault) else None
        if fault is not None:
            assert fault.status is not None
            merged.append(Outcome(block_id, fault.status, reason=fault.reason))
        else:
            assert real is not None
            merged.append(real)
    return merged


def die_in(call: Literal["pwrite", "pwritev"], number: int, part: int) -> None:
    """Have this process killed in its ``number``-th such call, with ``part`` bytes of it written."""
    real, write, calls = getattr(os, call), os.pwrite, itertools.count(1)

    def die(fd: int, data: Any, offset: int, *flags: int) -> int:
        if next(calls) < number:
            moved: int = real(fd, data, offset, *flags)
            return moved
        write(fd, (b"".join(data) if call == "pwritev" else data)[:part], offset)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    setattr(os, call, die)
