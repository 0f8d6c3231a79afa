"""What a user can set for the glue, in ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvtierd.errors import ConfigError

PREFIX = "kvtierd_"


@dataclass(frozen=True, slots=True)
class Settings:
    """Every ``kvtierd_*`` key; times in seconds.

    ``socket``: path of the daemon's engine socket. ``deadline``: how long the engine waits for the daemon at
    a time, a miss after it. ``attach_timeout``: the same once, while the engine starts.
    ``promotion_deadline``: how long a request waits for blocks that come from a slower tier. ``lease``: how
    long a hit stays pinned between lookup and load. ``tenant``, ``weights_id`` and ``layout_tag`` enter the
    cache namespace: set ``weights_id`` when one model path holds other weights from time to time.
    """

    socket: str
    deadline: float = 0.02
    attach_timeout: float = 5.0
    promotion_deadline: float = 5.0
    lease: float = 5.0
    tenant: str | None = None
    weights_id: str = ""
    layout_tag: str = ""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Read the settings out of the connector's extra config.

        Raises:
            ConfigError: an unknown ``kvtierd_*`` key, a value of the wrong kind, or no socket.
        """
        given = {name.removeprefix(PREFIX): v for name, v in extra.items() if name.startswith(PREFIX)}
        known = {field.name for field in fields(cls)}
        if unknown := sorted(given.keys() - known):
            names = ", ".join(PREFIX + name for name in sorted(known))
            raise ConfigError(f"kv_connector_extra_config: unknown key {PREFIX}{unknown[0]}; known: {names}")
        if not isinstance(given.get("socket"), str):
            raise ConfigError(
                "kv_connector_extra_config: kvtierd_socket is missing: the path of the daemon's engine socket"
            )
        for name in ("deadline", "attach_timeout", "promotion_deadline", "lease"):
            value = given.get(name, 1.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3600:
                raise ConfigError(f"kv_connector_extra_config: {PREFIX}{name} must be seconds in (0, 3600]")
        return cls(**given)
