"""Several tenants in one tier, each with a policy of its own: who is furthest over its share loses first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtierd.core.policies.base import Policy

if TYPE_CHECKING:
    from kvtierd.core.residency import Node
    from kvtierd.core.tenants import Account, Accounts


class Fair:
    """Looks at each account for a victim; their number is bounded (:mod:`kvtierd.core.tenants`)."""

    def __init__(self, accounts: Accounts, make: Callable[[], Policy]) -> None:
        self._accounts = accounts
        self._make = make
        self._policies: dict[str, Policy] = {}

    def _of(self, node: Node) -> Policy:
        return self._policies[self._account_of(node)]

    @staticmethod
    def _account_of(node: Node) -> str:
        account: Account | None = getattr(node, "account", None)  # only tiers below the pool have them
        assert account is not None, node
        return account.name

    def inserted(self, node: Node) -> None:
        """Tell the policy of the block's tenant."""
        name = self._account_of(node)
        if name not in self._policies:
            self._policies[name] = self._make()
        self._of(node).inserted(node)

    def touched(self, node: Node) -> None:
        """Tell the policy of the block's tenant."""
        self._of(node).touched(node)

    def offer(self, node: Node) -> None:
        """Tell the policy of the block's tenant."""
        self._of(node).offer(node)

    def withdraw(self, node: Node) -> None:
        """Tell the policy of the block's tenant."""
        self._of(node).withdraw(node)

    def removed(self, node: Node, *, evicted: bool) -> None:
        """Tell the policy of the block's tenant."""
        self._of(node).removed(node, evicted=evicted)

    def victim(self) -> Node | None:
        """Return the block that the first tenant which may lose one, and has one to lose, gives up."""
        for account in self._accounts.losers():
            policy = self._policies.get(account.name)
            node = policy.victim() if policy is not None else None
            if node is not None:
                return node
        return None
