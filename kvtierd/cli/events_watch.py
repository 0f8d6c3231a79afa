"""``kvtierd events watch``: follow an audience as a router would and compare with the daemon's inventory."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvtierd.cli.common import add_socket, control_socket, seconds
from kvtierd.cli.events_curve import add_curve, client_keys
from kvtierd.errors import ConfigError, ExitCode, Unavailable

if TYPE_CHECKING:
    from kvtierd.client import Client
    from kvtierd.config.audiences import Audience
    from kvtierd.testing.consumer import ReferenceConsumer, Residency

SHOWN = 5
JOIN = 30.0
"""Seconds for the first replay; the heartbeat asks for it at the latest."""


def add_watch(actions: Any) -> None:
    """Add the command's arguments."""
    watch = actions.add_parser(
        "watch",
        help="follow an audience and compare with the daemon's inventory",
        description="Keep the state that a router would have, with replay where needed, and every few seconds"
        " say whether it is what the running daemon holds. What differs twice in a row, with no news in"
        " between, is divergence: it is listed, and the exit code is 1.",
    )
    add_socket(watch)
    watch.add_argument("--audience", metavar="NAME", help="which audience (default: the first)")
    watch.add_argument("--interval", metavar="S", type=seconds, default=5.0, help="default 5")
    watch.add_argument("--once", action="store_true", help="stop after the first verdict")
    watch.add_argument("--json", action="store_true", help="print a JSON object for each verdict")
    add_curve(watch)


def run_watch(args: argparse.Namespace) -> int:
    """Print verdicts until interrupted or, with ``--once``, after one; 1 if the last one was divergence."""
    from kvtierd.cli.events import connectable
    from kvtierd.client import Client
    from kvtierd.testing.consumer import ReferenceConsumer

    client = Client(str(control_socket(args)), deadline=args.deadline)
    label, audience = _audience(client, args.audience)
    keys = client_keys(args, _configured(args, label)) if audience["curve"] else None
    if audience["curve"] and keys is None:
        raise ConfigError(f"audience {label!r} speaks CURVE: give kvtierd's public key with --server-key")
    if "bind" not in audience:
        raise ConfigError(f"audience {label!r} connects to {audience['connect']}: nobody else can subscribe")
    replay = audience.get("replay")
    code = ExitCode.OK
    with ReferenceConsumer(renumbers=audience["renumber_after"] is not None) as consumer:
        consumer.connect(
            connectable(audience["bind"]),
            replay and connectable(replay),
            topic=audience["topic"],
            secure=None if keys is None else keys.apply,
        )
        try:
            consumer.wait_for(lambda c: c.counts["batches"] > 0, JOIN, "a batch")
        except TimeoutError as error:
            raise Unavailable(str(error)) from None
        for verdict in _verdicts(client, consumer, label, args.interval):
            code = ExitCode.OK if verdict["equal"] else ExitCode.GENERIC
            print(json.dumps(verdict) if args.json else _line(verdict), flush=True)
            if args.once:
                break
    return code


def _configured(args: argparse.Namespace, label: str) -> Audience | None:
    """Return the audience of the tier file; with ``rank_ports``, the label has the rank behind a point."""
    if args.config is None:
        return None
    from kvtierd.config.load import load_tier_file

    found = {a.name: a for a in load_tier_file(args.config, os.environ).tier_file.events.audiences}
    return found.get(label) or found.get(label.rpartition(".")[0])


def _audience(client: Client, wanted: str | None) -> tuple[str, dict[str, Any]]:
    audiences = client.status().get("events", {}).get("audiences", {})
    for label, audience in audiences.items():
        if wanted in (None, label):
            return label, audience
    raise ConfigError(f"no audience {wanted!r}; there are: {', '.join(audiences) or 'none'}")


def _verdicts(
    client: Client, consumer: ReferenceConsumer, label: str, interval: float
) -> Iterator[dict[str, Any]]:
    """Yield a verdict whenever two comparisons in a row, without news in between, say the same."""
    before: tuple[int | None, set[Residency]] | None = None
    since = time.monotonic()
    while True:
        _poll(consumer, 0.2 if before is not None else 0.0)
        expected = _expected(client, label)
        audience = _audience(client, label)[1]
        _catch_up(consumer, audience["sequence"])
        different = _known(consumer, audience) ^ expected
        if not audience["removals"]:
            different &= expected
        if not different or before == (audience["events"], different):
            missing = sorted(map(_name, different & expected))
            extra = sorted(map(_name, different - expected))
            yield {
                "audience": label,
                "sequence": audience["sequence"],
                "residencies": len(consumer.resident),
                "equal": not different,
                "missing": missing,
                "extra": extra,
                "counts": dict(consumer.counts),
            }
            before = None
            _poll(consumer, interval)
            since = time.monotonic()
        else:
            before = (audience["events"], different)
            if time.monotonic() - since > JOIN:
                raise Unavailable(f"no verdict within {JOIN:g} s: too much comes and goes")


def _poll(consumer: ReferenceConsumer, duration: float) -> None:
    deadline = time.monotonic() + duration
    while (left := deadline - time.monotonic()) > 0:
        consumer.poll(left)


def _catch_up(consumer: ReferenceConsumer, sequence: int | None) -> None:
    """Read up to a batch, as far as it comes within a second."""
    deadline = time.monotonic() + 1.0
    while (consumer.expected or 0) <= (sequence or 0) and time.monotonic() < deadline:
        consumer.poll(0.05)


def _known(consumer: ReferenceConsumer, audience: dict[str, Any]) -> set[Residency]:
    """Return what the reader knows of the daemon's own tiers: an engine's blocks are not in its inventory."""
    media = set(audience["tiers"].values())
    return {entry for entry in consumer.resident if entry.medium in media}


def _expected(client: Client, label: str) -> set[Residency]:
    """Return what this audience should know, by the daemon's inventory."""
    from kvtierd.core.model import event_hash, group_of
    from kvtierd.testing.consumer import Residency

    status = client.status()
    audience = status["events"]["audiences"][label]
    places = {tier["name"]: tier.get("locality") for tier in status["tiers"]}
    found: set[Residency] = set()
    for page in client.survey():
        for entry in page.entries:
            medium = audience["tiers"].get(entry.tier)
            if medium is None:
                continue
            ranks = audience["ranks"] if audience["ranks"] is not None else [entry.dp_rank]
            for rank in ranks:
                if audience["rank"] not in (None, rank):
                    continue
                locality = places[entry.tier] if audience["form"] == "map" else None
                for event in entry.hashes or (event_hash(entry.key),):
                    found.add(Residency(event, group_of(entry.key), medium, locality, rank))
    return found


def _name(entry: Residency) -> str:
    name = entry.hash.hex() if isinstance(entry.hash, bytes) else f"{entry.hash:016x}"
    where = f"{entry.medium}/{entry.locality}" if entry.locality else f"{entry.medium}"
    return f"{name}.{entry.group} {where} dp={entry.dp_rank}"


def _line(verdict: dict[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S")
    head = (
        f"{clock} {verdict['audience']} batch {verdict['sequence']}: {verdict['residencies']:,} residencies"
    )
    if verdict["equal"]:
        return f"{head}, equal to the daemon's inventory"
    lines = [f"{head}, {len(verdict['missing'])} missing, {len(verdict['extra'])} too many"]
    for kind in ("missing", "extra"):
        lines += [f"  {kind:<8} {name}" for name in verdict[kind][:SHOWN]]
        if len(verdict[kind]) > SHOWN:
            lines.append(f"  {kind:<8} and {len(verdict[kind]) - SHOWN:,} more")
    return "\n".join(lines)
