"""Several writers of one root: temporaries, and whole files at any moment."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from kvtierd.edges.backends import fs_tree
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.testing.backend_kit import block, payload, read, scanned, write
from kvtierd.testing.on_disk import files_in, path_of

OLD = 1_000_000_000 * 10**9


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
