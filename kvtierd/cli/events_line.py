"""How ``kvtierd events tail`` prints one event: as a JSON object, or as a row that fits a terminal."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvtierd.wire.kvevents import DecodedEvent

SHOWN_TOKENS = 4
HASH_DIGITS = 16
"""Shown of a hash; an integer has no more, of bytes these are the first."""
HEADER = f"{'seq':>8}  {'time':<12} {'dp':>2} {'event':<12} {'where':<13} block"
_NOTHING: dict[str, tuple[object, ...]] = {
    "block_size": (0,),
    "group_idx": (0,),
    "kv_cache_spec_kind": ("full_attention",),
}
"""Values that tell a person nothing: of placeholders and of the usual, single group."""


class Message(NamedTuple):
    """One batch's frames."""

    topic: str
    number: int
    payload: bytes
    replayed: bool


def json_line(
    message: Message, ts: float, rank: int | None, event: DecodedEvent | None, *, tokens: bool
) -> str:
    """Return an event (None: an empty batch) as one JSON object; token ids shortened unless ``tokens``."""
    head = {
        "seq": message.number,
        "ts": ts,
        "topic": message.topic,
        "replayed": message.replayed,
        "dp_rank": rank,
    }
    fields = event and _fields(event)
    if fields and not tokens and (count := len(fields.get("token_ids", ()))) > SHOWN_TOKENS:
        fields |= {"token_ids": fields["token_ids"][:SHOWN_TOKENS], "token_count": count}
    return json.dumps({**head, "event": fields})


def human_line(
    message: Message,
    ts: float,
    rank: int | None,
    event: DecodedEvent | None,
    *,
    tokens: bool,
    width: int | None = None,
) -> str:
    """Return an event as a row under :data:`HEADER`, cut to ``width`` cells; ``r`` marks what is replayed.

    Token ids are counted, unless all of them are asked for with ``tokens``.
    """
    clock = time.strftime("%H:%M:%S", time.localtime(ts)) + f".{int(ts % 1 * 1000):03d}"
    mark = "r" if message.replayed else " "
    head = f"{message.number:>8}{mark} {clock} {'-' if rank is None else rank:>2}"
    if event is None:
        return f"{head} (empty)"
    fields = _fields(event)
    name = fields.pop("type")
    where = " ".join(filter(None, (fields.pop("medium", None), fields.pop("locality", None)))) or "-"
    hashes = ",".join(_hash(value) for value in fields.pop("block_hashes", ()))
    row = " ".join((head, f"{name:<12}", f"{where:<13}", hashes, *_details(fields, tokens=tokens))).rstrip()
    return row if width is None or len(row) <= width else f"{row[: width - 1]}…"


def _details(fields: dict[str, Any], *, tokens: bool) -> list[str]:
    """Return what else there is to know, the most telling first."""
    ids = fields.pop("token_ids", [])
    parent = fields.pop("parent_block_hash", None)
    size = fields.get("block_size")
    if ids and size == len(ids):
        del fields["block_size"]
    details = [f"{len(ids)} tokens"] if ids and not tokens else []
    if parent is not None:
        details.append(f"parent={_hash(parent)}")
    details += [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in fields.items()
        if value not in (None, []) and value not in _NOTHING.get(key, ())
    ]
    return [*details, f"token_ids={','.join(map(str, ids))}"] if ids and tokens else details


def _fields(event: DecodedEvent) -> dict[str, Any]:
    """Return an event as plain JSON values; hashes that are bytes as hex."""
    import msgspec

    fields: dict[str, Any] = _plain(msgspec.to_builtins(event, builtin_types=(bytes,)))
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def _hash(value: int | str) -> str:
    text = f"{value:016x}" if isinstance(value, int) and value >= 0 else str(value)
    return text if len(text) <= HASH_DIGITS else f"{text[:HASH_DIGITS]}…"
