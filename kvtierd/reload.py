"""Takes a changed tier file over while the daemon runs: all of it, or nothing and every reason why not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtierd import assembly
from kvtierd.config.change import Change, changes
from kvtierd.config.load import Loaded
from kvtierd.config.schema import FsTier, TierFile
from kvtierd.core import stimuli
from kvtierd.edges.backends.factory import make_spec
from kvtierd.edges.backends.fs import FsBackend
from kvtierd.errors import ConfigError
from kvtierd.logs import output
from kvtierd.logs.events import event
from kvtierd.wire.messages import ConfigChange, Reloaded

if TYPE_CHECKING:
    from kvtierd.daemon import Daemon

log = logging.getLogger(__name__)

READ_SECONDS = 10.0
OUTCOMES = ("applied", "refused", "unchanged")

Mark = tuple[int, int, int, int]


def mark_of(path: Path) -> Mark | None:
    """Return what tells one state of a file from another; follows links, since a ConfigMap swaps them."""
    try:
        there = path.stat()
    except OSError:
        return None  # in the middle of being replaced
    return there.st_dev, there.st_ino, there.st_mtime_ns, there.st_size


class Reloader:
    """Reloads the tier file of one daemon; one reload at a time.

    ``load`` reads and checks it, ``path`` is watched. Without them (a daemon made from values) there is
    nothing to reload.
    """

    def __init__(
        self, daemon: Daemon, load: Callable[[], Loaded] | None = None, path: Path | None = None
    ) -> None:
        self._daemon = daemon
        self._load, self._path = load, path
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self._loaded_at = time.time()
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._seen = self._taken = None if path is None else mark_of(path)
        """The file as it was looked at last, and as it was read last."""
        self.last_problem = ""

    def begin(self, why: str) -> None:
        """Reload in the background, as a signal or a changed file asks for."""
        self._spawn(self.reload(why))

    def answer(self, request: int, *, dry_run: bool, deliver: Callable[[Reloaded], None]) -> None:
        """Reload in the background (or only look) and deliver the answer to a request."""

        async def answered() -> None:
            outcome, found, problem = await self.reload("kvtierd reload", dry_run=dry_run)
            wired = tuple(ConfigChange(c.key, _shown(c.before), _shown(c.after), c.refusal) for c in found)
            deliver(Reloaded(id=request, outcome=outcome, changes=wired, problem=problem))

        self._spawn(answered())

    async def reload(self, why: str, *, dry_run: bool = False) -> tuple[str, list[Change], str]:
        """Read the file and put it in force; return the outcome, what differs, and what is wrong."""
        async with self._lock:
            if not dry_run:
                self._daemon.life.reloading()
            outcome, new, found, problem = await self._examine()
            if dry_run:
                return outcome, found, problem
            if outcome == "applied" and new is not None:
                try:
                    await self._change_audiences(new, found)
                    self._apply(new)
                except ConfigError as error:
                    outcome, problem = "refused", str(error)
            self._counts[outcome] += 1
            self.last_problem = problem
            if outcome != "refused":
                self._loaded_at = time.time()
            self._tell(why, outcome, found, problem)
            self._daemon.life.ready(f"reload {outcome} {problem}".strip().splitlines()[0])
            return outcome, found, problem

    def follow(self) -> None:
        """Look at the file now and then, if the tier file in force says so."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        period = self._daemon.tier_file.watch_file
        if period is not None and self._path is not None:
            self._timer = asyncio.get_running_loop().call_later(period, self._spawn_look)

    def close(self) -> None:
        """Look no more; what is under way is given up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._tasks:
            task.cancel()

    def statistics(self) -> dict[str, Any]:
        """Return counts by outcome and when the file in force was loaded (plain values)."""
        return {"reloads": dict(self._counts), "loaded_at": self._loaded_at, "problem": self.last_problem}

    # -- looking ------------------------------------------------------------------------------------

    def _spawn_look(self) -> None:
        self._spawn(self._look())

    async def _look(self) -> None:
        """Reload if the file is another one than was read last, and the same as a look ago: it is whole."""
        assert self._path is not None
        try:
            async with asyncio.timeout(READ_SECONDS):
                loop = asyncio.get_running_loop()
                mark = await loop.run_in_executor(None, mark_of, self._path)
        except TimeoutError:
            mark = None
        settled, self._seen = mark == self._seen, mark
        if mark is not None and settled and mark != self._taken:
            self._taken = mark
            await self.reload("the file changed")
        self.follow()

    async def _examine(self) -> tuple[str, TierFile | None, list[Change], str]:
        if self._load is None:
            return "refused", None, [], "this daemon was not started from a tier file"
        try:
            async with asyncio.timeout(READ_SECONDS):
                loaded = await asyncio.get_running_loop().run_in_executor(None, self._load)
        except TimeoutError:
            return "refused", None, [], f"the tier file could not be read within {READ_SECONDS:g} s"
        except ConfigError as error:
            return "refused", None, [], str(error)
        found = changes(self._daemon.tier_file, loaded.tier_file)
        refusals = [f"{change.key}: needs a restart: {change.refusal}" for change in found if change.refusal]
        if refusals:
            return "refused", None, found, "\n".join(refusals)
        if self._daemon._ladder is None:
            return "refused", None, found, "the daemon is starting or stopping"
        if problem := self._audience_problem(found):
            return "refused", None, found, problem
        return ("applied" if found else "unchanged"), loaded.tier_file, found, ""

    def _audience_problem(self, found: list[Change]) -> str:
        """Return why other audiences cannot be served, though in general they can."""
        keys = [change.key for change in found if change.key.startswith("events.audiences.")]
        announcer = self._daemon._announcer
        if not keys or announcer is None:
            return ""
        if self._daemon.tier_file.events.relay:
            return f"{keys[0]}: needs a restart: an engine's own events are passed on (events.relay)"
        if not announcer.settled:
            return f"{keys[0]}: readers are still being told of what changed at the start: try again"
        return ""

    # -- in force -----------------------------------------------------------------------------------

    async def _change_audiences(self, new: TierFile, found: list[Change]) -> None:
        hub, announcer = self._daemon._hub, self._daemon._announcer
        if hub is None or announcer is None:
            return
        if any(change.key.startswith("events.audiences.") for change in found):
            await hub.change(new.events, announcer.stores)

    def _apply(self, new: TierFile) -> None:
        """Put all the rest of a tier file in force, all of it live; nothing in here can fail."""
        daemon = self._daemon
        old, daemon.tier_file = daemon.tier_file, new
        limits = {}
        for tier in new.secondaries:
            mover = daemon._movers[tier.name]
            mover.retune(tier.deadline)
            if isinstance(tier, FsTier) and isinstance(mover.backend, FsBackend):
                mover.backend.min_free = tier.min_free
            spec = make_spec(tier, mover.backend, new.pool.bytes)
            limits[tier.name] = stimuli.TierLimits(spec.capacity, spec.budget, spec.ttl, spec.max_load_time)
        engine = new.engine
        daemon.turn([stimuli.Retune(limits, engine.job_ttl, engine.lease_ttl, engine.max_leases)])
        for server, control in ((daemon._engine, False), (daemon._control, True)):
            if server is not None:
                rules = assembly.socket_rules(new, control)
                server.limits, server.allowed = rules["limits"], rules["allowed"]
        if new.log.level != old.log.level:
            output.set_level(new.log.level)
        daemon.report.tier_file_changed(new)
        self.follow()

    def _tell(self, why: str, outcome: str, found: list[Change], problem: str) -> None:
        if outcome == "refused":
            log.warning(
                "reload (%s) refused, the tier file of before stays in force: %s",
                why,
                problem.replace("\n", "; "),
                extra=event("config_reload_refused", problem=problem),
            )
            return
        keys = [change.key for change in found]
        log.info(
            "reload (%s): %s",
            why,
            ", ".join(f"{c.key} {_shown(c.before)} -> {_shown(c.after)}" for c in found) or "nothing differs",
            extra=event("config_reloaded", outcome=outcome, changed=keys),
        )

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)
