"""A set of blocks that can only be evicted from the leaves of their prefix chains.

A block is a *leaf* when no block in the set names one of its hashes as parent. Blocks that are being written
count as well, so a store protects its parent from the moment of its reservation, and a chain can never evict
its own ancestors to make room for itself. Children are counted by the parent's event hash, not by pointer, so
a child may arrive before its parent.
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvtierd.core.model import Block, BlockId, BlockKey, group_of, hash_of
from kvtierd.core.policies.base import Policy

if TYPE_CHECKING:
    from kvtierd.core.tenants import Account

Link = tuple[str, int, "int | bytes"]

_LOOKS = 32
"""Blocks that one search for a victim spares at most."""

_RECONSIDERED = 4

_NOBODY: Final[list[int]] = []
"""Shared by all blocks that no load can wait for."""


class State(enum.Enum):
    """A block's state in one tier; only RESIDENT is visible to lookups, events and inventory."""

    RESERVED = "reserved"
    LOADING = "loading"
    WRITING = "writing"
    RESIDENT = "resident"


class Node:
    """One block in one tier.

    ``pins`` counts who needs the bytes to stay: jobs, leases, running operations, quarantines. A node that is
    ``gone`` has left the set but keeps its slot until the last pin is taken away. ``source`` names the tier
    that a promoted block came from. ``touch`` (time of the last use, in insertions), ``hits``, ``stamp``,
    ``place`` and ``shelf`` are the policy's. Only a LOADING block has ``waiters`` (numbers of loads),
    and only one in a secondary tier an ``account`` (whose it is).
    """

    __slots__ = (
        "account",
        "block",
        "generation",
        "gone",
        "hits",
        "link",
        "parent",
        "pins",
        "place",
        "shelf",
        "size",
        "slot",
        "source",
        "stamp",
        "state",
        "touch",
        "waiters",
    )

    def __init__(
        self, block: Block, state: State, *, slot: int = -1, generation: int = 0, size: int = 0
    ) -> None:
        namespace, key = block.id
        self.block = block
        self.state = state
        self.slot = slot
        self.generation = generation
        self.size = size
        self.pins = 0
        self.gone = False
        self.touch = 0
        self.hits = 0
        self.stamp = 0
        self.place = -1
        self.shelf: Any = None
        self.link: Link = (namespace, group_of(key), block.hashes[-1])
        meta = block.meta
        self.parent: Link | None = (
            (namespace, group_of(key), meta.parent) if meta is not None and meta.parent is not None else None
        )
        self.source = ""
        self.account: Account | None = None
        self.waiters: list[int] = [] if state is State.LOADING else _NOBODY

    def __repr__(self) -> str:
        gone = " gone" if self.gone else ""
        name = hash_of(self.block.id.key)[-4:].hex()
        return f"<{name} {self.state.value} slot={self.slot} pins={self.pins}{gone}>"


class ResidentSet:
    """Blocks of one tier (or of one layout in the pool) under one policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._spared: OrderedDict[Node, None] = OrderedDict()
        """Leaves taken from the policy because ``spare`` said so; entries can be stale."""
        self.spare: Callable[[BlockId], bool] | None = None
        """Whether a block should rather stay, as one whose copy to another tier is still to be made."""
        self._nodes: dict[str, dict[BlockKey, Node]] = {}
        """By namespace, so that a request's keys are found as they come off the wire."""
        self._children: dict[Link, int] = {}
        self._owners: dict[Link, Node | list[Node]] = {}
        """By event hash; a list only where several blocks share one."""

    def __len__(self) -> int:
        return sum(map(len, self._nodes.values()))

    def __iter__(self) -> Iterator[Node]:
        return itertools.chain.from_iterable(nodes.values() for nodes in self._nodes.values())

    def of(self, namespace: str) -> dict[BlockKey, Node]:
        """Return a namespace's nodes by key, in any state; the same mapping for the life of the set."""
        nodes = self._nodes.get(namespace)
        if nodes is None:
            nodes = self._nodes[namespace] = {}
        return nodes

    def namespaces(self) -> list[str]:
        """Return the namespaces that have blocks here, in any state."""
        return [namespace for namespace, nodes in self._nodes.items() if nodes]

    def get(self, block_id: BlockId) -> Node | None:
        """Return the block's node in any state."""
        nodes = self._nodes.get(block_id[0])
        return None if nodes is None else nodes.get(block_id[1])

    def known(self, block_id: BlockId) -> Node:
        """Return the node of a block that is in the set."""
        return self._nodes[block_id[0]][block_id[1]]

    def resident(self, block_id: BlockId) -> Node | None:
        """Return the block's node if it is visible."""
        node = self.get(block_id)
        return node if node is not None and node.state is State.RESIDENT else None

    def add(self, node: Node) -> None:
        """Put a block in and protect its parent. Its id must not be in the set."""
        namespace, key = node.block.id
        nodes = self.of(namespace)
        assert key not in nodes, node
        if node.parent is not None and self._closes_a_cycle(node):
            node.parent = None  # such a ring of parents could never be evicted
        nodes[key] = node
        self._own(node)
        if node.parent is not None:
            self._protect(node)
        self._policy.inserted(node)
        self.offer(node)

    def _own(self, node: Node) -> None:
        there = self._owners.get(node.link)
        if there is None:
            self._owners[node.link] = node
        elif isinstance(there, Node):
            self._owners[node.link] = [there, node]
        else:
            there.append(node)

    def _protect(self, node: Node) -> None:
        """Count a child for its parent's hash; with the first one its owners can go no more."""
        assert node.parent is not None
        parents = self._owners_of(node.parent)
        if parents:
            node.parent = parents[0].link  # the same tuple: there are as many as there are blocks
        before = self._children.get(node.parent, 0)
        self._children[node.parent] = before + 1
        if not before:
            for parent in parents:
                self._withdraw(parent)

    def _owners_of(self, link: Link) -> Sequence[Node]:
        there = self._owners.get(link)
        if there is None:
            return ()
        return (there,) if isinstance(there, Node) else there

    def remove(self, node: Node) -> None:
        """Take a block out; its parent may become evictable. A pinned node keeps its slot till unpinned."""
        namespace, key = node.block.id
        del self._nodes[namespace][key]
        node.gone = True
        self._withdraw(node)
        self._disown(node)
        self._policy.removed(node, evicted=node.state is State.RESIDENT)
        if node.parent is None:
            return
        left = self._children[node.parent] - 1
        if left:
            self._children[node.parent] = left
            return
        del self._children[node.parent]
        for parent in self._owners_of(node.parent):
            self.offer(parent)

    def _disown(self, node: Node) -> None:
        there = self._owners[node.link]
        if isinstance(there, Node):
            del self._owners[node.link]
            return
        there.remove(node)
        if not there:
            del self._owners[node.link]

    def pin(self, node: Node) -> None:
        """Keep the block's bytes in place."""
        node.pins += 1
        self._withdraw(node)

    def unpin(self, node: Node) -> None:
        """Take one pin away; a block without pins may be evicted."""
        assert node.pins > 0, node
        node.pins -= 1
        self.offer(node)

    def touch(self, node: Node) -> None:
        """Note a use of the block."""
        self._policy.touched(node)

    def victim(self) -> Node | None:
        """Return the block that eviction takes next, or ``None`` when all are pinned or parents.

        Blocks that ``spare`` speaks for go last. A spared leaf protects its whole chain.
        """
        self._reconsider()
        looks = 0
        while (node := self._policy.victim()) is not None:
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

    def evictable(self, node: Node) -> bool:
        """Whether the block is in the set, unpinned and a leaf."""
        return not node.gone and not node.pins and node.link not in self._children

    def has_children(self, node: Node) -> bool:
        """Whether some block of the set names this one as its parent."""
        return node.link in self._children

    def children_counts(self) -> dict[Link, int]:
        """Return a copy of the child counts (for validation)."""
        return dict(self._children)

    def offer(self, node: Node) -> None:
        """Tell the policy of a block that became evictable; no effect on others."""
        if node.place < 0 and self.evictable(node):
            self._policy.offer(node)

    def _withdraw(self, node: Node) -> None:
        if node.place >= 0:
            self._policy.withdraw(node)

    def _closes_a_cycle(self, node: Node) -> bool:
        if node.parent == node.link:
            return True
        if node.link not in self._children:
            return False
        seen: set[Link] = set()
        links = [node.parent]
        while links:
            link = links.pop()
            if link == node.link:
                return True
            if link is not None and link not in seen:
                seen.add(link)
                links += [owner.parent for owner in self._owners_of(link)]
        return False


def leaf_first(nodes: Iterable[Node]) -> list[Node]:
    """Order blocks so that each comes before its parent (a ring, which ``add`` prevents, would be cut)."""
    nodes = list(nodes)
    children: dict[Link, int] = {}
    for node in nodes:
        if node.parent is not None:
            children[node.parent] = children.get(node.parent, 0) + 1
    owners: dict[Link, list[Node]] = {}
    for node in nodes:
        owners.setdefault(node.link, []).append(node)
    ready = [node for node in nodes if node.link not in children]
    ordered: list[Node] = []
    while ready:
        node = ready.pop()
        ordered.append(node)
        if node.parent is None:
            continue
        children[node.parent] -= 1
        if not children[node.parent]:
            ready.extend(owners.get(node.parent, ()))
    return ordered


def root_first(nodes: Iterable[Node]) -> list[Node]:
    """Order blocks so that each comes after its parent."""
    return leaf_first(nodes)[::-1]
