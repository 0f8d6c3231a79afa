"""What each verb asks and what it makes of the answer, once for both clients and without I/O.

A verb is a generator: it yields a :class:`Verb`, is sent the reply or a :class:`Miss`, and returns the verb's
result. The blocking client drives it with waiting calls, the asyncio client with awaits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec

from kvtierd.client._link import STALE, Miss, R, Verb
from kvtierd.client._mapping import Region
from kvtierd.core import effects, stimuli
from kvtierd.core.effects import InventoryEntry, Skipped
from kvtierd.core.model import BlockKey, BlockMeta, KeyState, Layout, Scope, SkipReason, group_of
from kvtierd.wire.messages import (
    Level,
    LogLevel,
    LogLevelRequest,
    StatusReport,
    StatusRequest,
    SurveyPage,
    SurveyRequest,
)

T = TypeVar("T")
J = TypeVar("J", bound="JobData")
L = TypeVar("L", bound="LoadData")
F = TypeVar("F", bound="LookupData[Any]")
S = TypeVar("S")

Flow: TypeAlias = Generator[Verb[Any], Any, T]

_PAGE = 4096

STATUS = Verb(StatusRequest, StatusReport)


def log_level(level: Level | None) -> Verb[LogLevel]:
    """Return the request that changes or asks for the level of the daemon's log."""
    return Verb(partial(LogLevelRequest, level=level), LogLevel)


def order(request: type[stimuli.Request], reply: type[R], **fields: Any) -> Verb[R]:
    """Return an operator's request; only the control socket takes it."""
    return Verb(partial(request, **fields), reply)


def survey(tier: str | None, cursor: int) -> Verb[SurveyPage]:
    """Return the request for one page of a survey."""
    return Verb(partial(SurveyRequest, tier=tier, cursor=cursor), SurveyPage)


class SessionView(Protocol):
    """What a verb has to know of its session."""

    @property
    def layout(self) -> Layout:
        """The layout that was attached."""

    @property
    def region(self) -> Region | None:
        """The mapping in use."""

    @property
    def epoch(self) -> int:
        """The number of the connection in use."""


class LookupData(msgspec.Struct, Generic[S], eq=False):
    """States of the asked keys and how many leading ones are no MISS.

    ``lease`` (None without one) keeps the first ``leased`` keys (asked ``everywhere``: all HITs) in the pool
    until released or expired. ``sources``: empty, or for each key of the prefix the tier that it is being
    promoted from. ``reason`` is empty, or says why the daemon did not answer.
    """

    session: S
    states: tuple[KeyState, ...]
    prefix: int
    lease: int | None = None
    leased: int = 0
    sources: tuple[str, ...] = ()
    epoch: int = 0
    reason: str = ""


class SlotData(msgspec.Struct, kw_only=True, eq=False):
    """Slots of the pool, one for each key, in the mapping that they belong to."""

    keys: tuple[BlockKey, ...] = ()
    slots: tuple[int, ...] = ()
    pool_id: str = ""
    region: Region | None = None
    epoch: int = 0
    reason: str = ""

    def views(self) -> tuple[memoryview, ...]:
        """Return each key's payload (all ranks' parts and the padding between them) as writable memory.

        They stay in the mapping that the slots were given in, also when the session went to another pool.
        """
        if self.region is None:
            return ()
        sizes = self.region.attached.payload_bytes
        return tuple(
            self.region.slot(slot, sizes[group_of(key)])
            for key, slot in zip(self.keys, self.slots, strict=True)
        )


class JobData(SlotData, kw_only=True, eq=False):
    """Reserved slots: copy into them, then commit. ``skipped`` names the keys without a slot and why."""

    job: int = 0
    generation: int = 0
    skipped: tuple[Skipped, ...] = ()
    open: bool = False


class LoadData(SlotData, kw_only=True, eq=False):
    """Leased slots of the leading keys: copy out of them, then release. ``sources`` names the tiers."""

    lease: int = 0
    generations: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    open: bool = False


def lookup(
    make: Callable[..., F],
    keys: Iterable[BlockKey],
    promote: bool,
    lease: float | None,
    view: SessionView,
    *,
    everywhere: bool = False,
    touch: bool = False,
    scope: Scope | None = None,
) -> Flow[F]:
    """Ask for the state of keys."""
    verb = asked_states(keys, promote, lease, everywhere=everywhere, touch=touch, scope=scope)
    return found_states(make, verb, (yield verb), view.epoch)


def asked_states(
    keys: Iterable[BlockKey],
    promote: bool,
    lease: float | None,
    *,
    everywhere: bool = False,
    touch: bool = False,
    scope: Scope | None = None,
) -> Verb[effects.LookedUp]:
    """Return the request of :func:`lookup`."""
    asked = tuple(keys)

    def build(*, id: int) -> stimuli.Lookup:  # noqa: A002 - a partial with so many names takes twice as long
        return stimuli.Lookup(
            id=id, keys=asked, promote=promote, lease=lease, everywhere=everywhere, touch=touch, scope=scope
        )

    return Verb(build, effects.LookedUp, size=len(asked))


def found_states(
    make: Callable[..., F], verb: Verb[effects.LookedUp], reply: effects.LookedUp | Miss, epoch: int
) -> F:
    """Return what :func:`lookup` makes of the answer."""
    if isinstance(reply, Miss):
        return make((KeyState.MISS,) * verb.size, 0, None, 0, (), 0, reply.reason)
    return make(reply.states, reply.prefix, reply.lease, reply.leased, reply.sources, epoch)


def release_lookup(found: LookupData[Any]) -> Flow[None]:
    """Give a lookup's lease back; nothing happens without one."""
    lease, found.lease, found.leased = found.lease, None, 0
    if lease:
        yield _release(lease, found.epoch)


def prepare_store(
    make: Callable[..., J],
    keys: Iterable[BlockKey],
    meta: Sequence[BlockMeta | None] | None,
    scope: Scope | None,
    view: SessionView,
    traceparent: str | None = None,
) -> Flow[J]:
    """Reserve slots for keys that are not there yet.

    Raises:
        ValueError: ``meta`` is not parallel to ``keys``.
    """
    asked, described = tuple(keys), tuple(meta or ())
    if described and len(described) != len(asked):
        raise ValueError(f"{len(described)} metadata for {len(asked)} keys")
    build = partial(stimuli.PrepareStore, keys=asked, meta=described, scope=scope, traceparent=traceparent)
    reply: effects.Prepared | Miss = yield Verb(build, effects.Prepared)
    if isinstance(reply, Miss):
        return make(reason=reply.reason)
    region = _same_pool(view, reply.pool_id)
    if reply.keys and region is None:
        return make(reason=STALE)
    return make(
        job=reply.job,
        generation=reply.generation,
        pool_id=reply.pool_id,
        keys=reply.keys,
        slots=reply.slots,
        skipped=reply.skipped,
        region=region,
        epoch=view.epoch,
        open=bool(reply.job),
    )


def commit(job: JobData, failed: Iterable[BlockKey]) -> Flow[tuple[BlockKey, ...]]:
    """Make a job's blocks visible; returns the keys that are."""
    if not job.open:
        return ()
    job.open = False
    build = partial(
        stimuli.Commit, job=job.job, generation=job.generation, pool_id=job.pool_id, failed=tuple(failed)
    )
    reply: effects.Committed | Miss = yield Verb(build, effects.Committed, epoch=job.epoch)
    return () if isinstance(reply, Miss) else reply.stored


def abort(job: JobData) -> Flow[None]:
    """Give a job's slots back; no copy into them may be running."""
    if job.open:
        job.open = False
        build = partial(stimuli.Abort, job=job.job)
        yield Verb(build, effects.Done, epoch=job.epoch, ends=True)


def fail(job: int, keys: Iterable[BlockKey]) -> Flow[bool]:
    """Report a worker's failed copies; True when the daemon took note before the commit."""
    build = partial(stimuli.Fail, job=job, keys=tuple(keys))
    reply: effects.Done | Miss = yield Verb(build, effects.Done)
    return not isinstance(reply, Miss)


def load(
    make: Callable[..., L],
    keys: Iterable[BlockKey],
    deadline: float,
    scope: Scope | None,
    view: SessionView,
    traceparent: str | None = None,
) -> Flow[L]:
    """Lease the slots of the leading keys that can be had within ``deadline`` seconds."""
    build = partial(stimuli.Load, keys=tuple(keys), deadline=deadline, scope=scope, traceparent=traceparent)
    reply: effects.Loaded | Miss = yield Verb(build, effects.Loaded, patience=deadline)
    if isinstance(reply, Miss):
        return make(reason=reply.reason)
    region = _same_pool(view, reply.pool_id)
    if reply.keys and region is None:
        return make(reason=STALE)
    return make(
        lease=reply.lease,
        pool_id=reply.pool_id,
        keys=reply.keys,
        slots=reply.slots,
        generations=reply.generations,
        sources=reply.sources,
        region=region,
        epoch=view.epoch,
        open=bool(reply.lease),
    )


def release_load(loaded: LoadData) -> Flow[None]:
    """Give a load's lease back; no copy out of its slots may be running."""
    if loaded.open:
        loaded.open = False
        yield _release(loaded.lease, loaded.epoch)


def put(key: BlockKey, data: bytes | memoryview, meta: BlockMeta | None, view: SessionView) -> Flow[bool]:
    """Store one block, the ranks' parts one after another in ``data``; True when it is in the pool.

    Raises:
        ValueError: ``data`` is not a block of the key's group.
    """
    parts = _part_sizes(view.layout, group_of(key))
    source = memoryview(data).cast("B")
    if len(source) != sum(parts):
        raise ValueError(f"a block of group {group_of(key)} has {sum(parts)} bytes, not {len(source)}")
    job = yield from prepare_store(JobData, [key], [meta], None, view)
    if not job.keys:
        return any(skip.reason is SkipReason.RESIDENT for skip in job.skipped)
    start = 0
    for target in _parts(job, view.layout):
        target[:] = source[start : start + len(target)]
        start += len(target)
    stored = yield from commit(job, ())
    return bool(stored)


def get(key: BlockKey, deadline: float, view: SessionView) -> Flow[bytes | None]:
    """Load one block; returns a copy of the ranks' parts one after another, None when it cannot be had."""
    loaded = yield from load(LoadData, [key], deadline, None, view)
    if not loaded.keys:
        return None
    data = b"".join(_parts(loaded, view.layout))
    yield from release_load(loaded)
    return data


def counted(build: Callable[..., stimuli.Request]) -> Flow[int]:
    """Run a request that is answered with a number of blocks; 0 for a miss."""
    reply: effects.Done | Miss = yield Verb(build, effects.Done)
    return 0 if isinstance(reply, Miss) else reply.count


def evict(keys: Iterable[BlockKey], tiers: Sequence[str] | None) -> Flow[int]:
    """Remove keys from tiers; returns the number of blocks removed."""
    return counted(partial(stimuli.Evict, keys=tuple(keys), tiers=None if tiers is None else tuple(tiers)))


def reset(tiers: Sequence[str] | None) -> Flow[int]:
    """Remove everything of the namespace from tiers; returns the number of blocks removed."""
    return counted(partial(stimuli.Reset, tiers=None if tiers is None else tuple(tiers)))


def prefetch(keys: Iterable[BlockKey]) -> Flow[int]:
    """Start promoting keys; returns how many were started."""
    return counted(partial(stimuli.Prefetch, keys=tuple(keys)))


def touch(keys: Iterable[BlockKey]) -> Flow[int]:
    """Mark keys as just used; returns how many are known."""
    return counted(partial(stimuli.Touch, keys=tuple(keys)))


def renew(held: Iterable[JobData | LoadData | LookupData[Any]]) -> Flow[int]:
    """Give what is still held its whole time again; returns how many the daemon still had."""
    numbers = []
    epoch = 0
    for one in held:
        number = one.job if isinstance(one, JobData) else one.lease
        if number and (isinstance(one, LookupData) or one.open):
            numbers.append(number)
            epoch = one.epoch
    if not numbers:
        return 0
    build = partial(stimuli.Renew, numbers=tuple(numbers))
    reply: effects.Done | Miss = yield Verb(build, effects.Done, epoch=epoch)
    return 0 if isinstance(reply, Miss) else reply.count


def inventory(tier: str | None) -> Flow[list[InventoryEntry]]:
    """Return every residency of the namespace; empty when the daemon goes away on the way."""
    entries: list[InventoryEntry] = []
    cursor = 0
    while True:
        build = partial(stimuli.Inventory, tier=tier, cursor=cursor, limit=_PAGE)
        page: effects.InventoryPage | Miss = yield Verb(build, effects.InventoryPage)
        if isinstance(page, Miss):
            return []
        entries.extend(page.entries)
        cursor = page.cursor
        if cursor == 0:
            return entries


def acknowledge(fence: int | None, epoch: int) -> Flow[int | None]:
    """Say that no copy of revoked jobs and leases runs; returns the fence that the daemon took.

    Fences count anew with each pool, so one that came over an earlier connection says nothing on this one.
    """
    if fence is None:
        return None
    build = partial(stimuli.Acknowledge, fence=fence)
    reply: effects.Done | Miss = yield Verb(build, effects.Done, epoch=epoch)
    return None if isinstance(reply, Miss) else fence


def goodbye() -> Flow[None]:
    """Leave: this session touches the pool no more."""
    yield Verb(stimuli.Goodbye, effects.Done, ends=True)


def _release(lease: int, epoch: int) -> Verb[effects.Done]:
    return Verb(partial(stimuli.Release, lease=lease), effects.Done, epoch=epoch, ends=True)


def _same_pool(view: SessionView, pool_id: str) -> Region | None:
    """Return the mapping in use if it is the one that an answer speaks of: slots of another are garbage."""
    region = view.region
    return region if region is not None and region.pool_id == pool_id else None


def _part_sizes(layout: Layout, group: int) -> tuple[int, ...]:
    if not 0 <= group < len(layout.groups):
        raise ValueError(f"the layout has no group {group}")
    return (layout.groups[group].block_bytes,) * layout.ranks


def _parts(data: SlotData, layout: Layout) -> list[memoryview]:
    """Return the ranks' parts of the first key's slot."""
    assert data.region is not None
    group, view = group_of(data.keys[0]), data.views()[0]
    offsets = data.region.attached.rank_offsets[group]
    sizes = _part_sizes(layout, group)
    return [view[start : start + size] for start, size in zip(offsets, sizes, strict=True)]
