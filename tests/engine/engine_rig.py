"""A real vLLM engine on the CPU in this process, and all that the phases look at. For vLLM's environment."""

from __future__ import annotations

import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)

import contextlib
import random
import struct
import threading

import msgspec
import zmq
from tiny_model import VOCABULARY
from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from kvtierd.client import Client
from kvtierd.engines.vllm import worker
from kvtierd.testing.clock import wait_for

BLOCK = 32
NEW_TOKENS = 12
SALT = "tenant-a"
CONNECTOR = {
    "kv_connector": "KvtierdConnector",
    "kv_connector_module_path": "kvtierd.engines.vllm",
    "kv_role": "kv_both",
}
SPEC = {"spec_name": "KvtierdOffloadingSpec", "spec_module_path": "kvtierd.engines.vllm"}


def prompts(count=6, seed=11):
    """Prompts of 4 to 6 blocks over two shared prefixes; the last one carries a salt."""
    rng = random.Random(seed)

    def tokens(number):
        return [rng.randrange(3, VOCABULARY) for _ in range(number)]

    shared = [tokens(3 * BLOCK), tokens(2 * BLOCK)]
    made = []
    for number in range(count):
        tail = tokens(rng.randrange(BLOCK + 5, 3 * BLOCK))
        made.append({"prompt_token_ids": shared[number % 2] + tail})
    made[-1]["cache_salt"] = SALT
    return made


def different_blocks(asked):
    """How many different full blocks a list of prompts has."""
    chains = set()
    for prompt in asked:
        tokens, salt = prompt["prompt_token_ids"], prompt.get("cache_salt")
        chains |= {(salt, *tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)}
    return len(chains)


def engine(model, connector=None, events=None, **options):
    """Start an engine. ``connector``: extra settings of the glue; ``events``: (endpoint, replay endpoint).

    ``options`` are vLLM's own and go before the ones here.
    """
    if connector is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            **CONNECTOR, kv_connector_extra_config={**SPEC, "kvtierd_deadline": 5.0, **connector}
        )
    if events is not None:
        options["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=events[0], replay_endpoint=events[1]
        )
    usual = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 64,
        "max_model_len": 640,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    return LLM(model, **(usual | options))


def sampling(new_tokens=NEW_TOKENS):
    return SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)


def generate(llm, asked, new_tokens=NEW_TOKENS, **options):
    """Return each prompt's new tokens, and how many of its tokens came out of a cache."""
    outputs = llm.generate(asked, sampling(new_tokens), use_tqdm=False, **options)
    return [list(o.outputs[0].token_ids) for o in outputs], [o.num_cached_tokens for o in outputs]


def generate_stepwise(llm, asked, at_step, do):
    """As :func:`generate` without the counts, but calls ``do`` after ``at_step`` engine steps."""
    core = llm.llm_engine
    for number, prompt in enumerate(asked):
        core.add_request(f"stepwise-{number}", prompt, sampling())
    done, steps = {}, 0
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps == at_step:
            do()
    assert steps > at_step, "the generation was over before the point of interest"
    return [done[f"stepwise-{number}"] for number in range(len(asked))]


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def sessions_of(llm):
    """The glue's sessions in this process: the scheduler's and the worker's."""
    return [scheduler_of(llm).connector._manager._session, *(w._session for w in list(worker._workers))]


def stop(llm):
    """Shut the engine down as its process would at its end."""
    llm.llm_engine.engine_core.shutdown()


class Tool:
    """A second session in the engine's namespace: looks at the inventory, evicts, poisons."""

    def __init__(self, llm, socket):
        self.client = Client(socket, deadline=5.0)
        layout = scheduler_of(llm).connector._manager._session.layout
        self.session = self.client.attach(layout, engine_id="tool", role="scheduler")

    def blocks(self, tier):
        return {entry.key: entry.hashes for entry in self.session.inventory(tier)}

    def counters(self, tier):
        (found,) = [t for t in self.client.status()["tiers"] if t["name"] == tier]
        return found["counters"]

    def wait_on_disk(self, keys):
        wait_for(lambda: set(self.blocks("disk")) >= set(keys), "every block to be on disk", timeout=20)

    def empty_pool(self):
        self.session.evict(list(self.blocks("cpu")), tiers=["cpu"])
        assert self.blocks("cpu") == {}

    def poison(self):
        """Zero every block in the pool, behind everybody's back."""
        for key in self.blocks("cpu"):
            with self.session.load([key], deadline=0.0) as got:
                for view in got.views():
                    view[:] = bytes(len(view))


class Events:
    """Everything that an endpoint publishes, from now on, decoded with vLLM's own structs."""

    def __init__(self, endpoint):
        self.batches = []
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self):
        while not self._stop.is_set():
            if self._socket.poll(50):
                _, seq, payload = self._socket.recv_multipart()
                self.batches.append((int.from_bytes(seq, "big"), self._decoder.decode(payload)))

    def all(self):
        return [event for _, batch in list(self.batches) for event in batch.events]

    def close(self):
        self._stop.set()
        self._thread.join(5)
        self._socket.close(0)


def replayed(endpoint):
    """Ask an engine's replay socket for all that it published."""
    decoder, events = msgspec.msgpack.Decoder(KVEventBatch), []
    with contextlib.closing(zmq.Context.instance().socket(zmq.DEALER)) as socket:
        socket.connect(endpoint)
        socket.send_multipart([b"", struct.pack(">Q", 0)])
        while socket.poll(5000):
            *_, payload = socket.recv_multipart()
            if not payload:
                return events
            events += decoder.decode(payload).events
    raise TimeoutError(f"the replay of {endpoint} did not end; got {len(events)} events")


def by_block(events, medium):
    """What stored events of a medium say of each block: hash -> everything that must be equal elsewhere."""
    said = {}
    for event in events:
        if isinstance(event, BlockStored) and event.medium == medium:
            parent, size = event.parent_block_hash, event.block_size
            for index, block in enumerate(event.block_hashes):
                said[block] = [
                    parent,
                    list(event.token_ids[index * size : (index + 1) * size]),
                    size,
                    event.lora_id,
                    event.lora_name,
                    event.extra_keys[index] if event.extra_keys else None,
                    event.group_idx,
                    event.kv_cache_spec_kind,
                    event.kv_cache_spec_sliding_window,
                ]
                parent = block
    return said
