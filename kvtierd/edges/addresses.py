"""What is said, and with which exit code, when an address of ours cannot be bound."""

from __future__ import annotations

import errno
import os

from kvtierd.errors import ConfigError, ExitCode


class CannotBind(ConfigError):
    """An address cannot be bound: somebody has it, or this machine does not."""

    exit_code = ExitCode.CANT_CREATE


def cannot_bind(setting: str, address: str, error: OSError) -> CannotBind:
    """Return the exception for ``address``, which the key ``setting`` asks for; ``error`` has the errno."""
    # A name that cannot be looked up has no errno of the system's, but words of its own.
    known = error.errno is not None and error.errno in errno.errorcode
    reason = os.strerror(error.errno) if known and error.errno is not None else error.strerror
    if error.errno == errno.EADDRINUSE:
        return CannotBind(
            f"{setting} {address} is taken by another process: choose another address or stop it ({reason})"
        )
    return CannotBind(f"{setting} {address} cannot be bound: {reason}")
