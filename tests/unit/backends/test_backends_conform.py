"""The conformance kit on every backend that ships, bare and behind the fault wrapper."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtierd.core.model import BlockId
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.edges.backends.memory import MemoryBackend
from kvtierd.testing.backend_kit import BackendKit
from kvtierd.testing.faults import FaultyBackend


def path_of(root: Path, block_id: BlockId) -> Path:
    """Where FORMAT.md says that a block lies."""
    name = f"{block_id.key.hash.hex()}.{block_id.key.group}"
    return root / "v1" / block_id.namespace / block_id.key.hash.hex()[-2:] / name


class TestFs(BackendKit):
    @pytest.fixture
    def root(self, tmp_path):
        return tmp_path / "root"

    @pytest.fixture
    def backend(self, root):
        return self.make(root)

    def make(self, root):
        backend = FsBackend("disk", root)
        backend.open()
        return backend

    def reopen(self, backend):
        return self.make(backend.root)

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


class TestFsBehindFaults(TestFs):
    def make(self, root):
        return FaultyBackend(super().make(root))

    def reopen(self, backend):
        return self.make(backend.inner.root)


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
