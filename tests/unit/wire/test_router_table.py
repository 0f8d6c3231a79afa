"""The table of ROUTERS.md that says where each router cannot follow is made from the recorded verdicts.

``python tests/unit/wire/test_router_table.py`` writes it anew.
"""

import json
from pathlib import Path

from kvtierd.testing.consumer import ReferenceConsumer
from kvtierd.wire.kvevents import BlockRemoved, BlockStored, Form, decode_batch, encode_batch

ROOT = Path(__file__).parents[3]
VECTORS = json.loads((ROOT / "tests/golden/router_verdicts.json").read_text())["vectors"]
DOCUMENT = ROOT / "kvtierd/wire/ROUTERS.md"
BEGIN, END = "<!-- made from the verdicts: begin -->\n", "<!-- made from the verdicts: end -->\n"
ROUTERS = ("Dynamo", "vllm-router", "llm-d", "AIBrix")
FINE, LOST, BLIND, OTHER = "+", "batch lost", "not seen", ""
LEVEL = {"gpu": 0, "cpu": 1, "cpu_pinned": 1, "storage": 2, "fs": 2, "obj": 2}
WEIGHT = (1.0, 0.8, 0.3)


def truth(payload):
    """The media of the blocks that a batch tells of, in its order; "" for one that it takes back."""
    batch, reader = decode_batch(payload), ReferenceConsumer()
    reader.fold(batch)
    where = {entry.hash: (entry.medium or "gpu").lower() for entry in reader.resident}
    told = [h for event in batch.events if isinstance(event, BlockStored) for h in event.block_hashes]
    return [where.get(h, "") for h in dict.fromkeys(told)]


def prefix(media):
    """How deep each block of the prefix lies, and its tokens in GPU, in CPU too, on disk too."""
    levels = []
    for medium in media:
        if not medium:
            break
        levels.append(LEVEL[medium])
    ends = [sum(4 for _ in levels) if levels and max(levels) <= level else 0 for level in range(3)]
    return levels, ends


def is_array(verdict):
    """Whether its events are arrays, which one of the routers reads and one does not."""
    return verdict["name"].startswith("array")


def dynamo(media, verdict):
    levels, ends = prefix(media)
    tokens = verdict["dynamo"]["tokens"] or [0, 0, 0]
    return FINE if tokens == ends else BLIND if levels and not any(tokens) else f"{tokens}"


def vllm_router(media, verdict):
    levels, _ = prefix(media)
    if is_array(verdict):
        return OTHER
    if not verdict["vllm_router"]["decodes"]:
        return LOST
    credited = verdict["vllm_router"]["credited"]
    if credited == int(4 * len(levels) * WEIGHT[max(levels, default=0)]):
        return FINE
    weights = {int(4 * len(levels) * weight): name for weight, name in zip(WEIGHT, LEVEL, strict=False)}
    return (
        BLIND if not credited else f"as {weights[credited].upper()}" if credited in weights else "as external"
    )


def llm_d(media, verdict):
    if not verdict["llm_d"]["decodes"]:
        return LOST
    seen = [place.split("[")[0] for place in verdict["llm_d"]["blocks"]]
    return FINE if seen == [*media, "", ""][:2] else BLIND


def aibrix(media, verdict):
    levels, _ = prefix(media)
    if not is_array(verdict):
        return OTHER
    if not verdict["aibrix"]["decodes"]:
        return LOST
    percent = verdict["aibrix"]["match_percent"]
    wanted = 100 * len(levels) // 2
    return FINE if percent == wanted else f"{percent} % of {wanted} %" if percent else BLIND


def sent(payload):
    """Whether kvtierd sends such a batch, and to whom."""
    batch = decode_batch(payload)
    if batch.data_parallel_rank is None or any(map(_never, batch.events)):
        return "never"
    encoded = {encode_batch(batch.ts, batch.events, batch.data_parallel_rank, form): form for form in Form}
    if payload not in encoded:
        return "never"
    if any(event.medium in ("FS", "OBJ") for event in batch.events):
        return "to `vllm-0.26`"
    return "to audiences of arrays" if encoded[payload] is Form.ARRAY else "yes"


def _never(event):
    """What kvtierd's own rules keep out."""
    if not isinstance(event, BlockStored | BlockRemoved) or event.ownership is not None:
        return True
    if not all(isinstance(h, int) and h >= 1 << 32 for h in event.block_hashes):
        return True
    if event.medium not in ("GPU", "CPU", "STORAGE", "FS", "OBJ"):
        return True
    if not isinstance(event, BlockStored):
        return False
    kindless = event.group_idx == 0 and event.kv_cache_spec_kind is None and event.block_size > 0
    return kindless or event.session_id is not None or event.lookahead_token_ids is not None


def table():
    head = ("a batch as", "kvtierd sends it", *ROUTERS)
    rows = []
    for verdict in VECTORS:
        payload = bytes.fromhex(verdict["hex"])
        media = truth(payload)
        cells = [judge(media, verdict) for judge in (dynamo, vllm_router, llm_d, aibrix)]
        if set(cells) - {FINE, OTHER}:
            rows.append((f"`{verdict['name'].split(' ')[0]}`", sent(payload), *cells))
    rows.sort(key=lambda row: row[1] == "never")
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def test_the_document_has_the_table_of_the_verdicts():
    document = DOCUMENT.read_text()
    found = document.split(BEGIN)[1].split(END)[0]
    assert found == table(), f"write it anew: python {Path(__file__).relative_to(ROOT)}"


def test_no_router_loses_a_batch_that_its_preset_sends():
    """What each stumbles over is said in the table; a whole batch lost would cost its other events."""
    for verdict in VECTORS:
        to = sent(bytes.fromhex(verdict["hex"]))
        if to == "yes":
            assert verdict["vllm_router"]["decodes"], verdict["name"]
            assert verdict["llm_d"]["decodes"], verdict["name"]
        if to == "to audiences of arrays":
            assert verdict["aibrix"]["decodes"], verdict["name"]


if __name__ == "__main__":
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table() + END + rest.split(END)[1])
