"""What grows with the blocks is not for the collector: else one of its passes stops the daemon the longer."""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator

import pytest

from kvtierd.core.geometry import UNIT
from kvtierd.core.model import BlockId, EventKind, Medium, TierEvent
from kvtierd.core.policies import POLICIES
from kvtierd.core.tier import TierSpec
from kvtierd.edges.backends.fs_segments import SlotMap
from kvtierd.testing.books import Books
from kvtierd.testing.events_bench import stored
from kvtierd.testing.rig import LadderRig, key
from kvtierd.wire.hold import Hold
from kvtierd.wire.kvevents import BlockStored, Form, to_wire
from kvtierd.wire.projection import View
from kvtierd.wire.relay import EngineCache, residents

BLOCKS = 2048
BATCH = 32

Grow = Callable[[int], object]
"""Takes so many blocks in that it had not."""


def seen() -> int:
    """Return how many objects a collection walks: those that it can learn to leave alone are."""
    gc.collect()
    return len(gc.get_objects())


@contextlib.contextmanager
def few_seen(most: int) -> Iterator[None]:
    before = seen()
    yield
    more = seen() - before
    assert more <= most, f"{more} more objects for the collector"


def core(policy: str) -> Grow:
    disk = TierSpec("disk", Medium.STORAGE, policy=POLICIES[policy], capacity=BLOCKS * UNIT * 3 // 4)
    rig = LadderRig(BLOCKS // 2, [disk], primary=TierSpec("cpu", Medium.CPU, policy=POLICIES[policy]))
    numbers = itertools.count()

    def grow(blocks: int) -> LadderRig:
        for _ in range(blocks // BATCH):
            rig.store(*itertools.islice(numbers, BATCH))
        for kept in (rig.events, rig.effects, rig.notices, rig.answers):
            kept.clear()
        return rig

    return grow


def stream(view: View) -> Grow:
    books, numbers = Books(view, ring_batches=8), itertools.count()

    def grow(blocks: int) -> None:
        for _ in range(blocks // BATCH):
            books.tell([stored(number) for number in itertools.islice(numbers, BATCH)])

    return grow


def disk() -> Grow:
    slots, numbers = SlotMap(1 << 20), itertools.count()

    def grow(blocks: int) -> None:
        for number in itertools.islice(numbers, blocks):
            ((segment, slot),) = places = slots.take("space", 4096)
            slots.publish(BlockId("space", key(number)), segment, slot)
            slots.wrote(places)

    return grow


def relayed() -> Grow:
    cache, hold, numbers = EngineCache(0), Hold(), itertools.count()

    def grow(blocks: int) -> None:
        for number in itertools.islice(numbers, blocks):
            (event,) = to_wire(TierEvent(EventKind.STORED, "gpu", Medium.CPU, None, stored(number).block))
            assert isinstance(event, BlockStored)
            cache.known.update((one, (event, 0)) for one in residents(0, event))
            hold.note(0, [event])

    return grow


VIEWS = {
    "as it is": View(),
    "many blocks in an event": View(one_block=False),
    "arrays": View(form=Form.ARRAY),
    "each rank": View(each_rank=True),
    "orphans": View(reannounce=True),
}
HOLDERS: dict[str, Callable[[], Grow]] = {
    **{f"core, {policy}": lambda policy=policy: core(policy) for policy in sorted(POLICIES)},
    **{f"stream, {name}": lambda view=view: stream(view) for name, view in VIEWS.items()},
    "packed blocks": disk,
    "an engine's events": relayed,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_blocks_that_stay_are_not_walked_by_the_collector(name: str) -> None:
    HOLDERS[name]()(BATCH)  # what is made once for all
    grow = HOLDERS[name]()
    with few_seen(BLOCKS // 16):
        grow(BLOCKS)
