"""What differs between two tier files, and whether a running daemon can take it over. No I/O.

Every key stands below a prefix of :data:`LIVE` or :data:`RESTART`; the longest one decides, and a test fails
for a key that has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtierd.config.schema import TierFile

Path = tuple[str, ...]

LIVE: Final[tuple[str, ...]] = (
    "tiers.*.max_bytes",
    "tiers.*.min_free",
    "tiers.*.inflight_bytes",
    "tiers.*.deadline",
    "tiers.*.ttl",
    "tiers.*.max_load_time",
    "events.audiences",
    "events.on_stop",
    "log.level",
    "access.engine",
    "access.control",
    "engine",
    "watch_file",
)
"""What a reload changes; of ``engine`` and ``access`` for what begins from then on."""

_OPENED: Final = "the tier's storage is opened and its threads are made at the start"
_STREAM: Final = "sockets, numbers and what each reader knows are laid out at the start"
RESTART: Final[Mapping[str, str]] = {
    "version": "there is one version of the tier file",
    "runtime_dir": "the sockets and the lock of the running daemon are there",
    "state_dir": "the journal of the running daemon is there",
    "pool": "the pool is made once, and mapped by engines",
    "tenants": "accounts and their shares are made at the start",
    "tiers": "tiers are made and put in their order at the start",
    "tiers.*.name": "tiers are told apart by it",
    "tiers.*.type": _OPENED,
    "tiers.*.path": _OPENED,
    "tiers.*.url": _OPENED,
    "tiers.*.endpoint": _OPENED,
    "tiers.*.region": _OPENED,
    "tiers.*.account": _OPENED,
    "tiers.*.credentials": _OPENED,
    "tiers.*.ca_bundle": _OPENED,
    "tiers.*.allow_http": _OPENED,
    "tiers.*.unsigned_payload": _OPENED,
    "tiers.*.connect_timeout": _OPENED,
    "tiers.*.request_timeout": _OPENED,
    "tiers.*.retries": _OPENED,
    "tiers.*.options": _OPENED,
    "tiers.*.io": _OPENED,
    "tiers.*.fsync": _OPENED,
    "tiers.*.pack_below": _OPENED,
    "tiers.*.shared": _OPENED,
    "tiers.*.readers": _OPENED,
    "tiers.*.writers": _OPENED,
    "tiers.*.policy": "the policy has kept its own order of the blocks since the start",
    "tiers.*.demote": "which tiers get a block when is fixed at the start",
    "tiers.*.locality": "readers know the tier's blocks by it",
    "tiers.*.events": "readers would have to be told of all the tier's blocks",
    "events.enabled": _STREAM,
    "events.model": _STREAM,
    "events.ring_batches": _STREAM,
    "events.ring_bytes": _STREAM,
    "events.heartbeat": _STREAM,
    "events.relay": _STREAM,
    "admin": "the listener is bound at the start",
    "log.format": "the log is opened at the start",
    "traces": "the exporter is made at the start",
    "access.mode": "the sockets are made with it",
    "access.control_mode": "the sockets are made with it",
    "access.group": "the sockets are made with it",
}
"""What needs a restart, and why."""

_NAMED: Final = (("tiers",), ("events", "audiences"))
"""Lists whose entries are told apart by their names."""


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs: ``before`` and ``after`` as they are written (``None``: not there).

    ``refusal``: why only a restart can take it over; empty where a reload can.
    """

    key: str
    before: Any
    after: Any
    refusal: str = ""


def changes(old: TierFile, new: TierFile) -> list[Change]:
    """Return every difference, in the order of the new file, then what is only in the old one."""
    before, after = (dict(_values(file.model_dump(mode="json"))) for file in (old, new))
    orders = [[tier.name for tier in file.tiers] for file in (old, new)]
    found = []
    if orders[0] != orders[1]:
        found.append(Change("tiers", ", ".join(orders[0]), ", ".join(orders[1]), RESTART["tiers"]))
    for path in dict.fromkeys((*after, *before)):
        was, will = before.get(path), after.get(path)
        known = path[0] != "tiers" or all(path[1] in order for order in orders)
        if was != will and known:
            found.append(Change(".".join(path), was, will, verdict(_pattern(path))))
    return found


def verdict(pattern: Path) -> str:
    """Return why a key needs a restart, or nothing where it does not.

    Raises:
        KeyError: nobody has decided that.
    """
    for length in range(len(pattern), 0, -1):
        prefix = ".".join(pattern[:length])
        if prefix in LIVE:
            return ""
        if prefix in RESTART and not (prefix == "tiers" and length < len(pattern)):
            return RESTART[prefix]
    raise KeyError(".".join(pattern))


def _values(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of all that is no section; entries of named lists go by their names."""
    if isinstance(value, dict) and path[2:] != ("options",):
        for key, child in value.items():
            yield from _values(child, (*path, key))
    elif path in _NAMED:
        for child in value:
            yield from _values(child, (*path, child["name"]))
    else:
        yield path, value


def _pattern(path: Path) -> Path:
    for lists in _NAMED:
        if path[: len(lists)] == lists and len(path) > len(lists):
            return (*lists, "*", *path[len(lists) + 1 :])
    return path
