"""The pool: sized before it is taken, sealed, shared, pre-faulted, locked as far as allowed."""

import errno
import fcntl
import gc
import mmap
import os
import threading
from pathlib import Path

import pytest

from kvtierd.config.schema import Pool as Settings
from kvtierd.core.geometry import UNIT
from kvtierd.edges import pool as pool_module
from kvtierd.edges.backing import SEALS
from kvtierd.edges.libc import MADV_POPULATE_WRITE, Libc
from kvtierd.edges.memory_limits import Room
from kvtierd.edges.pool import Pool
from kvtierd.errors import ExitCode, PoolError

MIB = 1 << 20


class FakeCalls(Libc):
    """The real calls, except those that a test makes fail, with a gate to hold a pre-fault at."""

    def __init__(self, *, lock_error=0, populate_error=0, after=0):
        super().__init__()
        self.locked = []
        self.populated = 0
        self.lock_error = lock_error
        self.populate_error = populate_error
        self.after = after
        self.at_gate = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def madvise(self, address, length, advice):
        if advice == MADV_POPULATE_WRITE:
            self.at_gate.set()
            assert self.gate.wait(20)
            self.populated += 1
            if self.populate_error and self.populated > self.after:
                raise OSError(self.populate_error, os.strerror(self.populate_error))
        super().madvise(address, length, advice)

    def lock(self, address, length):
        if self.lock_error:
            raise OSError(self.lock_error, os.strerror(self.lock_error))
        self.locked.append((address, length))


@pytest.fixture
def allocate(tmp_path):
    pools = []

    def allocate(size="8MiB", calls=None, **settings):
        settings = {"lock": "off", "prefault_threads": 1, **settings}
        pool = Pool.allocate(Settings(bytes=size, **settings), tmp_path, calls)
        pools.append(pool)
        return pool

    yield allocate
    for pool in pools:
        pool.close()


@pytest.fixture
def open_descriptors():
    def count():
        gc.collect()  # what other tests left is closed now, not between two counts
        return len(os.listdir("/proc/self/fd"))

    return count


def test_a_pool_has_the_asked_size_and_an_id_of_its_own(allocate):
    one, two = allocate(), allocate()
    assert one.bytes == os.fstat(one.fd).st_size == 8 * MIB
    assert len(bytes.fromhex(one.pool_id)) == 16
    assert one.pool_id != two.pool_id


def test_a_size_is_rounded_down_to_whole_units(allocate):
    assert allocate("1000000B").bytes == 1_000_000 // UNIT * UNIT


def test_nobody_can_shrink_grow_or_unseal_a_memfd_pool(allocate):
    pool = allocate()
    for size in (0, UNIT, 16 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, size)
    assert fcntl.fcntl(pool.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_a_second_mapping_of_the_descriptor_is_the_same_memory(allocate, backing):
    pool = allocate(backing=backing)
    other = mmap.mmap(pool.fd, pool.bytes)
    pool.slot_view(5, 3)[:] = b"abc"
    assert other[5 * UNIT : 5 * UNIT + 3] == b"abc"
    other[:2] = b"xy"
    assert bytes(pool.view(0, 2)) == b"xy"
    other.close()


def test_a_view_is_writable_exact_and_inside_the_pool(allocate):
    pool = allocate()
    view = pool.view(UNIT, 100)
    assert (len(view), view.readonly) == (100, False)
    del view
    assert len(pool.view(0, pool.bytes)) == pool.bytes
    assert len(pool.view(pool.bytes, 0)) == 0
    for offset, length in ((-1, 1), (0, -1), (0, pool.bytes + 1), (pool.bytes, 1)):
        with pytest.raises(ValueError, match="outside the pool"):
            pool.view(offset, length)


def test_the_prefault_backs_every_page_and_shows_its_progress(allocate, monkeypatch):
    monkeypatch.setattr(pool_module, "PREFAULT_CHUNK", MIB)
    calls = FakeCalls()
    pool = allocate(calls=calls, prefault_threads=3)
    assert (pool.prefaulted_bytes, pool.achieved["prefault"]["state"]) == (0, "pending")
    calls.gate.clear()
    thread = threading.Thread(target=pool.prefault)
    thread.start()
    assert calls.at_gate.wait(20)
    assert pool.prefaulted_bytes < pool.bytes
    assert pool.achieved["prefault"]["state"] == "running"
    calls.gate.set()
    thread.join(20)
    assert pool.prefaulted_bytes == pool.bytes
    assert pool.achieved["prefault"] == {"state": "done"}
    assert os.fstat(pool.fd).st_blocks * 512 >= pool.bytes


def test_an_old_kernel_is_prefaulted_page_by_page_and_nothing_is_lost(allocate):
    pool = allocate(calls=FakeCalls(populate_error=errno.EINVAL))
    pool.view(3 * UNIT, 4)[:] = b"keep"
    assert pool.prefault() is True
    assert os.fstat(pool.fd).st_blocks * 512 >= pool.bytes
    assert "page by page" in pool.achieved["prefault"]["reason"]
    assert bytes(pool.view(3 * UNIT, 4)) == b"keep"


def test_a_prefault_without_memory_is_a_pool_error_that_names_the_setting(allocate, monkeypatch):
    monkeypatch.setattr(pool_module, "PREFAULT_CHUNK", MIB)
    pool = allocate(calls=FakeCalls(populate_error=errno.ENOMEM, after=3))
    with pytest.raises(PoolError, match=rf"pool\.bytes: .* {3 * MIB} of {8 * MIB} bytes"):
        pool.prefault()
    assert pool.achieved["prefault"]["state"] == "failed"


def test_a_prefault_can_be_cancelled_between_chunks(allocate, monkeypatch):
    monkeypatch.setattr(pool_module, "PREFAULT_CHUNK", MIB)
    calls = FakeCalls()
    pool = allocate(calls=calls)
    calls.gate.clear()
    results = []
    thread = threading.Thread(target=lambda: results.append(pool.prefault()))
    thread.start()
    assert calls.at_gate.wait(20)
    pool.cancel()
    calls.gate.set()
    thread.join(20)
    assert (results, pool.prefaulted_bytes) == ([False], MIB)
    assert pool.achieved["prefault"]["state"] == "cancelled"


def test_close_during_a_prefault_waits_for_it_and_unmaps(allocate, monkeypatch):
    monkeypatch.setattr(pool_module, "PREFAULT_CHUNK", MIB)
    calls = FakeCalls()
    pool = allocate(calls=calls)
    calls.gate.clear()
    prefault = threading.Thread(target=pool.prefault)
    prefault.start()
    assert calls.at_gate.wait(20)
    close = threading.Thread(target=pool.close)
    close.start()
    calls.gate.set()
    prefault.join(20)
    close.join(20)
    assert pool.close() is True
    assert pool.prefault() is False


def test_close_twice_is_safe_and_frees_everything(allocate, open_descriptors):
    before = open_descriptors()
    pool = allocate(backing="file")
    assert pool.close() is True
    assert pool.close() is True
    assert open_descriptors() == before


def test_a_view_that_is_still_out_keeps_its_memory_after_close(allocate):
    pool = allocate()
    view = pool.view(0, 4)
    assert pool.close() is False
    view[:] = b"fine"
    assert bytes(view) == b"fine"


def test_closing_undoes_what_was_registered_last_first(allocate):
    pool, undone = allocate(), []
    pool.on_close(lambda: undone.append(1))
    pool.on_close(lambda: undone.append(2))
    pool.close()
    pool.close()
    assert undone == [2, 1]


def test_locking_is_best_effort_by_default_and_says_what_came_of_it(allocate):
    calls = FakeCalls()
    pool = allocate(calls=calls, lock="auto")
    assert calls.locked == [(pool.address, pool.bytes)]
    assert pool.achieved["lock"] == {"state": "locked"}
    refused = allocate(calls=FakeCalls(lock_error=errno.ENOMEM), lock="auto")
    assert refused.achieved["lock"]["state"] == "not locked"
    assert "memlock limit" in refused.achieved["lock"]["reason"]


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_a_lock_that_is_required_and_not_allowed_stops_the_start(
    allocate, tmp_path, open_descriptors, backing
):
    before = open_descriptors()
    with pytest.raises(PoolError, match=r"pool\.lock: require: .*CAP_IPC_LOCK") as caught:
        allocate(calls=FakeCalls(lock_error=errno.ENOMEM), lock="require", backing=backing)
    assert caught.value.exit_code == ExitCode.CANT_CREATE
    assert open_descriptors() == before
    assert list(tmp_path.iterdir()) == []


def test_lock_off_locks_nothing(allocate):
    calls = FakeCalls(lock_error=errno.ENOMEM)
    assert allocate(calls=calls, lock="off").achieved["lock"] == {"state": "off"}


def test_the_real_lock_either_works_or_says_why(allocate):
    pool = allocate("1MiB", lock="auto")
    assert pool.achieved["lock"]["state"] in ("locked", "not locked")
    assert ("reason" in pool.achieved["lock"]) == (pool.achieved["lock"]["state"] == "not locked")


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_a_pool_larger_than_a_memory_limit_is_refused_before_it_is_taken(
    allocate, monkeypatch, tmp_path, open_descriptors, backing
):
    """L99."""
    monkeypatch.setattr(pool_module, "memory_rooms", lambda: iter([Room("cgroup's memory limit", 5 * MIB)]))
    before = open_descriptors()
    with pytest.raises(PoolError) as caught:
        allocate(backing=backing)
    message = str(caught.value)
    assert f"{8 * MIB} bytes) needed" in message
    assert f"{5 * MIB} bytes) available in the cgroup's memory limit" in message
    assert message.startswith("pool.bytes: ")
    assert caught.value.exit_code == ExitCode.CANT_CREATE
    assert open_descriptors() == before
    assert list(tmp_path.iterdir()) == []


def test_a_file_pool_larger_than_its_filesystem_is_refused_before_it_is_taken(
    allocate, monkeypatch, tmp_path
):
    """L99."""
    monkeypatch.setattr(
        pool_module, "filesystem_room", lambda folder: Room(f"filesystem at {folder}", 4 * MIB)
    )
    with pytest.raises(PoolError, match=rf"available in the filesystem at {tmp_path}"):
        allocate(backing="file")
    assert list(tmp_path.iterdir()) == []


def test_a_pool_beyond_this_machine_is_refused(allocate):
    with pytest.raises(PoolError, match="available in the"):
        allocate("1PiB")


def test_a_file_pool_is_fully_allocated_private_and_gone_after_close(allocate, tmp_path):
    pool = allocate(backing="file")
    stat = (tmp_path / "pool").stat()
    assert stat.st_mode & 0o777 == 0o600
    assert stat.st_blocks * 512 >= pool.bytes
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_pool_lies_where_it_is_told(allocate, tmp_path):
    allocate(backing="file", path=tmp_path / "deep" / "slab")
    assert (tmp_path / "deep" / "slab").stat().st_size == 8 * MIB


def test_what_a_dead_daemon_left_is_replaced_without_hurting_its_engines(allocate, tmp_path):
    """L98: an engine that still maps the old file keeps its memory."""
    (tmp_path / "pool").write_bytes(b"old" + bytes(UNIT))
    with (tmp_path / "pool").open("r+b") as file:
        engine = mmap.mmap(file.fileno(), UNIT)
    pool = allocate(backing="file")
    assert engine[:3] == b"old"
    assert bytes(pool.view(0, 3)) == bytes(3)
    engine.close()


def test_the_file_of_a_live_daemon_is_never_touched(allocate, tmp_path):
    """L98."""
    pool = allocate(backing="file")
    with pytest.raises(PoolError, match="another daemon that is running"):
        allocate(backing="file")
    assert (tmp_path / "pool").stat().st_ino == os.fstat(pool.fd).st_ino


def test_an_engine_that_holds_the_descriptor_does_not_keep_the_file_locked(allocate, tmp_path):
    pool = allocate(backing="file")
    engine = os.dup(pool.fd)
    pool.close()
    (tmp_path / "pool").touch()
    allocate(backing="file")
    os.close(engine)


@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
def test_a_pool_path_that_is_no_file_is_refused(allocate, tmp_path, kind):
    path = tmp_path / "pool"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "precious").write_bytes(b"mine")
        path.symlink_to(tmp_path / "precious")
    else:
        os.mkfifo(path)
    with pytest.raises(PoolError, match=r"pool\.path"):
        allocate(backing="file")
    assert path.is_symlink() or path.exists()


def test_huge_pages_fall_back_to_normal_ones_and_say_why(allocate, monkeypatch):
    monkeypatch.setattr(pool_module, "huge_page_room", lambda: (0, 2 * MIB))
    pool = allocate(huge_pages=True)
    assert pool.achieved["huge_pages"]["state"] == "not used"
    assert "0 in free huge pages" in pool.achieved["huge_pages"]["reason"]
    assert pool.prefault() is True


def test_huge_pages_that_the_kernel_refuses_fall_back_too(allocate, monkeypatch, open_descriptors):
    if Path("/proc/sys/vm/nr_hugepages").read_text().strip() != "0":
        pytest.skip("this machine has huge pages")
    monkeypatch.setattr(pool_module, "huge_page_room", lambda: (1 << 40, 2 * MIB))
    before = open_descriptors()
    pool = allocate(huge_pages=True)
    assert pool.achieved["huge_pages"]["state"] == "not used"
    pool.close()
    assert open_descriptors() == before
