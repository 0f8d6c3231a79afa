"""What a user can set for the backend, in ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvtierd.errors import ConfigError

PREFIX = "kvtierd_"


@dataclass(frozen=True, slots=True)
class Settings:
    """Every ``kvtierd_*`` key; times in seconds.

    ``socket``: path of the daemon's engine socket. ``deadline``: bound of one call to the daemon.
    ``promotion_deadline``: how much longer a load may wait for pages from a slower tier; SGLang's threads
    wait, never its scheduler. ``tenant`` and ``weights_id`` enter the cache namespace.
    """

    socket: str
    deadline: float = 0.25
    promotion_deadline: float = 5.0
    tenant: str | None = None
    weights_id: str = ""

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> Settings:
        """Read the settings out of SGLang's extra config; keys without the prefix are SGLang's own.

        Raises:
            ConfigError: an unknown ``kvtierd_*`` key, a value of the wrong kind, or no socket.
        """
        given = {n.removeprefix(PREFIX): v for n, v in (extra or {}).items() if n.startswith(PREFIX)}
        kinds: dict[str, tuple[type, ...]] = {
            "socket": (str,),
            "tenant": (str, type(None)),
            "weights_id": (str,),
            "deadline": (int, float),
            "promotion_deadline": (int, float),
        }
        if unknown := sorted(given.keys() - {field.name for field in fields(cls)}):
            names = ", ".join(PREFIX + name for name in sorted(kinds))
            raise ConfigError(f"HiCache extra config: unknown key {PREFIX}{unknown[0]}; known: {names}")
        if "socket" not in given:
            raise ConfigError(
                "HiCache extra config: kvtierd_socket is missing: the path of the daemon's engine socket"
            )
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, kinds[name]):
                raise ConfigError(f"HiCache extra config: {PREFIX}{name} cannot be {value!r}")
            if isinstance(value, int | float) and not 0 < value <= 3600:
                raise ConfigError(f"HiCache extra config: {PREFIX}{name} must be seconds in (0, 3600]")
        return cls(**given)
