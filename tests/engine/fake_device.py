"""A device without hardware: streams that run only when told to, in the order that the check wants.

What is given to a stream is queued; :meth:`FakeDevice.run` carries out whatever may run, one stream at a time
in the given order of preference, so that a copy which is not ordered after the computation runs before it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque


class FakeEvent:
    def __init__(self, device):
        self._device = device
        self.done = True
        self.at = 0.0

    def record(self, stream):
        self.done = False
        stream.queue.append(self._arrive)

    def _arrive(self):
        self.done, self.at = True, float(self._device.tick())

    def query(self):
        return self.done

    def synchronize(self):
        self._device.synchronisations += 1
        self._device.run(until=self)
        assert self.done

    def elapsed_time(self, other):
        return other.at - self.at


class FakeStream:
    def __init__(self, device, name):
        self._device = device
        self.name = name
        self.queue = deque()

    def wait_stream(self, other):
        reached = FakeEvent(self._device)
        reached.record(other)
        self.queue.append(reached)


class FakeDevice:
    """``operations`` counts batched copies; ``refuse`` makes registrations fail; ``broken`` the copies."""

    def __init__(self, *, batched=True):
        self.streams = []
        self.synchronisations = 0
        self.operations = 0
        self.registered = {}
        self.refuse = ""
        self.broken = None
        self.out_of_order = []
        self.batch = self._batch if batched else None
        self._ticks = 0
        self.compute = self._current = self.stream()

    def tick(self):
        self._ticks += 1
        return self._ticks

    def stream(self):
        self.streams.append(FakeStream(self, f"stream-{len(self.streams)}"))
        return self.streams[-1]

    def event(self):
        return FakeEvent(self)

    def current_stream(self):
        return self.compute

    @contextlib.contextmanager
    def on(self, stream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def register(self, address, nbytes):
        if not self.refuse:
            self.registered[address] = nbytes
        return self.refuse

    def unregister(self, address):
        del self.registered[address]

    def _batch(self, source, target, sizes, *, is_src_access_order_any):
        self.operations += 1
        if self.broken is not None:
            raise self.broken
        self.out_of_order.append(is_src_access_order_any)

        def copy():  # reads the descriptors when it runs: they must have been kept
            for each in zip(target.tolist(), source.tolist(), sizes.tolist(), strict=True):
                ctypes.memmove(*each)

        self._current.queue.append(copy)

    def calculate(self, do):
        """Give the compute stream a kernel."""
        self.compute.queue.append(do)

    def run(self, until=None):
        """Carry out what may run, side streams first, until an event is reached or nothing may."""
        moved = True
        while moved and not (until is not None and until.done):
            moved = any(self._advance(stream) for stream in reversed(self.streams))

    @staticmethod
    def _advance(stream):
        if not stream.queue:
            return False
        first = stream.queue[0]
        if isinstance(first, FakeEvent):
            if not first.done:
                return False
            stream.queue.popleft()
            return True
        stream.queue.popleft()()
        return True
