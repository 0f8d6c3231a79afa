"""From an object tier of the tier file to its backend."""

from __future__ import annotations

from functools import partial

from kvtierd.config.object_store import split_url
from kvtierd.config.schema import ObjectTier
from kvtierd.edges.backends.object import ObjectBackend
from kvtierd.edges.backends.object_store import connect


def make_object_backend(tier: ObjectTier) -> ObjectBackend:
    """Return the backend of a tier whose url is a bucket's, not opened yet."""
    return ObjectBackend(
        tier.name,
        partial(connect, tier),
        place=tier.url,
        prefix=split_url(tier.url)[2],
        deadline=tier.deadline,
        request_timeout=tier.request_timeout,
        retries=tier.retries,
        list_at_start=not tier.shared,
    )
