"""Which cores a measurement runs on: where the kernel places its processes changes a round trip fourfold.

A bare echo on its client's core takes 11 us here, on another one 45: waking an idle core is dear. So whoever
compares two servers has to give both the same place. As in a pod whose sidecar has processor time of its
own, the client gets one core and what it talks to the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Places:
    """Cores of a client and of what it talks to; the same single one where there is no other."""

    client: frozenset[int]
    servers: frozenset[int]

    @property
    def apart(self) -> bool:
        """Whether the two never have to wait for each other's core."""
        return not self.client & self.servers


def places(*, together: bool = False) -> Places:
    """Divide the cores that this thread may use; ``together``: one core for both."""
    first, *others = sorted(os.sched_getaffinity(0))
    client = frozenset({first})
    return Places(client, client if together or not others else frozenset(others))


@contextmanager
def on_cores(cores: Set[int]) -> Iterator[None]:
    """Keep this thread, and what it starts meanwhile, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
