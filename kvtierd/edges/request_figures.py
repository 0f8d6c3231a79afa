"""What engines asked, how it ended and how long it took: one note for each request, none for each block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

from kvtierd.core.effects import ErrorCode, Refused, Reply
from kvtierd.core.stimuli import Request
from kvtierd.edges.histogram import Histogram
from kvtierd.wire.messages import ClientMessage, Hello, verb_of

ASKED = tuple(message for message in get_args(ClientMessage) if message is not Hello)
"""All that counts as a request."""


@dataclass(slots=True)
class _Verb:
    ok: int = 0
    refused: int = 0
    durations: Histogram = field(default_factory=Histogram)


class Unanswered:
    """The requests of one connection that have no answer yet; they count as asked until it is gone."""

    def __init__(self, figures: RequestFigures) -> None:
        self._figures = figures
        self._asked: dict[int, tuple[type[Request], float]] = {}

    def asked(self, request: Request, now: float) -> None:
        """Note a request that arrived at ``now``."""
        self._asked[request.id] = type(request), now

    def answered(self, reply: Reply, now: float) -> None:
        """Note an answer, if it is one to a request noted before."""
        asked = self._asked.pop(reply.id, None)
        if asked is not None:
            self._figures.took(asked[0], reply, now - asked[1])


class RequestFigures:
    """Counters of all connections of one socket."""

    def __init__(self) -> None:
        self._verbs: dict[type[Request], _Verb] = {message: _Verb() for message in ASKED}
        self._refusals = {code.value: 0 for code in ErrorCode}

    def took(self, request: type[Request], reply: Reply, seconds: float) -> None:
        """Count one answered request."""
        verb = self._verbs[request]
        if isinstance(reply, Refused):
            verb.refused += 1
            self._refusals[reply.code] += 1
        else:
            verb.ok += 1
        verb.durations.note(seconds)

    def glanced(self, request: type[Request], seconds: float) -> None:
        """Count one that was answered at sight."""
        verb = self._verbs[request]
        verb.ok += 1
        verb.durations.note(seconds)

    @property
    def durations(self) -> dict[str, Histogram]:
        """Seconds from arrival to answer, by verb."""
        return {verb_of(message): verb.durations for message, verb in self._verbs.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "verbs": {
                verb_of(message): {"ok": verb.ok, "refused": verb.refused}
                for message, verb in self._verbs.items()
            },
            "refusals": dict(self._refusals),
        }
