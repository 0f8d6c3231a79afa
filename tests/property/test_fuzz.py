"""Every decoder under hostile bytes: what is no message is refused in one of the ways that its page promises.

The bytes are made from good ones. Where a checksum stands guard, half of them are sealed again, as somebody
with access to the disk or the bucket could do.
"""

from __future__ import annotations

import io
import os
import random
import zlib
from pathlib import Path

import msgspec
import pytest
import xxhash

from kvtierd.client import KeyState
from kvtierd.client._link import Link
from kvtierd.config.load import load_tier_file
from kvtierd.core import effects
from kvtierd.core.model import Block, BlockId, BlockMeta, EventKind, Locality, Medium, TierEvent, block_key
from kvtierd.edges.backends import fs_format
from kvtierd.errors import ConfigError, RemoteProtocolError
from kvtierd.testing.fuzz import Mutator, client_seeds
from kvtierd.wire import frames, kvevents, records, relay_records, slot_records
from kvtierd.wire.announced import TierLabel
from kvtierd.wire.framing import frame
from kvtierd.wire.messages import StatusReport, Welcome, encode
from kvtierd.wire.relay import EngineCache
from kvtierd.wire.session import ServerConnection

FRAMES = int(os.environ.get("KVTIERD_FUZZ_FRAMES", "20000"))
CONFIG = Path(__file__).parents[2] / "config" / "full.yaml"
TABLE = Path(__file__).parents[1] / "golden" / "slot_table_v1.bin"
META = BlockMeta(
    hashes=(2**64 - 1, b"\x01" * 32),
    parent=5,
    token_ids=(1, 2, 3),
    block_size=16,
    extra_keys=(("mm", 1), None),
)
BLOCK = Block.of(BlockId("0" * 32, block_key(b"k" * 32, 1)), 4096, META, 1)
LABEL = TierLabel("disk", Medium.STORAGE, Locality.LOCAL)


@pytest.fixture
def rng(request):
    """A generator that a failure can be repeated with."""
    seed = int(os.environ.get("KVTIERD_SOAK_SEED", random.SystemRandom().getrandbits(32)))
    request.node.user_properties.append(("seed", seed))
    print(f"seed {seed}")
    return random.Random(seed)


pytestmark = [pytest.mark.soak, pytest.mark.timeout(FRAMES / 200 + 60)]


def test_what_a_client_may_send(rng):
    """The connection passes on requests, refuses them, or closes; it never raises anything else."""
    mutator = Mutator(rng, client_seeds())
    passed = closed = 0
    while passed < FRAMES:
        connection = ServerConnection()
        connection.receive(frame(client_seeds()[0]))
        try:
            for _ in range(50):
                passed += 1
                for request in connection.receive(mutator.framed()):
                    msgspec.msgpack.encode(request)  # as a log or a journal might
                for answer in connection.take_output():
                    assert len(answer) < 1 << 16
                if connection.closed:
                    break
        except RemoteProtocolError:
            closed += 1
            assert connection.closed
            assert connection.receive(b"\0" * 100) == []
    assert closed > 0


def test_what_a_daemon_may_send(rng):
    """A client takes answers, ignores notices that it does not know, or gives the connection up."""
    replies = [
        Welcome(id=1, version=1),
        StatusReport(id=2, body={"a": [1, {"b": None}]}),
        effects.Loaded(
            id=3,
            lease=1,
            pool_id="ab",
            keys=(BLOCK.id.key,),
            slots=(4,),
            generations=(1,),
            sources=("cpu",),
        ),
        effects.LookedUp(id=4, found=bytes((KeyState.HIT,)), prefix=1, lease=1, leased=1),
        effects.Revoked(id=0, fence=3),
        effects.Refused(id=5, code=effects.ErrorCode.BUSY, message="x"),
        effects.Done(id=6, count=2),
    ]
    mutator = Mutator(rng, [encode(reply) for reply in replies])
    refused = 0
    for _ in range(FRAMES):
        link = Link(None, "fuzz")
        link.open()
        try:
            link.feed(mutator.framed())
        except RemoteProtocolError:
            refused += 1
    assert refused > 0


def test_what_lies_on_a_disk_or_in_a_bucket(rng):
    """A header is right in every byte or a FormatError; one that was sealed again may lie: no crash."""
    good = fs_format.encode(BLOCK, fs_format.digest(bytes(4096)))
    offset, metadata, _, _ = fs_format.unseal(good)
    mutator = Mutator(rng, [bytes(metadata)])
    accepted = 0
    for number in range(FRAMES):
        region = bytearray(good)
        if number % 2:
            found = mutator.payload()[: offset - fs_format.PREFIX_BYTES - 8]
            region[fs_format.PREFIX_BYTES : fs_format.PREFIX_BYTES + len(found)] = found
            for _ in range(rng.choice((0, 0, 1))):
                region[rng.randrange(fs_format.PREFIX_BYTES)] = rng.randrange(256)
            region[offset - 8 : offset] = xxhash.xxh3_64_digest(bytes(region[: offset - 8]))
            data = bytes(region)
        else:
            data = mutator.mutate(good)
        try:
            header = fs_format.decode(data)
        except fs_format.FormatError:
            continue
        accepted += 1
        assert number % 2 or data[:offset] == good, "only who seals it again can change a byte"
        fs_format.encode(header.block, header.payload_digest)
    assert accepted > 0


def test_what_a_journal_may_hold(rng):
    """Torn or unreadable, or entries; a journal that lies is no crash."""
    writer = records.RecordWriter()
    bodies = [
        writer.changes(1.0, [TierEvent(EventKind.STORED, "disk", Medium.STORAGE, Locality.LOCAL, BLOCK)]),
        writer.kept(2.0, [(LABEL, BLOCK)]),
        writer.mark(3.0, records.Mark.SETTLED),
    ]
    mutator = Mutator(rng, [body[8:] for body in bodies])
    outcomes = {"read": 0, "torn": 0, "unreadable": 0}
    for _ in range(FRAMES):
        data = records.header("boot")
        for _ in range(3):
            body = mutator.payload()
            data += len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
        if rng.random() < 0.3:
            data = mutator.mutate(data)
        file, reader = io.BytesIO(data), records.HistoryReader(2.0)
        try:
            records.read_header(file)
            reader.generation()
            for record in records.read_records(file):
                reader.take(record)
            reader.finish(whole=True)
            outcomes["read"] += 1
        except records.Torn:
            outcomes["torn"] += 1
        except records.Unreadable:
            outcomes["unreadable"] += 1
    assert all(outcomes.values()), outcomes


def test_what_a_slot_table_may_hold(rng):
    """Torn or unreadable, or a state of the pool that recovery can look at; a table that lies is no crash."""
    golden = TABLE.read_bytes()
    file = io.BytesIO(golden)
    frames.read_magic(file, slot_records.MAGIC, slot_records.MAGIC[:6], "a slot table")
    magic = golden[: file.tell()]
    bodies = list(frames.bodies(file))
    mutator = Mutator(rng, bodies)
    outcomes = {"read": 0, "torn": 0, "unreadable": 0}
    for _ in range(FRAMES):
        data = magic + frames.checked(bodies[0])
        for body in bodies[1:]:
            data += frames.checked(mutator.payload() if rng.random() < 0.3 else body)
        if rng.random() < 0.2:
            data = mutator.mutate(data)
        reader = slot_records.SlotReader()
        try:
            reader.read(io.BytesIO(data))
            outcomes["read"] += 1
        except frames.Torn:
            outcomes["torn"] += 1
        except frames.Unreadable:
            outcomes["unreadable"] += 1
    assert all(outcomes.values()), outcomes


def engine_batches():
    stored = kvevents.BlockStored(
        block_hashes=(1, 2),
        parent_block_hash=3,
        token_ids=(1, 2),
        block_size=1,
        lora_id=None,
        lora_name=None,
        medium="GPU",
    )
    removed = kvevents.BlockRemoved(block_hashes=(1,), medium="GPU")
    return [
        kvevents.encode_batch(1.0, [stored, removed, kvevents.AllBlocksCleared()], 0, form)
        for form in kvevents.Form
    ]


def test_what_an_engine_may_publish(rng):
    """A relayed batch is taken, or nothing; what it says can be told on."""
    mutator = Mutator(rng, engine_batches())
    cache, taken = EngineCache(), 0
    for number in range(FRAMES):
        if number % 500 == 0:
            cache = EngineCache()
        told = cache.take(mutator.payload())
        if told is not None:
            taken += 1
            for event in told.events:
                kvevents.encode_batch(1.0, [event], 0)
    assert taken > 0


def test_what_a_relays_record_may_hold(rng):
    """It is read up to what is torn; what is whole and a lie is no crash."""
    mutator = Mutator(rng, engine_batches())
    for _ in range(FRAMES // 10):
        kinds = list(relay_records.Kind)
        data = b"".join(
            relay_records.encode(
                relay_records.Record(rng.choice(kinds), rng.randrange(5), 1.0, mutator.payload())
            )
            for _ in range(4)
        )
        if rng.random() < 0.3:
            data = mutator.mutate(data)
        relay_records.recover(data, EngineCache(), tail=1.0)


def test_what_a_tier_file_may_say(rng, tmp_path):
    """It loads, or is refused in words; never a traceback."""
    mutator = Mutator(rng, [CONFIG.read_bytes()])
    path = tmp_path / "tiers.yaml"
    refused = 0
    for _ in range(max(100, FRAMES // 200)):
        path.write_bytes(mutator.payload())
        try:
            load_tier_file(path, {})
        except ConfigError:
            refused += 1
    assert refused > 0
