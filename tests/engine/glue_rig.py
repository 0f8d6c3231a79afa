"""What the checks of the vLLM glue share: requests, identities, managers and workers over fake sessions."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from fake_session import FakePipeline, spec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from kvtierd.core.model import Group, Layout
from kvtierd.engines.vllm.identity import GroupShape, Identity
from kvtierd.engines.vllm.manager import KvtierdManager
from kvtierd.engines.vllm.transfer import WorkerReport
from kvtierd.engines.vllm.worker import KvtierdWorker

PAGE = 1024
TOKENS = 4


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def identity(*, ranks=1, rank=0, groups=1, chunk=1, **more):
    shapes = tuple(
        GroupShape(
            group=g,
            tokens_per_block=TOKENS,
            blocks_per_chunk=chunk,
            hashes_per_chunk=chunk,
            full_attention=g == 0,
            spec_kind="full_attention" if g == 0 else "sliding_window",
            sliding_window=None if g == 0 else 8,
        )
        for g in range(groups)
    )
    group = Group(tokens_per_block=TOKENS * chunk, block_bytes=2 * PAGE * chunk)
    layout = Layout(model="m", dtype="d", layout="l", groups=(group,) * groups, ranks=ranks)
    return Identity(layout=layout, engine_id="e", dp_rank=0, rank=rank, shapes=shapes, **more)


def request(blocks, name="r", **more):
    return SimpleNamespace(
        request_id=name,
        block_hashes=[bytes([7]) * 28 + n.to_bytes(4, "big") for n in range(1, blocks + 1)],
        all_token_ids=list(range(blocks * TOKENS + 1)),
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
        trace_headers=None,
        **{"kv_transfer_params": None, **more},
    )


def keys_of(req, group=0, chunk=1):
    return [make_offload_key(h, group) for h in req.block_hashes[chunk - 1 :: chunk]]


def manager(session, who=None, **settings):
    made = KvtierdManager(spec(**settings))
    clock = Clock()
    made._lookups._clock = made._jobs._clock = clock
    made.bind(FakePipeline(session), who or identity())
    return made, clock


def tracked(made, req):
    made.track(req)
    return ReqContext(req_id=req.request_id)


def prepare_store(made, keys, context):
    """Prepare a store as vLLM does within a step, and flush it at once, so that it has its slots."""
    output = made.prepare_store(keys, context)
    if output is not None:
        end_step(made, output.store_spec, flush=True)
    return output


def prepare_load(made, keys, context):
    """Prepare a load as vLLM does within a step, to the step's end."""
    spec = made.prepare_load(keys, context)
    end_step(made)
    return spec


def end_step(made, *stores, flush=False):
    """End the building of a step with these stores; ``flush``: vLLM wants their blocks back at once."""
    jobs = {spec.ticket: SimpleNamespace(dst_spec=spec) for spec in stores}
    return made.fill(SimpleNamespace(store_jobs=jobs, jobs_to_flush=set(jobs) if flush else None))


def step(made):
    made.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))


def worker(session, who=None, *, blocks=8, tensors=2, groups=1, chunk=1, copier=None):
    caches = [
        torch.randint(-128, 127, (blocks, PAGE), dtype=torch.int8, generator=torch.Generator().manual_seed(t))
        for t in range(tensors)
    ]
    refs = [[CanonicalKVCacheRef(t, PAGE) for t in range(tensors)] for _ in range(groups)]
    canonical = CanonicalKVCaches([CanonicalKVCacheTensor(c, PAGE) for c in caches], refs)
    who = who or identity(groups=groups, chunk=chunk)
    made = KvtierdWorker(session, who, canonical, chunk, copier)
    return made, caches


def gpu(blocks, sizes=None, indices=None):
    sizes = sizes or [len(blocks)]
    return GPULoadStoreSpec(blocks, sizes, indices or [0] * len(sizes))


def finish(made):
    results = made.get_finished()
    assert all(result.success for result in results), "vLLM's worker dies of an unsuccessful transfer"
    return [result.job_id for result in results]


def report(made):
    return made.take_report(WorkerReport())


def store(made, copier, req, context, blocks, job=1):
    output = prepare_store(made, keys_of(req), context)
    assert copier.submit_store(job, gpu(blocks), output.store_spec) is True
    assert finish(copier) == [job]
    told = report(copier)
    made.note_failures(told)
    made.complete_store(set(output.keys_to_store), context)
    return output
