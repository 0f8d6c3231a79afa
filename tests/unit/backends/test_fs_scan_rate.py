"""How fast a start indexes what a filesystem tier holds."""

from __future__ import annotations

import os
import time

import pytest

from kvtierd.core.model import Block, BlockId, block_key
from kvtierd.edges.backends import fs_format, fs_tree
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.testing.backend_kit import NAMESPACE

FILES = 200_000
SIZE = 4096


@pytest.mark.slow
def test_two_hundred_thousand_files_are_indexed_at_fifty_thousand_a_second(tmp_path, capsys):
    """L67: from a warm cache, on the two cores of the reference machine; payloads are holes, none is read."""
    root = tmp_path / "root"
    backend = FsBackend("disk", root, pack_below=0)
    backend.open()
    digest = fs_format.digest(bytes(SIZE))
    folders = {}
    for number in range(FILES):
        block = Block.of(BlockId(NAMESPACE, block_key(number.to_bytes(32, "big"))), SIZE)
        shard = fs_tree.shard_of(block.key)
        if shard not in folders:
            folders[shard] = root / "v1" / NAMESPACE / shard
            folders[shard].mkdir(parents=True)
        fd = os.open(folders[shard] / fs_tree.file_name(block.key), os.O_WRONLY | os.O_CREAT, 0o600)
        header = fs_format.encode(block, digest)
        os.write(fd, header)
        os.ftruncate(fd, len(header) + SIZE)
        os.close(fd)
    took = []
    for _ in range(5):  # others may have the cores meanwhile
        begin = time.perf_counter()
        assert sum(map(len, backend.scan())) == FILES
        took.append(time.perf_counter() - begin)
        if FILES / took[-1] >= 50_000:
            break
    backend.close()
    with capsys.disabled():
        print(f"\n{FILES / min(took):,.0f} files a second", end="")
    assert FILES / min(took) >= 50_000
