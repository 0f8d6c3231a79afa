"""Who blocks belong to, and how tenants share a tier: accounts with a share each.

A tenant within its share never loses a block for one that is over its own; who is furthest over loses
first. Below the pool that is a matter of eviction (:class:`kvtierd.core.policies.fair.Fair`). The pool's
slots cannot change hands one by one, so there the unused part of a share stays free for its tenant
(:meth:`Accounts.room`).

The number of accounts is bounded whatever engines call themselves: with tenants in the tier file these and
``other``, else the first ``NAMED`` that come and ``other``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OTHER = "other"
"""All tenants without an account of their own; with tenants in the tier file also engines without any."""
NONE = "none"
"""Engines that name no tenant, where the tier file names none either."""
NAMED = 32
NAME_LENGTH = 64
NAMESPACES = 16384
"""Of so many namespaces the tenant is known; of any beyond, it is ``other``."""


class Tenants:
    """By which name the tenant of a namespace goes. ``named``: those of the tier file."""

    def __init__(self, named: Sequence[str] = ()) -> None:
        self._fixed = bool(named)
        self._names = dict.fromkeys(named)
        self._of: dict[str, str] = {}

    def learn(self, namespace: str, tenant: str | None) -> None:
        """Take in whose a namespace is, as its layout says."""
        if namespace not in self._of and len(self._of) < NAMESPACES:
            self._of[namespace] = self._name(tenant)

    def _name(self, tenant: str | None) -> str:
        name = NONE if not tenant else tenant[:NAME_LENGTH]
        if name not in self._names and not self._fixed and len(self._names) < NAMED:
            self._names[name] = None
        return name if name in self._names else OTHER

    def of(self, namespace: str) -> str:
        """Return the account's name for a namespace; ``other`` where nobody said whose it is."""
        return self._of.get(namespace, OTHER)

    @property
    def names(self) -> tuple[str, ...]:
        """All names there are by now, ``other`` last."""
        return (*(name for name in self._names if name != OTHER), OTHER)


@dataclass(eq=False, slots=True)
class Account:
    """What one tenant has in one tier.

    ``share``: bytes that it is sure of. ``held``: bytes that its blocks take, those being written included;
    in the pool the bytes of its slots, free ones too. ``blocks``: their number, counted below the pool only.
    """

    name: str
    share: int = 0
    held: int = 0
    blocks: int = 0
    evicted: int = 0

    @property
    def excess(self) -> int:
        """Bytes over the share; negative within it."""
        return self.held - self.share


@dataclass(slots=True)
class Accounts:
    """A tier's accounts. Without ``shares`` they only count."""

    tenants: Tenants
    shares: Mapping[str, int] = field(default_factory=dict)
    floor: float = -math.inf
    """Accounts lose blocks only while their excess is above this."""
    _accounts: dict[str, Account] = field(default_factory=dict)

    def of(self, namespace: str) -> Account:
        """Return the account that a namespace's new blocks belong to."""
        return self.named(self.tenants.of(namespace))

    def named(self, name: str) -> Account:
        """Return the account of this name."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name, self.shares.get(name, 0))
        return account

    def forget_held(self) -> None:
        """Take everybody for empty; whoever counts adds up anew."""
        for account in self._accounts.values():
            account.held = 0

    def losers(self) -> list[Account]:
        """Return the accounts that may lose blocks now, who is furthest over its share first."""
        may = [account for account in self._accounts.values() if account.excess > self.floor]
        may.sort(key=lambda account: (-account.excess, account.name))
        return may

    def room(self, account: Account, free: int) -> int:
        """Return how many of ``free`` bytes an account may take: up to its share, and what no share keeps."""
        kept = 0
        for name, share in self.shares.items():
            if name != account.name:
                kept += max(0, share - self.named(name).held)
        return max(min(-account.excess, free), free - kept, 0)
