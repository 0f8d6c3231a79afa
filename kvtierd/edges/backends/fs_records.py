"""The readable record in each namespace's folder: for people, and to know at start whose blocks they are."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from kvtierd.core.geometry import Geometry
from kvtierd.core.model import Layout
from kvtierd.edges.backends import fs_files, fs_format, fs_tree
from kvtierd.edges.backends.fs_tree import Folders

LIMIT = 1 << 20
"""Bytes of a record that are looked at."""


def write(root: Path, device: int | None, namespace: str, layout: Layout) -> None:
    """Write a namespace's record.

    Raises:
        OSError: it could not be written.
    """
    geometry = Geometry.of(layout)
    record = {
        "format": fs_format.VERSION,
        "namespace": namespace,
        "layout": msgspec.to_builtins(layout),
        "slot_bytes": geometry.slot_bytes,
        "payload_bytes": geometry.payload_bytes,
    }
    text = json.dumps(record, indent=2, ensure_ascii=True).encode("ascii") + b"\n"
    if not fs_tree.is_namespace(namespace):
        raise OSError(errno.EINVAL, "not a namespace")
    with Folders(root, device) as folders:
        folder = folders.namespace(namespace, create=True)
        fs_files.publish(folder, fs_tree.RECORD, fs_files.write_all([text]))


def tenants(root: Path) -> dict[str, str | None]:
    """Return whose the namespaces below a root are, as far as sound records say so."""
    found: dict[str, str | None] = {}
    with contextlib.suppress(OSError), os.scandir(root / fs_tree.BLOCKS) as entries:
        for entry in entries:
            if fs_tree.is_namespace(entry.name):
                with contextlib.suppress(OSError, ValueError, msgspec.ValidationError):
                    layout = _layout(Path(entry.path) / fs_tree.RECORD)
                    if layout.namespace() == entry.name:  # nobody becomes another tenant by a changed record
                        found[entry.name] = layout.tenant
    return found


def _layout(path: Path) -> Layout:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        record: Any = json.loads(file.read(LIMIT))
    if not isinstance(record, dict):
        raise ValueError("not a record")
    return msgspec.convert(record.get("layout"), Layout)
