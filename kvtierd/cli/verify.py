"""``kvtierd verify``: proves every block in tiers' storage against its checksums."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from kvtierd.cli.common import table, text
from kvtierd.cli.main import Subparsers
from kvtierd.cli.progress import Progress
from kvtierd.cli.storage import add_storage, opened, refuse_if_alive, shortened, tiers
from kvtierd.errors import ExitCode

if TYPE_CHECKING:
    from kvtierd.core.model import BlockId
    from kvtierd.core.stimuli import Outcome
    from kvtierd.edges.backends.base import Backend
    from kvtierd.edges.backends.fs_upkeep import FsUpkeep

_REASON = re.compile(r"(?P<reason>.+?) \((?P<place>[^()]*/[^()]*)\)")
"""Of a block that does not say whose it is: what is wrong, and where in the tree it lies."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "verify",
        help="prove every block in a tier's storage",
        description="Read every block in the storage of tiers and prove its header and payload; a daemon may"
        " use it meanwhile. Exit code 0: all are good, or with --remove all that were not are out; 74: some"
        " are corrupt or cannot be read.",
    )
    add_storage(parser)
    parser.add_argument(
        "--remove", action="store_true", help="take corrupt blocks out, unless a daemon uses them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per tier and bad block")


def run(args: argparse.Namespace) -> int:
    """Check and print; return 0 or 74."""
    tier_file, chosen = tiers(args)
    if args.remove:
        refuse_if_alive(tier_file, [tier.name for tier in chosen if not tier.shared])
    reports = []
    for tier in chosen:
        report = Report(tier.name)
        reports.append(report)
        with (
            opened(tier, by_path=args.path is not None) as backend,
            Progress(f"verify {tier.name}", _total(backend)) as progress,
        ):
            bad = _printer(tier.name, as_json=args.json)
            check(backend, report, progress, bad, remove=args.remove)
            report.seconds = round(progress.seconds, 3)
    for line in json_lines(reports) if args.json else lines(reports):
        print(line)
    return ExitCode.IO if any(report.left for report in reports) else ExitCode.OK


@dataclass
class Report:
    """What a tier's blocks proved to be; ``bytes`` of the good ones."""

    tier: str
    good: int = 0
    corrupt: int = 0
    unreadable: int = 0
    removed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def bad(self) -> int:
        """How many are not good."""
        return self.corrupt + self.unreadable

    @property
    def left(self) -> int:
        """How many are not good and still there."""
        return self.bad - self.removed

    def take(self, outcome: Outcome) -> bool:
        """Count one block; say whether it is corrupt."""
        from kvtierd.core.stimuli import Status

        if outcome.status is Status.OK:
            self.good += 1
            self.bytes += outcome.stored_bytes
            return False
        corrupt = outcome.status is Status.CORRUPT
        self.corrupt += corrupt
        self.unreadable += not corrupt
        reason, _ = _reason(outcome)
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        return corrupt


def check(
    backend: Backend | FsUpkeep,
    report: Report,
    progress: Progress,
    bad: Callable[[Outcome], None],
    *,
    remove: bool,
) -> None:
    """Check all of a tier's blocks; tell ``bad`` of those that are not good."""
    from kvtierd.core.stimuli import Status

    doomed: list[BlockId] = []
    for outcomes in _verified(backend):
        for outcome in outcomes:
            corrupt = report.take(outcome)
            progress.advance(1, outcome.stored_bytes)
            if outcome.status is not Status.OK:
                bad(outcome)
            if corrupt:
                doomed.append(outcome.id)
    if remove and doomed:
        removed = backend.delete(doomed, corrupt=True)
        report.removed = sum(outcome.status is Status.OK for outcome in removed)


def _verified(backend: Backend | FsUpkeep) -> Iterator[list[Outcome]]:
    """Use the backend's own check; one without is scanned and read."""
    from dataclasses import replace

    from kvtierd.core.stimuli import Status
    from kvtierd.edges.backends.base import Maintained, Transfer

    if isinstance(backend, Maintained):
        yield from backend.verify()
        return
    for batch in backend.scan():
        for found in batch:
            memory = memoryview(bytearray(found.block.payload_bytes))
            (outcome,) = backend.read([Transfer(found.block, memory)])
            if outcome.status is not Status.GONE:
                yield [replace(outcome, stored_bytes=found.stored_bytes)]


def _total(backend: Backend | FsUpkeep) -> int:
    from kvtierd.edges.backends.base import Maintained

    return sum(space.blocks for space in backend.namespaces()) if isinstance(backend, Maintained) else 0


def _printer(tier: str, *, as_json: bool) -> Callable[[Outcome], None]:
    from kvtierd.core.model import group_of, hash_of

    def show(outcome: Outcome) -> None:
        namespace, key = outcome.id.namespace, outcome.id.key
        reason, place = _reason(outcome)
        status = outcome.status.value
        if as_json:
            where = {"tier": tier, "namespace": namespace, "hash": hash_of(key).hex(), "group": group_of(key)}
            print(json.dumps({**where, "status": status, "reason": reason, "place": place}))
        else:
            name = place or f"{namespace}/{hash_of(key).hex() or 'unknown'}.{group_of(key)}"
            print(f"{tier}: {status} {shortened(text(name))}: {text(reason)}")

    return show


def _reason(outcome: Outcome) -> tuple[str, str | None]:
    """Return what is wrong, in words that many blocks share, and the block's place if they carry it."""
    from kvtierd.core.model import hash_of

    reason = outcome.reason or outcome.status.value
    both = _REASON.fullmatch(reason)
    return (both["reason"], both["place"]) if both and not hash_of(outcome.id.key) else (reason, None)


def json_lines(reports: Sequence[Report]) -> Iterator[str]:
    """Yield one JSON object per tier."""
    for report in reports:
        yield json.dumps(asdict(report))


def lines(reports: Sequence[Report]) -> Iterator[str]:
    """Yield a table for people and the verdict."""
    from kvtierd.config.units import human_size

    if not reports:
        yield "there is no tier below the pool"
        return
    columns = ("good", "corrupt", "unreadable", "removed")
    rows = []
    for report in reports:
        row = {"tier": report.tier} | {name: f"{getattr(report, name):,}" for name in columns}
        rate = report.bytes / report.seconds if report.seconds else 0
        rows.append(row | {"bytes": human_size(report.bytes), "per second": human_size(rate)})
    yield from table(rows, right=(*columns, "bytes", "per second"))
    yield _conclusion(reports)


def _conclusion(reports: Sequence[Report]) -> str:
    bad = sum(report.bad for report in reports)
    removed = sum(report.removed for report in reports)
    if not bad:
        return "every block is good"
    blocks, are, were = ("block", "is", "was") if bad == 1 else ("blocks", "are", "were")
    if not removed:
        return f"{bad:,} {blocks} {are} not good"
    if removed == bad:
        return f"{bad:,} {blocks} {were} not good and {were} taken out"
    return f"{bad:,} {blocks} {were} not good: {removed:,} taken out, {bad - removed:,} still there"
