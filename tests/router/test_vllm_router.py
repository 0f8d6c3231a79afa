"""vLLM's router, fed by a real daemon, credits what the daemon's inventory says; alone and beside Dynamo.

It credits a prefix by its slowest tier: 0.8 a token while all of it is in CPU, 0.3 once blocks on disk
extend it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import pytest

from kvtierd.testing.clock import wait_for
from kvtierd.testing.local_daemon import free_port

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


def credit(cpu: int, disk: int) -> int:
    return int(disk * 0.3) if disk > cpu else int(cpu * 0.8)


def credits_truth(router: Any, pod: Any, *chains: Any) -> None:
    """Wait until the router credits every prompt as the daemon's inventory has it."""
    for made in chains:
        expected = credit(*pod.truth(made))
        wait_for(lambda: router.credited(made.tokens) == expected, f"the router to credit {expected}")  # noqa: B023


def agree(pod: Any, indexers: list[Any], routers: list[Any], *chains: Any) -> None:
    """Wait until everybody believes what the daemon's inventory says of every prompt."""
    for made in chains:
        expected = pod.truth(made)
        for indexer in indexers:
            wait_for(lambda: indexer.query(made.tokens) == expected, f"Dynamo to answer {expected}")  # noqa: B023
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
