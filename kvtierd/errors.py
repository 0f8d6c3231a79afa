"""Every exception of kvtierd and the exit code that each one ends a command with.

One root, so that a caller can catch ``KvtierdError`` and nothing else. A miss is a value and never an
exception; what stands here is misuse, a broken peer, a broken tier or a broken promise of our own.
Exit codes are those of ``sysexits.h``.
"""

from __future__ import annotations

import enum
from typing import Any


class ExitCode(enum.IntEnum):
    """Process exit codes (sysexits.h names without their prefix)."""

    OK = 0
    GENERIC = 1
    USAGE = 64
    UNAVAILABLE = 69
    INTERNAL = 70
    CANT_CREATE = 73
    IO = 74
    TEMPORARY = 75
    NO_PERMISSION = 77
    CONFIG = 78

    @property
    def meaning(self) -> str:
        """What a person should take from it."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.OK: "it worked; a daemon: it was stopped and left cleanly",
    ExitCode.GENERIC: "it did not, and the message says why",
    ExitCode.USAGE: "the call is wrong: a command, option or argument that does not exist",
    ExitCode.UNAVAILABLE: "no daemon answers",
    ExitCode.INTERNAL: "a bug, or a broken invariant: the daemon ends rather than serve a wrong byte",
    ExitCode.CANT_CREATE: "the pool, a socket or a folder cannot be made",
    ExitCode.IO: "a tier's storage failed, or holds corrupt blocks",
    ExitCode.TEMPORARY: "not all that was accepted could be written within the grace",
    ExitCode.NO_PERMISSION: "the daemon does not take commands from this user",
    ExitCode.CONFIG: "the tier file or a variable that overrides it is wrong",
}


class KvtierdError(Exception):
    """Root of all exceptions that kvtierd raises on purpose."""

    exit_code = ExitCode.GENERIC


class ConfigError(KvtierdError):
    """The tier file or its environment overrides cannot be used.

    The message names the file, the line where known, the path of the key and what to do.
    """

    exit_code = ExitCode.CONFIG


class PoolError(KvtierdError):
    """The pool cannot be allocated, mapped, locked or pinned as asked."""

    exit_code = ExitCode.CANT_CREATE


class Unavailable(KvtierdError):
    """No daemon answers at the address."""

    exit_code = ExitCode.UNAVAILABLE


class ProtocolError(KvtierdError):
    """Base of both sides' protocol mistakes."""

    exit_code = ExitCode.INTERNAL


class LocalProtocolError(ProtocolError):
    """This side tried something that the protocol does not allow; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow; the connection is closed."""


class RequestRefused(KvtierdError):
    """The daemon answered a request with a coded error.

    ``code`` is one of :class:`kvtierd.wire.messages.ErrorCode`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class TierError(KvtierdError):
    """A tier's storage cannot be opened or used; names the tier."""

    exit_code = ExitCode.IO

    def __init__(self, tier: str, message: str) -> None:
        super().__init__(f"tier {tier!r}: {message}")
        self.tier = tier


class TierRefused(TierError):
    """A tier cannot be used until somebody changes something: waiting does not help, so a start ends."""


class TierTaken(TierRefused):
    """Another daemon has the tier's storage to itself."""


class InvariantBroken(KvtierdError):
    """A promise of the core does not hold: a bug in kvtierd.

    ``block`` is the identity of the block where it was seen, if that is known.
    """

    exit_code = ExitCode.INTERNAL

    def __init__(self, message: str, block: Any = None) -> None:
        super().__init__(message)
        self.block = block
