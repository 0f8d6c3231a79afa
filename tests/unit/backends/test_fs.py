"""Blocks as files: what reaches the disk, what faults do, what is left alone."""

from __future__ import annotations

import json
import os
import shutil
import stat

import pytest

from kvtierd.core.model import Block, BlockId, BlockMeta, block_key
from kvtierd.core.stimuli import Status
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.errors import TierError
from kvtierd.testing.backend_kit import LAYOUT, NAMESPACE, block, payload, read, scanned, write
from kvtierd.testing.on_disk import files_in, path_of

OLD = 1_000_000_000 * 10**9


def test_a_block_is_one_file_under_its_documented_name(backend, root):
    write(backend, block(0x1FF), payload(1))
    assert files_in(root) == [f"v1/{NAMESPACE}/ff/{0x1FF:064x}.0"]
    assert path_of(root, block(0x1FF).id).stat().st_size == 4096 + 5000
    assert path_of(root, block(0x1FF).id).stat().st_mode & stat.S_IRWXO & 0o2 == 0


def test_stored_bytes_are_the_blocks_that_the_file_occupies(backend, root):
    one = block(1, size=20_000)
    stored = write(backend, one, payload(1, 20_000)).stored_bytes
    assert stored == 4096 + 20480
    assert path_of(root, one.id).stat().st_blocks * 512 in (0, stored)  # 0: not allocated yet


@pytest.mark.parametrize("namespace", ["../x", "/x", "a/../../b", "\0", "x" * 5000, "", "F" * 32, "0" * 31])
def test_a_namespace_that_is_not_32_hex_digits_touches_nothing(backend, root, namespace):
    """L126."""
    odd = Block.of(BlockId(namespace, block_key(b"k")), 4)
    assert write(backend, odd, b"data").status is Status.FAILED
    assert read(backend, odd) is Status.FAILED
    assert backend.delete([odd.id])[0].status is Status.FAILED
    backend.describe(namespace, LAYOUT)
    assert files_in(root.parent) == []


@pytest.mark.parametrize("level", ["v1", NAMESPACE, "shard"])
def test_no_folder_is_followed_out_of_the_root(backend, root, tmp_path, level):
    """L126: a link inside the root to a folder outside."""
    outside = tmp_path / "outside"
    outside.mkdir()
    parts = {"v1": root / "v1", NAMESPACE: root / "v1" / NAMESPACE, "shard": root / "v1" / NAMESPACE / "01"}
    link = parts[level]
    shutil.rmtree(root / "v1")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    assert write(backend, block(1), payload(1)).status is Status.FAILED
    assert read(backend, block(1)) is Status.CORRUPT
    assert backend.delete([block(1).id], corrupt=True)[0].status is Status.OK
    if level == "v1":
        with pytest.raises(TierError, match="ENOTDIR"):
            scanned(backend)
    else:
        assert scanned(backend) == []
    assert list(outside.iterdir()) == []


def test_a_linked_file_is_not_followed_and_can_be_replaced(backend, root, tmp_path):
    write(backend, block(1), payload(1))
    path = path_of(root, block(1).id)
    target = tmp_path / "elsewhere"
    path.rename(target)
    path.symlink_to(target)
    assert read(backend, block(1)) is Status.CORRUPT
    assert scanned(backend) == []
    write(backend, block(1), payload(2))
    assert read(backend, block(1)) == payload(2)
    assert target.stat().st_size == 4096 + 5000


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_thing_that_is_no_file_is_corrupt_and_can_be_moved_aside(backend, root, make):
    write(backend, block(1), payload(1))
    path = path_of(root, block(1).id)
    path.unlink()
    make(path)
    assert read(backend, block(1)) is Status.CORRUPT
    assert scanned(backend) == []
    assert backend.delete([block(1).id], corrupt=True)[0].status is Status.OK
    assert read(backend, block(1)) is Status.GONE


def test_foreign_names_are_left_alone_and_counted(backend, root):
    """L78."""
    write(backend, block(1), payload(1))
    folder = path_of(root, block(1).id).parent
    names = ["README", "00.x", "0.0", f"{'ab' * 65}.0", f"{2:064x}.0", f"{1:064x}.00", "%2e.0", "ü.0"]
    for name in names:
        (folder / name).write_bytes(b"not ours")
    (root / "v1" / "lost+found").mkdir()
    (root / "v1" / NAMESPACE / "zz").mkdir()
    (root / "stray").write_bytes(b"")
    assert [found.block.id for found in scanned(backend)] == [block(1).id]
    assert backend.statistics()["scan: foreign"] == len(names) + 2
    assert all((folder / name).read_bytes() == b"not ours" for name in names)


def test_a_newer_format_is_no_hit_and_is_left_to_the_newer_daemon(backend, root):
    write(backend, block(1), payload(1))
    path = path_of(root, block(1).id)
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    assert scanned(backend) == []
    assert path.read_bytes() == data
    assert read(backend, block(1)) is Status.CORRUPT
    assert backend.statistics()["scan: unknown format version"] == 1


def test_corrupt_files_are_moved_aside_and_the_newest_are_kept(root):
    """L63."""
    backend = FsBackend("disk", root, quarantine=3, pack_below=0)
    backend.open()
    for number in range(6):
        write(backend, block(number), payload(number))
        backend.delete([block(number).id], corrupt=True)
    kept = sorted((root / "quarantine").iterdir())
    assert [path.name.split(".")[2] for path in kept] == [f"{number:064x}" for number in (3, 4, 5)]
    assert kept[0].read_bytes()[4096:] == payload(3)
    assert backend.statistics()["quarantined"] == 6


def test_a_scan_moves_provably_bad_files_aside(backend, root):
    write(backend, block(1), payload(1))
    path_of(root, block(1).id).write_bytes(b"")
    assert scanned(backend) == []
    assert [name.split("/")[0] for name in files_in(root)] == ["quarantine"]
    assert backend.statistics()["scan: too short"] == 1


def test_a_read_marks_the_file_as_used(backend, root):
    write(backend, block(1), payload(1))
    path = path_of(root, block(1).id)
    os.utime(path, ns=(OLD, OLD))
    read(backend, block(1))
    assert path.stat().st_mtime_ns > OLD


def test_the_namespace_record_says_what_the_blocks_are(backend, root):
    backend.describe(NAMESPACE, LAYOUT)
    record = json.loads((root / "v1" / NAMESPACE / "namespace.json").read_text())
    assert (record["namespace"], record["format"]) == (NAMESPACE, 1)
    assert record["layout"]["model"] == "kit"
    assert (record["payload_bytes"], record["slot_bytes"]) == ([5000], 8192)
    assert scanned(backend) == []
    assert "scan: foreign" not in backend.statistics()


def test_a_scan_reads_no_payload(backend, root):
    write(backend, block(1), payload(1))
    path = path_of(root, block(1).id)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert len(scanned(backend)) == 1
    assert read(backend, block(1)) is Status.CORRUPT


def test_a_header_of_several_pages_is_scanned(backend):
    meta = BlockMeta(hashes=(1,), token_ids=tuple(range(10_000)))
    big = Block.of(block(1).id, 5000, meta)
    write(backend, big, payload(1))
    (found,) = scanned(backend)
    assert found.block == big


def test_a_scan_yields_batches_in_order_over_all_namespaces(backend, root):
    blocks = [block(number, size=1, namespace=f"{number % 3:032x}") for number in range(1100)]
    for number, one in enumerate(blocks):
        write(backend, one, b"x")
        os.utime(path_of(root, one.id), ns=(OLD, OLD + (number * 7) % 1100))
    batches = list(backend.scan())
    order = sorted(range(1100), key=lambda number: (number * 7) % 1100)
    assert [found.block.id for batch in batches for found in batch] == [blocks[i].id for i in order]
    assert [len(batch) for batch in batches] == [512, 512, 76]
