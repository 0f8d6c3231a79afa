"""Reads the headers of a folder of block files; also the process that does so beside the daemon.

A scan is bound by the interpreter, and the daemon's is busy with engines: listing, reading and checksums run
in processes of their own, which send the daemon what it has to decode. Protocol: one line a folder on
standard input (namespace and folder name), for each a length (4 bytes, little-endian) and that many bytes of
msgpack (:class:`FolderContent`) on standard output; the end of the input ends the process.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvtierd.edges.backends import fs_format, fs_tree
from kvtierd.edges.backends.fs_format import FormatError
from kvtierd.edges.backends.fs_tree import READ, Folders

Proved = tuple[int, str, int, int, bytes]
"""Last use in nanoseconds, file name, lengths of header region and payload, metadata."""


class FolderContent(msgspec.Struct, array_like=True):
    """What a folder holds: proved headers, bad files with their flaw, temporaries, and how much else."""

    proved: list[Proved] = []
    bad: list[tuple[str, str]] = []
    temporaries: list[str] = []
    foreign: int = 0
    unreadable: int = 0


def read_folder(folders: Folders, namespace: str, shard: str) -> FolderContent:
    """Prove the header and size of all block files of a folder; never raises for what lies in it."""
    content = FolderContent()
    try:
        folder = fs_tree.open_folder(shard, folders.namespace(namespace))
    except OSError:
        content.unreadable += 1
        return content
    try:
        for name in _names(folder, content):
            if fs_tree.is_block(name, shard):
                _read_file(folder, name, content)
            elif name.startswith(fs_tree.TEMPORARY):
                content.temporaries.append(name)
            else:
                content.foreign += 1
    finally:
        os.close(folder)
    return content


def _names(folder: int, content: FolderContent) -> Iterator[str]:
    try:
        yield from os.listdir(folder)
    except OSError:
        content.unreadable += 1


def _read_file(folder: int, name: str, content: FolderContent) -> None:
    try:
        fd = os.open(name, READ, dir_fd=folder)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                content.foreign += 1
                return
            start = os.pread(fd, fs_format.ALIGN, 0)
            length = fs_format.data_offset(start)
            if length > len(start):
                start += os.pread(fd, length - len(start), len(start))
        finally:
            os.close(fd)
        offset, metadata, payload, _ = fs_format.unseal(start)
        if info.st_size != offset + payload:
            short = info.st_size < offset + payload
            raise FormatError(fs_format.Flaw.SHORT if short else fs_format.Flaw.LONG)
        content.proved.append((info.st_mtime_ns, name, offset, payload, metadata.tobytes()))
    except FormatError as error:
        content.bad.append((name, error.flaw))
    except FileNotFoundError:
        return  # deleted since it was listed
    except OSError as error:
        if fs_tree.is_no_file(error):
            content.foreign += 1
        else:
            content.unreadable += 1


def serve(root: Path, device: int | None, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer folder after folder until the requests end."""
    encoder = msgspec.msgpack.Encoder()
    with Folders(root, device) as folders:
        for line in requests:
            namespace, shard = line.decode("ascii").split()
            data = encoder.encode(read_folder(folders, namespace, shard))
            answers.write(len(data).to_bytes(4, "little") + data)
            answers.flush()


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # engines first
        os.nice(5)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve(Path(sys.argv[1]), int(sys.argv[2]), sys.stdin.buffer, sys.stdout.buffer)
