"""The conformance kit on every backend that ships, bare and behind the fault wrapper."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtierd.core.model import BlockId, group_of, hash_of
from kvtierd.core.stimuli import Status
from kvtierd.edges.backends import fs_format
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.edges.backends.memory import MemoryBackend
from kvtierd.testing.backend_kit import BackendKit, block, payload, read, scanned, write
from kvtierd.testing.faults import FaultyBackend


def path_of(root: Path, block_id: BlockId) -> Path:
    """Where FORMAT.md says that a block's file lies."""
    name = f"{hash_of(block_id.key).hex()}.{group_of(block_id.key)}"
    return root / "v1" / block_id.namespace / hash_of(block_id.key).hex()[-2:] / name


def reopened(backend: FsBackend) -> FsBackend:
    """One daemon at a time has an unshared root: a restart ends the first."""
    backend.close()
    backend.open()
    return backend


class TestFsFiles(BackendKit):
    options: ClassVar[dict[str, Any]] = {"pack_below": 0}

    @pytest.fixture
    def root(self, tmp_path):
        return tmp_path / "root"

    @pytest.fixture
    def backend(self, root):
        backend = self.make(root)
        yield backend
        backend.close()

    def make(self, root):
        backend = FsBackend("disk", root, **self.options)
        backend.open()
        return backend

    def reopen(self, backend):
        return reopened(backend)

    @pytest.fixture
    def raw_get(self, root):
        def get(block_id):
            path = path_of(root, block_id)
            return path.read_bytes() if path.exists() else None

        return get

    @pytest.fixture
    def raw_put(self, root):
        def put(block_id, data):
            path = path_of(root, block_id)
            if data is None:
                path.unlink()
                return
            times = path.stat() if path.exists() else None
            path.write_bytes(data)
            if times is not None:
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

        return put


class TestFsFilesDirect(TestFsFiles):
    options: ClassVar[dict[str, Any]] = {"pack_below": 0, "io": "direct"}


class TestFsFilesBuffered(TestFsFiles):
    options: ClassVar[dict[str, Any]] = {"pack_below": 0, "io": "buffered"}


class TestFsShared(TestFsFiles):
    options: ClassVar[dict[str, Any]] = {"shared": True}

    def reopen(self, backend):
        return self.make(backend.root)

    def test_a_second_write_replaces_the_first(self, backend):
        """Not here: one that is there already was written by another daemon and is as good."""
        write(backend, block(1), payload(1))
        assert write(backend, block(1), payload(2)).status is Status.OK
        assert read(backend, block(1)) == payload(1)
        assert len(scanned(backend)) == 1

    def test_a_write_replaces_a_file_that_is_not_its_block(self, backend, raw_put):
        write(backend, block(1), payload(1))
        for rubbish in (b"", b"rubbish", bytes(8192)):
            raw_put(block(1).id, rubbish)
            assert write(backend, block(1), payload(2)).status is Status.OK
            assert read(backend, block(1)) == payload(2)


class TestFsBehindFaults(TestFsFiles):
    def make(self, root):
        return FaultyBackend(super().make(root))

    def reopen(self, backend):
        reopened(backend.inner)
        return FaultyBackend(backend.inner)


class TestFsPacked(TestFsFiles):
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def raw_slot(self, backend):
        """Where a block was put: segment file, offset, slot size; fixed at the first question."""
        known = {}

        def slot(block_id):
            if block_id not in known:
                at = backend._packed.slots.find(block_id)
                if at is None:
                    return None
                segment, number = at
                folder = backend.root / "v1" / segment.namespace / "packed"
                known[block_id] = folder / segment.name, segment.offset(number), segment.slot_bytes
            return known[block_id]

        return slot

    @pytest.fixture
    def raw_get(self, raw_slot):
        def get(block_id):
            at = raw_slot(block_id)
            if at is None:
                return None
            with at[0].open("rb") as file:
                file.seek(at[1])
                slot = file.read(at[2])
            header = fs_format.decode(slot)
            return slot[: header.data_offset + header.block.payload_bytes]

        return get

    @pytest.fixture
    def raw_put(self, raw_slot):
        def put(block_id, data):
            path, offset, size = raw_slot(block_id)
            fill = bytes(size) if data is None else data + b"\xff" * (size - len(data))
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(fill)

        return put

    def test_a_block_with_bytes_behind_it_is_corrupt(self, backend, raw_get, raw_put):
        """Not in a slot: what lies behind a payload there is nobody's and is not looked at."""
        write(backend, block(1), payload(1))
        raw_put(block(1).id, raw_get(block(1).id) + b"\0")
        assert read(backend, block(1)) == payload(1)


class TestFsPackedDirect(TestFsPacked):
    options: ClassVar[dict[str, Any]] = {"io": "direct", "fsync": "data"}


class TestFsPackedBuffered(TestFsPacked):
    options: ClassVar[dict[str, Any]] = {"io": "buffered"}


class TestMemory(BackendKit):
    @pytest.fixture
    def backend(self):
        return MemoryBackend("ram")

    def reopen(self, backend):
        return MemoryBackend("ram", backend.store)

    @pytest.fixture
    def raw_get(self, backend):
        return backend.store.get

    @pytest.fixture
    def raw_put(self, backend):
        def put(block_id, data):
            if data is None:
                del backend.store[block_id]
            else:
                backend.store[block_id] = data

        return put


class TestMemoryBehindFaults(TestMemory):
    @pytest.fixture
    def store(self):
        return {}

    @pytest.fixture
    def backend(self, store):
        return FaultyBackend(MemoryBackend("ram", store))

    def reopen(self, backend):
        return FaultyBackend(MemoryBackend("ram", backend.inner.store))

    @pytest.fixture
    def raw_get(self, store):
        return store.get

    @pytest.fixture
    def raw_put(self, backend, store):
        def put(block_id, data):
            if data is None:
                del store[block_id]
            else:
                store[block_id] = data

        return put
