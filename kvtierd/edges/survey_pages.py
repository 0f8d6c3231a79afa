"""One connection's survey of what is resident, page by page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvtierd.core.effects import ErrorCode, Refused
from kvtierd.core.inventory import Survey
from kvtierd.wire.messages import SurveyPage, SurveyRequest

Begin = Callable[[str | None], Survey | str]


class Pages:
    """``begin`` starts a survey of the tier named, or says why not; ``None`` where there are none.

    ``path`` is the socket's, to name the one beside it where surveys are made.
    """

    def __init__(self, begin: Begin | None, path: Path) -> None:
        self._begin = begin
        self._path = path
        self._survey: Survey | None = None

    def next(self, request: SurveyRequest) -> SurveyPage | Refused:
        """Return the page that is asked for, if it is the next one."""
        if self._begin is None:
            where = self._path.with_name("control.sock")
            return Refused(id=request.id, code=ErrorCode.NOT_ALLOWED, message=f"surveys are made at {where}")
        if request.cursor == 0:
            begun = self._begin(request.tier)
            if isinstance(begun, str):
                return Refused(id=request.id, code=ErrorCode.UNKNOWN_TIER, message=begun)
            self._survey = begun
        survey = self._survey
        if survey is None or request.cursor != survey.position:
            message = "no survey stands at this cursor: begin with cursor 0"
            return Refused(id=request.id, code=ErrorCode.BAD_REQUEST, message=message)
        entries = survey.page(request.limit)
        if len(entries) < request.limit:
            self._survey = None
        cursor = survey.position if self._survey is not None else 0
        return SurveyPage(id=request.id, entries=entries, cursor=cursor, models=survey.models(entries))
