"""What tools do with a whole bucket: list, prove and collect. Never part of an engine's request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial

from kvtierd.core.model import BlockId
from kvtierd.core.stimuli import FoundBlock, Outcome, Status
from kvtierd.edges.backends import fs_format
from kvtierd.edges.backends.base import Leftover, StoredNamespace
from kvtierd.edges.backends.fs_format import Flaw, FormatError
from kvtierd.edges.backends.object_errors import Fault, Meaning, StoreFailed
from kvtierd.edges.backends.object_keys import Keys
from kvtierd.edges.backends.object_patience import Budget
from kvtierd.edges.backends.object_requests import PARALLEL, Requests, parallel

PROVE_BATCH = 128
MAX_RECORD = 64 << 10


class ObjectUpkeep:
    """The part of an object tier's backend that looks after the store (``Maintained``).

    There are no temporaries, since a put is all or nothing and no multipart upload is ever begun, and nothing
    is kept aside: a corrupt object is deleted.
    """

    def __init__(self, requests: Requests, keys: Keys) -> None:
        self._requests = requests
        self._keys = keys

    def list_blocks(self) -> Iterator[list[FoundBlock]]:
        """Yield all blocks with right headers in batches, in the order of their names.

        One list request per thousand objects and one small get for each.

        Raises:
            TierError: the bucket cannot be listed.
        """
        for ids in self._ids(self._keys.root):
            for start in range(0, len(ids), PROVE_BATCH):
                prove = partial(self._prove, budget=self._requests.begin())
                answers = parallel(prove, ids[start : start + PROVE_BATCH])
                self._requests.count("unproved", sum(isinstance(answer, Fault) for answer in answers))
                yield [answer for answer in answers if isinstance(answer, FoundBlock)]

    def namespaces(self) -> list[StoredNamespace]:
        """Return what there is of each namespace, by a listing; sizes are those of whole objects."""
        found: dict[str, StoredNamespace] = {}
        for page in self._requests.pages(self._keys.root):
            for entry in page:
                block_id = self._keys.parse(entry.key)
                if block_id is None:
                    continue
                name = block_id.namespace
                so_far = found.get(name)
                if so_far is None:
                    so_far = StoredNamespace(name, self._model(name), 0, 0, 0.0)
                found[name] = StoredNamespace(
                    name,
                    so_far.model,
                    so_far.blocks + 1,
                    so_far.bytes + entry.size,
                    max(so_far.used_at, entry.modified),
                )
        return list(found.values())

    def _model(self, namespace: str) -> str:
        """Return the model that a namespace's record names, empty where none can be read."""
        try:
            record = self._requests.get(self._keys.record(namespace), MAX_RECORD, self._requests.begin())
            model = json.loads(bytes(record))["layout"]["model"]
        except (StoreFailed, FormatError, ValueError, LookupError, TypeError):
            return ""
        return model if isinstance(model, str) else ""

    def remove_namespace(self, namespace: str) -> None:
        """Remove all objects below a namespace's prefix, its record last (it comes last in a listing)."""
        for page in self._requests.pages(self._keys.namespace(namespace)):
            try:
                self._requests.delete([entry.key for entry in page], self._requests.begin())
            except StoreFailed as failed:
                if failed.fault.meaning is not Meaning.ABSENT:
                    raise self._requests.failed("cannot delete", failed) from None

    def stale_temporaries(self, *, remove: bool = False) -> list[Leftover]:
        """Return nothing: there are none."""
        return []

    def quarantined(self, *, remove: bool = False) -> list[Leftover]:
        """Return nothing: corrupt objects are deleted."""
        return []

    def verify(self) -> Iterator[list[Outcome]]:
        """Get and prove every stored block; changes nothing."""
        for ids in self._ids(self._keys.root):
            for start in range(0, len(ids), PARALLEL):
                answers = parallel(self._verify, ids[start : start + PARALLEL])
                yield [answer for answer in answers if answer is not None]

    def _verify(self, block_id: BlockId) -> Outcome | None:
        budget, key = self._requests.begin(), self._keys.block(block_id)
        try:
            header, size = self._requests.head(key, fs_format.ALIGN, budget)
            if header.block.id != block_id:
                raise FormatError(Flaw.OTHER_BLOCK)
            header.check_size(size)
            content = self._requests.get(key, size, budget)
            header.check_size(len(content))
            header.check_payload(content[header.data_offset :])
        except StoreFailed as failed:
            if failed.fault.meaning is Meaning.ABSENT:
                return None
            return Outcome(block_id, Status.FAILED, reason=failed.fault.reason)
        except FormatError as error:
            return Outcome(block_id, Status.CORRUPT, reason=str(error))
        return Outcome(block_id, Status.OK, size)

    def _ids(self, prefix: str) -> Iterator[Sequence[BlockId]]:
        """Yield the blocks whose names are found below a prefix."""
        for page in self._requests.pages(prefix):
            found = [self._keys.parse(entry.key) for entry in page]
            yield [block_id for block_id in found if block_id is not None]

    def _prove(self, block_id: BlockId, budget: Budget) -> FoundBlock | Fault | None:
        """Look for one block: it, None when no good object of it is there, or why that is not known."""
        try:
            header, size = self._requests.head(self._keys.block(block_id), fs_format.ALIGN, budget)
            if header.block.id != block_id:
                raise FormatError(Flaw.OTHER_BLOCK)
            header.check_size(size)
        except StoreFailed as failed:
            return None if failed.fault.meaning is Meaning.ABSENT else failed.fault
        except (FormatError, ValueError) as error:
            self._requests.count(f"not a block: {error}")
            return None
        return FoundBlock(header.block, size)
