"""What is wrong with a daemon and what to do, in words: read off its status alone.

Used by the status page and the commands; imports nothing heavy. A status may be of another version, so what
is missing in it is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvtierd.config.units import human_size

Status = Mapping[str, Any]

ERROR, WARNING, NOTE = "error", "warning", "note"
_RANK = {ERROR: 0, WARNING: 1, NOTE: 2}


@dataclass(frozen=True, slots=True)
class Advice:
    """``level``: error, warning or note. ``what`` is a whole sentence, ``do`` says what helps."""

    level: str
    what: str
    do: str

    def as_dict(self) -> dict[str, str]:
        """Return plain values."""
        return asdict(self)


def advise(status: Status, recent: Mapping[str, float] | None = None) -> list[Advice]:
    """Return what needs somebody's eye, worst first.

    ``recent``: growth of some counters over the last minutes, by the names of
    :meth:`kvtierd.report.Report.sample`; without it what only matters while it goes on is not judged.
    """
    found = [
        *_life(status),
        *_pool(status),
        *_engines(status),
        *(advice for tier in status.get("tiers", ()) for advice in _tier(tier)),
        *_events(status),
        *_recent(status, recent or {}),
    ]
    return sorted(found, key=lambda advice: _RANK[advice.level])


def _life(status: Status) -> Iterator[Advice]:
    state = status.get("state")
    if state == "starting":
        pool = status.get("pool", {})
        done, size = pool.get("prefaulted_bytes", 0), pool.get("bytes", 0)
        yield Advice(
            NOTE,
            f"Starting: {human_size(done)} of {human_size(size)} of the pool are pre-faulted.",
            "Wait. Engines can attach when this is done; pool.prefault_threads makes it faster.",
        )
    elif state == "draining":
        yield Advice(
            WARNING,
            "Drained by an operator: no stores are taken, /readyz answers 503.",
            "Stop the daemon when everything is written (kvtierd drain tells), or kvtierd drain --undo.",
        )
    elif state in ("stopping", "aborting"):
        yield Advice(NOTE, "Stopping: engines are told to recompute.", "Nothing: it ends by itself.")
    for what, seconds in status.get("hanging", {}).items():
        yield Advice(
            WARNING,
            f"The {what} has made no progress for {seconds:.0f} s.",
            "Look at what it waits for (mount, bucket, disk). Engines are served without it meanwhile.",
        )
    stalls = status.get("watch", {}).get("loop_stalls", 0)
    if stalls:
        longest = status["watch"].get("loop_longest_stall_seconds", 0.0)
        yield Advice(
            WARNING,
            f"The event loop has stood still {stalls} times, {longest:.1f} s at the longest.",
            "The log shows where. Give the container more CPU if it is throttled.",
        )


def _pool(status: Status) -> Iterator[Advice]:
    lock = status.get("pool", {}).get("lock", {})
    if lock.get("state") == "not locked":
        yield Advice(
            NOTE,
            f"The pool is not locked in memory: {lock.get('reason', 'the system refused')}.",
            "Raise the memlock limit, or write pool.lock: off if the machine has no swap.",
        )
    if slots := status.get("quarantined_slots"):
        yield Advice(
            NOTE,
            f"{slots} slots are in quarantine: a process that may still copy has not answered.",
            "Nothing, if they go away. If not, find the engine process that hangs and end it.",
        )
    for layout in status.get("layouts", ()):
        waste, slot = layout.get("waste_bytes_per_slot") or [0], layout.get("slot_bytes") or 1
        if min(waste) * 10 > slot:
            yield Advice(
                NOTE,
                f"Model {layout.get('model')!r}: {min(waste)} of {slot} bytes of each slot are not used.",
                "Choose a block size whose bytes over all ranks are just below a multiple of 4 KiB.",
            )


def _engines(status: Status) -> Iterator[Advice]:
    if status.get("state") == "ready" and not status.get("sessions"):
        yield Advice(
            NOTE,
            "No engine is attached.",
            "Point the engine's connector at engine.sock in runtime_dir, and see its log.",
        )


def tier_condition(tier: Mapping[str, Any]) -> str:
    """Return one word for a tier; what is wrong with it comes before its being indexed."""
    condition = str(tier.get("condition", "ok"))
    return "indexing" if tier.get("scanning") and condition == "ok" else condition


def _tier(tier: Mapping[str, Any]) -> Iterator[Advice]:
    name, condition = tier.get("name"), tier_condition(tier)
    reason = tier.get("reason") or tier.get("last_fault") or "no reason given"
    if condition in ("stalled", "degraded"):
        yield Advice(
            ERROR if condition == "stalled" else WARNING,
            f"Tier {name} is {condition}: {reason}.",
            "Repair its storage (mount, permission, space, credentials). It is tried again by itself;"
            " other tiers serve meanwhile.",
        )
    elif condition == "slow":
        yield Advice(
            WARNING,
            f"Tier {name} cannot keep up: {reason}.",
            "Some blocks are not written there. Use faster storage, or demote: on_evict to write less.",
        )
    if stuck := tier.get("undeletable_bytes"):
        yield Advice(
            WARNING,
            f"Tier {name} could not delete {human_size(stuck)}: {tier.get('last_fault') or 'see the log'}.",
            "Check permissions of its folder or bucket; deletion is tried again every half minute.",
        )
    if crowded := tier.get("left", {}).get("crowded"):
        yield Advice(
            WARNING,
            f"Tier {name}: its storage was full before max_bytes was reached; {crowded} blocks gave way.",
            "Give the storage room, or lower max_bytes to what it really has.",
        )
    if condition == "indexing":
        yield Advice(
            NOTE,
            f"Tier {name} is being indexed: {tier.get('blocks', 0)} blocks so far.",
            "Nothing: what is found serves at once.",
        )


def _events(status: Status) -> Iterator[Advice]:
    events = status.get("events", {})
    for name, audience in events.get("audiences", {}).items():
        if reason := audience.get("sequence_degraded"):
            yield Advice(
                WARNING,
                f"Audience {name}: numbers cannot be kept across a restart: {reason}.",
                "Make state_dir writable and give it space.",
            )
        if audience.get("unmatched_removals"):
            yield Advice(
                ERROR,
                f"Audience {name}: {audience['unmatched_removals']} removals of what was never announced.",
                "This is a bug: please report it with the log.",
            )
        if audience.get("subscribers") == 0:
            where = audience.get("bind") or audience.get("connect")
            yield Advice(
                NOTE,
                f"Audience {name}: nobody is subscribed.",
                f"Point a router at {where}, or take the audience out of the tier file.",
            )
    journal = events.get("journal", {})
    if reason := journal.get("degraded"):
        yield Advice(
            WARNING,
            f"What is announced cannot be recorded: {reason}.",
            "Make state_dir writable and give it space: after a crash readers would get everything anew.",
        )
    for relay in events.get("relay", {}).get("engines", ()):
        if not relay.get("connected"):
            yield Advice(
                WARNING,
                f"The engine's own events are not heard at {relay.get('endpoint')}.",
                "Start the engine with kv_events_config on this endpoint, or remove events.relay.",
            )


def _recent(status: Status, recent: Mapping[str, float]) -> Iterator[Advice]:
    if count := recent.get("no_room", 0.0):
        yield Advice(
            WARNING,
            f"{count:.0f} blocks found no room in the pool in the last minutes: all of it is in use.",
            "Raise pool.bytes, or lower what engines hold at a time (leases, concurrent loads).",
        )
    if count := recent.get("revoked", 0.0):
        yield Advice(
            WARNING,
            f"{count:.0f} jobs or leases of engines ran out in the last minutes.",
            "An engine was killed or hangs; if it is only slow, raise engine.job_ttl and engine.lease_ttl.",
        )
    if count := recent.get("dropped", 0.0):
        yield Advice(
            WARNING,
            f"{count:.0f} event batches did not get out in the last minutes.",
            "A subscriber is slow. Readers repair the gap by a replay; raise the audience's hwm if it stays.",
        )
    for tier in status.get("tiers", ()):
        if count := recent.get(f"failed.{tier.get('name')}", 0.0):
            yield Advice(
                WARNING,
                f"Tier {tier.get('name')}: {count:.0f} blocks failed in the last minutes:"
                f" {tier.get('last_fault') or 'see the log'}.",
                "Check its storage; each failure costs a recompute and no more.",
            )
