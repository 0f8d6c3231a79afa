"""Blocks as files: what reaches the disk, what faults do, what is left alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import resource
import shutil
import stat
import subprocess
import sys
import textwrap
import threading

import pytest

from kvtierd.core.model import Block, BlockId, BlockMeta, block_key, group_of, hash_of
from kvtierd.core.stimuli import Status
from kvtierd.edges.backends import fs_lock, fs_tree
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.errors import TierError
from kvtierd.testing.backend_kit import LAYOUT, NAMESPACE, block, payload, read, scanned, write

OLD = 1_000_000_000 * 10**9


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def backend(root):
    opened = FsBackend("disk", root, pack_below=0)
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def shared(root):
    opened = FsBackend("disk", root, shared=True)
    opened.open()
    yield opened
    opened.close()


def path_of(root, block_id):
    name = f"{hash_of(block_id.key).hex()}.{group_of(block_id.key)}"
    return root / "v1" / block_id.namespace / hash_of(block_id.key).hex()[-2:] / name


def files_in(root):
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())
    return [name for name in names if name.rpartition("/")[2] != "lock"]


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


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
    odd = Block(BlockId(namespace, block_key(b"k")), 4)
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


class Fails:
    """Stands in for one function of ``os``: does ``before`` and raises, until healed."""

    def __init__(self, monkeypatch, name, code, before=None):
        self.real, self.code, self.before, self.active = getattr(os, name), code, before, True
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args, **kwargs):
        if not self.active:
            return self.real(*args, **kwargs)
        if self.before is not None:
            self.before(self.real, *args)
        raise OSError(self.code, os.strerror(self.code))


def half(real, fd, vector, offset, flags=0):
    real(fd, [memoryview(vector[0])[:100]], offset)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (errno.ENOSPC, Status.FULL),
        (errno.EDQUOT, Status.FULL),
        (errno.EIO, Status.FAILED),
        (errno.EROFS, Status.FAILED),
    ],
)
def test_a_write_that_fails_half_way_leaves_no_file_and_the_old_block(
    backend, root, monkeypatch, code, status
):
    write(backend, block(1), payload(1))
    fault = Fails(monkeypatch, "pwritev", code, before=half)
    assert write(backend, block(1), payload(2)).status is status
    assert write(backend, block(2), payload(2)).status is status
    fault.active = False
    assert files_in(root) == [f"v1/{NAMESPACE}/01/{1:064x}.0"]
    assert read(backend, block(1)) == payload(1)


def test_a_rename_that_fails_leaves_no_file(backend, root, monkeypatch):
    Fails(monkeypatch, "rename", errno.EIO)
    assert write(backend, block(1), payload(1)).status is Status.FAILED
    assert files_in(root) == []


def test_short_transfers_are_continued(backend, monkeypatch):
    """The kernel may move less than asked, on either side of a buffer's border."""
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)

        def little(fd, vector, offset, flags=0, real=real):
            return real(fd, [memoryview(vector[0])[:1500]], offset, flags)

        monkeypatch.setattr(os, name, little)
    assert write(backend, block(1), payload(1)).status is Status.OK
    assert read(backend, block(1)) == payload(1)


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_passing_read_error_fails_and_keeps_the_file(backend, monkeypatch, call, code):
    """L43."""
    write(backend, block(1), payload(1))
    fault = Fails(monkeypatch, call, code)
    assert read(backend, block(1)) is Status.FAILED
    fault.active = False
    assert read(backend, block(1)) == payload(1)


def test_a_close_error_after_a_full_read_is_harmless(backend, monkeypatch):
    """L43."""
    write(backend, block(1), payload(1))
    close, opened = os.close, set()
    preadv = os.preadv

    def note(fd, *rest):
        opened.add(fd)
        return preadv(fd, *rest)

    def failing(fd):
        close(fd)
        if fd in opened:
            opened.discard(fd)
            raise OSError(errno.EIO, "close")

    monkeypatch.setattr(os, "preadv", note)
    monkeypatch.setattr(os, "close", failing)
    assert read(backend, block(1)) == payload(1)


def test_running_out_of_descriptors_fails_and_recovers(backend):
    """L81."""
    write(backend, block(1), payload(1))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), limits[1]))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        statuses = (read(backend, block(1)), write(backend, block(2), payload(2)).status)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert statuses == (Status.FAILED, Status.FAILED)
    assert read(backend, block(1)) == payload(1)


def test_the_descriptor_count_stays_flat(backend, root, monkeypatch):
    """L81: good and failing cycles alike."""
    write(backend, block(1), payload(1))
    before = open_descriptors()
    for cycle in range(100):
        write(backend, block(2), payload(cycle))
        read(backend, block(2))
        read(backend, block(3))
        path_of(root, block(2).id).write_bytes(b"short")
        assert read(backend, block(2)) is Status.CORRUPT
        backend.delete([block(2).id], corrupt=cycle % 2 == 0)
        scanned(backend)
        with monkeypatch.context() as patch:
            Fails(patch, "pwritev", errno.ENOSPC)
            write(backend, block(4), payload(4))
    assert open_descriptors() == before


def test_a_missing_root_is_a_failure_and_not_a_loss(backend, root):
    """L79: the folder goes and comes back."""
    write(backend, block(1), payload(1))
    aside = root.with_name("aside")
    root.rename(aside)
    assert read(backend, block(1)) is Status.FAILED
    assert write(backend, block(2), payload(2)).reason == "ESTALE: the root folder is missing"
    assert backend.delete([block(1).id])[0].status is Status.FAILED
    with pytest.raises(TierError, match="ESTALE"):
        scanned(backend)
    assert not root.exists()
    aside.rename(root)
    assert read(backend, block(1)) == payload(1)


def test_a_root_that_was_removed_works_again_when_there_is_a_folder(backend, root, monkeypatch):
    """L79: and belongs to this daemon as before."""
    monkeypatch.setattr(fs_lock, "WAIT_SECONDS", 0.0)
    write(backend, block(1), payload(1))
    shutil.rmtree(root)
    assert write(backend, block(2), payload(2)).status is Status.FAILED
    assert not root.exists()
    root.mkdir()
    assert write(backend, block(2), payload(2)).status is Status.OK
    assert read(backend, block(1)) is Status.GONE
    assert read(backend, block(2)) == payload(2)
    with pytest.raises(TierError, match="in use by process"):
        FsBackend("other", root).open()


def test_a_cleared_root_is_a_loss_and_is_filled_again(backend, root):
    write(backend, block(1), payload(1))
    shutil.rmtree(root)
    root.mkdir()
    assert read(backend, block(1)) is Status.GONE
    assert write(backend, block(1), payload(1)).status is Status.OK
    assert read(backend, block(1)) == payload(1)


def test_another_filesystem_at_the_root_is_a_failure(backend, monkeypatch):
    write(backend, block(1), payload(1))
    monkeypatch.setattr(backend, "_device", -1)
    assert read(backend, block(1)) is Status.FAILED
    assert write(backend, block(2), payload(2)).status is Status.FAILED


def test_a_root_that_cannot_be_used_says_what_to_do(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierError, match=r"tier 'disk': cannot use .*change the tier's path"):
        FsBackend("disk", tmp_path / "file" / "root").open()


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
    big = Block(block(1).id, 5000, meta)
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


def temporary(folder, boot, age):
    path = folder / f".tmp-{boot}-1-{'0' * 16}"
    path.write_bytes(b"half")
    if age == "old":
        os.utime(path, ns=(OLD, OLD))
    return path


@pytest.mark.parametrize(
    ("boot", "age", "locked", "removed"),
    [
        (fs_tree.BOOT_ID, "old", False, True),
        (fs_tree.BOOT_ID, "old", True, False),
        (fs_tree.BOOT_ID, "fresh", False, False),
        ("f" * 32, "old", False, False),
        ("", "old", False, False),
    ],
    ids=["dead writer", "live writer", "fresh", "another host", "unknown host"],
)
def test_only_a_temporary_whose_writer_is_provably_dead_is_removed(shared, root, boot, age, locked, removed):
    """L65: in a root that several daemons share."""
    backend = shared
    write(backend, block(1), payload(1))
    path = temporary(path_of(root, block(1).id).parent, boot, age)
    with path.open("rb") as holder:
        if locked:
            fcntl.flock(holder, fcntl.LOCK_EX)
        assert [found.block.id for found in scanned(backend)] == [block(1).id]
    assert path.exists() is not removed


def test_a_root_of_ones_own_has_no_other_writers(backend, root):
    """L65: whatever boot, age and process a temporary is of, only this process could be writing it."""
    write(backend, block(1), payload(1))
    folder = path_of(root, block(1).id).parent
    left = [temporary(folder, boot, age) for boot, age in [("f" * 32, "old"), (fs_tree.BOOT_ID, "fresh")]]
    parent = os.open(folder, os.O_RDONLY)
    own, name = fs_tree.create_temporary(parent)
    scanned(backend)
    os.close(own)
    os.close(parent)
    assert not any(path.exists() for path in left)
    assert (folder / name).exists()


def test_a_writer_that_was_killed_leaves_a_temporary_that_a_scan_removes(shared, root):
    """L65: the lock dies with its process."""
    backend = shared
    write(backend, block(1), payload(1))
    program = """
        import os, signal, sys
        from kvtierd.edges.backends import fs
        from kvtierd.testing.backend_kit import block, payload, write
        backend = fs.FsBackend("disk", sys.argv[1], shared=True)
        backend.open()
        real = os.pwritev
        def die(fd, vector, offset, flags=0):
            real(fd, [bytes(vector[0])[:2000]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        os.pwritev = die
        write(backend, block(257), payload(9))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), root], timeout=50, check=False)
    assert done.returncode == -9
    (left,) = path_of(root, block(1).id).parent.glob(".tmp-*")
    scanned(backend)
    assert left.exists()
    os.utime(left, ns=(OLD, OLD))
    scanned(backend)
    assert not left.exists()
    assert read(backend, block(1)) == payload(1)


def _write_all(root, number, start, results):
    backend = FsBackend("disk", root, shared=True)
    backend.open()
    start.wait(30)
    transfers = [Transfer(block(i), memoryview(payload(i + number))) for i in range(50)]
    outcomes = [outcome for _ in range(3) for outcome in backend.write(transfers)]
    results.put([outcome.status.value for outcome in outcomes])


def test_several_processes_write_the_same_blocks_without_an_error(shared, root):
    """L64."""
    backend = shared
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    workers = [
        context.Process(target=_write_all, args=(root, number, start, results), daemon=True)
        for number in range(3)
    ]
    for worker in workers:
        worker.start()
    statuses = [status for _ in workers for status in results.get(timeout=50)]
    for worker in workers:
        worker.join(30)
    results.close()
    results.join_thread()
    assert statuses == ["ok"] * 450
    for i in range(50):
        assert read(backend, block(i)) in [payload(i + number) for number in range(3)]
    assert not [name for name in files_in(root) if ".tmp-" in name]
    assert len(files_in(root)) == 50


def test_readers_see_whole_blocks_while_they_are_replaced(backend):
    write(backend, block(1), payload(0))
    stop = threading.Event()

    def replace():
        number = 0
        while not stop.is_set():
            number = (number + 1) % 5
            write(backend, block(1), payload(number))

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        seen = {read(backend, block(1)) for _ in range(300)}
    finally:
        stop.set()
        writer.join(30)
    assert seen <= {payload(number) for number in range(5)}
