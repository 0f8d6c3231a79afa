"""How bytes move: aligned or not, cached or not, refused or not; always the same bytes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from kvtierd.core.stimuli import Status
from kvtierd.edges.backends import fs_io
from kvtierd.edges.backends.base import Transfer
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.edges.backends.fs_io import File, Io
from kvtierd.testing.backend_kit import block, payload, read, scanned, write

SIZES = [1, 4095, 4096, 4097, 70_000, 262_144, 300_001]


def pool(*parts: bytes) -> list[memoryview]:
    """Lay parts out as the pool does: each starts on a page and is as long as it is."""
    steps = [-(-len(part) // 4096) * 4096 for part in parts]
    memory = memoryview(mmap.mmap(-1, sum(steps)))
    views, start = [], 0
    for part, step in zip(parts, steps, strict=True):
        views.append(memory[start : start + len(part)])
        views[-1][:] = part
        start += step
    return views


def open_backend(root, **options) -> FsBackend:
    backend = FsBackend("disk", root, **options)
    backend.open()
    return backend


def direct_works(folder) -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        return True
    return False


@pytest.fixture
def calls(monkeypatch):
    """Note for each transfer whether O_DIRECT was set."""
    noted: list[tuple[str, bool]] = []
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def noting(fd, *rest, name=name, real=real):
            noted.append((name, bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
            return real(fd, *rest)

        monkeypatch.setattr(os, name, noting)
    return noted


@pytest.mark.parametrize("fsync", ["none", "data"])
@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
@pytest.mark.parametrize("pack_below", [0, 256 << 10])
def test_aligned_memory_comes_back_whatever_its_length(tmp_path, io, fsync, pack_below):
    backend = open_backend(tmp_path / "root", io=io, fsync=fsync, pack_below=pack_below)
    blocks = [block(number, size=size) for number, size in enumerate(SIZES)]
    parts = [payload(number, size) for number, size in enumerate(SIZES)]
    outcomes = backend.write([Transfer(b, v) for b, v in zip(blocks, pool(*parts), strict=True)])
    assert [outcome.status for outcome in outcomes] == [Status.OK] * len(SIZES)
    if os.geteuid() == 0:
        os.sync()
    for path in (tmp_path / "root").rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for _ in range(2):
        views = pool(*map(bytes, map(len, parts)))
        outcomes = backend.read([Transfer(b, v) for b, v in zip(blocks, views, strict=True)])
        assert [outcome.status for outcome in outcomes] == [Status.OK] * len(SIZES)
        assert [bytes(view) for view in views] == parts
    backend.close()


@pytest.mark.parametrize("pack_below", [0, 512 << 10])
def test_a_big_file_ends_with_its_payload_also_when_written_directly(tmp_path, calls, pack_below):
    if not direct_works(tmp_path):
        pytest.skip("this filesystem has no direct I/O")
    backend = open_backend(tmp_path / "root", io="direct", pack_below=pack_below)
    del calls[:]
    (view,) = pool(payload(1, 600_001))
    backend.write([Transfer(block(1, size=600_001), view)])
    (path,) = (tmp_path / "root").glob("v1/*/01/*")
    assert path.stat().st_size == 4096 + 600_001
    assert calls == [("pwritev", True)]
    backend.close()


def test_auto_reads_from_the_page_cache_what_is_there_and_the_rest_directly(tmp_path, calls):
    backend = open_backend(tmp_path / "root", pack_below=0)
    if not (backend._io.direct and backend._io.cachestat):
        pytest.skip("no direct I/O or no cachestat here")
    one = block(1, size=300_000)
    (view,) = pool(payload(1, 300_000))
    backend.write([Transfer(one, view)])
    (path,) = (tmp_path / "root").glob("v1/*/01/*")
    with path.open("rb") as file:
        os.fsync(file.fileno())
        file.read()
    del calls[:]
    backend.read([Transfer(one, view)])
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    backend.read([Transfer(one, view)])
    assert calls == [("preadv", False), ("preadv", True)]
    assert bytes(view) == payload(1, 300_000)
    with path.open("rb") as file:
        assert fs_io.cached_pages(file.fileno(), 0, 300_000) == 0
    backend.close()


@pytest.mark.parametrize(("cached", "direct"), [(0.75, False), (0.25, True)])
def test_auto_reads_what_is_mostly_cached_from_the_cache_and_adds_nothing_to_it(
    tmp_path, calls, cached, direct
):
    backend = open_backend(tmp_path / "root", pack_below=0)
    if not (backend._io.direct and backend._io.cachestat and backend._io.dontcache):
        pytest.skip("no direct I/O, no cachestat or no uncached reads here")
    size, one = 1 << 20, block(1, size=1 << 20)
    (view,) = pool(payload(1, size))
    backend.write([Transfer(one, view)])
    (path,) = (tmp_path / "root").glob("v1/*/01/*")
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        file.read(int(size * cached))
        before = fs_io.cached_pages(file.fileno(), 0, size)
        del calls[:]
        assert backend.read([Transfer(one, view)])[0].status is Status.OK
        assert {how for _, how in calls} == {direct}
        assert bytes(view) == payload(1, size)
        assert fs_io.cached_pages(file.fileno(), 0, size) <= before + 1
    backend.close()


def test_auto_writes_do_not_stay_in_the_page_cache(tmp_path):
    backend = open_backend(tmp_path / "root", pack_below=0)
    if not (backend._io.dontcache and backend._io.cachestat):
        pytest.skip("this kernel or filesystem cannot drop behind writes")
    size = 1 << 20
    blocks = [block(number, size=size) for number in range(8)]
    backend.write([Transfer(b, v) for b, v in zip(blocks, pool(*[bytes(size)] * 8), strict=True)])
    pages = 0
    for path in (tmp_path / "root").glob("v1/*/??/*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            pages += fs_io.cached_pages(file.fileno(), 0, size) or 0
    assert pages < 8 * 256 // 4
    backend.close()


def test_memory_that_is_not_aligned_moves_through_the_page_cache(tmp_path):
    backend = open_backend(tmp_path / "root", io="direct", pack_below=0)
    memory = bytearray(payload(1, 300_001))
    one = block(1, size=300_000)
    backend.write([Transfer(one, memoryview(memory)[1:])])
    assert read(backend, one) == bytes(memory[1:])
    backend.close()


def test_what_the_filesystem_refuses_is_not_used(tmp_path, monkeypatch):
    """L70: no direct I/O, no holes, no cachestat, no uncached writes; the probe's file is gone."""
    real = os.pwritev

    def plain_only(fd, vector, offset, flags=0):
        if flags:
            raise OSError(errno.EOPNOTSUPP, "no")
        return real(fd, vector, offset)

    def no_direct(self, on):
        if on:
            raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(os, "pwritev", plain_only)
    monkeypatch.setattr(File, "set_direct", no_direct)
    monkeypatch.setattr(fs_io, "cached_pages", lambda *_: None)
    for io in ("auto", "direct"):
        backend = open_backend(tmp_path / "root", io=io)
        assert not backend._io.direct
        assert [p.name for p in (tmp_path / "root").rglob("*") if p.is_file()] == ["lock"]
        one = block(1, size=300_000)
        write(backend, one, payload(1, 300_000))
        assert read(backend, one) == payload(1, 300_000)
        backend.delete([one.id])
        backend.close()


def test_a_read_at_the_end_of_a_file_stops_there(tmp_path):
    io = Io("direct")
    fd = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT)
    io.probe(fd)
    os.close(fd)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, bytes(range(256)) * 40, 0)
    (view,) = pool(bytes(20_000))
    assert io.read(File(fd), 0, [io.region(4096), view]) == 10_240
    assert bytes(view[:6144]) == bytes(range(256)) * 24
    os.close(fd)


MOUNTED = """
    import os, sys
    from kvtierd.edges.backends.fs import FsBackend
    from kvtierd.testing.backend_kit import block, payload, read, scanned, write
    root = sys.argv[1]
    size = int(sys.argv[2])
    backend = FsBackend("disk", root, pack_below=600_000)
    backend.open()
    number = 0
    while (outcome := write(backend, block(number, size=size), payload(number, size))).status.value == "ok":
        number += 1
    print(outcome.status.value, outcome.reason)
    assert number > 3, number
    assert all(read(backend, block(n, size=size)) == payload(n, size) for n in range(number))
    temporaries = [name for _, _, names in os.walk(root) for name in names if name.startswith(".tmp-")]
    assert temporaries == [], temporaries
    assert len(scanned(backend)) == number
    backend.delete([block(0, size=size).id, block(1, size=size).id])
    print(write(backend, block(number, size=size), payload(number, size)).status.value)
    assert read(backend, block(number, size=size)) == payload(number, size)
    backend.close()
"""


@pytest.mark.parametrize(
    ("options", "size", "said"),
    [
        ("size=1m", 5000, "full ENOSPC: the filesystem is full"),
        ("size=4m", 300_000, "full ENOSPC: the filesystem is full"),
        ("size=64m,nr_inodes=20", 600_000, "full ENOSPC: the filesystem has no free inodes"),
    ],
)
def test_a_filesystem_that_is_really_full_is_full_until_there_is_room(tmp_path, options, size, said):
    """L70, and no fakes: a small tmpfs in a mount namespace of its own."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        pytest.skip("needs unshare and mount")
    mounts = f'mount -t tmpfs -o {options} none "$1" && exec "$2" -c "$3" "$1" {size}'
    arguments = ["sh", str(tmp_path), sys.executable, textwrap.dedent(MOUNTED)]
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", mounts, *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mounts for us here: {done.stderr.strip()}")
    assert (done.returncode, done.stdout) == (0, f"{said}\nok\n"), done.stderr


def test_min_free_is_left_to_others(tmp_path, monkeypatch):
    backend = open_backend(tmp_path / "root", min_free=1 << 30)
    real = os.fstatvfs

    class Info:
        f_frsize = 4096
        f_bavail = ((1 << 30) + 30_000) // 4096
        f_favail = 100

    monkeypatch.setattr(os, "fstatvfs", lambda fd: Info)
    parts = [Transfer(block(n), memoryview(payload(n))) for n in range(4)]
    outcomes = backend.write(parts)
    assert [outcome.status for outcome in outcomes] == [Status.OK, Status.OK, Status.FULL, Status.FULL]
    assert outcomes[2].reason == "less than min_free would stay free"
    monkeypatch.setattr(os, "fstatvfs", real)
    assert len(scanned(backend)) == 2
    backend.close()


@pytest.mark.parametrize("pack_below", [0, 256 << 10])
@pytest.mark.parametrize("fsync", ["none", "data"])
def test_what_survives_a_power_cut_has_its_name_on_the_disk_too(tmp_path, monkeypatch, fsync, pack_below):
    backend = open_backend(tmp_path / "root", fsync=fsync, pack_below=pack_below)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    (view,) = pool(payload(1, 5000))
    assert backend.write([Transfer(block(1), view)])[0].status is Status.OK
    where = "packed" if pack_below else "01"
    folder = str(tmp_path / "root" / "v1" / block(1).id.namespace / where)
    assert (folder in synced) is (fsync == "data")
    assert len(synced) == (2 if fsync == "data" else 0), "the data, then its folder"
    assert synced[-1:] == ([folder] if fsync == "data" else [])
    backend.close()


@pytest.mark.parametrize("size", [8191, 8192, 8193, 30_001])
@pytest.mark.parametrize("io", ["buffered", "auto", "direct"])
def test_what_is_read_in_parts_is_whole_proved_and_never_half(tmp_path, monkeypatch, io, size):
    monkeypatch.setattr(fs_io, "_PIECE", 8192)
    backend = open_backend(tmp_path, io=io, pack_below=0)
    try:
        one, data = block(1, size=size), payload(1, size)
        write(backend, one, data)
        (view,) = pool(bytes(size))
        assert [each.status for each in backend.read([Transfer(one, view)])] == [Status.OK]
        assert bytes(view) == data
        (path,) = (each for each in (tmp_path / "v1").rglob("*.0") if each.is_file())
        whole = path.read_bytes()
        for at in (4096, 4096 + size // 2, 4096 + size - 1):  # in the first part, in the middle, at the end
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            (outcome,) = backend.read([Transfer(one, view)])
            assert (outcome.status, outcome.reason) == (Status.CORRUPT, "payload checksum differs")
    finally:
        backend.close()
