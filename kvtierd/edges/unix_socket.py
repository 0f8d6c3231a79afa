"""Unix listening sockets: there with the right mode, only when ready, never over a living daemon's."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

from kvtierd.errors import ExitCode, KvtierdError

BACKLOG = 128


class CannotCreate(KvtierdError):
    """Another daemon answers at the path, or the folder cannot hold a socket."""

    exit_code = ExitCode.CANT_CREATE


def make_folder(setting: str, path: Path) -> None:
    """Create a folder of the daemon with mode 0770 where it is not there yet; ``setting`` names its key."""
    try:
        path.mkdir(mode=0o770, parents=True, exist_ok=True)
    except OSError as error:
        raise CannotCreate(f"{setting} {path}: {error.strerror}: create it or choose another") from error


def listen(path: Path, mode: int = 0o660) -> socket.socket:
    """Return a listening socket at ``path``; it has ``mode`` from the first moment.

    It is bound beside its place and renamed, so that a client finds either nothing or a socket that answers.
    A stale socket is replaced only after a connect to it failed.
    """
    if _answers(path):
        raise CannotCreate(f"{path}: another daemon answers there: stop it or choose another runtime_dir")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    umask = os.umask(0o777 & ~mode)
    try:
        listener.bind(str(beside))
        listener.listen(BACKLOG)
        os.rename(beside, path)
    except OSError as error:
        listener.close()
        with contextlib.suppress(OSError):
            beside.unlink()
        raise CannotCreate(f"{path}: {error.strerror}") from error
    finally:
        os.umask(umask)
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
