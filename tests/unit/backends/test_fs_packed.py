"""Small blocks in segments: what is proved, what a crash leaves, what space they take."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from kvtierd.config.schema import FsTier
from kvtierd.core.model import Block, BlockMeta, hash_of
from kvtierd.core.stimuli import Status
from kvtierd.edges.backends import fs_io, fs_packed, fs_slot_io
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.errors import TierError
from kvtierd.testing.backend_kit import NAMESPACE, block, payload, read, scanned, write

SLOT = 4096 + 8192


@pytest.fixture
def backend(root, request):
    opened = FsBackend("disk", root, pack_below=getattr(request, "param", fs_packed.PACK_BELOW))
    opened.open()
    yield opened
    opened.close()


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("v1/*/packed/*"))


def restart(backend: FsBackend) -> None:
    backend.close()
    backend.open()


def slot_of(backend: FsBackend, number: int) -> tuple[Path, int]:
    segment, slot = backend._packed.slots.find(block(number).id)
    return backend.root / "v1" / segment.namespace / "packed" / segment.name, segment.offset(slot)


def flip(path: Path, offset: int, bit: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bit]))


def allocated(root: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("backend", [256 << 10], indirect=True)
def test_small_blocks_share_a_file_and_big_ones_do_not(backend, root):
    for number in range(20):
        write(backend, block(number), payload(number))
    big = block(99, size=256 << 10)
    write(backend, big, payload(99, 256 << 10))
    (segment,) = segments(root)
    assert segment.name.startswith(f"{SLOT}-")
    assert [path.name for path in root.glob("v1/*/??/*")] == [f"{99:064x}.0"]
    assert read(backend, big) == payload(99, 256 << 10)
    assert backend.statistics()["packed_blocks"] == 20


def test_another_limit_loses_no_block_of_before_and_has_none_twice(root):
    """Whatever was packed or not by an earlier run is found, written again where it belongs, and deleted."""
    sizes = {1: 5000, 2: 9000}
    blocks = {number: block(number, size=size) for number, size in sizes.items()}

    def run(pack_below):
        opened = FsBackend("disk", root, pack_below=pack_below)
        opened.open()
        return opened

    for first, then in ((1, 1 << 20), (1 << 20, 1), (8000, 1), (1, 8000), (8000, 1 << 20)):
        backend = run(first)
        for number, one in blocks.items():
            assert write(backend, one, payload(number, sizes[number])).status is Status.OK
        backend.close()
        backend = run(then)
        assert {found.block.id for found in scanned(backend)} == {one.id for one in blocks.values()}
        for number, one in blocks.items():
            assert read(backend, one) == payload(number, sizes[number])
            assert write(backend, one, payload(number + 10, sizes[number])).status is Status.OK
            assert read(backend, one) == payload(number + 10, sizes[number])
        in_files = [path for path in root.glob("v1/*/??/*") if path.is_file()]
        assert len(in_files) == sum(size >= then for size in sizes.values())
        assert backend.statistics()["packed_blocks"] == len(sizes) - len(in_files)
        for one in blocks.values():
            backend.delete([one.id])
            assert read(backend, one) is Status.GONE
        assert not scanned(backend)
        backend.close()


def test_blocks_of_different_sizes_and_namespaces_have_different_segments(backend, root):
    blocks = [block(1, size=100), block(2, size=5000), block(3, size=5001), block(4, namespace="f" * 32)]
    for one in blocks:
        write(backend, one, payload(1, one.payload_bytes))
    assert sorted(int(path.name.split("-")[0]) for path in segments(root)) == [8192, SLOT, SLOT]


def test_every_flipped_byte_of_a_slot_is_caught(backend):
    """L63: header, metadata, padding and payload."""
    meta = BlockMeta(hashes=(1,), parent=5, token_ids=(1, 2, 3), block_size=16)
    one = Block.of(block(1).id, 700, meta)
    write(backend, one, payload(1, 700))
    path, offset = slot_of(backend, 1)
    for byte in range(4096 + 700):
        flip(path, offset + byte, 1 << (byte % 8))
        assert read(backend, one) is Status.CORRUPT, byte
        flip(path, offset + byte, 1 << (byte % 8))
    assert read(backend, one) == payload(1, 700)


def test_flipped_headers_are_no_hits_after_a_restart(backend):
    for number in range(40):
        write(backend, block(number), payload(number))
    for number in range(0, 40, 2):
        path, offset = slot_of(backend, number)
        flip(path, offset + number * 100)
    restart(backend)
    assert sorted(one.block.id for one in scanned(backend)) == [block(n).id for n in range(1, 40, 2)]
    write(backend, block(100), payload(100))
    assert all(read(backend, block(n)) == payload(n) for n in [*range(1, 40, 2), 100])
    assert len(segments(backend.root)) == 1


def test_a_deleted_block_does_not_come_back(backend):
    for number in range(3):
        write(backend, block(number), payload(number))
    backend.delete([block(1).id])
    restart(backend)
    assert [one.block.id for one in scanned(backend)] == [block(0).id, block(2).id]
    assert read(backend, block(1)) is Status.GONE


def test_freed_slots_are_written_again_before_new_ones(backend, root):
    for number in range(10):
        write(backend, block(number), payload(number))
    places = {slot_of(backend, number) for number in range(10)}
    for number in range(10):
        backend.delete([block(number).id])
        write(backend, block(100 + number), payload(number))
    assert {slot_of(backend, 100 + number) for number in range(10)} == places
    assert backend.statistics()["spare_bytes"] == 0


def test_spare_space_is_bounded_and_the_rest_goes_back_to_the_filesystem(backend, root):
    backend.reserve(1 << 20)
    limit = backend._packed.slots.spare_limit
    for number in range(60):
        write(backend, block(number), payload(number))
    for number in range(59):
        backend.delete([block(number).id])
    spare = backend.statistics()["spare_bytes"]
    assert limit - SLOT < spare <= limit
    assert allocated(root) <= SLOT + spare + 3 * 4096
    assert read(backend, block(59)) == payload(59)


def test_an_empty_segment_is_removed(backend, root):
    for number in range(5):
        write(backend, block(number), payload(number))
    for number in range(5):
        backend.delete([block(number).id])
    assert segments(root) == []
    assert backend.statistics()["spare_bytes"] == 0
    write(backend, block(1), payload(1))
    assert read(backend, block(1)) == payload(1)


def test_a_restart_gives_back_what_no_block_needs(backend, root):
    for number in range(20):
        write(backend, block(number), payload(number))
    for number in range(19):
        backend.delete([block(number).id])
    assert backend.statistics()["spare_bytes"] == 19 * SLOT
    restart(backend)
    assert len(scanned(backend)) == 1
    assert backend.statistics()["spare_bytes"] == 0
    assert allocated(root) <= SLOT + 3 * 4096


def test_a_block_that_was_written_twice_is_kept_once(backend, monkeypatch):
    """As after a kill between the header of the new slot and the wiping of the old one."""
    write(backend, block(1), payload(1))
    monkeypatch.setattr(fs_packed.PackedStore, "publish", lambda *args: None)
    write(backend, block(1), payload(1))
    monkeypatch.undo()
    restart(backend)
    assert [one.block.id for one in scanned(backend)] == [block(1).id]
    assert read(backend, block(1)) == payload(1)
    backend.delete([block(1).id])
    restart(backend)
    assert scanned(backend) == []


def test_writes_while_the_scan_runs_are_found_once(backend):
    for number in range(1200):
        write(backend, block(number, size=1), b"x")
    restart(backend)
    scan = backend.scan()
    seen = [one.block.id for one in next(scan)]
    write(backend, block(5000, size=1), b"y")
    backend.delete([seen[0]])
    write(backend, block(1199, size=1), b"z")
    seen += [one.block.id for batch in scan for one in batch]
    assert seen.count(block(1199).id) <= 1
    assert read(backend, block(5000, size=1)) == b"y"
    assert read(backend, block(1199, size=1)) == b"z"
    restart(backend)
    assert len(scanned(backend)) == 1200


def test_a_small_file_of_a_shared_time_is_read_and_replaced(root):
    before = FsBackend("disk", root, shared=True)
    before.open()
    for number in range(3):
        write(before, block(number), payload(number))
    before.close()
    backend = FsBackend("disk", root)
    backend.open()
    assert len(scanned(backend)) == 3
    assert read(backend, block(0)) == payload(0)
    write(backend, block(1), payload(9))
    backend.delete([block(2).id])
    assert [path.name for path in root.glob("v1/*/??/*")] == [f"{0:064x}.0"]
    assert [one.block.id for one in scanned(backend)] == [block(0).id, block(1).id]
    backend.close()


def test_segments_are_removed_when_a_root_becomes_shared(backend, root):
    """Nobody would count or delete them there."""
    write(backend, block(1), payload(1))
    backend.close()
    shared = FsBackend("disk", root, shared=True)
    shared.open()
    assert segments(root) == []
    assert scanned(shared) == []
    shared.close()


def test_a_segment_removed_by_somebody_else_is_a_loss_of_its_blocks_only(backend, root):
    """L75."""
    other = block(9, size=100)
    write(backend, other, payload(9, 100))
    for number in range(4):
        write(backend, block(number), payload(number))
    next(path for path in segments(root) if path.name.startswith(str(SLOT))).unlink()
    assert read(backend, block(0)) is Status.GONE
    assert write(backend, block(7), payload(7)).status is Status.OK
    assert [outcome.status for outcome in backend.delete([block(1).id])] == [Status.OK]
    assert read(backend, block(7)) == payload(7)
    assert read(backend, other) == payload(9, 100)
    shutil.rmtree(root / "v1")
    assert read(backend, block(7)) is Status.GONE
    assert write(backend, block(8), payload(8)).status is Status.OK
    assert read(backend, block(8)) == payload(8)


@pytest.mark.parametrize("thing", ["link", "folder", "fifo"])
def test_a_thing_in_a_segments_place_is_never_followed_or_waited_for(backend, root, tmp_path, thing):
    """L126."""
    write(backend, block(1), payload(1))
    (path,) = segments(root)
    outside = tmp_path / "outside"
    path.rename(outside)
    before = outside.stat().st_mtime_ns, outside.stat().st_blocks
    {"link": lambda: path.symlink_to(outside), "folder": path.mkdir, "fifo": lambda: os.mkfifo(path)}[thing]()
    assert isinstance(read(backend, block(1)), Status)
    assert write(backend, block(2), payload(2)).status in (Status.FAILED, Status.OK)
    assert isinstance(scanned(backend), list)
    assert (outside.stat().st_mtime_ns, outside.stat().st_blocks) == before


def test_corrupt_slots_are_kept_aside(backend, root):
    write(backend, block(1), payload(1))
    path, offset = slot_of(backend, 1)
    flip(path, offset + 4096)
    backend.delete([block(1).id], corrupt=True)
    (kept,) = (root / "quarantine").iterdir()
    assert kept.name.split(".")[1:3] == [NAMESPACE, f"{1:064x}"]
    assert kept.read_bytes()[4097 : 4096 + 5000] == payload(1)[1:]


@pytest.mark.parametrize(
    ("code", "status"),
    [(errno.ENOSPC, Status.FULL), (errno.EDQUOT, Status.FULL), (errno.EIO, Status.FAILED)],
)
@pytest.mark.parametrize("call", ["pwritev", "pwrite"])
def test_a_write_that_fails_half_way_leaves_no_block_and_no_space(
    backend, root, monkeypatch, call, code, status
):
    write(backend, block(1), payload(1))
    before = allocated(root)
    with monkeypatch.context() as patched:

        def fails(fd, data, offset, *flags):
            part = bytes(data[0] if isinstance(data, list) else data)[:100]
            os_pwrite(fd, part, offset)
            raise OSError(code, os.strerror(code))

        os_pwrite = os.pwrite
        patched.setattr(os, call, fails)
        assert write(backend, block(2), payload(2)).status is status
        assert write(backend, block(1), payload(3)).status is status
    assert allocated(root) == before
    assert read(backend, block(1)) == payload(1)
    assert write(backend, block(2), payload(2)).status is Status.OK
    restart(backend)
    assert len(scanned(backend)) == 2


def test_a_block_that_cannot_be_wiped_stays_and_is_reported_once(backend, monkeypatch, caplog):
    """L68."""
    for number in range(3):
        write(backend, block(number), payload(number))
    real, bad = os.pwrite, slot_of(backend, 0)[1]

    def refuses(fd, data, offset):
        if offset == bad:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuses)
    for _ in range(3):
        outcomes = backend.delete([block(0).id, block(1).id])
        assert [outcome.status for outcome in outcomes] == [Status.FAILED, Status.OK]
    assert outcomes[0].reason == "EROFS: the filesystem is read-only"
    assert caplog.text.count("read-only") == 1
    monkeypatch.undo()
    assert read(backend, block(0)) == payload(0)
    assert backend.delete([block(0).id])[0].status is Status.OK


def test_a_killed_writer_leaves_no_false_hit_and_little_space(backend, root):
    """L65: killed in the middle of writes, deletes and reads, many times."""
    backend.close()
    program = """
        import os, sys, itertools
        from kvtierd.edges.backends.base import Transfer
        from kvtierd.edges.backends.fs import FsBackend
        from kvtierd.testing.backend_kit import block, payload
        backend = FsBackend("disk", sys.argv[1])
        backend.open()
        known = [one.block.id for batch in backend.scan() for one in batch]
        data = [payload(number) for number in range(60)]
        print("ready", flush=True)
        for turn in itertools.count():
            for start in range(0, 60, 12):
                numbers = range(start, start + 12)
                backend.write([Transfer(block(n), memoryview(data[n])) for n in numbers])
                backend.delete([block(n).id for n in numbers if (n + turn) % 3 == 0])
                print("on", flush=True)
    """
    for run in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), root], stdout=subprocess.PIPE, text=True
        )
        for _ in range(1 + 7 * run):  # how far it comes; where in a batch the kill falls is chance
            assert child.stdout.readline() in ("ready\n", "on\n")
        child.send_signal(signal.SIGKILL)
        child.wait(30)
        child.stdout.close()
        backend.open()
        found = scanned(backend)
        assert len({one.block.id for one in found}) == len(found)
        for one in found:
            number = int.from_bytes(hash_of(one.block.key), "big")
            assert read(backend, block(number)) == payload(number)
        assert allocated(root) <= len(found) * SLOT + 4 * 4096
        backend.close()
    backend.open()


@pytest.mark.parametrize(
    ("call", "number", "part"),
    [("pwritev", 1, 2000), ("pwritev", 1, 6000), ("pwrite", 1, 8), ("pwrite", 2, 0), ("pwrite", 2, 3000)],
    ids=["half a payload", "payload", "time of use", "no header", "half a header"],
)
def test_a_writer_killed_between_the_parts_of_a_block_leaves_none(backend, root, call, number, part):
    """L65: also not the block whose slot is taken over."""
    for one in (1, 2):
        write(backend, block(one), payload(one))
    backend.delete([block(1).id])
    backend.close()
    program = """
        import sys
        from kvtierd.edges.backends.fs import FsBackend
        from kvtierd.testing.backend_kit import block, payload, scanned, write
        from kvtierd.testing.faults import die_in
        backend = FsBackend("disk", sys.argv[1])
        backend.open()
        scanned(backend)
        write(backend, block(3), payload(3))
        backend.delete([block(3).id])
        die_in(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        write(backend, block(4), payload(4))
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), root, call, str(number), str(part)]
    assert subprocess.run(arguments, timeout=50, check=False).returncode == -signal.SIGKILL
    backend.open()
    assert [one.block.id for one in scanned(backend)] == [block(2).id]
    assert allocated(root) <= SLOT + 3 * 4096
    assert read(backend, block(2)) == payload(2)


def test_readers_see_whole_blocks_while_slots_are_recycled(backend):
    """Or none at all: two operations on one block at a time, which the core never starts, may miss it."""
    write(backend, block(1), payload(0))
    stop = threading.Event()

    def replace_it():
        number = 0
        while not stop.is_set():
            number = (number + 1) % 5
            write(backend, block(1), payload(number))
            write(backend, block(2), payload(number))
            backend.delete([block(2).id])

    writer = threading.Thread(target=replace_it)
    writer.start()
    try:
        seen = {read(backend, block(1)) for _ in range(500)}
    finally:
        stop.set()
        writer.join(30)
    assert seen - {Status.GONE} <= {payload(number) for number in range(5)}
    assert seen != {Status.GONE}


def test_two_daemons_on_one_root_are_told_apart(backend, root, monkeypatch):
    monkeypatch.setattr("kvtierd.edges.backends.fs_lock.WAIT_SECONDS", 0.0)
    for shared in (False, True):
        with pytest.raises(TierError, match=r"in use by process .*shared: true"):
            FsBackend("other", root, shared=shared).open()
    backend.close()
    other = FsBackend("other", root)
    other.open()
    other.close()
    backend.open()


def test_nothing_is_packed_where_holes_cannot_be_punched(root, monkeypatch):
    def refuses(fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(fs_io, "punch", refuses)
    backend = FsBackend("disk", root)
    backend.open()
    write(backend, block(1), payload(1))
    assert segments(root) == []
    assert read(backend, block(1)) == payload(1)
    backend.close()


def test_a_batch_is_stored_in_order_and_its_order_is_kept(backend):
    transfers = [Transfer(block(n), memoryview(payload(n))) for n in (5, 3, 9, 1)]
    assert [outcome.stored_bytes for outcome in backend.write(transfers)] == [SLOT] * 4
    restart(backend)
    assert [one.block.id for one in scanned(backend)] == [block(n).id for n in (5, 3, 9, 1)]


def test_the_descriptor_count_stays_flat(backend, opened_below, monkeypatch):
    """L81: good and failing cycles alike."""
    write(backend, block(1), payload(1))
    before = opened_below()
    assert before, "the lock at least"
    for cycle in range(100):
        write(backend, block(2), payload(cycle))
        read(backend, block(2))
        read(backend, block(3))
        path, offset = slot_of(backend, 2)
        flip(path, offset)
        assert read(backend, block(2)) is Status.CORRUPT
        backend.delete([block(2).id], corrupt=cycle % 2 == 0)
        scanned(backend)
        with monkeypatch.context() as patched:
            patched.setattr(
                fs_slot_io, "write", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "bad"))
            )
            assert write(backend, block(4), payload(4)).status is Status.FAILED
    assert opened_below() == before


def test_a_tier_file_packs_what_the_backend_packs_by_itself():
    assert FsTier.model_fields["pack_below"].default == fs_packed.PACK_BELOW
