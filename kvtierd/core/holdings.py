"""How much one session may hold, and for how long: counts of its jobs and leases, the limit, renewal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvtierd.core.effects import Done
from kvtierd.core.stimuli import LadderRequest, Load, Lookup, PrepareStore, Renew

if TYPE_CHECKING:
    from kvtierd.core.sessions import Session, Sessions
    from kvtierd.core.stack import Stack


class _Held(Protocol):
    session: int
    deadline: float


H = TypeVar("H", bound=_Held)


class Holdings(dict[int, H]):
    """Jobs or leases by their number, with a count of each session's."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def __setitem__(self, number: int, held: H) -> None:
        assert number not in self, "numbers are never used again"
        super().__setitem__(number, held)
        self.counts[held.session] += 1

    def __delitem__(self, number: int) -> None:
        session = self[number].session
        super().__delitem__(number)
        self.counts[session] -= 1
        if not self.counts[session]:
            del self.counts[session]


class Limit:
    """What one session may hold at most; renews what it holds.

    ``max_leases``: jobs and leases together. ``job_ttl`` and ``lease_ttl``: seconds that a renewal gives.
    """

    def __init__(
        self, stack: Stack, sessions: Sessions, *, max_leases: int, job_ttl: float, lease_ttl: float
    ) -> None:
        self._stack = stack
        self._sessions = sessions
        self.max_leases = max_leases
        self._job_ttl, self._lease_ttl = job_ttl, lease_ttl

    def retune(self, max_leases: int, job_ttl: float, lease_ttl: float) -> None:
        """Put other limits in force; what is held already stays."""
        self.max_leases, self._job_ttl, self._lease_ttl = max_leases, job_ttl, lease_ttl

    def problem(self, session: Session, request: LadderRequest) -> str:
        """Say why a request that would hold more is not taken; nothing if it is."""
        if isinstance(request, Lookup):
            if request.lease is None:
                return ""
        elif not isinstance(request, (PrepareStore, Load)):
            return ""
        held = self._sessions.jobs.counts[session.number] + self._sessions.leases.counts[session.number]
        if held < self.max_leases:
            return ""
        self._stack.primary.counters["leases_refused"] += 1
        return f"this connection has {held} jobs and leases (engine.max_leases): end some"

    def renew(self, session: Session, request: Renew) -> None:
        """Give jobs and leases of the session their whole time again; what ended before stays ended."""
        count = 0
        for number in request.numbers:
            for held, ttl in self._of(session, number):
                held.deadline = max(held.deadline, self._stack.now + ttl)
                count += 1
        self._stack.answer(session.number, Done(id=request.id, count=count))

    def _of(self, session: Session, number: int) -> list[tuple[_Held, float]]:
        job, lease = self._sessions.jobs.get(number), self._sessions.leases.get(number)
        found: list[tuple[_Held | None, float]] = [(job, self._job_ttl), (lease, self._lease_ttl)]
        return [(held, ttl) for held, ttl in found if held is not None and held.session == session.number]
