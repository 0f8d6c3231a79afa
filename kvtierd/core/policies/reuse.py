"""How long blocks wait until they are asked for again, learned from a bounded sample of their names.

Ages are in insertions and grouped into half octaves. For each class of blocks the sample gives the share
that was asked for again at each age; from these comes what keeping a block of that age is worth: the best
ratio of hits to block-time that any further stay can have (the Gittins index of the block, which is what
hit density policies such as LHD (Beckmann et al., NSDI 2018) approximate). It rises and falls with age as
the workload has it: with recency it falls, with loops and pauses it rises first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvtierd.core.model import GROUP_BYTES, BlockId

BUCKETS = 96
"""Ages below 2^49, which no block reaches."""

_SAMPLES = 4096
_HORIZON = 16
"""In turnovers of the set: a block that was not asked for in this time counts as never."""

_DECAY = 0.95
_PRIOR = 32.0
"""Made-up blocks in each class, spread over all octaves: without evidence the oldest is worth least."""

_HASH_SPAN = 1 << 32
_MIX = 0x9E3779B1
_SALIENT = slice(-4 - GROUP_BYTES, -GROUP_BYTES)
"""The last bytes of a key's hash."""


def age_bucket(age: int) -> int:
    """Return the bucket of an age: 0, 1, 2 to 3, 4 to 5, 6 to 9 and so on, two for each power of two."""
    age += 2
    bits = age.bit_length()
    return 2 * bits - 4 + (age >> (bits - 2) & 1)


def bucket_start(bucket: int) -> int:
    """Return the lowest age of a bucket."""
    half, odd = divmod(bucket, 2)
    return (2 + odd << half) - 2


_WIDTHS = [bucket_start(bucket + 1) - bucket_start(bucket) for bucket in range(BUCKETS)]


def worth_by_age(hits: Sequence[float], losses: Sequence[float]) -> list[float]:
    """Return, for each age bucket, the best ratio of later hits to later block-time.

    ``hits[b]`` blocks were asked for again at an age in bucket b, ``losses[b]`` were given up there. Walks
    from the oldest age back with the upper hull of (block-time, hits), so it is linear in the buckets.
    """
    left = time = found = 0.0
    hull: list[tuple[float, float]] = [(0.0, 0.0)]
    worth = [0.0] * len(hits)
    for bucket in range(len(hits) - 1, -1, -1):
        ended = hits[bucket] + losses[bucket]
        left += ended
        time -= (left - ended / 2) * _WIDTHS[bucket]
        found -= hits[bucket]
        while len(hull) > 1 and _slope(time, found, hull[-1]) <= _slope(time, found, hull[-2]):
            hull.pop()
        worth[bucket] = _slope(time, found, hull[-1])
        hull.append((time, found))
    return worth


def _slope(time: float, found: float, point: tuple[float, float]) -> float:
    span = point[0] - time
    return (point[1] - found) / span if span > 0 else 0.0


class ReuseTimes:
    """Follows sampled names through uses and evictions alike, so that it also sees what eviction cost."""

    def __init__(self, classes: int) -> None:
        self._last: OrderedDict[BlockId, tuple[int, int]] = OrderedDict()
        """Time and class of each followed name's last use, the longest ago first."""
        self._span = _HASH_SPAN
        self._hits = [[0.0] * BUCKETS for _ in range(classes)]
        self._losses = [[0.0] * BUCKETS for _ in range(classes)]

    def used(self, block_id: BlockId, kind: int, now: int, residents: int) -> None:
        """Note a use of a block that is of class ``kind`` from now on."""
        if self._span < _HASH_SPAN and _mixed(block_id) >= self._span:
            return
        last = self._last
        if (before := last.pop(block_id, None)) is not None:
            self._hits[before[1]][age_bucket(now - before[0])] += 1
        last[block_id] = (now, kind)
        oldest, (since, old_kind) = next(iter(last.items()))
        if now - since > _HORIZON * residents:
            del last[oldest]
            self._losses[old_kind][age_bucket(now - since)] += 1
        if len(last) > _SAMPLES:
            self._halve()

    def _halve(self) -> None:
        """Follow half as many names from now on; which ones is a property of the name."""
        self._span //= 2
        for block_id in [block_id for block_id in self._last if _mixed(block_id) >= self._span]:
            del self._last[block_id]

    def forget(self, block_id: BlockId) -> None:
        """Stop following a block whose last use came to nothing."""
        self._last.pop(block_id, None)

    def worth(self, now: int) -> list[list[float]]:
        """Return each class's worth by age, and let the evidence fade a little."""
        extra = _PRIOR / BUCKETS
        waiting = [[extra] * BUCKETS for _ in self._losses]
        bucket, start = BUCKETS, bucket_start(BUCKETS)
        for since, kind in self._last.values():  # the longest ago first, so that few buckets are looked up
            if now - since < start:
                bucket = age_bucket(now - since)
                start = bucket_start(bucket)
            waiting[kind][bucket] += 1
        worth = []
        for hits, losses, open_ones in zip(self._hits, self._losses, waiting, strict=True):
            ended = [loss + still for loss, still in zip(losses, open_ones, strict=True)]
            worth.append(worth_by_age(_smoothed([hit + extra for hit in hits]), _smoothed(ended)))
        self._hits = [[value * _DECAY for value in row] for row in self._hits]
        self._losses = [[value * _DECAY for value in row] for row in self._losses]
        return worth


def _smoothed(row: Sequence[float]) -> list[float]:
    """Share a quarter of each bucket with either neighbour: one long prompt is many blocks of one age."""
    before, after = [row[0], *row[:-1]], [*row[1:], row[-1]]
    return [(left + 2 * here + right) / 4 for left, here, right in zip(before, row, after, strict=True)]


def _mixed(block_id: BlockId) -> int:
    """Return a number below ``_HASH_SPAN`` that depends on nothing but the name."""
    return int.from_bytes(block_id.key[_SALIENT], "big") * _MIX % _HASH_SPAN
