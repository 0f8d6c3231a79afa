"""What gc and verify see and do below a root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtierd.edges.backends import fs_lock, fs_offline, fs_tree
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.errors import TierError
from kvtierd.testing.backend_kit import LAYOUT, NAMESPACE, block, payload, read, scanned, write

BIG = 600_000
OTHER = "f" * 32


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(fs_lock, "WAIT_SECONDS", 0.0)


@pytest.fixture
def backend(root):
    opened = FsBackend("disk", root, pack_below=BIG)
    opened.open()
    opened.describe(NAMESPACE, LAYOUT)
    for number in range(3):
        write(opened, block(number), payload(number))
        write(opened, block(10 + number, size=BIG), payload(number, BIG))
    write(opened, block(1, namespace=OTHER), payload(1))
    yield opened
    opened.close()


def temporary(root: Path) -> Path:
    path = root / "v1" / NAMESPACE / "0a" / f".tmp-{fs_tree.BOOT_ID}-1-{'0' * 16}"
    path.write_bytes(b"half")
    return path


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_namespaces_are_listed_with_their_records_and_sizes(backend, root):
    first, second = fs_offline.namespaces(root)
    assert (first.namespace, first.blocks, second.namespace, second.blocks) == (NAMESPACE, 6, OTHER, 1)
    assert first.record is not None
    assert first.record["layout"]["model"] == "kit"
    assert second.record is None
    stored = 3 * (4096 + 8192) + 3 * (4096 + 602_112)
    assert stored <= first.bytes <= stored + 3 * 4096


def test_verify_proves_every_block_with_its_payload(backend, root):
    done = []
    verdicts = list(fs_offline.verify(root, lambda at, of: done.append((at, of))))
    assert {verdict.id for verdict in verdicts} == {one.block.id for one in scanned(backend)}
    assert [verdict.flaw for verdict in verdicts] == [None] * 7
    assert done == [(n, 7) for n in range(1, 8)]


def test_verify_names_what_is_wrong_and_changes_nothing(backend, root):
    flip(root / "v1" / NAMESPACE / "0a" / f"{10:064x}.0", 100_000)
    segment, slot = backend._packed.slots.find(block(1).id)
    path = root / "v1" / NAMESPACE / "packed" / segment.name
    flip(path, segment.offset(slot) + 5000)
    segment, slot = backend._packed.slots.find(block(2).id)
    flip(path, segment.offset(slot) + 3000)
    flaws = {verdict.place: verdict.flaw for verdict in fs_offline.verify(root) if verdict.flaw}
    assert sorted(flaws.values()) == [
        "header checksum differs",
        "payload checksum differs",
        "payload checksum differs",
    ]
    assert any("#" in place for place in flaws)
    assert all((root / place.partition("#")[0]).exists() for place in flaws)


def test_stale_temporaries_are_listed_first_and_removed_when_asked(backend, root):
    path = temporary(root)
    assert fs_offline.stale_temporaries(root) == []  # fresh, and a daemon lives here
    os.utime(path, (0, 0))
    assert fs_offline.stale_temporaries(root) == [str(path.relative_to(root))]
    assert path.exists()
    with pytest.raises(TierError, match=r"in use by process .*stop the daemon"):
        fs_offline.stale_temporaries(root, remove=True)
    backend.close()
    assert fs_offline.stale_temporaries(root, remove=True) == [str(path.relative_to(root))]
    assert not path.exists()


def test_a_namespace_is_removed_with_all_that_is_ours(backend, root):
    foreign = root / "v1" / NAMESPACE / "0a" / "notes"
    with pytest.raises(TierError, match="in use"):
        fs_offline.remove_namespace(root, NAMESPACE)
    backend.close()
    fs_offline.remove_namespace(root, OTHER)
    assert not (root / "v1" / OTHER).exists()
    foreign.write_text("mine")
    fs_offline.remove_namespace(root, NAMESPACE)
    assert [path for path in (root / "v1").rglob("*") if path.is_file()] == [foreign]
    with pytest.raises(TierError, match="no namespace"):
        fs_offline.remove_namespace(root, "../etc")
    backend.open()
    assert scanned(backend) == []


def test_a_shared_root_is_cleaned_beside_living_daemons(root):
    shared = FsBackend("disk", root, shared=True)
    shared.open()
    write(shared, block(1), payload(1))
    write(shared, block(2, namespace=OTHER), payload(2))
    fs_offline.remove_namespace(root, OTHER)
    assert read(shared, block(1)) == payload(1)
    assert [one.block.id for one in scanned(shared)] == [block(1).id]
    shared.close()


def test_a_root_that_is_not_there_is_said(tmp_path):
    for act in (
        fs_offline.namespaces,
        fs_offline.stale_temporaries,
        lambda root: list(fs_offline.verify(root)),
    ):
        with pytest.raises(TierError, match="missing"):
            act(tmp_path / "none")
