"""A set of blocks that can only be evicted from the leaves of their prefix chains.

A block is a *leaf* when no block in the set names one of its hashes as parent. Blocks that are being written
count as well, so a store protects its parent from the moment of its reservation, and a chain can never evict
its own ancestors to make room for itself. Children are counted by the parent's event hash, not by pointer, so
a child may arrive before its parent.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, cast

import msgspec

from kvtierd.core.model import Block, BlockId, BlockKey, State, group_of, hash_of
from kvtierd.core.policies.base import Policy
from kvtierd.core.presence import Presence
from kvtierd.core.tenants import Account

Link = int | bytes | tuple[int, int | bytes]
"""What names a block among those of its namespace: its event hash, outside group 0 with the group."""

_LOOKS = 32
"""Blocks that one search for a victim spares at most."""

_RECONSIDERED = 4


class Node(msgspec.Struct, gc=False, eq=False):
    """One block in one tier.

    ``pins`` counts who needs the bytes to stay: jobs, leases, running operations, quarantines; a node that is
    GONE keeps its slot until the last one is taken away. ``parent`` is an event hash, ``children`` counts the
    blocks of the set that name this one; the set sees to both. ``touch`` (time of the last use, in
    insertions), ``hits``, ``stamp``, ``place`` and ``shelf`` are the policy's.

    It may refer to nothing that leads back to it: the garbage collector does not see it. So a million of them
    cost it nothing, and as a struct one is made in a third of the time. With what a tier adds it takes 112
    bytes, which is a size that Python's allocator has; one more field costs 16 a block.
    """

    block: Block
    state: State
    pins: int = 0
    parent: Link | None = None
    children: int = 0
    touch: int = 0
    hits: int = 0
    stamp: int = 0
    place: int = -1
    shelf: int = -1

    @property
    def link(self) -> Link:
        """The event hash that children name."""
        return links_of(self.block)[0]

    def __repr__(self) -> str:
        name = hash_of(self.block.key)[-4:].hex()
        return f"<{name} {self.state.value} pins={self.pins}>"


class PoolNode(Node, gc=False, eq=False, kw_only=True):
    """One block in the pool, and where: a slot's unit, and the number of its reservation."""

    slot: int = -1
    generation: int = 0

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]} slot={self.slot}>"


class StoredNode(Node, gc=False, eq=False, kw_only=True):
    """One block in a secondary tier: the bytes that it takes there, and whose it is."""

    size: int = 0
    account: Account | None = None


N = TypeVar("N", bound=Node)


def size_of(node: Node, slot_bytes: int) -> int:
    """Return the bytes that a block takes where it is; ``slot_bytes``: what it does in the pool."""
    return node.size if isinstance(node, StoredNode) else slot_bytes


class Family(Generic[N]):
    """A namespace's blocks, by key and by event hash."""

    __slots__ = ("nodes", "orphans", "owners")

    def __init__(self) -> None:
        self.nodes: dict[BlockKey, N] = {}
        self.owners: dict[Link, N | list[N]] = {}
        """A list only where several blocks share one event hash."""
        self.orphans: dict[Link, int] = {}
        """How many blocks name a parent that is not in the set."""

    def owners_of(self, link: Link) -> Sequence[N]:
        """Return the blocks with this event hash."""
        there = self.owners.get(link)
        if there is None:
            return ()
        return there if isinstance(there, list) else (there,)

    def own(self, link: Link, node: N) -> None:
        """Note the block by its event hash; children may be there already."""
        there = self.owners.setdefault(link, node)
        if there is node:
            if self.orphans:
                node.children = self.orphans.pop(link, 0)
        elif isinstance(there, list):
            node.children = there[0].children
            there.append(node)
        else:
            node.children = there.children
            self.owners[link] = [there, node]

    def disown(self, link: Link, node: N) -> None:
        """Forget the block by its event hash; the last one leaves its children as orphans."""
        there = self.owners[link]
        if isinstance(there, list) and len(there) > 1:
            there.remove(node)
            return
        del self.owners[link]
        if node.children:
            self.orphans[link] = node.children


class ResidentSet(Generic[N]):
    """Blocks of one tier (or of one layout in the pool) under one policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._spared: OrderedDict[N, None] = OrderedDict()
        """Leaves taken from the policy because ``spare`` said so; entries can be stale."""
        self.spare: Callable[[BlockId], bool] | None = None
        """Whether a block should rather stay, as one whose copy to another tier is still to be made."""
        self.presence: Presence | None = None
        """Is told of each block that comes or goes, in any state."""
        self._families: dict[str, Family[N]] = {}
        """By namespace, so that a request's keys are found as they come off the wire."""

    def __len__(self) -> int:
        return sum(len(family.nodes) for family in self._families.values())

    def __iter__(self) -> Iterator[N]:
        return itertools.chain.from_iterable(family.nodes.values() for family in self._families.values())

    def _family(self, namespace: str) -> Family[N]:
        family = self._families.get(namespace)
        if family is None:
            family = self._families[namespace] = Family()
        return family

    def of(self, namespace: str) -> dict[BlockKey, N]:
        """Return a namespace's nodes by key, in any state; the same mapping for the life of the set."""
        return self._family(namespace).nodes

    def namespaces(self) -> list[str]:
        """Return the namespaces that have blocks here, in any state."""
        return [namespace for namespace, family in self._families.items() if family.nodes]

    def get(self, block_id: BlockId) -> N | None:
        """Return the block's node in any state."""
        family = self._families.get(block_id.namespace)
        return None if family is None else family.nodes.get(block_id.key)

    def known(self, block_id: BlockId) -> N:
        """Return the node of a block that is in the set."""
        return self._families[block_id.namespace].nodes[block_id.key]

    def resident(self, block_id: BlockId) -> N | None:
        """Return the block's node if it is visible."""
        node = self.get(block_id)
        return node if node is not None and node.state is State.RESIDENT else None

    def add(self, node: N) -> None:
        """Put a block in and protect its parent. Its id must not be in the set."""
        namespace = node.block.common.namespace
        self._enter(self._families.get(namespace) or self._family(namespace), node)
        if not node.pins:
            self.offer(node)

    def fill(self, namespace: str, nodes: Collection[N]) -> None:
        """Put many blocks in, as :meth:`add` does, without offering those that soon turn out to be parents.

        Raises:
            KeyError: one is in the set already; the set is of no use then.
        """
        family = self._family(namespace)
        for node in nodes:
            self._enter(family, node)
        for node in nodes:
            if not node.children:
                self.offer(node)

    def _enter(self, family: Family[N], node: N) -> None:
        key = node.block.key
        if family.nodes.setdefault(key, node) is not node:
            raise KeyError(key)
        if self.presence is not None:
            self.presence.add(key)
        link, parent = links_of(node.block)
        family.own(link, node)
        if parent is not None:
            self._protect(node, family, link, parent)
        self._policy.inserted(node)

    def _protect(self, node: N, family: Family[N], link: Link, parent: Link) -> None:
        """Count a child for its parent's hash; with the first one its owners can go no more."""
        if parent == link or (node.children and self._closes_a_cycle(link, family, parent)):
            return  # such a ring of parents could never be evicted
        node.parent = parent
        owner = family.owners.get(parent)
        if owner is None:
            family.orphans[parent] = family.orphans.get(parent, 0) + 1
            return
        for each in owner if isinstance(owner, list) else (owner,):
            each.children += 1
            if each.place >= 0:
                self._policy.withdraw(each)

    def remove(self, node: N) -> None:
        """Take a block out; its parent may become evictable. A pinned node keeps its slot till unpinned."""
        block = node.block
        family = self._families[block.common.namespace]
        del family.nodes[block.key]
        if self.presence is not None:
            self.presence.remove(block.key)
        evicted, node.state = node.state is State.RESIDENT, State.GONE
        if node.place >= 0:
            self._policy.withdraw(node)
        family.disown(node.link, node)
        self._policy.removed(node, evicted=evicted)
        if node.parent is not None:
            self._leave(family, node.parent)

    def _leave(self, family: Family[N], parent: Link) -> None:
        """Count a child less for its parent's hash; with the last one its owners may go."""
        owner = family.owners.get(parent)
        if owner is None:
            family.orphans[parent] -= 1
            if not family.orphans[parent]:
                del family.orphans[parent]
            return
        for each in owner if isinstance(owner, list) else (owner,):
            each.children -= 1
            if not each.children:
                self.offer(each)

    def pin(self, node: N) -> None:
        """Keep the block's bytes in place."""
        node.pins += 1
        if node.place >= 0:
            self._policy.withdraw(node)

    def unpin(self, node: N) -> None:
        """Take one pin away; a block without pins may be evicted."""
        assert node.pins > 0, node
        node.pins -= 1
        if not (node.pins or node.children):
            self.offer(node)

    def touch(self, node: N) -> None:
        """Note a use of the block."""
        self._policy.touched(node)

    def victim(self) -> N | None:
        """Return the block that eviction takes next, or ``None`` when all are pinned or parents.

        Blocks that ``spare`` speaks for go last. A spared leaf protects its whole chain.
        """
        if self._spared:
            self._reconsider()
        looks = 0
        while (node := cast("N | None", self._policy.victim())) is not None:
            if not self.evictable(node):
                self._withdraw(node)  # somebody raised its pins past this set
                continue
            if looks == _LOOKS or self.spare is None or not self.spare(node.block.id):
                return node
            self._withdraw(node)
            self._spared[node] = None
            looks += 1
        while self._spared:
            node = next(iter(self._spared))
            if node.place < 0 and self.evictable(node):
                return node
            del self._spared[node]
        return None

    def _reconsider(self) -> None:
        """Look again at a few spared blocks, the longest spared first."""
        for _ in range(min(_RECONSIDERED, len(self._spared))):
            node, _none = self._spared.popitem(last=False)
            if node.place >= 0 or not self.evictable(node):
                continue
            if self.spare is not None and self.spare(node.block.id):
                self._spared[node] = None
            else:
                self.offer(node)

    @staticmethod
    def evictable(node: Node) -> bool:
        """Whether the block is in its set, unpinned and a leaf."""
        return not (node.pins or node.children or node.state is State.GONE)

    def orphans(self) -> dict[str, dict[Link, int]]:
        """Return by namespace how many blocks name a parent that is not in the set (for validation)."""
        return {name: dict(family.orphans) for name, family in self._families.items() if family.orphans}

    def offer(self, node: N) -> None:
        """Let the policy have the block if it may be evicted and is not offered yet."""
        if node.place < 0 and self.evictable(node):
            self._policy.offer(node)

    def _withdraw(self, node: N) -> None:
        if node.place >= 0:
            self._policy.withdraw(node)

    @staticmethod
    def _closes_a_cycle(own: Link, family: Family[N], parent: Link) -> bool:
        seen: set[Link] = set()
        links = [parent]
        while links:
            link = links.pop()
            if link == own:
                return True
            if link not in seen:
                seen.add(link)
                owners = family.owners_of(link)
                links += [owner.parent for owner in owners if owner.parent is not None]
        return False


def links_of(block: Block) -> tuple[Link, Link | None]:
    """Return a block's own link and that of its parent."""
    group = group_of(block.key)
    link, parent = block.told_as, block.parent
    if isinstance(link, tuple):
        link = link[-1]
    if not group:
        return link, parent
    return (group, link), (group, parent) if parent is not None else None


def leaf_first(nodes: Iterable[N]) -> list[N]:
    """Order blocks so that each comes before its parent (a ring, which ``add`` prevents, would be cut)."""
    families: dict[str, list[N]] = {}
    for node in nodes:
        families.setdefault(node.block.namespace, []).append(node)
    return [node for family in families.values() for node in _leaf_first(family)]


def _leaf_first(nodes: Sequence[N]) -> list[N]:
    children = Counter(node.parent for node in nodes)
    owners: dict[Link | None, list[N]] = {}
    for node in nodes:
        if node.link in children:
            owners.setdefault(node.link, []).append(node)
    ready = [node for node in nodes if node.link not in children]
    ordered: list[N] = []
    while ready:
        node = ready.pop()
        ordered.append(node)
        children[node.parent] -= 1
        if not children[node.parent]:
            ready.extend(owners.get(node.parent, ()))
    return ordered


def root_first(nodes: Iterable[N]) -> list[N]:
    """Order blocks so that each comes after its parent."""
    return leaf_first(nodes)[::-1]
