"""The scan: garbage, order over files and slots, and the processes that read beside the daemon."""

from __future__ import annotations

import errno
import random
import subprocess

import pytest

from kvtierd.core.model import hash_of
from kvtierd.core.stimuli import Status
from kvtierd.edges.backends import fs_scan_pool
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.edges.backends.fs_scan_pool import FolderReader
from kvtierd.errors import TierError
from kvtierd.testing.backend_kit import NAMESPACE, block, payload, read, scanned, write

FILE = 64 << 10
"""The smallest block that has a file of its own here."""


@pytest.fixture
def backend(root):
    opened = FsBackend("disk", root, pack_below=FILE)
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def started(monkeypatch):
    """Collect the processes that are started."""
    processes: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def starting(*args, **kwargs):
        processes.append(real(*args, **kwargs))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", starting)
    return processes


def restart(backend):
    backend.close()
    backend.open()


def test_files_and_slots_come_in_one_order_of_last_use(backend):
    sizes = [1, 300_000, 5000, 400_000, 7, 270_000]
    for number, size in enumerate(sizes):
        write(backend, block(number, size=size), payload(number, size))
    read(backend, block(0, size=1))
    read(backend, block(1, size=300_000))
    restart(backend)
    order = [int.from_bytes(hash_of(one.block.key), "big") for one in scanned(backend)]
    assert order == [2, 3, 4, 5, 0, 1]


def test_garbage_of_every_kind_is_no_hit_and_stops_nothing(backend, root):
    """L78."""
    good = [block(number) for number in range(8)]
    for number, one in enumerate(good):
        write(backend, one, payload(number))
    write(backend, block(0x1AB, size=600_000), payload(1, 600_000))
    shard, packed = root / "v1" / NAMESPACE / "ab", root / "v1" / NAMESPACE / "packed"
    whole = (shard / f"{0x1AB:064x}.0").read_bytes()
    for number, content in enumerate([b"", whole[:-1], whole + b"x", whole, b"\x80\x04pickle" * 999]):
        (shard / f"{number + 2:062x}ab.0").write_bytes(content)
    for name in ("README", "8192-xyz", "8193-" + "0" * 16, "0-" + "0" * 16):
        (packed / name).write_bytes(whole)
    (packed / ("8192-" + "a" * 16)).write_bytes(random.Random(1).randbytes(600_000))
    (packed / ("12288-" + "b" * 16)).write_bytes(b"")
    (packed / ("16384-" + "c" * 16)).mkdir()
    (packed / ("20480-" + "d" * 16)).symlink_to("/etc/passwd")
    (root / "v1" / ("e" * 32)).write_bytes(b"a file in a namespace's place")
    restart(backend)
    found = {one.block.id for one in scanned(backend)}
    assert found == {one.id for one in good} | {block(0x1AB).id}
    assert all(read(backend, one) == payload(number) for number, one in enumerate(good))
    assert (packed / "README").read_bytes() == whole
    assert (packed / ("8193-" + "0" * 16)).exists()
    assert not (packed / ("8192-" + "a" * 16)).exists()  # a segment without a block
    assert len(list((root / "quarantine").iterdir())) == 5
    assert write(backend, block(50), payload(50)).status is Status.OK


def test_processes_read_what_is_too_much_for_one(backend, root, started, monkeypatch):
    monkeypatch.setattr(fs_scan_pool, "FEW_FILES", 10)
    blocks = [block(number, size=FILE, namespace=f"{number % 2:032x}") for number in range(40)]
    data = bytes(FILE)
    for one in blocks:
        write(backend, one, data)
    bad = root / "v1" / blocks[39].id.namespace / "27" / f"{39:064x}.0"
    bad.write_bytes(b"short")
    assert [one.block.id for one in scanned(backend)] == [one.id for one in blocks[:39]]
    assert not bad.exists()
    assert len(started) >= 2
    assert all(process.returncode is not None for process in started)


@pytest.mark.parametrize("trouble", ["cannot start", "dies at once"])
def test_without_processes_the_scan_reads_all_by_itself(backend, root, monkeypatch, trouble):
    monkeypatch.setattr(fs_scan_pool, "FEW_FILES", 1)
    for number in range(20):
        write(backend, block(number, size=FILE), bytes(FILE))

    def refuses(*args, **kwargs):
        raise OSError(errno.EAGAIN, "no more processes")

    if trouble == "cannot start":
        monkeypatch.setattr(subprocess, "Popen", refuses)
    else:
        monkeypatch.setattr("sys.executable", "/bin/false")
    assert len(scanned(backend)) == 20


def test_a_scan_that_is_broken_off_ends_its_processes(backend, root, started, monkeypatch):
    monkeypatch.setattr(fs_scan_pool, "FEW_FILES", 1)
    for number in range(20):
        write(backend, block(number, size=FILE), bytes(FILE))
    reading = FolderReader(root, None, 2).read([(NAMESPACE, f"{number:02x}") for number in range(20)])
    for _ in range(3):
        next(reading)
    reading.close()
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_a_probe_finds_what_other_daemons_stored_and_nothing_else(root):
    daemons = [FsBackend(f"disk{number}", root, shared=True) for number in range(2)]
    for one in daemons:
        one.open()
    first, second = daemons
    for number in range(3):
        write(first, block(number), payload(number))
    path = root / "v1" / NAMESPACE / "01" / f"{1:064x}.0"
    path.write_bytes(path.read_bytes()[:-1])
    found = second.probe([block(number).id for number in range(4)])
    assert [(one.block.id, one.stored_bytes) for one in found] == [(block(n).id, 4096 + 8192) for n in (0, 2)]
    assert second.statistics()["probe: too short"] == 1
    assert read(second, block(0)) == payload(0)
    first.delete([block(0).id])
    assert read(second, block(0)) is Status.GONE
    assert second.probe([block(0).id]) == []
    root.rename(root.with_name("away"))
    with pytest.raises(TierError, match="missing"):
        second.probe([block(0).id])
    for one in daemons:
        one.close()
