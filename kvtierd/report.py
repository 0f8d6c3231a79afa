"""What people see of a daemon: health for probes, status for everybody, figures for metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtierd import __version__
from kvtierd.advice import advise
from kvtierd.config.memory import bounds, index_bytes
from kvtierd.edges.histogram import Histogram
from kvtierd.edges.history import History
from kvtierd.edges.memory_limits import anonymous_bytes
from kvtierd.edges.metrics.family import Figures
from kvtierd.edges.metrics.plan import make_plan
from kvtierd.edges.watch import HANGS_AFTER

if TYPE_CHECKING:
    from kvtierd.config.schema import TierFile
    from kvtierd.daemon import Daemon

TAIL = 50
"""Events that the status page shows."""


class Report:
    """Reads a daemon's rooms, those that exist by now; changes nothing."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._plan = make_plan(daemon.tier_file)
        self.history = History(self.sample)
        self.logs: Callable[[], dict[str, Any]] = dict
        """Figures of the log, where this process has one."""

    def tier_file_changed(self, tier_file: TierFile) -> None:
        """Show what another tier file says."""
        self._plan = make_plan(tier_file)

    def health(self) -> dict[str, Any]:
        """Return what probes need: the state, whether engines are served, ages, and what is in trouble.

        What hangs behind the pool (a tier, the stream) is shown and leaves it ready: engines are served.
        """
        daemon = self._daemon
        tiers = () if daemon._ladder is None else daemon._ladder.stack.secondaries
        degraded = [tier.name for tier in tiers if tier.gate.condition != "ok"]
        return {
            "state": daemon.state,
            "ready": daemon.state == "ready" and daemon.watch.loop_age < HANGS_AFTER,
            "turn_age_seconds": daemon.pulse.turn_age,
            "loop_age_seconds": daemon.watch.loop_age,
            "degraded": degraded,
            "hanging": daemon.watch.hanging(),
        }

    def ages(self) -> dict[str, float]:
        """Return for how many seconds what is under way outside the loop has been, by name."""
        daemon = self._daemon
        ages = {f"tier {name}": mover.oldest() for name, mover in daemon._movers.items()}
        if daemon._hub is not None:
            ages["events"] = daemon._hub.overdue
        return ages

    def status(self) -> dict[str, Any]:
        """Return the whole status as plain values."""
        daemon = self._daemon
        body: dict[str, Any] = {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_seconds": time.monotonic() - daemon.pulse.started,
            "turns": sum(daemon.pulse.turns.counts),
            **self.health(),
            "watch": daemon.watch.report(),
            "log": self.logs(),
            "config": daemon.reloader.statistics(),
        }
        if daemon._kept is not None:
            body["pool"] = daemon._kept.statistics()
        if daemon._ladder is not None:
            body.update(daemon._ladder.statistics())
        if daemon._guard is not None:
            body["guard"] = daemon._guard.statistics()
        if daemon._hub is not None:
            journal = {} if daemon._announcer is None else daemon._announcer.statistics()
            relay = {} if daemon._merged is None else daemon._merged.statistics()
            body["events"] = {**daemon._hub.statistics(), "journal": journal, "relay": relay}
        body["memory"] = self._memory()
        body["movers"] = {name: mover.statistics() for name, mover in daemon._movers.items()}
        for name, server in (("engine", daemon._engine), ("control", daemon._control)):
            if server is not None:
                body[name] = server.statistics()
        return body

    def _memory(self) -> dict[str, Any]:
        """Return what the daemon takes besides the pool, and the bounds of ``config/MEMORY.md``, in bytes."""
        ladder = self._daemon._ladder
        entries = 0
        if ladder is not None:
            entries = sum(len(space.blocks) for space in ladder.stack.primary.spaces.values())
            entries += sum(len(tier.blocks) for tier in ladder.stack.secondaries)
        return {
            "anonymous_bytes": anonymous_bytes(),
            "bounds": bounds(self._daemon.tier_file),
            "index_entries": entries,
            "index_bytes": index_bytes(entries),
        }

    def sample(self) -> dict[str, float]:
        """Return the counters that charts and advice look back on."""
        daemon = self._daemon
        if daemon._ladder is None:
            return {}
        stack = daemon._ladder.stack
        counters = stack.primary.counters
        sample: dict[str, float] = {
            "misses": counters["lookup_misses"],
            "no_room": counters["store_skipped_no_room"],
            "revoked": counters["jobs_revoked"] + counters["leases_revoked"],
            "dropped": 0 if daemon._hub is None else daemon._hub.dropped,
        }
        for tier in stack.tiers:
            sample[f"hits.{tier.name}"] = tier.counters["lookup_hits"]
            sample[f"failed.{tier.name}"] = tier.counters["read_failed"] + tier.counters["write_failed"]
        return sample

    def page(self) -> dict[str, Any]:
        """Return what the status page shows."""
        now = time.monotonic()
        status = self.status()
        return {
            "time": time.time(),
            "status": status,
            "advice": [advice.as_dict() for advice in advise(status, self.history.grown())],
            "history": self.history.rows(now),
            "tail": [] if self._daemon._hub is None else self._daemon._hub.tail(TAIL),
        }

    def figures(self) -> Figures:
        """Return the status and what only metrics show."""
        daemon = self._daemon
        histograms: dict[tuple[str, ...], Histogram] = {
            ("turn",): daemon.pulse.turns,
            ("lag",): daemon.pulse.lag,
        }
        for name, mover in daemon._movers.items():
            histograms |= {("operation", name, kind): took for kind, took in mover.durations.items()}
        if daemon._engine is not None:
            histograms |= {
                ("request", verb): took for verb, took in daemon._engine.requests.durations.items()
            }
        return Figures(self.status(), self._plan, histograms)
