"""What only the control socket answers, beside the status and surveys: orders that change the daemon."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvtierd.core import stimuli
from kvtierd.core.effects import ErrorCode, Refused, Reply
from kvtierd.core.stimuli import OperatorEvict, OperatorRequest, OperatorReset, Request
from kvtierd.logs import output
from kvtierd.logs.events import event
from kvtierd.wire.messages import Draining, DrainRequest, LogLevel, LogLevelRequest, ReloadRequest

if TYPE_CHECKING:
    from kvtierd.daemon import Daemon

log = logging.getLogger(__name__)


class Orders:
    """Carries out what arrives on the control socket of one daemon.

    An order of :attr:`table` gets the connection's number and the request; it returns the answer, or ``None``
    when that is delivered later.
    """

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.draining = False
        self.table: Mapping[type[Request], Callable[[int, Any], Reply | None]] = {
            LogLevelRequest: self._log_level,
            OperatorReset: self._to_ladder,
            OperatorEvict: self._to_ladder,
            DrainRequest: self._drain,
            ReloadRequest: self._reload,
        }

    def _log_level(self, session: int, request: LogLevelRequest) -> Reply:
        """Change the level of the log, if one is named, and tell which is in force."""
        if request.level is not None:
            output.set_level(request.level)
        return LogLevel(id=request.id, level=output.level())

    def _to_ladder(self, session: int, request: OperatorRequest) -> Reply | None:
        if self._daemon._ladder is None:
            return _too_early(request)
        if not request.dry_run:
            log.warning(
                "an operator's %s: %r",
                type(request).__name__,
                request,
                extra=event("operator_order", order=type(request).__name__, request=request.id),
            )
        self._daemon.turn([stimuli.Ordered(session, request)])
        return None

    def _reload(self, session: int, request: ReloadRequest) -> Reply | None:
        self._daemon.reloader.answer(
            request.id,
            dry_run=request.dry_run,
            deliver=lambda reply: self._daemon._deliver(session, [reply]),
        )
        return None

    def _drain(self, session: int, request: DrainRequest) -> Reply:
        """Begin, go on with or (``undo``) end the drain; tell what is still to be written."""
        daemon = self._daemon
        if daemon._ladder is None:
            return _too_early(request)
        if request.undo == self.draining:
            self.draining = not request.undo
            daemon.state = "draining" if self.draining else "ready"
            daemon.life.status("drained by an operator" if self.draining else "engines can attach")
            log.warning(
                "%s by an operator",
                "the drain is undone" if request.undo else "drained",
                extra=event("operator_order", order="undrain" if request.undo else "drain"),
            )
            daemon.turn([stimuli.Resume() if request.undo else stimuli.Drain(stores=False)])
        tiers = daemon._ladder.stack.secondaries
        writing: Counter[str] = Counter()
        for operation in daemon._ladder.stack.operations.values():
            writing[operation.tier.name] += len(operation.stored) if operation.kind == "write" else 0
        return Draining(
            id=request.id,
            draining=self.draining,
            waiting={tier.name: len(tier.wanted) + writing[tier.name] for tier in tiers},
            blocked={tier.name: tier.gate.reason for tier in tiers if tier.gate.outage or tier.gate.stalled},
        )


def _too_early(request: Request) -> Refused:
    return Refused(id=request.id, code=ErrorCode.BUSY, message="the tiers are not open yet: try again")
