"""What every backend must do, as tests: subclass :class:`BackendKit` in a pytest module and run it.

::

    class TestMyBackend(BackendKit):
        @pytest.fixture
        def backend(self, tmp_path): ...                # opened
        @pytest.fixture
        def raw_get(self, backend): ...                 # BlockId -> stored bytes or None, without the backend
        @pytest.fixture
        def raw_put(self, backend): ...                 # (BlockId, bytes or None) -> None; None removes
        def reopen(self, backend): ...                  # a second, opened backend over the same storage
"""

# ruff: noqa: D102 - the name of a test is its promise; it needs no docstring
from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvtierd.core.model import Block, BlockId, BlockMeta, Group, Layout, block_key
from kvtierd.core.stimuli import FoundBlock, Outcome, Status
from kvtierd.edges.backends.base import Backend, Transfer

RawGet = Callable[[BlockId], bytes | None]
RawPut = Callable[[BlockId, bytes | None], None]

LAYOUT = Layout(
    model="kit", dtype="uint8", layout="flat", groups=(Group(tokens_per_block=16, block_bytes=5000),)
)
NAMESPACE = LAYOUT.namespace()
SIZE = 5000


def block(number: int, *, size: int = SIZE, namespace: str = NAMESPACE, group: int = 0) -> Block:
    """Return a small block without metadata."""
    key = block_key(number.to_bytes(32, "big"), group)
    return Block.of(BlockId(namespace, key), size)


def payload(number: int, size: int = SIZE) -> bytes:
    """Return bytes that differ for every number and at every offset nearby."""
    return bytes((number * 31 + offset * 7 + offset // 251) % 256 for offset in range(size))


def write(backend: Backend, what: Block, data: bytes) -> Outcome:
    """Write one block."""
    (outcome,) = backend.write([Transfer(what, memoryview(data))])
    assert outcome.id == what.id
    return outcome


def read(backend: Backend, what: Block) -> bytes | Status:
    """Read one block; its bytes, or the status that it failed with."""
    memory = bytearray(what.payload_bytes)
    (outcome,) = backend.read([Transfer(what, memoryview(memory))])
    assert outcome.id == what.id
    return bytes(memory) if outcome.status is Status.OK else outcome.status


def scanned(backend: Backend) -> list[FoundBlock]:
    """Return all that a scan finds, in its order."""
    return [found for batch in backend.scan() for found in batch]


class BackendKit:
    """Conformance tests; see the module for the fixtures to override."""

    @pytest.fixture
    def backend(self) -> Backend:
        """Return an opened backend over empty storage; override."""
        raise NotImplementedError

    @pytest.fixture
    def raw_get(self, backend: Backend) -> RawGet:
        """Return a function that reads a block's stored bytes around the backend; override."""
        raise NotImplementedError

    @pytest.fixture
    def raw_put(self, backend: Backend) -> RawPut:
        """Return a function that replaces or removes (None) stored bytes around the backend; override."""
        raise NotImplementedError

    def reopen(self, backend: Backend) -> Backend:
        """Return a second, opened backend over the same storage; override."""
        raise NotImplementedError

    @pytest.fixture
    def raw_corrupt(self, raw_get: RawGet, raw_put: RawPut) -> Callable[[BlockId, int], None]:
        """Return a function that flips one bit of the stored byte at an offset (negative: from the end)."""

        def corrupt(block_id: BlockId, offset: int) -> None:
            stored = bytearray(raw_get(block_id) or b"")
            stored[offset] ^= 0x10
            raw_put(block_id, bytes(stored))

        return corrupt

    @pytest.mark.parametrize("size", [1, 511, 4095, 4096, 4097, 300_000])
    def test_a_block_comes_back_as_it_was_written(self, backend: Backend, size: int) -> None:
        one = block(1, size=size)
        assert write(backend, one, payload(1, size)).status is Status.OK
        assert read(backend, one) == payload(1, size)

    def test_outcomes_come_in_the_order_of_the_call(self, backend: Backend) -> None:
        blocks = [block(number) for number in range(8)]
        stored = [Transfer(one, memoryview(payload(i))) for i, one in enumerate(blocks) if i % 2]
        assert [outcome.id for outcome in backend.write(stored)] == [transfer.block.id for transfer in stored]
        memory = [bytearray(SIZE) for _ in blocks]
        asked = [Transfer(one, memoryview(target)) for one, target in zip(blocks, memory, strict=True)]
        outcomes = backend.read(asked)
        assert [outcome.id for outcome in outcomes] == [one.id for one in blocks]
        assert [outcome.status for outcome in outcomes] == [Status.GONE, Status.OK] * 4
        assert all(bytes(memory[i]) == payload(i) for i in range(1, 8, 2))

    def test_empty_calls_do_nothing(self, backend: Backend) -> None:
        assert (list(backend.write([])), list(backend.read([])), list(backend.delete([]))) == ([], [], [])

    def test_a_block_that_is_not_there_is_gone(self, backend: Backend) -> None:
        assert read(backend, block(1)) is Status.GONE

    def test_a_second_write_replaces_the_first(self, backend: Backend) -> None:
        write(backend, block(1), payload(1))
        assert write(backend, block(1), payload(2)).status is Status.OK
        assert read(backend, block(1)) == payload(2)
        assert len(scanned(backend)) == 1

    def test_namespaces_and_groups_keep_equal_hashes_apart(self, backend: Backend) -> None:
        blocks = [block(7), block(7, group=1), block(7, namespace="f" * 32)]
        for number, one in enumerate(blocks):
            write(backend, one, payload(number))
        assert [read(backend, one) for one in blocks] == [payload(number) for number in range(3)]

    @pytest.mark.parametrize(
        "key", [b"\0", b"../../../../etc/x", b"/x", b"a\0b", b"\xff" * 64, b".", b"%2e%2e"]
    )
    def test_any_hash_of_1_to_64_bytes_is_a_name(self, backend: Backend, key: bytes) -> None:
        odd = Block.of(BlockId(NAMESPACE, block_key(key, 2**31)), SIZE)
        assert write(backend, odd, payload(3)).status is Status.OK
        assert read(backend, odd) == payload(3)
        assert [found.block.id for found in scanned(backend)] == [odd.id]

    @pytest.mark.parametrize("offset", [0, 9, 33, 60, 4095, 4096, 6000, -1])
    def test_a_flipped_byte_is_corrupt(
        self, backend: Backend, raw_corrupt: Callable[[BlockId, int], None], offset: int
    ) -> None:
        write(backend, block(1), payload(1))
        raw_corrupt(block(1).id, offset)
        assert read(backend, block(1)) is Status.CORRUPT

    @pytest.mark.parametrize("keep", [0, 1, 47, 4095, 4096, 4097, -1])
    def test_a_truncated_block_is_corrupt(
        self, backend: Backend, raw_get: RawGet, raw_put: RawPut, keep: int
    ) -> None:
        write(backend, block(1), payload(1))
        raw_put(block(1).id, (raw_get(block(1).id) or b"")[:keep])
        assert read(backend, block(1)) is Status.CORRUPT

    def test_a_block_with_bytes_behind_it_is_corrupt(
        self, backend: Backend, raw_get: RawGet, raw_put: RawPut
    ) -> None:
        write(backend, block(1), payload(1))
        raw_put(block(1).id, (raw_get(block(1).id) or b"") + b"\0")
        assert read(backend, block(1)) is Status.CORRUPT

    def test_swapped_blocks_are_corrupt(self, backend: Backend, raw_get: RawGet, raw_put: RawPut) -> None:
        first, second = block(1), block(2)
        write(backend, first, payload(1))
        write(backend, second, payload(2))
        one, two = raw_get(first.id), raw_get(second.id)
        raw_put(first.id, two)
        raw_put(second.id, one)
        assert read(backend, first) is Status.CORRUPT
        assert read(backend, second) is Status.CORRUPT

    def test_a_block_of_another_namespace_is_corrupt(
        self, backend: Backend, raw_get: RawGet, raw_put: RawPut
    ) -> None:
        here, there = block(1), block(1, namespace="e" * 32)
        write(backend, here, payload(1))
        write(backend, there, payload(1))
        raw_put(here.id, raw_get(there.id))
        assert read(backend, here) is Status.CORRUPT

    def test_a_block_of_another_size_is_corrupt(self, backend: Backend) -> None:
        write(backend, block(1), payload(1))
        assert read(backend, block(1, size=SIZE - 1)) is Status.CORRUPT

    def test_a_corrupt_block_leaves_its_neighbours_alone(
        self, backend: Backend, raw_corrupt: Callable[[BlockId, int], None]
    ) -> None:
        blocks = [block(number) for number in range(5)]
        for number, one in enumerate(blocks):
            write(backend, one, payload(number))
        raw_corrupt(blocks[2].id, -1)
        memory = [bytearray(SIZE) for _ in blocks]
        outcomes = backend.read([Transfer(b, memoryview(m)) for b, m in zip(blocks, memory, strict=True)])
        assert [outcome.status for outcome in outcomes].index(Status.CORRUPT) == 2
        assert all(bytes(memory[i]) == payload(i) for i in (0, 1, 3, 4))

    def test_a_block_removed_by_somebody_else_is_gone(self, backend: Backend, raw_put: RawPut) -> None:
        write(backend, block(1), payload(1))
        raw_put(block(1).id, None)
        assert read(backend, block(1)) is Status.GONE

    def test_a_deleted_block_is_gone_and_deleting_again_is_fine(self, backend: Backend) -> None:
        write(backend, block(1), payload(1))
        for _ in range(2):
            (outcome,) = backend.delete([block(1).id])
            assert outcome.status is Status.OK
        assert read(backend, block(1)) is Status.GONE
        assert scanned(backend) == []

    def test_a_block_deleted_as_corrupt_can_be_written_again(
        self, backend: Backend, raw_corrupt: Callable[[BlockId, int], None]
    ) -> None:
        write(backend, block(1), payload(1))
        raw_corrupt(block(1).id, 5000)
        (outcome,) = backend.delete([block(1).id], corrupt=True)
        assert outcome.status is Status.OK
        assert read(backend, block(1)) is Status.GONE
        assert scanned(backend) == []
        write(backend, block(1), payload(2))
        assert read(backend, block(1)) == payload(2)

    def test_a_write_of_the_wrong_length_stores_nothing(self, backend: Backend) -> None:
        assert write(backend, block(1), payload(1)[:-1]).status is Status.FAILED
        assert read(backend, block(1)) is Status.GONE

    @pytest.mark.parametrize(
        "meta",
        [
            None,
            BlockMeta(hashes=(2**64 - 1,)),
            BlockMeta(hashes=(b"\0\xff",), parent=b"p", spec_kind=None),
            BlockMeta(hashes=(1, 2), parent=0, token_ids=tuple(range(2000)), block_size=16, sliding_window=4),
            BlockMeta(hashes=(1,), lora_id=3, lora_name="é", extra_keys=(("a", 1, b"x", None), None)),
        ],
    )
    def test_a_scan_gives_back_all_of_a_block(self, backend: Backend, meta: BlockMeta | None) -> None:
        described = Block.of(block(1).id, SIZE, meta, 3)
        write(backend, described, payload(1))
        (found,) = scanned(self.reopen(backend))
        assert found.block == described
        assert read(backend, described) == payload(1)

    def test_other_metadata_does_not_make_a_block_corrupt(self, backend: Backend) -> None:
        meta = BlockMeta(hashes=(1,), token_ids=tuple(range(3000)))
        write(backend, Block.of(block(1).id, SIZE, meta), payload(1))
        assert read(backend, block(1)) == payload(1)
        write(backend, block(2), payload(2))
        assert read(backend, Block.of(block(2).id, SIZE, meta)) == payload(2)

    def test_a_scan_is_in_order_of_last_use(self, backend: Backend) -> None:
        blocks = [block(number) for number in range(6)]
        for number, one in enumerate(blocks):
            write(backend, one, payload(number))
        read(backend, blocks[1])
        write(backend, blocks[0], payload(0))
        order = [found.block.id for found in scanned(self.reopen(backend))]
        assert order == [blocks[i].id for i in (2, 3, 4, 5, 1, 0)]

    def test_a_scan_passes_over_what_is_not_a_block(
        self, backend: Backend, raw_get: RawGet, raw_put: RawPut
    ) -> None:
        for number in range(7):
            write(backend, block(number), payload(number))
        whole = raw_get(block(6).id) or b""
        raw_put(block(0).id, b"")
        raw_put(block(1).id, b"\x80\x04\x95pickle" * 900)
        raw_put(block(2).id, whole)
        raw_put(block(3).id, whole[:-1])
        raw_put(block(4).id, whole + b"x")
        found = scanned(self.reopen(backend))
        assert sorted(one.block.id for one in found) == [block(5).id, block(6).id]

    @pytest.mark.parametrize("size", [1, 4096, 4097])
    def test_the_estimate_is_what_a_write_and_a_scan_report(self, backend: Backend, size: int) -> None:
        meta = BlockMeta(hashes=(1,), token_ids=tuple(range(1500)))
        for number, one in enumerate([block(1, size=size), Block.of(block(2).id, size, meta)]):
            estimate = backend.estimate(one)
            assert write(backend, one, payload(number, size)).stored_bytes == estimate
            (stored,) = [found.stored_bytes for found in scanned(backend) if found.block.id == one.id]
            assert stored == estimate

    def test_blocks_survive_a_restart(self, backend: Backend) -> None:
        write(backend, block(1), payload(1))
        assert read(self.reopen(backend), block(1)) == payload(1)

    def test_describing_a_namespace_twice_adds_no_block(self, backend: Backend) -> None:
        for _ in range(2):
            backend.describe(NAMESPACE, LAYOUT)
        assert scanned(backend) == []

    def test_writers_of_one_block_at_once_leave_one_whole_block(self, backend: Backend) -> None:
        """L64."""
        outcomes: list[Outcome] = []
        start = threading.Barrier(4, timeout=30)

        def work(number: int) -> None:
            start.wait()
            outcomes.extend(write(backend, block(1), payload(number)) for _ in range(10))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert [outcome.status for outcome in outcomes] == [Status.OK] * 40
        assert read(backend, block(1)) in [payload(number) for number in range(4)]
        assert len(scanned(backend)) == 1
