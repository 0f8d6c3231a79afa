"""llm-d and AIBrix cannot be installed here: their rules, proved on their verdicts, read what presets send.

Facts: ``tests/golden/router_verdicts.json``, what each program made of 34 batches. The rules below reproduce
all of it, and are then fed with whole life cycles as the presets of these two routers send them.
"""

import json
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from kvtierd.config.audiences import PRESETS, Audience, Events
from kvtierd.core.model import (
    Block,
    BlockId,
    BlockMeta,
    EventKind,
    Locality,
    Medium,
    TierEvent,
    block_key,
)
from kvtierd.edges.hub import _stream_plan
from kvtierd.wire.orphans import Orphans
from kvtierd.wire.projection import Projection, runs_of
from kvtierd.wire.stream import StreamLog

VECTORS = json.loads((Path(__file__).parents[2] / "golden" / "router_verdicts.json").read_text())["vectors"]
MAIN_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
STORED += ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
REMOVED = ("block_hashes", "medium", "group_idx")
KNOWN = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}


class Rejected(Exception):
    """The whole batch is lost."""


def fields_of(event):
    if isinstance(event, dict):
        name, fields = event.get("type"), event
    else:
        name = event[0]
        fields = dict(zip(KNOWN.get(name, ()), event[1:], strict=False))
    if name not in KNOWN:
        raise Rejected(name)
    return name, fields


class LlmD:
    """Per block hash and medium, how many stores were not taken back; a hash is known while there is one."""

    def __init__(self):
        self.held = Counter()
        self.ignored = 0

    def apply(self, payload):
        batch = msgspec.msgpack.decode(payload)
        if len(batch) != 3:
            raise Rejected("not three elements")
        for name, fields in [fields_of(event) for event in batch[1]]:
            hashes = [self.hash_of(h) for h in fields.get("block_hashes", ())]
            if name == "AllBlocksCleared":
                self.held.clear()
            elif name == "BlockStored":
                self.stored(fields, hashes)
            else:
                place = self.place(fields)
                for one in hashes:
                    self.ignored += not self.held[one, place]
                    self.held[one, place] -= bool(self.held[one, place])

    @staticmethod
    def hash_of(value):
        if isinstance(value, bytes):
            return int.from_bytes(value[-8:], "big")
        if not isinstance(value, int) or -(1 << 31) <= value < 1 << 32:
            raise Rejected("unsupported hash type")
        return value

    @staticmethod
    def place(fields):
        group = fields.get("group_idx")
        return (fields.get("medium") or "gpu").lower() + ("" if group is None else f"[group={group}]")

    def known(self, one):
        return any(count for (held, _), count in self.held.items() if held == one)

    def stored(self, fields, hashes):
        parent, group = fields.get("parent_block_hash"), fields.get("group_idx")
        kindless = group is not None and fields.get("kv_cache_spec_kind") not in MAIN_KINDS
        orphan = parent is not None and not self.known(self.hash_of(parent))
        placeholder = not fields["token_ids"] and not all(map(self.known, hashes))
        if kindless or orphan or placeholder:
            self.ignored += 1
        else:
            self.held.update((one, self.place(fields)) for one in hashes)


class AIBrix:
    """A set of prefixes of any pod: all blocks of an event hang on the event's parent."""

    def __init__(self):
        self.prefixes = set()
        self.named = {}

    def apply(self, payload):
        batch = msgspec.msgpack.decode(payload)
        if len(batch) not in (2, 3) or (len(batch) == 3 and type(batch[2]) is not int):
            raise Rejected("batch")
        if not isinstance(batch[0], float):
            raise Rejected("timestamp")
        if not all(isinstance(event, list) for event in batch[1]):
            raise Rejected("expected an array")
        for name, fields in [fields_of(event) for event in batch[1]]:
            for index, one in enumerate(fields.get("block_hashes", ())):
                if name == "BlockRemoved":
                    self.prefixes.discard(self.named.get(one))
                    continue
                size = fields["block_size"]
                tokens = tuple(fields["token_ids"][index * size : (index + 1) * size])
                self.named[one] = (self.named.get(fields["parent_block_hash"]), tokens)
                self.prefixes.add(self.named[one])

    def percent(self, tokens, size):
        blocks = [tuple(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        prefix, found = None, 0
        for block in blocks:
            prefix = (prefix, block)
            if prefix not in self.prefixes:
                break
            found += 1
        return 100 * found // len(blocks)


def fed(reader, payload):
    try:
        reader.apply(payload)
    except Rejected:
        return False
    return True


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_the_rules_come_to_the_verdicts_of_the_real_programs(vector):
    payload = bytes.fromhex(vector["hex"])
    llm_d = LlmD()
    assert fed(llm_d, payload) is vector["llm_d"]["decodes"]
    places = [place for (_, place), count in llm_d.held.items() if count]
    assert [*places, "", ""][:2] == vector["llm_d"]["blocks"]
    aibrix = AIBrix()
    assert fed(aibrix, payload) is vector["aibrix"]["decodes"]
    assert aibrix.percent(vector["query_tokens"], vector["block_size"]) == vector["aibrix"]["match_percent"]


# -- life cycles as the presets send them

H = 0xF100000000000000
CHAINS, LENGTH = 12, 6


def block(chain, depth):
    number = chain * 100 + depth
    meta = BlockMeta(
        hashes=(H + number,),
        parent=H + number - 1 if depth else None,
        token_ids=tuple(range(number * 4, number * 4 + 4)),
        block_size=4,
    )
    return Block.of(BlockId("ns", block_key(number.to_bytes(8, "big"))), 4096, meta)


TIERS = {"cpu": (Medium.CPU, None), "disk": (Medium.STORAGE, Locality.LOCAL)}


class Life:
    """Random stores, evictions from either end and promotions in two tiers, as one preset's batches."""

    def __init__(self, preset, seed):
        audience = Audience(name="a", preset=preset)
        plan = _stream_plan(Events(audiences=(audience,)), audience, 0, {"cpu": "cpu", "disk": "fs"})
        self.projection = Projection(plan.view)
        if plan.view.reannounce:
            self.projection.watcher = Orphans(self.projection.announced, removals=plan.view.removals)
        self.log = StreamLog(plan.limits, plan.view)
        self.there = {tier: set() for tier in TIERS}
        self.ever = set()
        self.number = 0
        self.random = random.Random(seed)

    def step(self):
        tier = self.random.choice(list(TIERS))
        place = (self.random.randrange(CHAINS), self.random.randrange(LENGTH))
        kind = EventKind.REMOVED if place in self.there[tier] else EventKind.STORED
        (self.there[tier].discard if kind is EventKind.REMOVED else self.there[tier].add)(place)
        if kind is EventKind.STORED:
            self.ever.add((tier, place))
        return self.send(TierEvent(kind, tier, *TIERS[tier], block(*place)))

    def send(self, *events):
        payloads = []
        for run in runs_of([c for c in self.projection.apply(events) if c.told]):
            payloads.append(self.log.append(self.number, 1.5, run.rank, run.changes))
            self.number += 1
        return payloads


@pytest.mark.parametrize("seed", range(5))
def test_llm_d_ends_with_what_is_there_and_counts_every_block_once(seed):
    """Where all ancestors are somewhere: a child without its parent is not for llm-d to keep."""
    life, reader = Life("llm-d", seed), LlmD()
    for _ in range(2000):
        for payload in life.step():
            reader.apply(payload)
    for chain in range(CHAINS):  # bring back the parents that left before their children
        for depth in range(LENGTH):
            if not any((chain, depth) in there for there in life.there.values()):
                life.there["cpu"].add((chain, depth))
                for payload in life.send(
                    TierEvent(EventKind.STORED, "cpu", Medium.CPU, None, block(chain, depth))
                ):
                    reader.apply(payload)
    expected = {
        (block(*place).hashes[0], f"{TIERS[tier][0].value.lower()}[group=0]"): 1
        for tier, places in life.there.items()
        for place in places
    }
    for held, place in expected:
        assert reader.held[held, place] == 1
    assert +reader.held == Counter(expected)


@pytest.mark.parametrize("seed", range(5))
def test_aibrix_is_never_cut_off_and_knows_every_prefix_in_cpu(seed):
    life, reader = Life("aibrix", seed), AIBrix()
    for _ in range(2000):
        for payload in life.step():
            assert b"BlockRemoved" not in payload, "it would delete the prefix of all pods"
            reader.apply(payload)
    for chain in range(CHAINS):
        tokens = [t for depth in range(LENGTH) for t in block(chain, depth).meta.token_ids]
        held = 0
        while held < LENGTH and (chain, held) in life.there["cpu"]:
            held += 1
        assert reader.percent(tokens, 4) >= 100 * held // LENGTH
    for tier, place in life.ever:
        if tier == "disk" and ("cpu", place) not in life.ever:
            assert block(*place).hashes[0] not in reader.named, "what is only on disk is not for it"


def test_every_preset_is_for_a_router_whose_needs_are_written_down():
    text = (Path(__file__).parents[3] / "kvtierd" / "wire" / "ROUTERS.md").read_text()
    for preset, settings in PRESETS.items():
        section = text.split(f"\n## `{preset}`\n")[1].split("\n## ")[0]
        for key in settings:
            assert f"`{key}" in section, f"{preset}: no reason for {key}"
