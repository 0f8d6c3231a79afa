"""A log's changes as the bytes of an event batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from kvtierd.core.model import Block, Common, block_key
from kvtierd.wire.kvevents import Form, as_array, encode_batch, pack, stored
from kvtierd.wire.places import Place
from kvtierd.wire.projection import Change, View
from kvtierd.wire.templates import HASH, PARENT, TOKENS, Template, array_head, cut, in_a_row

_Raw = msgspec.Raw
_BATCH, _NO_TOKENS = array_head(3), array_head(0)


def encode_changes(ts: float, rank: int, changes: Sequence[Change], view: View) -> bytes:
    """Return the batch that tells changes of one dp rank, but for those that readers are not to hear."""
    tokens, form = view.tokens, view.form
    told = [change for change in changes if change.told]
    if not view.one_block:
        return encode_batch(ts, [*pack(change.to_wire(tokens) for change in told)], rank, form)
    row: list[Any] = [_BATCH, float(ts), array_head(len(told))]
    common: Common | None = None
    place: Place | None = None
    template: Template | None = None
    for change in told:
        block = change.block
        if block is not None and (told_as := block.told_as).__class__ is not tuple:
            # The same for many in a row, and the same objects: to look for these costs half.
            if common is not block.common or place is not change.key[1]:
                common, place = block.common, change.place
                template = _template(common, place, change.grouped, form)
            if template is not None:
                start, parent, ids, end = template
                words = _Raw(block.tokens) if tokens and block.tokens else _NO_TOKENS
                row += start, told_as, parent, block.parent, ids, words, end
                continue
        event = change.to_wire(tokens, True)
        row.append(event if form is Form.MAP else as_array(event))
    row.append(rank)
    return in_a_row(row)


def _template(common: Common, place: Place, grouped: bool, form: Form) -> Template | None:
    """Return the template of stores, if they have so much in common that it is worth one."""
    if not (common.described and common.is_shared):
        return None
    return _made(common, place.medium, place.locality, place.group if grouped else None, form)


@functools.lru_cache(maxsize=256)
def _made(common: Common, medium: str, locality: str | None, group: int | None, form: Form) -> Template:
    block = Block(common, block_key(b""), HASH, PARENT, bytes(TOKENS))
    event = stored(block, 0, medium, locality, group, raw=True)
    return cut(event if form is Form.MAP else as_array(event))
