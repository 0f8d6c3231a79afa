"""The folder and the places of the Unix sockets: one daemon, nobody's files, right modes."""

import os
import socket
import stat
import threading

import pytest

from kvtierd.edges.peers import Allowed, Peer, peer_of
from kvtierd.edges.unix_socket import (
    CannotCreate,
    Permissions,
    inode_of,
    listen,
    lock_folder,
    remove_own,
    unlock_folder,
)


def test_what_is_no_socket_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    before = {path: inode_of(path) for path in tmp_path.iterdir()}
    for path in before:
        with pytest.raises(CannotCreate, match="is no socket and is left alone"):
            listen(path)
    assert {path: inode_of(path) for path in tmp_path.iterdir()} == before
    assert (tmp_path / "file").read_text() == "mine"


def test_a_link_to_a_stale_socket_is_refused_too(tmp_path):
    listen(tmp_path / "stale").close()
    (tmp_path / "link").symlink_to(tmp_path / "stale")
    with pytest.raises(CannotCreate, match="no socket"):
        listen(tmp_path / "link")


def test_a_daemon_that_is_too_busy_to_accept_keeps_its_place(tmp_path):
    """A full backlog is no proof of death: only a refused connect is."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        waiting = []
        try:
            while True:
                client = socket.socket(socket.AF_UNIX)
                waiting.append(client)
                client.setblocking(False)
                client.connect(str(path))
        except BlockingIOError:
            pass
        before = inode_of(path)
        with pytest.raises(CannotCreate, match="another daemon may be there"):
            listen(path)
        assert inode_of(path) == before
        for client in waiting:
            client.close()


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_nobody_ever_sees_another_mode_than_the_one_that_was_asked_for(tmp_path, umask, mode):
    """L110: watched from a thread while sockets are made under another umask."""
    path, seen, done = tmp_path / "s", set(), threading.Event()

    def watch():
        while not done.is_set():
            for name in os.listdir(tmp_path):
                try:
                    found = stat.S_IMODE((tmp_path / name).stat().st_mode)
                except FileNotFoundError:
                    continue
                seen.add((name.startswith("."), found))

    watcher = threading.Thread(target=watch)
    before = os.umask(umask)
    try:
        watcher.start()
        for _ in range(50):
            listen(path, Permissions(mode)).close()
            path.unlink()
        with listen(path, Permissions(mode)):
            assert stat.S_IMODE(path.stat().st_mode) == mode
        assert os.umask(umask) == umask, "the umask of other threads was not touched"
    finally:
        done.set()
        watcher.join()
        os.umask(before)
    assert {found for hidden, found in seen if not hidden} <= {mode}
    assert all(found & ~mode == 0 for _, found in seen), "never more than asked for"


def test_the_group_is_set_before_the_name_appears(tmp_path):
    gid = os.getgid()
    with listen(tmp_path / "s", Permissions(group=gid)):
        assert (tmp_path / "s").stat().st_gid == gid
    with pytest.raises(CannotCreate, match="no group 'kvtierd-nobody'"):
        listen(tmp_path / "t", Permissions(group="kvtierd-nobody"))
    assert not (tmp_path / "t").exists()


def test_a_folder_has_one_owner_at_a_time_and_nothing_stays_behind(tmp_path):
    first = lock_folder(tmp_path)
    with pytest.raises(CannotCreate, match=f"another daemon has it.*pid {os.getpid()}"):
        lock_folder(tmp_path)
    unlock_folder(tmp_path, first)
    assert list(tmp_path.iterdir()) == []
    second = lock_folder(tmp_path)
    unlock_folder(tmp_path, second)


def test_a_folder_that_cannot_be_locked_says_what_to_do(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotCreate, match="make the folder writable for this user or choose another"):
        lock_folder(tmp_path)


def test_a_lock_that_a_dead_daemon_left_is_taken(tmp_path):
    (tmp_path / "lock").write_text("99999999\n")
    fd = lock_folder(tmp_path)
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    unlock_folder(tmp_path, fd)


def test_a_lock_whose_name_was_taken_away_is_no_lock(tmp_path, monkeypatch):
    """Its owner leaves between our open and our flock: the file of the name is another one by then."""
    import fcntl

    real, calls = fcntl.flock, []

    def flock(fd, how):
        if not calls:
            (tmp_path / "lock").unlink()
        calls.append(fd)
        return real(fd, how)

    monkeypatch.setattr("kvtierd.edges.unix_socket.fcntl.flock", flock)
    fd = lock_folder(tmp_path)
    assert len(calls) == 2
    assert os.path.samestat((tmp_path / "lock").stat(), os.fstat(fd))
    unlock_folder(tmp_path, fd)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("elsewhere", path)])
def test_a_lock_that_is_no_file_is_refused(tmp_path, make):
    make(tmp_path / "lock")
    with pytest.raises(CannotCreate, match="runtime_dir"):
        lock_folder(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_only_the_own_socket_is_removed(tmp_path):
    with listen(tmp_path / "s"):
        mine = inode_of(tmp_path / "s")
    (tmp_path / "s").rename(tmp_path / "old")
    with listen(tmp_path / "s"):
        remove_own(tmp_path / "s", mine)
        assert (tmp_path / "s").exists()
        remove_own(tmp_path / "s", inode_of(tmp_path / "s"))
        assert not (tmp_path / "s").exists()


def test_a_peer_is_who_the_kernel_says():
    one, other = socket.socketpair()
    with one, other:
        peer = peer_of(one)
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
    assert peer.groups == {os.getegid(), *os.getgroups()}


@pytest.mark.parametrize(
    ("allowed", "welcome"),
    [
        (Allowed(), True),
        (Allowed(uids=(7,)), True),
        (Allowed(uids=(8,)), False),
        (Allowed(gids=(50,)), True),
        (Allowed(gids=(51,)), False),
        (Allowed(uids=(8,), gids=(50,)), True),
        (Allowed(uids=(8,), own_uid=7), True),
        (Allowed(own_uid=8), True),
    ],
)
def test_an_allow_list_lets_in_by_user_or_any_group(allowed, welcome):
    assert allowed.lets_in(Peer(pid=1, uid=7, groups=frozenset({5, 50}))) is welcome
