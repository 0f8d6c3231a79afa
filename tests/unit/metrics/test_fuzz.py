"""L134: whatever a tier's storage answers, counters never fall and the exporter is up."""

from __future__ import annotations

import random

import pytest

from kvtierd.core.effects import Delete, Probe, Read, Write
from kvtierd.core.stimuli import FoundBlock, Outcome, Status
from kvtierd.edges.backends.memory import MemoryBackend
from kvtierd.edges.metrics.exporter import Exporter
from kvtierd.edges.metrics.family import Figures
from kvtierd.testing.backend_kit import block
from kvtierd.testing.mover_bench import MoverBench, at, run

FALLING = ("in_flight", "in_flight_blocks", "in_flight_bytes", "oldest_seconds", "now", "readers", "writers")


class Liar(MemoryBackend):
    """Answers anything."""

    def __init__(self, seed):
        super().__init__("ram")
        self.random = random.Random(seed)

    def answer(self, ids):
        ids = list(ids)
        match self.random.randrange(8):
            case 0:
                raise OSError("broken")
            case 1:
                return None
            case 2:
                ids = ids[1:]
            case 3:
                ids = [*ids, *ids]
            case 4:
                self.random.shuffle(ids)
            case 5:
                return [Outcome(block_id, Status.OK, stored_bytes=-(1 << 40)) for block_id in ids]
        return [
            Outcome(block_id, self.random.choice(list(Status)), stored_bytes=self.random.randrange(1 << 50))
            for block_id in ids
        ]

    def write(self, transfers):
        return self.answer(transfer.block.id for transfer in transfers)

    read = write

    def delete(self, ids, *, corrupt=False):
        return self.answer(ids)

    def probe(self, ids):
        if self.random.randrange(3) == 0:
            raise OSError("broken")
        some = [block(self.random.randrange(40)) for _ in range(self.random.randrange(9))]
        return [FoundBlock(one, -5) for one in self.random.choice([some, [*some, *some], []])]


def numbers(tree, path=()):
    """Yield (path, value) of all counters in a tree of figures."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from numbers(value, (*path, name))
        elif isinstance(value, int | float) and name not in FALLING:
            yield (*path, name), value


@pytest.mark.parametrize("seed", range(6))
def test_figures_only_grow_whatever_a_backend_answers(plan, seed):
    @run
    async def scene():
        async with MoverBench(inner=Liar(seed)) as bench:
            seen = {}
            for op in range(60):
                ids = tuple(block(number).id for number in range(op % 7 + 1))
                effects = (
                    Write(op, "ram", at(*range(op % 7 + 1))),
                    Read(op, "ram", at(*range(op % 7 + 1))),
                    Delete(op, "ram", ids),
                    Probe(op, "ram", ids),
                )
                effect = effects[(op + seed) % 4]
                bench.mover.submit(effect)
                await (bench.answer(op) if isinstance(effect, Probe) else bench.outcomes(op))
                figures = bench.mover.statistics()
                now = dict(numbers(figures))
                assert all(now[path] >= value for path, value in seen.items())
                seen = now
                status = {"state": "ready", "movers": {"disk": figures}}
                histograms = {
                    ("operation", "disk", kind): took for kind, took in bench.mover.durations.items()
                }
                text = Exporter(lambda: Figures(status, plan, histograms)).render("")[1].decode()  # noqa: B023
                assert 'kvtierd_tier_errors_total{kind="exception",tier="disk"}' in text
                assert "-" not in "".join(
                    line.rpartition(" ")[2][0] for line in text.splitlines() if "_total{" in line
                )
            assert not any(figures[kind]["in_flight_bytes"] for kind in ("read", "write", "delete", "probe"))

    scene()
