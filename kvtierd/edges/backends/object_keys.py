"""Names of objects: ``PREFIX/v1/NAMESPACE/SS/HASH.GROUP`` and ``PREFIX/v1/NAMESPACE/namespace.json``.

``SS`` is the hash's last byte in hex: it spreads load over a bucket's partitions. Every name is made from
validated or hex-encoded parts, so none can leave the prefix.
"""

from __future__ import annotations

import re

from kvtierd.core.model import BlockId, block_key, group_of, hash_of

VERSION = "v1"
RECORD = "namespace.json"
_NAMESPACE = re.compile(r"[0-9a-f]{32}", re.ASCII)
_BLOCK = re.compile(
    r"([0-9a-f]{32})/([0-9a-f]{2})/((?:[0-9a-f]{2}){1,64})\.(0|[1-9][0-9]{0,8}|[1-3][0-9]{9})", re.ASCII
)


class Keys:
    """The names below one prefix (no slash at either end; may be empty)."""

    def __init__(self, prefix: str) -> None:
        self.root = f"{prefix}/{VERSION}" if prefix else VERSION

    def block(self, block_id: BlockId) -> str:
        """Return a block's key.

        Raises:
            ValueError: the namespace is none, or the hash or group is out of bounds.
        """
        name = hash_of(block_id.key)
        if not 1 <= len(name) <= 64 or group_of(block_id.key) >= 4 * 10**9:
            raise ValueError("key out of bounds")
        where = f"{self.namespace(block_id.namespace)}/{name[-1:].hex()}"
        return f"{where}/{name.hex()}.{group_of(block_id.key):d}"

    def record(self, namespace: str) -> str:
        """Return the key of a namespace's record; raises ``ValueError`` for one that is none."""
        return f"{self.namespace(namespace)}/{RECORD}"

    def namespace(self, namespace: str) -> str:
        """Return the prefix of a namespace's keys; raises ``ValueError`` for one that is none."""
        if _NAMESPACE.fullmatch(namespace) is None:
            raise ValueError("not a namespace")
        return f"{self.root}/{namespace}"

    def parse(self, path: str) -> BlockId | None:
        """Return the block whose key this is, or None."""
        if not path.startswith(f"{self.root}/"):
            return None
        match = _BLOCK.fullmatch(path[len(self.root) + 1 :])
        if match is None:
            return None
        block_id = BlockId(match[1], block_key(bytes.fromhex(match[3]), int(match[4])))
        return block_id if self.block(block_id) == path else None
