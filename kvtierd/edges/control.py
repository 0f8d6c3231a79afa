"""What only the control socket answers, beside the status and surveys: orders that change the daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvtierd.core.effects import Reply
from kvtierd.core.stimuli import Request
from kvtierd.logs import output
from kvtierd.wire.messages import LogLevel, LogLevelRequest


def log_level(request: LogLevelRequest) -> LogLevel:
    """Change the level of the log, if one is named, and tell which is in force."""
    if request.level is not None:
        output.set_level(request.level)
    return LogLevel(id=request.id, level=output.level())


ORDERS: Final[Mapping[type[Request], Callable[[Any], Reply]]] = {LogLevelRequest: log_level}
