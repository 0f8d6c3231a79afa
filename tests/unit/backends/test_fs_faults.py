"""Blocks as files when calls fail: what is a passing fault, what is a loss, and what stays."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil

import pytest

from kvtierd.core.stimuli import Status
from kvtierd.edges.backends import fs_lock
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.errors import TierError
from kvtierd.testing.backend_kit import NAMESPACE, block, payload, read, scanned, write
from kvtierd.testing.on_disk import files_in, path_of


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


def test_the_descriptor_count_stays_flat(backend, root, opened_below, monkeypatch):
    """L81: good and failing cycles alike."""
    write(backend, block(1), payload(1))
    before = opened_below()
    assert before, "the lock at least"
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
    assert opened_below() == before


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
