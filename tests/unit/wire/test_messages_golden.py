"""Protocol v1 is frozen: the bytes of every message, both ways, and the page that describes them.

After an intended change (only new fields with defaults are allowed), run this file as a script to write the
golden file anew, and look at the difference.
"""

import json
import re
import typing
from pathlib import Path

import msgspec
import pytest

from kvtierd.core import effects, stimuli
from kvtierd.core.effects import ErrorCode, InventoryEntry, Skipped
from kvtierd.core.model import BlockMeta, Group, KeyState, Layout, Scope, SkipReason, block_key
from kvtierd.wire import messages

HERE = Path(__file__).resolve()
GOLDEN = HERE.parents[2] / "golden" / "protocol_v1.json"
PAGE = Path(messages.__file__).with_name("PROTOCOL.md")

K1, K2 = block_key(bytes(range(32)), 0), block_key(b"\xff" * 8, 1)
LAYOUT = Layout(
    model="org/model",
    revision="main",
    dtype="bfloat16",
    layout="flash_attn:NHD",
    groups=(Group(tokens_per_block=16, block_bytes=65536), Group(tokens_per_block=16, block_bytes=4096)),
    ranks=2,
    hash_algorithm="sha256_cbor",
    hash_seed="0",
    tenant="t1",
)
META = BlockMeta(
    hashes=(2**64 - 1, b"\x01" * 32),
    parent=5,
    token_ids=(1, 2, 3),
    block_size=16,
    lora_id=7,
    lora_name="ad",
    extra_keys=(("mm", 1), None),
    spec_kind="sliding_window",
    sliding_window=1024,
)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CLIENT = [
    messages.Hello(id=1, versions=(1, 2), features=("f",), required=("r",), client="golden/1"),
    messages.StatusRequest(id=2),
    messages.SurveyRequest(id=18, tier="disk", cursor=1024, limit=100),
    messages.LogLevelRequest(id=20, level="debug"),
    messages.DrainRequest(id=21, undo=True),
    messages.ReloadRequest(id=24, dry_run=True),
    stimuli.OperatorReset(
        id=22, namespaces=("ab",), model="org/model", tenant="t1", tiers=("disk",), dry_run=True
    ),
    stimuli.OperatorEvict(id=23, tier="disk", blocks=5, bytes=1 << 30, namespace="ab", dry_run=True),
    stimuli.Attach(id=3, layout=LAYOUT, engine_id="e0", process=b"p" * 16, dp_rank=1, role="worker", rank=1),
    stimuli.Lookup(
        id=4,
        keys=(K1, K2),
        promote=True,
        lease=0.5,
        everywhere=True,
        touch=True,
        scope=Scope(load_from=("disk",)),
    ),
    stimuli.PrepareStore(
        id=5,
        keys=(K1, K2),
        meta=(META, None),
        scope=Scope(load_from=("disk",), store_to=()),
        traceparent=TRACE,
    ),
    stimuli.Commit(id=6, job=9, generation=3, pool_id="ab12", failed=(K2,)),
    stimuli.Abort(id=7, job=9),
    stimuli.Fail(id=8, job=9, keys=(K2,)),
    stimuli.Load(id=9, keys=(K1,), deadline=0.25, scope=Scope(load_from=("disk",)), traceparent=TRACE),
    stimuli.Release(id=10, lease=4),
    stimuli.Renew(id=19, numbers=(4, 9)),
    stimuli.Touch(id=11, keys=(K1,)),
    stimuli.Evict(id=12, keys=(K1,), tiers=("cpu",)),
    stimuli.Reset(id=13, tiers=("cpu", "disk")),
    stimuli.Prefetch(id=14, keys=(K2,)),
    stimuli.Inventory(id=15, tier="disk", cursor=4096, limit=100),
    stimuli.Acknowledge(id=16, fence=2),
    stimuli.Goodbye(id=2**31),
]
SERVER = [
    messages.Welcome(id=1, version=1, features=("f",), daemon="kvtierd/0.1.0"),
    messages.StatusReport(id=2, body={"pool": {"bytes": 1 << 33, "pinned": False}, "tiers": ["cpu"]}),
    messages.LogLevel(id=20, level="debug"),
    messages.Draining(id=21, draining=True, waiting={"disk": 3}, blocked={"far": "cannot be reached"}),
    messages.Reloaded(
        id=24,
        outcome="refused",
        changes=(messages.ConfigChange("pool.bytes", "1GiB", "2GiB", "needs a restart"),),
        problem="pool.bytes: needs a restart",
    ),
    effects.Removed(
        id=22, blocks={"disk": 2}, bytes={"disk": 8192}, namespaces=("ab",), unknown=("cd",), left=1
    ),
    messages.SurveyPage(
        id=18,
        entries=(
            effects.SurveyEntry("disk", "0123456789abcdef0123456789abcdef", K1, 135168, 0, (2**64 - 1,)),
        ),
        cursor=1124,
        models={"0123456789abcdef0123456789abcdef": "org/model"},
    ),
    effects.Attached(
        id=3,
        session=1,
        namespace="0123456789abcdef0123456789abcdef",
        pool_id="ab12",
        pool_bytes=1 << 33,
        unit_bytes=4096,
        slot_bytes=131072,
        payload_bytes=(131072, 8192),
        rank_offsets=((0, 65536), (0, 4096)),
        fence=1,
        tiers=("cpu", "disk"),
    ),
    effects.LookedUp(
        id=4, found=bytes((KeyState.HIT, KeyState.PENDING)), prefix=2, lease=4, leased=1, sources=("", "disk")
    ),
    effects.Prepared(
        id=5,
        job=9,
        generation=3,
        pool_id="ab12",
        keys=(K1,),
        slots=(64,),
        skipped=(Skipped(K2, SkipReason.NO_ROOM),),
    ),
    effects.Committed(id=6, stored=(K1,)),
    effects.Loaded(
        id=9, lease=4, pool_id="ab12", keys=(K1,), slots=(64,), generations=(3,), sources=("disk",)
    ),
    effects.Done(id=12, count=1),
    effects.InventoryPage(
        id=15,
        entries=(InventoryEntry("disk", "STORAGE", "LOCAL", K1, (2**64 - 1,), 0),),
        cursor=4196,
        total=5000,
    ),
    effects.Refused(id=7, code=ErrorCode.UNKNOWN_JOB, message="no job 9"),
    effects.Revoked(id=0, fence=2),
]
# Shapes inside messages; the page names their fields as well.
PARTS = [Layout, Group, BlockMeta, Scope, Skipped, InventoryEntry, effects.SurveyEntry]


def tag(message):
    return message.__struct_config__.tag


def golden():
    return json.loads(GOLDEN.read_text())


def cases():
    sides = [("client", CLIENT, messages.decode_client), ("server", SERVER, messages.decode_server)]
    return [
        pytest.param(side, example, decode, id=f"{side}-{tag(example)}")
        for side, examples, decode in sides
        for example in examples
    ]


def test_there_is_an_example_of_every_message():
    for union, examples in ((messages.ClientMessage, CLIENT), (messages.ServerMessage, SERVER)):
        assert {type(example) for example in examples} == set(typing.get_args(union))
        assert len(examples) == len(typing.get_args(union))


@pytest.mark.parametrize(("side", "example", "decode"), cases())
def test_a_message_has_its_golden_bytes_and_they_its_meaning(side, example, decode):
    data = bytes.fromhex(golden()[side][tag(example)])
    assert messages.encode(example).hex() == data.hex()
    assert decode(data) == example


@pytest.mark.parametrize(("side", "example", "decode"), cases())
def test_a_message_with_a_field_of_the_future_means_the_same(side, example, decode):
    """L37: an older reader of a newer writer."""
    fields = msgspec.msgpack.decode(messages.encode(example))
    fields["zz_new"] = {"a": [1, None]}
    assert decode(msgspec.msgpack.encode(fields)) == example


@pytest.mark.parametrize(("side", "example", "decode"), cases())
def test_a_message_without_its_optional_fields_is_still_read(side, example, decode):
    """L37: a newer reader of an older writer."""
    fields = msgspec.msgpack.decode(messages.encode(example))
    required = {field.encode_name for field in msgspec.structs.fields(example) if field.required}
    decode(msgspec.msgpack.encode({name: fields[name] for name in {"type", *required}}))


@pytest.mark.parametrize(
    "kind", [type(example) for example in CLIENT + SERVER] + PARTS, ids=lambda k: k.__name__
)
def test_the_page_names_every_message_and_field(kind):
    text = PAGE.read_text()
    heading = f"`{kind.__struct_config__.tag}`" if kind.__struct_config__.tag else f"`{kind.__name__}`"
    sections = [part for part in re.split(r"(?m)^(?=#{2,3} )", text) if heading in part.splitlines()[0]]
    assert len(sections) == 1, f"PROTOCOL.md has no section (or several) for {heading}"
    for field in msgspec.structs.fields(kind):
        assert f"`{field.encode_name}`" in sections[0] or field.encode_name == "id"


@pytest.mark.parametrize("enum", [ErrorCode, SkipReason, KeyState, stimuli.Role], ids=lambda e: e.__name__)
def test_the_page_names_every_code_and_state(enum):
    text = PAGE.read_text()
    for member in enum:
        assert f"`{member.name if isinstance(member.value, int) else member.value}`" in text


def test_the_page_states_the_limits():
    text = PAGE.read_text()
    assert f"{messages.MAX_FRAME_BYTES:,}" in text
    assert f"version {messages.PROTOCOL_MAX}" in text


def write():
    GOLDEN.write_text(
        json.dumps(
            {
                side: {tag(example): messages.encode(example).hex() for example in examples}
                for side, examples in (("client", CLIENT), ("server", SERVER))
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    write()
