"""vLLM's router, fed by a real daemon, credits what the daemon's inventory says; alone and beside Dynamo.

It credits 1 a token on the GPU, and what extends that by its slowest tier: 0.8 while all of it is in CPU, 0.3
once blocks on disk are part of it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvtierd.testing.clock import wait_for
from kvtierd.testing.fake_publisher import FakePublisher
from kvtierd.testing.local_daemon import free_port
from kvtierd.testing.lossy_proxy import LossyProxy
from kvtierd.wire.kvevents import BlockRemoved, BlockStored

from .conftest import PATIENCE

pytestmark = [pytest.mark.router, pytest.mark.slow, pytest.mark.timeout(240)]


def audience(name: str, preset: str, **more: Any) -> dict[str, Any]:
    ports = {key: f"tcp://127.0.0.1:{free_port()}" for key in ("bind", "replay")}
    return {"name": name, "preset": preset, **ports, **more}


def free_pair() -> int:
    """Return a loopback port that was free a moment ago, and so was the next."""
    while True:
        port = free_port()
        with socket.socket() as following, contextlib.suppress(OSError):
            following.bind(("127.0.0.1", port + 1))
            return port


def credit(made: Any, gpu: int, cpu: int, disk: int) -> int:
    """Return what it credits of a prompt; of a whole one, the last block has to be computed again."""
    credited = gpu + int((disk - gpu) * 0.3 if disk > cpu else (cpu - gpu) * 0.8)
    return credited if credited < len(made.tokens) else len(made.tokens) - 16


def comes_to(ask: Callable[[], Any], expected: Any, who: str) -> None:
    """Wait until a router says this."""
    seen: list[Any] = []

    def right() -> bool:
        seen[:] = [ask()]
        return bool(seen == [expected])

    try:
        wait_for(right, who, timeout=PATIENCE)
    except TimeoutError:
        raise AssertionError(f"{who} says {seen[0]}, not {expected}") from None


def credits_truth(router: Any, pod: Any, *chains: Any) -> None:
    """Wait until the router credits every prompt as the daemon's inventory has it."""
    for made in chains:
        expected = credit(made, *pod.whole_truth(made))
        comes_to(partial(router.credited, made.tokens), expected, "the router")


def agree(pod: Any, indexers: list[Any], routers: list[Any], *chains: Any) -> None:
    """Wait until everybody believes what the daemon's inventory says of every prompt at a quiet point."""
    pod.settle()
    for made in chains:
        expected = pod.whole_truth(made)
        for indexer in indexers:
            comes_to(partial(indexer.tiers, made.tokens), expected, "Dynamo")
    for router in routers:
        credits_truth(router, pod, *chains)


def test_both_routers_follow_one_daemon_through_its_whole_life(
    make_pod: Callable[..., Any], start_indexer: Callable[[], Any], start_vllm_router: Callable[..., Any]
) -> None:
    pod = make_pod(audiences=[audience("dynamo", "dynamo"), audience("vllm", "vllm-router")], ring_batches=20)

    def another() -> tuple[Any, Any]:
        indexer = start_indexer()
        indexer.register(pod.ends["dynamo"]["bind"], pod.ends["dynamo"]["replay"], block_size=pod.tokens)
        return indexer, start_vllm_router(pod.ends["vllm"])

    indexer, router = another()
    first, second = pod.chain(1, 6), pod.chain(2, 6)
    pod.store(first.blocks)
    assert pod.truth(first) == (96, 96)
    agree(pod, [indexer], [router], first, second)

    pod.store(second.blocks)  # the pool has room for two of the first one's blocks
    assert pod.truth(first) == (32, 96)
    agree(pod, [indexer], [router], first, second)

    pod.load(first.blocks)  # promoted again
    assert pod.truth(first) == (96, 96)
    agree(pod, [indexer], [router], first, second)

    more = [pod.chain(seed, 6) for seed in range(3, 7)]  # more than the disk holds
    for made in more:
        pod.store(made.blocks)
    assert pod.truth(first) != (96, 96)
    agree(pod, [indexer], [router], first, second, *more)

    indexers, routers = zip((indexer, router), another(), strict=True)  # late: the ring has wrapped
    agree(pod, list(indexers), list(routers), first, second, *more)

    pod.session.reset(["disk"])  # of one tier: nobody forgets the other
    assert pod.truth(more[-1]) == (96, 96)
    agree(pod, list(indexers), list(routers), first, second, *more)

    pod.store(first.blocks)
    assert pod.stop() == 0
    pod.start()
    assert pod.truth(first) == (0, 96)
    agree(pod, list(indexers), list(routers), first, second, *more)
    pod.load(first.blocks)
    agree(pod, list(indexers), list(routers), first, second, *more)
    events = pod.daemon_status()["events"]
    assert not any(one["unmatched_removals"] for one in events["audiences"].values())


def on_device(block: Any) -> BlockStored:
    """An engine's own event."""
    meta = block.meta
    return BlockStored(
        meta.hashes, meta.parent, meta.token_ids, meta.block_size, None, "GPU", None, group_idx=0,
        kv_cache_spec_kind="full_attention",
    )  # fmt: skip


def test_both_routers_follow_losses_kills_and_the_engines_restart(
    make_pod: Callable[..., Any], start_indexer: Callable[[], Any], start_vllm_router: Callable[..., Any]
) -> None:
    """L18, L24, L31: through proxies that lose and repeat what they are told to; the replays go direct."""
    relay = {key: f"tcp://127.0.0.1:{free_port()}" for key in ("connect", "replay")}
    pod = make_pod(
        audiences=[audience("dynamo", "dynamo"), audience("vllm", "vllm-router")],
        ring_batches=20,
        relay=[relay],
    )
    with contextlib.ExitStack() as stack:
        proxies = {name: stack.enter_context(LossyProxy(end["bind"])) for name, end in pod.ends.items()}

        def another() -> tuple[Any, Any]:
            ends = {name: {**end, "bind": proxies[name].endpoint} for name, end in pod.ends.items()}
            indexer = start_indexer()
            dynamo = ends["dynamo"]
            indexer.register(dynamo["bind"], dynamo["replay"], block_size=pod.tokens)
            return indexer, start_vllm_router(ends["vllm"])

        engine = stack.enter_context(FakePublisher(**relay_ends(relay)))
        first, second, third = (pod.chain(seed, 6) for seed in range(3))
        chains = [first, second, third]
        readers = [another()]

        def check() -> None:
            agree(pod, [one for one, _ in readers], [one for _, one in readers], *chains)

        pod.store(first.blocks)
        check()

        for proxy in proxies.values():
            proxy.lose(1)
        pod.store(second.blocks)
        wait_for(lambda: all(proxy.lost == 1 for proxy in proxies.values()), "a message to be lost")
        check()
        for proxy in proxies.values():
            proxy.repeat(3)
        pod.load(first.blocks)
        check()

        engine.publish(*map(on_device, third.blocks))  # only on the GPU
        pod.on_device = {block.key for block in third.blocks}
        check()
        engine.publish(BlockRemoved(third.blocks[5].meta.hashes, "GPU", 0))
        pod.on_device.discard(third.blocks[5].key)
        check()

        for proxy in proxies.values():
            proxy.lose(1)  # of what is told after the kill, too
        pod.kill()
        pod.start()
        assert pod.truth(first)[0] == 0
        check()

        for seed in range(3, 9):  # more batches than the ring has
            chains.append(pod.chain(seed, 3))
            pod.store(chains[-1].blocks)
        readers.append(another())
        check()

        engine.close()
        engine = stack.enter_context(FakePublisher(**relay_ends(relay)))
        pod.on_device = set()
        check()
        engine.publish(*map(on_device, first.blocks[:2]))
        pod.on_device = {block.key for block in first.blocks[:2]}
        check()
        for proxy in proxies.values():
            assert proxy.lost == 2
        assert pod.daemon_status()["events"]["relay"]["engines"][0]["restarts"] <= 1


def relay_ends(relay: dict[str, str]) -> dict[str, str]:
    """Where the engine publishes what the relay connects to."""
    return {"endpoint": relay["connect"], "replay": relay["replay"]}


def test_blocks_stored_before_their_parents_count_when_the_parents_come(
    make_pod: Callable[..., Any], start_vllm_router: Callable[..., Any]
) -> None:
    """The router drops a block whose parent it does not know; also one that joins only then."""
    pod = make_pod(audiences=[audience("vllm", "vllm-router")], ring_batches=2)
    early = start_vllm_router(pod.ends["vllm"])
    made, other = pod.chain(1, 4), pod.chain(2, 3)
    pod.store(made.blocks[2:])
    pod.store(other.blocks)
    wait_for(lambda: pod.daemon_status()["events"]["orphans"] == 4, "two orphans in two tiers")
    credits_truth(early, pod, made, other)
    late = start_vllm_router(pod.ends["vllm"])
    credits_truth(late, pod, other)
    pod.store(made.blocks[:2])
    assert pod.truth(made) == (64, 64)
    for router in (early, late):
        credits_truth(router, pod, made, other)


def test_the_router_takes_numbers_that_begin_anew_for_a_new_start(
    make_pod: Callable[..., Any], start_vllm_router: Callable[..., Any]
) -> None:
    """What ``renumber_after`` rests on; without it a late router would want every number since the first."""
    limit = 1 << 16
    pod = make_pod(audiences=[audience("vllm", "vllm-router", renumber_after=limit)])
    made, other = pod.chain(1, 6), pod.chain(2, 2)
    assert pod.stop() == 0
    state = pod.daemon.folder / "state"
    (state / "next-sequence-vllm").unlink(missing_ok=True)
    (state / "sequence-vllm").write_text(str(limit - 4))
    pod.start()
    early = start_vllm_router(pod.ends["vllm"])
    pod.store(made.blocks)
    credits_truth(early, pod, made)
    wait_for(
        lambda: pod.daemon_status()["events"]["renumbered"] == 1, "the numbers to begin anew", timeout=20
    )
    pod.store(other.blocks)
    late = start_vllm_router(pod.ends["vllm"])
    for router in (early, late):
        credits_truth(router, pod, made, other)
    assert max(late.numbers()) < 100
    assert "incarnation 1" in early.text()


def test_every_dp_rank_has_its_stream_and_shared_blocks_count_for_each(
    make_pod: Callable[..., Any], start_vllm_router: Callable[..., Any]
) -> None:
    """L119: the router drops batches of another rank than the endpoint's, and credits ranks apart."""
    port, replay = free_pair(), free_pair()
    ports = {"bind": f"tcp://127.0.0.1:{port}", "replay": f"tcp://127.0.0.1:{replay}"}
    pod = make_pod(audiences=[{"name": "vllm", "preset": "vllm-router", "rank_ports": 2, **ports}])
    assert pod.ends["vllm.1"]["bind"] == f"tcp://127.0.0.1:{port + 1}"
    first = pod.chain(1, 4)
    pod.store(first.blocks)
    rank_1 = start_vllm_router(pod.ends["vllm"], pod.ends["vllm.1"])
    credits_truth(rank_1, pod, first)
    with pod.attached(dp_rank=1):
        wait_for(lambda: any(rank_1.numbers(1)), "batches of rank 1")
        second = pod.chain(2, 3)
        pod.store(second.blocks)
        credits_truth(rank_1, pod, first, second)
