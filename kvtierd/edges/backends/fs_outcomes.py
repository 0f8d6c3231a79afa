"""What becomes of errors: an outcome for the block, a counter, and the first of its kind in the log."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Literal, ParamSpec

from kvtierd.core.model import BlockId
from kvtierd.core.stimuli import Outcome, Status
from kvtierd.edges.backends import fs_faults
from kvtierd.edges.backends.fs_format import FormatError
from kvtierd.logs.events import event

log = logging.getLogger(__name__)

_LOGGED_REASONS = 64

P = ParamSpec("P")
What = Literal["write", "read", "delete"]


class Outcomes:
    """A tier's counters, and outcomes of what went wrong; calls come from several threads."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._counts: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._mutex = threading.Lock()

    @property
    def counts(self) -> dict[str, int]:
        """A copy of the counters, by what was counted."""
        with self._mutex:
            return dict(self._counts)

    def count(self, what: str, by: int = 1) -> None:
        """Count something."""
        with self._mutex:
            self._counts[what] += by

    def guarded(
        self,
        root: int,
        what: What,
        block_id: BlockId,
        act: Callable[P, Outcome],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Outcome:
        """Act on one block below an open root; errors of the system become outcomes."""
        try:
            return act(*args, **kwargs)
        except FormatError as error:
            status = Status.CORRUPT if what == "read" else Status.FAILED
            return self.of(what, block_id, status, str(error))
        except OSError as error:
            status = fs_faults.status(error, reading=what == "read")
            return self.of(what, block_id, status, fs_faults.describe(error, root))

    def of(self, what: What, block_id: BlockId, status: Status, reason: str) -> Outcome:
        """Return a block's outcome, counted; the first of a kind that people should know of is logged."""
        self.count(f"{status.value}: {reason}")
        if status in (Status.FAILED, Status.FULL):
            self._log_once(f"{what}: {reason}")
        return Outcome(block_id, status, reason=reason)

    def _log_once(self, fault: str) -> None:
        with self._mutex:
            if fault in self._logged or len(self._logged) >= _LOGGED_REASONS:
                return
            self._logged.add(fault)
        log.warning(
            "tier %s: %s; later ones are only counted",
            self._tier,
            fault,
            extra=event("tier_fault", tier=self._tier),
        )
