"""The whole root stays within max_bytes: blocks counted exactly, everything else within the reserve (L66)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtierd.core.stimuli import Status
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.testing.backend_kit import block, payload, read, scanned, write

MAX_BYTES = 24 << 20
SIZES = (1, 5000, 60_000, 100_001, 300_000)
PAYLOADS = {size: payload(size, size) for size in SIZES}


def occupied(root: Path) -> int:
    """Bytes of all files and folders below and with the root."""
    total = root.lstat().st_blocks
    for folder, folders, files in os.walk(root):
        total += sum(os.lstat(os.path.join(folder, name)).st_blocks for name in (*folders, *files))
    return total * 512


class Accounting(RuleBasedStateMachine):
    """Does what the core does: keeps blocks within ``max_bytes`` less the reserve, evicting the oldest."""

    @initialize(shared=st.booleans(), io=st.sampled_from(["auto", "direct", "buffered"]))
    def start(self, shared: bool, io: str) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvtierd-accounting-")
        self.root = Path(self.folder.name) / "root"
        self.backend = FsBackend("disk", self.root, shared=shared, io=io)
        self.backend.open()
        self.capacity = MAX_BYTES - self.backend.reserve(MAX_BYTES)
        self.held: dict[tuple[int, int], int] = {}

    def make_room(self, size: int) -> None:
        while sum(self.held.values()) + size > self.capacity:
            number, of = next(iter(self.held))
            (outcome,) = self.backend.delete([block(number, size=of).id])
            assert outcome.status is Status.OK
            del self.held[number, of]

    @rule(first=st.integers(0, 200), count=st.integers(1, 24), size=st.sampled_from(SIZES))
    def store(self, first: int, count: int, size: int) -> None:
        for number in range(first, first + count):
            one = block(number * 1000 + SIZES.index(size), size=size)
            key = (number * 1000 + SIZES.index(size), size)
            if key not in self.held:
                self.make_room(self.backend.estimate(one))
                outcome = write(self.backend, one, PAYLOADS[size])
                assert outcome.status is Status.OK
                assert outcome.stored_bytes == self.backend.estimate(one)
                self.held[key] = outcome.stored_bytes

    @rule(data=st.data(), corrupt=st.booleans())
    def delete(self, data: st.DataObject, corrupt: bool) -> None:
        if self.held:
            for number, size in data.draw(
                st.lists(st.sampled_from(list(self.held)), max_size=12, unique=True)
            ):
                (outcome,) = self.backend.delete([block(number, size=size).id], corrupt=corrupt)
                assert outcome.status is Status.OK
                del self.held[number, size]

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        if self.held:
            number, size = data.draw(st.sampled_from(list(self.held)))
            assert read(self.backend, block(number, size=size)) == PAYLOADS[size]

    @rule(scan=st.booleans())
    def restart(self, scan: bool) -> None:
        self.backend.close()
        self.backend.open()
        self.backend.reserve(MAX_BYTES)
        if scan:
            found = {found.block.id: found.stored_bytes for found in scanned(self.backend)}
            assert found == {block(n, size=size).id: stored for (n, size), stored in self.held.items()}

    @invariant()
    def nothing_is_over(self) -> None:
        if hasattr(self, "root"):
            assert occupied(self.root) <= MAX_BYTES

    @invariant()
    def what_is_not_a_block_is_within_the_reserve(self) -> None:
        if hasattr(self, "root"):
            assert occupied(self.root) <= sum(self.held.values()) + MAX_BYTES - self.capacity

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.backend.close()
            self.folder.cleanup()


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [60_000, 300_000])
def test_a_full_tier_stays_within_its_limit_while_it_turns_over(tmp_path, shared, size):
    """L66: four times the limit goes through it."""
    limit = 16 << 20
    root = tmp_path / "root"
    backend = FsBackend("disk", root, shared=shared)
    backend.open()
    capacity = limit - backend.reserve(limit)
    held, used, data = [], 0, payload(1, size)
    for number in range(4 * limit // size):
        one = block(number, size=size)
        while used + backend.estimate(one) > capacity:
            gone = held.pop(0)
            assert backend.delete([gone.id], corrupt=number % 7 == 0)[0].status is Status.OK
            used -= backend.estimate(gone)
        used += write(backend, one, data).stored_bytes
        held.append(one)
        if number % 16 == 0:
            assert occupied(root) <= limit
    assert occupied(root) <= limit
    assert all(read(backend, one) == data for one in held)
    backend.close()


@pytest.mark.parametrize("max_bytes", [0, 1, 4096, 1 << 20, 1 << 30, 1 << 44])
def test_the_reserve_is_a_small_part(tmp_path, max_bytes):
    backend = FsBackend("disk", tmp_path / "root")
    backend.open()
    reserved = backend.reserve(max_bytes)
    assert 0 <= reserved <= max_bytes // 8
    assert reserved <= max_bytes // 16 + (1 << 20)
    backend.close()
