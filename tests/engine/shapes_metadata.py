"""What events say of blocks with pictures, salts and adapters, beside what vLLM's own block pool says.

vLLM's requests, hashes and events, and a real daemon; no model that could see a picture runs on the CPU in
seconds, and none is needed: the extra keys come out of the request alone.
"""

from __future__ import annotations

import random

import msgspec
from engine_rig import BLOCK, Events, by_block
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from kvtierd.client import Client, Group, KeyState, Layout
from kvtierd.engines.vllm.chain import Chain
from kvtierd.engines.vllm.identity import GroupShape
from kvtierd.testing.clock import wait_for

BLOCKS = 8
CHUNKS = (1, 4)
PICTURES = ((5, 20), (BLOCK - 3, 2 * BLOCK), (3 * BLOCK + 1, 1), (3 * BLOCK + 2, 3 * BLOCK))
"""Offset and length in tokens: within a block, over three, a single token, four; none in the last."""


def metadata(trials):
    """For each kind of request and chunk size: what the engine says, and what is told at each placement."""
    kv_cache_utils.init_none_hash(sha256)
    return {"metadata": {f"{kind}/{chunk}": _told(trials, kind, chunk) for chunk in CHUNKS for kind in KINDS}}


KINDS = {
    "plain": {},
    "salt": {"cache_salt": "tenant-a"},
    "adapter": {"lora": "poet"},
    "pictures": {"pictures": PICTURES},
    "all": {"cache_salt": "tenant-a", "lora": "poet", "pictures": PICTURES},
}


def request(name, *, cache_salt=None, lora=None, pictures=(), tokens=BLOCKS * BLOCK + 3):
    """One of vLLM's own."""
    rng = random.Random(name)
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"picture-{number}-of-{name}",
            mm_position=PlaceholderRange(offset=offset, length=length),
        )
        for number, (offset, length) in enumerate(pictures)
    ]
    return Request(
        request_id=name,
        prompt_token_ids=[rng.randrange(3, 500) for _ in range(tokens)],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
        lora_request=LoRARequest(lora, 3, f"/adapters/{lora}") if lora else None,
        cache_salt=cache_salt,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
    )


def _engine_says(req):
    """The events of vLLM's own block pool, over the wire and back."""
    pool = BlockPool(BLOCKS + 1, True, BLOCK, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(BLOCKS)
    pool.cache_full_blocks(req, blocks, 0, BLOCKS, BLOCK, 0)
    sent = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=pool.take_events()))
    return _fields(by_block(msgspec.msgpack.decode(sent, type=KVEventBatch).events, "GPU"))


def _fields(said):
    """Parent, tokens, block size, adapter's number and name, extra keys; the rest is the model's."""
    return {str(block): what[:6] for block, what in said.items()}


def _told(trials, kind, chunk):
    req = request(f"{kind}-{chunk}", **KINDS[kind])
    shape = GroupShape(0, BLOCK, chunk, chunk, True, "full_attention", None)
    chain = Chain(req, [shape])
    keys = chain.all()
    assert keys == [make_offload_key(h, 0) for h in req.block_hashes[chunk - 1 :: chunk]]
    group = Group(tokens_per_block=BLOCK * chunk, block_bytes=4096)
    layout = Layout(model=f"metadata-{kind}-{chunk}", dtype="d", layout="l", groups=(group,))
    events = Events(trials.rig.daemon.endpoint)
    client = Client(trials.rig.daemon.socket, deadline=10.0)
    try:
        wait_for(lambda: bool(events.batches), "a heartbeat: from now on nothing is missed")
        session = client.attach(layout, engine_id=f"{kind}-{chunk}")
        job = session.prepare_store(keys, meta=[chain.meta(key) for key in keys])
        assert len(job.commit()) == len(keys) == BLOCKS // chunk
        seen = {"engine": _engine_says(req)}
        seen["pool"] = _heard(events, "CPU")
        seen["disk"] = _heard(events, "STORAGE")
        session.evict(keys, ["cpu"])
        del events.batches[:]
        with session.load(keys, deadline=5.0) as got:
            assert len(got.keys) == len(keys)
        seen["promoted"] = _heard(events, "CPU")
        assert set(session.lookup(keys).states) == {KeyState.HIT}
        session.reset()
    finally:
        events.close()
        client.close()
    return seen


def _heard(events, medium):
    wait_for(lambda: len(by_block(events.all(), medium)) == BLOCKS, f"the events of {medium}", timeout=30)
    return _fields(by_block(events.all(), medium))
