"""A filesystem tier's root as ``kvtierd gc`` and ``kvtierd verify`` see it (:class:`.base.Maintained`).

Looking takes no lock and is allowed while daemons use the root. Removing is refused while one holds it alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvtierd.core.model import BlockId, block_key, hash_of
from kvtierd.core.stimuli import Outcome, Status
from kvtierd.edges.backends import fs_offline, fs_tree
from kvtierd.edges.backends.base import Leftover, StoredNamespace
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.edges.backends.fs_format import Flaw
from kvtierd.edges.backends.fs_offline import NamespaceReport, Verdict

BATCH = 64
_FLAWS = frozenset(flaw.value for flaw in Flaw)


class FsUpkeep:
    """What the tools do to one root."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root

    def namespaces(self) -> list[StoredNamespace]:
        """Return what there is of each namespace; its latest use is that of its latest file."""
        return [self._namespace(report) for report in fs_offline.namespaces(self.root)]

    def _namespace(self, report: NamespaceReport) -> StoredNamespace:
        layout = (report.record or {}).get("layout")
        model = layout.get("model") if isinstance(layout, dict) else None
        used_at = _latest(self.root / fs_tree.BLOCKS / report.namespace)
        return StoredNamespace(
            report.namespace, model if isinstance(model, str) else "", report.blocks, report.bytes, used_at
        )

    def remove_namespace(self, namespace: str) -> None:
        """Remove a namespace's blocks and its record."""
        fs_offline.remove_namespace(self.root, namespace)

    def stale_temporaries(self, *, remove: bool = False) -> list[Leftover]:
        """Return, or remove and return, what dead writers left."""
        found = [self._leftover(place) for place in fs_offline.stale_temporaries(self.root)]
        if not remove:
            return found
        gone = set(fs_offline.stale_temporaries(self.root, remove=True))
        return [one for one in found if one.place in gone]

    def quarantined(self, *, remove: bool = False) -> list[Leftover]:
        """Return, or remove and return, the blocks that were kept aside."""
        folder = self.root / fs_tree.QUARANTINE
        names = sorted(os.listdir(folder)) if folder.is_dir() and not folder.is_symlink() else []
        ours = [name for name in names if fs_tree.is_namespace(name[21:53])]
        found = [self._leftover(f"{fs_tree.QUARANTINE}/{name}") for name in ours]
        if remove and found:
            with self._owned():
                for one in found:
                    with contextlib.suppress(FileNotFoundError):
                        (self.root / one.place).unlink()
        return found

    def verify(self) -> Iterator[list[Outcome]]:
        """Prove every block, payload included."""
        batch: list[Outcome] = []
        for verdict in fs_offline.verify(self.root):
            batch.append(_outcome(verdict))
            if len(batch) == BATCH:
                yield batch
                batch = []
        yield batch

    def delete(self, ids: Sequence[BlockId], *, corrupt: bool = False) -> list[Outcome]:
        """Take blocks out, as the tier itself would: a scan already does so with broken headers."""
        known = [block_id for block_id in ids if hash_of(block_id.key)]
        with self._owned() as backend:
            for _ in backend.scan():
                pass
            done = {outcome.id: outcome for outcome in backend.delete(known, corrupt=corrupt)}
        return [done.get(block_id) or Outcome(block_id, Status.OK) for block_id in ids]

    @contextlib.contextmanager
    def _owned(self) -> Iterator[FsBackend]:
        """Open the tier for this process alone.

        Raises:
            TierError: a daemon uses it.
        """
        backend = FsBackend(self.name, self.root)
        backend.open()
        try:
            yield backend
        finally:
            backend.close()

    def _leftover(self, place: str) -> Leftover:
        try:
            size = os.stat(self.root / place, follow_symlinks=False).st_blocks * 512
        except OSError:
            size = 0
        return Leftover(place, size)


def _outcome(verdict: Verdict) -> Outcome:
    """Return a verdict as an outcome; an empty hash stands for a block that does not say whose it is."""
    if verdict.id is None:
        namespace = verdict.place.split("/")[1]
        reason = f"{verdict.flaw} ({verdict.place})"
        return Outcome(BlockId(namespace, block_key(b"")), Status.CORRUPT, reason=reason)
    if verdict.flaw is None:
        return Outcome(verdict.id, Status.OK, verdict.bytes)
    status = Status.CORRUPT if verdict.flaw in _FLAWS else Status.FAILED
    return Outcome(verdict.id, status, reason=verdict.flaw)


def _latest(folder: Path) -> float:
    """Return the latest modification time of a file below a folder, 0.0 where there is none."""
    return max(_times(folder), default=0.0)


def _times(folder: Path) -> Iterable[float]:
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.stat(os.path.join(where, name), follow_symlinks=False).st_mtime
