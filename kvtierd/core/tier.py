"""A tier: what is resident in it, and its own queue of events for placement changes that really happened."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvtierd.core.gate import Gate
from kvtierd.core.geometry import UNIT, Geometry
from kvtierd.core.ledger import Ledger, Placed, Shaped, Vacated
from kvtierd.core.model import (
    Block,
    BlockId,
    BlockKey,
    Departure,
    EventKind,
    Layout,
    Locality,
    Medium,
    State,
    TierEvent,
)
from kvtierd.core.pace import ReadPace
from kvtierd.core.policies.base import Policy
from kvtierd.core.policies.fair import Fair
from kvtierd.core.policies.lru import Lru
from kvtierd.core.residency import PoolNode, ResidentSet, StoredNode
from kvtierd.core.slots import Arena, ExtentMap
from kvtierd.core.stimuli import TierLimits
from kvtierd.core.tenants import Account, Accounts, Tenants

UNWELCOME_LIMIT = 1 << 16

_LEFT = {why: f"left_{why.value}" for why in Departure}
_EVICTED = frozenset({Departure.CAPACITY, Departure.CROWDED})


@dataclass(frozen=True, slots=True)
class TierSpec:
    """What the tier file says of a tier. ``capacity`` and ``budget`` in bytes; ``None`` means unbounded.

    ``estimate`` gives the bytes that a block will occupy; ``budget`` bounds bytes in flight to the tier;
    ``ttl`` in seconds; ``on_evict``: written when the pool evicts a block, not when one is stored;
    ``shared``: other daemons write there too. ``max_load_time``: a hit that would take more seconds is none.
    ``shares``: bytes that tenants are sure of, by their names.
    """

    name: str
    medium: Medium
    locality: Locality | None = None
    events: bool = True
    policy: Callable[[], Policy] | None = None
    capacity: int | None = None
    budget: int = 256 << 20
    estimate: Callable[[Block], int] = lambda block: block.payload_bytes
    ttl: float | None = None
    on_evict: bool = False
    shared: bool = False
    max_load_time: float | None = None
    shares: Mapping[str, int] = field(default_factory=dict)


class Tier:
    """Name, labels, event queue, accounts and counters: what primary and secondaries have in common."""

    def __init__(self, spec: TierSpec, tenants: Tenants) -> None:
        self.spec = spec
        self.accounts = Accounts(tenants, spec.shares)
        self.name = spec.name
        self.counters: Counter[str] = Counter()
        self.last_fault = ""
        self._queue: list[TierEvent] = []

    def announce(self, kind: EventKind, block: Block) -> None:
        """Queue one placement change, once per change."""
        self.counters["stored" if kind is EventKind.STORED else "removed"] += 1
        spec = self.spec
        if spec.events:
            self._queue.append(TierEvent(kind, spec.name, spec.medium, spec.locality, block))

    def count(self, why: Departure, account: Account) -> None:
        """Count a visible block that leaves, and whose it was."""
        self.counters[_LEFT[why]] += 1
        if why in _EVICTED:
            self.counters["evictions"] += 1
            account.evicted += 1

    def take_events(self) -> list[TierEvent]:
        """Return and empty the queue, oldest first."""
        events, self._queue = self._queue, []
        return events


class PoolSpace:
    """One layout's share of the pool: its slots and the blocks in them."""

    def __init__(
        self, layout: Layout, geometry: Geometry, extents: ExtentMap, policy: Policy, account: Account
    ) -> None:
        self.layout = layout
        self.account = account
        self.namespace = layout.namespace()
        self.geometry = geometry
        self.arena = Arena(extents, geometry.units)
        self.blocks: ResidentSet[PoolNode] = ResidentSet(policy)
        self.index = self.blocks.of(self.namespace)
        """The layout's nodes by key."""
        self.sessions: set[int] = set()
        self.promoting = 0
        """Slots of promotions under way or not read yet."""
        self.unread: dict[BlockKey, str] = {}
        """Blocks of the set that were promoted, and are not counted yet for the tier that they came from."""
        self.leaving: set[PoolNode] = set()
        """Nodes that left the set but are pinned: their slots are not free yet."""
        self.awaited: set[bytes] = set()
        """Processes that attached to an earlier daemon and may come back for their blocks."""

    @property
    def attached(self) -> bool:
        """Whether an engine uses this layout, or is about to come back to it."""
        return bool(self.sessions or self.awaited)

    def shape(self) -> Shaped:
        """Return what there is to write down of it, but for its blocks."""
        extents = ((extent.start, extent.units) for extent in self.arena.extents)
        return Shaped(self.layout, tuple(extents))

    def most_slots(self) -> int:
        """Return how many slots the layout would have with all that no other layout holds."""
        return self.arena.slots + self.arena.free_units // self.arena.slot_units

    def unpin(self, node: PoolNode) -> None:
        """Take a pin away and free the slot of a node that was only waiting for that."""
        self.blocks.unpin(node)
        if node.state is State.GONE and not node.pins:
            self.leaving.discard(node)
            self.arena.give(node.slot)

    def drop(self, node: PoolNode) -> None:
        """Take a node out of the set; its slot is freed now or with its last pin."""
        self.blocks.remove(node)
        if self.unread:
            self.unread.pop(node.block.key, None)
        if node.pins:
            self.leaving.add(node)
        else:
            self.arena.give(node.slot)


class PrimaryTier(Tier):
    """The CPU tier: the slots of the pool ARE its storage."""

    def __init__(self, spec: TierSpec, pool_units: int, tenants: Tenants) -> None:
        super().__init__(spec, tenants)
        self.ledger = Ledger()
        self.extents = ExtentMap(pool_units)
        self.spaces: dict[str, PoolSpace] = {}

    def nodes(self) -> Iterator[PoolNode]:
        """Iterate over the blocks of all layouts."""
        for space in self.spaces.values():
            yield from space.blocks

    def units_for(self, account: Account) -> int:
        """Return how many of the free units an account may take."""
        self.settle()
        return self.accounts.room(account, self.extents.free_units * UNIT) // UNIT

    def settle(self) -> None:
        """Bring up to date what each account holds: a sum over layouts, made when somebody asks."""
        self.accounts.forget_held()
        for space in self.spaces.values():
            space.account.held += space.arena.slots * space.geometry.slot_bytes

    def space_of(self, node: PoolNode) -> PoolSpace:
        """Return the layout's share that a node lives in."""
        return self.spaces[node.block.common.namespace]

    def get(self, block_id: BlockId) -> PoolNode | None:
        """Return a block's node in any state."""
        space = self.spaces.get(block_id.namespace)
        return space.blocks.get(block_id) if space is not None else None

    def resident(self, block_id: BlockId) -> PoolNode | None:
        """Return a block's node if it is visible."""
        node = self.get(block_id)
        return node if node is not None and node.state is State.RESIDENT else None

    def unpin(self, nodes: Iterable[PoolNode]) -> None:
        """Take a pin of each away, wherever the nodes live."""
        spaces = self.spaces
        for node in nodes:
            spaces[node.block.common.namespace].unpin(node)

    def forget(self, node: PoolNode, why: Departure) -> None:
        """Take a block away and announce that, if it was visible."""
        space, visible = self.space_of(node), node.state is State.RESIDENT
        space.drop(node)
        if visible:
            self.count(why, space.account)
            if self.ledger.on:
                self.ledger.note(Vacated(node.slot))
            self.announce(EventKind.REMOVED, node.block)

    def abandon(self, node: PoolNode) -> None:
        """Take a block away that nobody can see yet."""
        self.space_of(node).drop(node)

    def publish(self, nodes: Collection[PoolNode]) -> None:
        """Make reserved or loading blocks visible and announce them."""
        for node in nodes:
            node.state = State.RESIDENT
        if self.ledger.on:
            for node in nodes:
                self.ledger.note(Placed(node.slot, node.generation, node.block))
        self._tell("stored", nodes)

    def restored(self, nodes: Collection[PoolNode]) -> None:
        """Queue blocks that were visible before the daemon started, as :meth:`publish` does for new ones."""
        self._tell("restored", nodes)

    def _tell(self, counter: str, nodes: Collection[PoolNode]) -> None:
        self.counters[counter] += len(nodes)
        if self.spec.events:
            kind, name, medium, locality = EventKind.STORED, self.name, self.spec.medium, self.spec.locality
            self._queue += [TierEvent(kind, name, medium, locality, node.block) for node in nodes]


class SecondaryTier(Tier):
    """A tier below the pool, kept by a backend; its content is known from this index alone.

    ``used`` counts resident blocks, ``writing`` and ``deleting`` what operations in flight occupy, so that
    the three together never exceed the capacity.
    """

    def __init__(self, spec: TierSpec, tenants: Tenants) -> None:
        super().__init__(spec, tenants)
        make = spec.policy or Lru
        self.blocks: ResidentSet[StoredNode] = ResidentSet(
            Fair(self.accounts, make) if spec.shares else make()
        )
        self.used = 0
        self.writing = 0
        self.deleting = 0
        self.in_flight = 0
        self.wanted: OrderedDict[BlockId, None] = OrderedDict()
        """Blocks to be written when there is budget and room; not pinned, dropped when evicted before."""
        self.deletes: dict[BlockId, int] = {}
        """Bytes of blocks whose deletion is in flight: no other operation may name them."""
        self.gate = Gate(spec.budget)
        self.loading = ReadPace(spec.max_load_time)
        self.retried: set[BlockId] = set()
        """Blocks whose write failed once; the next failure is the last."""
        self.leaving: dict[str, set[BlockId]] = {}
        """By namespace: blocks that are wanted or being written because the pool wants to evict them."""
        self.stuck: dict[BlockId, int] = {}
        """Bytes of blocks that left the index but could not be deleted; they take room until they can."""
        self.stuck_bytes = 0
        self.ages: OrderedDict[BlockId, float] = OrderedDict()
        """When each block was last used, oldest first; kept only with a ttl."""
        self.overdue: OrderedDict[BlockId, None] = OrderedDict()
        """Blocks past the ttl that could not leave yet, as parents of younger ones; not in ``ages``."""
        self.unaged: OrderedDict[BlockId, None] = OrderedDict()
        """Blocks from before there was a ttl, whose age begins soon; not in ``ages``."""
        self.asked: dict[BlockId, int] = {}
        """Blocks that a probe in flight looks for, and its number; not those that left meanwhile."""
        self.doomed: set[BlockId] = set()
        """Blocks whose write is in flight and unwanted by now."""
        self.scanning = True
        self.unannounced: dict[BlockId, None] = {}
        """Found by the scan, to be announced when it ends."""
        self.removed_in_scan: set[BlockId] = set()
        """Blocks that left while the scan ran: if it comes across them, it saw what was there before."""
        self.unwelcome: set[BlockId] = set()
        """Blocks that were to leave before the scan came across them."""
        self.unwelcome_namespaces: set[str] = set()
        """Namespaces that were reset while the scan ran."""
        self.all_unwelcome = False
        """Whether everything was."""

    def retune(self, limits: TierLimits) -> None:
        """Put other limits in force; that it holds no more than it may is left to others."""
        if limits.ttl is None:
            for ages in (self.ages, self.overdue, self.unaged):
                ages.clear()
        elif self.spec.ttl is None:
            visible = (node for node in self.blocks if node.state is State.RESIDENT)
            self.unaged = OrderedDict.fromkeys(node.block.id for node in visible)
        self.spec = dataclasses.replace(
            self.spec,
            capacity=limits.capacity,
            budget=limits.budget,
            ttl=limits.ttl,
            max_load_time=limits.max_load_time,
        )
        self.gate.budget, self.loading.bound = limits.budget, limits.max_load_time

    def resident(self, block_id: BlockId) -> StoredNode | None:
        """Return a block's node if it is visible."""
        return self.blocks.resident(block_id)

    def busy(self, block_id: BlockId) -> bool:
        """Whether an operation on the block is in flight, so that no other may start."""
        node = self.blocks.get(block_id)
        return block_id in self.deletes or (node is not None and node.state is State.WRITING)

    def fits(self, size: int) -> bool:
        """Whether ``size`` more bytes fit now, with all that is in flight."""
        capacity = self.spec.capacity
        held = self.used + self.writing + self.deleting + self.stuck_bytes
        return capacity is None or held + size <= capacity

    def stick(self, block_id: BlockId, size: int) -> None:
        """Note that a block could not be deleted: it takes room, and is skipped from now on."""
        self.counters["undeletable"] += 1
        self.stuck[block_id] = size
        self.stuck_bytes += size

    def unstick(self, block_id: BlockId) -> int:
        """Forget that a block could not be deleted; returns its bytes (0: it was not stuck)."""
        size = self.stuck.pop(block_id, 0)
        self.stuck_bytes -= size
        return size

    def unwant(self, block_id: BlockId) -> None:
        """Take a block out of the queue of those to be written."""
        self.wanted.pop(block_id, None)
        self.left(block_id)

    def left(self, block_id: BlockId) -> bool:
        """Note that a block leaves the pool for this tier no more; whether it did."""
        leaving = self.leaving.get(block_id.namespace)
        if leaving is None or block_id not in leaving:
            return False
        leaving.discard(block_id)
        if not leaving:
            del self.leaving[block_id.namespace]
        return True

    def refuse_found(self, block_id: BlockId) -> None:
        """Note that a block has to leave should the scan come across it."""
        if len(self.unwelcome) < UNWELCOME_LIMIT:
            self.unwelcome.add(block_id)
        else:  # too much goes, which costs a hit; too little could be a wrong one
            self.unwelcome_namespaces.add(block_id.namespace)

    def refuse_all_found(self, namespaces: Collection[str] | None) -> None:
        """Note that the scan has to remove all of these namespaces (``None``: of any)."""
        if namespaces is None:
            self.all_unwelcome = True
        else:
            self.unwelcome_namespaces.update(namespaces)

    def is_unwelcome(self, block_id: BlockId) -> bool:
        """Whether a block that the scan came across has to leave."""
        return (
            self.all_unwelcome
            or block_id in self.unwelcome
            or block_id.namespace in self.unwelcome_namespaces
        )

    def touch(self, namespace: str, keys: Sequence[BlockKey], now: float) -> int:
        """Note a use of the blocks that are there, the first one last; return how many those are."""
        find, touch, count = self.blocks.of(namespace).get, self.blocks.touch, 0
        aging = self.spec.ttl is not None
        for key in reversed(keys):
            if (node := find(key)) is None:
                continue
            touch(node)
            count += 1
            if aging and node.state is State.RESIDENT:
                self.used_at(node.block.id, now)
        return count

    def used_at(self, block_id: BlockId, when: float) -> None:
        """Note a use for the ttl."""
        if self.spec.ttl is not None:
            self.overdue.pop(block_id, None)
            self.unaged.pop(block_id, None)
            self.ages[block_id] = when
            self.ages.move_to_end(block_id)

    def add(self, node: StoredNode) -> None:
        """Put a block into the set, whatever its state, on its tenant's account."""
        node.account = account = self.accounts.of(node.block.namespace)
        account.held += node.size
        account.blocks += 1
        self.blocks.add(node)

    def remove(self, node: StoredNode) -> None:
        """Take a block out of the set and off its tenant's account."""
        self.blocks.remove(node)
        assert node.account is not None, node
        node.account.held -= node.size
        node.account.blocks -= 1

    def resize(self, node: StoredNode, size: int) -> None:
        """Take in what a block of the set really occupies."""
        assert node.account is not None, node
        node.account.held += size - node.size
        node.size = size

    def show(self, node: StoredNode, now: float) -> None:
        """Make a block of the set visible and announce it."""
        node.state = State.RESIDENT
        self.used += node.size
        if self.spec.ttl is not None:
            self.used_at(node.block.id, now)
        self.announce(EventKind.STORED, node.block)

    def forget(self, node: StoredNode, why: Departure) -> None:
        """Take a visible block out and announce that, unless nobody was told of it yet."""
        self.remove(node)
        assert node.account is not None, node
        self.count(why, node.account)
        self.used -= node.size
        block_id = node.block.id
        for notes in (self.ages, self.overdue, self.unaged, self.asked):
            if notes:  # as hardly ever; to look an id up costs more
                notes.pop(block_id, None)
        if self.scanning:
            self.removed_in_scan.add(block_id)
        if self.unannounced and block_id in self.unannounced:
            del self.unannounced[block_id]
        else:
            self.announce(EventKind.REMOVED, node.block)
