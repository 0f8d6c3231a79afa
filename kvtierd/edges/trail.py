"""What happened to a request, in the log: lines of engine, core and tiers that ids join.

An answer has its ``session`` and ``request`` (an engine's own messages name both), a store its ``job`` and
``generation``, a load its ``lease``; a tier's operation (``op``) names the generations of the blocks that it
moves. One line for each request and operation at debug, none for any block; what failed is a warning.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from kvtierd.core.effects import Reply
from kvtierd.core.sessions import Sessions
from kvtierd.core.stack import Operation, Stack
from kvtierd.core.stimuli import Finished, Status, Stimulus
from kvtierd.edges.mover_work import Work, ids_of
from kvtierd.edges.traces import Traces
from kvtierd.logs.events import event

log = logging.getLogger(__name__)

_IDS = ("job", "generation", "lease", "code")
_COUNTS = ("keys", "stored", "skipped", "states", "slots")
_FAULTS = (Status.FAILED, Status.FULL, Status.CORRUPT)
MAX_GENERATIONS = 8


class Trail:
    """What the daemon tells of its turns: the log's lines and, where wanted, spans."""

    def __init__(self, traces: Traces | None = None) -> None:
        self._traces = traces

    def before(self, stack: Stack, stimulus: Stimulus) -> None:
        """Note what the core is about to take in."""
        ended(stack, stimulus)
        if self._traces is not None:
            self._traces.before(stimulus)

    def started(self, stack: Stack, effect: Work) -> None:
        """Note a tier's operation that is about to begin."""
        started(stack, effect)

    def answered(self, sessions: Sessions, number: int, replies: Sequence[Reply]) -> None:
        """Note a session's answers."""
        answered(sessions, number, replies)
        if self._traces is not None:
            for reply in replies:
                self._traces.answered(number, reply)

    @property
    def wordy(self) -> bool:
        """Whether every answer gets a line."""
        return log.isEnabledFor(logging.DEBUG)

    def close(self) -> None:
        """Tell no more."""
        if self._traces is not None:
            self._traces.close()


def answered(sessions: Sessions, number: int, replies: Iterable[Reply]) -> None:
    """Log a session's answers; it may be gone by now."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    session = sessions.open.get(number)
    engine = session.engine if session is not None else None
    for reply in replies:
        verb = type(reply).__name__
        fields = {name: getattr(reply, name) for name in _IDS if getattr(reply, name, None)}
        fields |= {name: len(getattr(reply, name)) for name in _COUNTS if hasattr(reply, name)}
        ids = {"session": number, "engine": engine, "request": reply.id, "answer": verb}
        log.debug(
            "session %d, request %d: %s",
            number,
            reply.id,
            verb,
            extra=event("request_answered", **ids, **fields),
        )


def started(stack: Stack, effect: Work) -> None:
    """Log the beginning of a tier's operation."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    operation, blocks = stack.operations[effect.op], len(ids_of(effect))
    log.debug(
        "tier %s: %s of %d blocks begins",
        operation.tier.name,
        operation.kind,
        blocks,
        extra=event("operation_started", **_known(effect.op, operation), blocks=blocks),
    )


def ended(stack: Stack, finished: Stimulus) -> None:
    """Log the end of a tier's operation, if this is one, before the core takes it in."""
    if not isinstance(finished, Finished):
        return
    operation = stack.operations.get(finished.op)
    if operation is None:
        return
    counts = Counter(outcome.status for outcome in finished.outcomes)
    faults = sum(counts[status] for status in _FAULTS)
    # What cannot be deleted costs nobody a block; the backend tells of it once.
    level = logging.WARNING if faults and operation.kind != "delete" else logging.DEBUG
    if not log.isEnabledFor(level):
        return
    outcomes = {status.value: count for status, count in counts.items()}
    reason = next((outcome.reason for outcome in finished.outcomes if outcome.status in _FAULTS), "")
    log.log(
        level,
        "tier %s: %s ended: %s%s",
        operation.tier.name,
        operation.kind,
        ", ".join(f"{count} {name}" for name, count in outcomes.items()),
        f" ({reason})" if reason else "",
        extra=event(
            "operation_failed" if faults else "operation_ended",
            **_known(finished.op, operation),
            **outcomes,
            seconds=round(finished.seconds, 6),
            reason=reason,
        ),
    )


def _known(op: int, operation: Operation) -> dict[str, object]:
    generations = sorted({node.generation for node in operation.pooled})
    return {
        "tier": operation.tier.name,
        "op": op,
        "kind": operation.kind,
        "generations": generations[:MAX_GENERATIONS],
    }
