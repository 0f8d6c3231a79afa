"""Runs the turns between the rooms. With :mod:`kvtierd.assembly`, which makes them, all that knows them all.

One turn: stimuli go into the ladder, effects come out, the tiers' queues are drained in order, answers and
one batch of events leave. A turn is synchronous, so that order is a property of the code. Nothing but a turn
changes the core; workers and timers end by feeding a stimulus to the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from kvtierd import __version__, assembly, ending, takeover, telling
from kvtierd.config.schema import TierFile
from kvtierd.core import effects, stimuli
from kvtierd.core.guard import Guard
from kvtierd.core.inventory import Survey
from kvtierd.core.ladder import Ladder
from kvtierd.core.model import TierEvent
from kvtierd.core.refusal import unknown_tier
from kvtierd.edges import pinning, systemd
from kvtierd.edges.admin import AdminServer
from kvtierd.edges.announcer import Announcer
from kvtierd.edges.aside import DaemonThreads
from kvtierd.edges.backends.base import Backend
from kvtierd.edges.engine import EngineServer
from kvtierd.edges.handover import Inheritance
from kvtierd.edges.hub import EventHub
from kvtierd.edges.kept_pool import KeptPool
from kvtierd.edges.liveness import Liveness
from kvtierd.edges.merge import MergedStream
from kvtierd.edges.movers import Mover
from kvtierd.edges.opening import Openings
from kvtierd.edges.pool import Pool
from kvtierd.edges.pulse import Pulse
from kvtierd.edges.trail import Trail
from kvtierd.edges.unix_socket import lock_folder, make_folder, unlock_folder
from kvtierd.edges.watch import BEAT_SECONDS, Watch
from kvtierd.errors import InvariantBroken, PoolError
from kvtierd.logs.events import event
from kvtierd.orders import Orders
from kvtierd.reload import Reloader
from kvtierd.report import Report
from kvtierd.takeover import Takeover

log = logging.getLogger(__name__)


class Daemon:
    """One daemon on one tier file. ``run`` lives until :meth:`stop`; it never imports torch by itself."""

    def __init__(self, tier_file: TierFile, *, paranoid: bool = False, takeover: bool = False) -> None:
        self.tier_file = tier_file
        self._takes_over = takeover
        self._takeover = Takeover(self)
        self._gone = False
        """Whether another daemon serves in this one's place."""
        self._ticking = False
        self.report = Report(self)
        self._trail = Trail()
        self.orders = Orders(self)
        self.reloader = Reloader(self)
        self.life = systemd.Life()
        self.state = "starting"
        self._paranoid = paranoid
        self._stop = asyncio.Event()
        self._turned = asyncio.Event()
        self._up = asyncio.Event()
        """Whether the start is over: engines are served before that."""
        self._failure: BaseException | None = None
        self.pulse = Pulse()
        self._stuck = False
        self._engines = False
        self.watch = Watch(self.report.ages)
        self._deadline: tuple[float, asyncio.TimerHandle] | None = None
        self._kept: KeptPool | None = None
        self._ladder: Ladder | None = None
        self._guard: Guard | None = None
        self._openings: Openings | None = None
        self._backends: dict[str, Backend] = {}
        self._movers: dict[str, Mover] = {}
        self._hub: EventHub | None = None
        self._merged: MergedStream | None = None
        self._announcer: Announcer | None = None
        self._liveness: Liveness | None = None
        self._engine: EngineServer | None = None
        self._control: EngineServer | None = None
        self._admin: AdminServer | None = None

    # -- life ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start, serve until stopped, and drain.

        Raises:
            KvtierdError: it could not start, or a promise of the core broke.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(DaemonThreads())
        make_folder("runtime_dir", self.tier_file.runtime_dir)
        self._backends = assembly.make_backends(self.tier_file)
        self._trail = await self._loop.run_in_executor(None, assembly.make_trail, self.tier_file)
        inheritance = await takeover.inherit(self) if self._takes_over else None
        if inheritance is None:
            self._lock = lock_folder(self.tier_file.runtime_dir)
        self._beat()
        try:
            if await self._came_up(inheritance):
                await self._stop.wait()
            if not self._gone:
                await ending.drain(self)
        finally:
            ending.close(self)
            if self._gone:
                os.close(self._lock)
            else:
                unlock_folder(self.tier_file.runtime_dir, self._lock)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Begin a clean stop; a second call ends it at once."""
        if self._stop.is_set():
            self.state = "aborting"
            self._turned.set()
        self._stop.set()

    async def _came_up(self, inheritance: Inheritance | None) -> bool:
        """Start; give up when a stop was asked for and the start does not end within half of the grace."""
        start = asyncio.ensure_future(self._start(inheritance))
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            await asyncio.wait((start,), timeout=self.tier_file.engine.shutdown_grace / 2)
        stop.cancel()
        if start.done():
            await start
            return True
        log.warning(
            "stopped while the start waits for a call that does not return", extra=event("storage_not_closed")
        )
        self._stuck = True  # its thread may hold anything that was made
        start.cancel()
        return False

    async def _start(self, inheritance: Inheritance | None) -> None:
        """Make the pool ready, then the tiers and sockets; engines can attach when all of it answers."""
        config = self.tier_file
        self._up.clear()
        self._control = self._server("control.sock", 1)
        if inheritance is None:
            kept = await self._loop.run_in_executor(None, KeptPool.open, config.pool, config.runtime_dir)
            await self._control.start()
        else:
            kept = inheritance.kept
            kept.know(inheritance.handed.table, whole=inheritance.handed.whole, live=inheritance.handed.live)
        self._kept, pool = kept, kept.pool
        if config.admin.listen is not None:
            self._admin = assembly.make_admin(config.admin.listen, self.report)
            await self._admin.start()
        self.watch.start(self._admin.fileno() if self._admin is not None else None)
        backends = self._backends
        self._openings = openings = assembly.make_openings(config, backends, self._loop)
        openings.start()
        if inheritance is None:
            await self._prefault(pool)
            await self._loop.run_in_executor(None, pinning.pin, pool, config.pool.pin)
            await openings.settle()
        ladder = assembly.make_ladder(config, pool, backends)
        if config.events.enabled:
            await telling.open_stream(self, ladder, fresh=openings.fresh and not kept.survived)
        self._movers = assembly.make_movers(config, pool, backends, self._loop, self.turn)
        self._liveness = Liveness(
            self._loop, lambda process: self.turn([stimuli.ProcessDied(process)]), kept.pipes
        )
        restored = await self._go_on(kept, ladder, self._liveness)
        first = 1 if inheritance is None else inheritance.handed.next_number
        self._engine = self._server("engine.sock", first, pool, self._liveness)
        if inheritance is None:
            await self._engine.start()
        else:
            await takeover.serve_on(self, inheritance)
        self._takeover = Takeover(self)
        self._takeover.start()
        self._ticking = True
        self.state = "ready"
        self.life.ready("engines can attach")
        if self._hub is not None:
            log.info(
                "events: %s",
                ", ".join(f"{k} {v}" for k, v in self._hub.bound_endpoints().items()),
                extra=event("events_bound", **self._hub.bound_endpoints()),
            )
        log.info(
            "ready: engines attach at %s",
            self._engine.path,
            extra=event("ready", socket=str(self._engine.path)),
        )
        openings.follow(self._usable)
        self.reloader.follow()
        await telling.begin_stream(self, restored)
        self._up.set()

    def handed_over(self) -> None:
        """End: another daemon serves now."""
        self._gone = True
        self._stop.set()

    async def _go_on(self, kept: KeptPool, ladder: Ladder, liveness: Liveness) -> list[TierEvent]:
        """Begin with what an earlier daemon left in the pool; return the stores of that."""
        processes = await self._loop.run_in_executor(None, kept.restore, ladder, self._loop.time())
        liveness.find(processes)
        restored = ladder.take_events()
        self._guard = Guard(ladder, paranoid=self._paranoid)
        self._ladder = ladder
        return restored

    async def _prefault(self, pool: Pool) -> None:
        done = self._loop.run_in_executor(None, pool.prefault)
        stop = asyncio.ensure_future(self._stop.wait())
        either: set[asyncio.Future[Any]] = {done, stop}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not done.done():
            pool.cancel()
        if not await done and not self._stop.is_set():
            raise PoolError("the pre-fault of the pool was interrupted")

    def _server(
        self, name: str, first: int, pool: Pool | None = None, liveness: Liveness | None = None
    ) -> EngineServer:
        return EngineServer(
            self.tier_file.runtime_dir / name,
            turn=self.turn,
            glance=self._glance,
            status=self.report.status,
            survey=self._begin_survey if pool is None else None,
            orders=self.orders.table if pool is None else None,
            liveness=liveness,
            pool_fd=pool.fd if pool is not None else None,
            presence=assembly.shown(self.tier_file, pool) if pool is not None else None,
            **assembly.socket_rules(self.tier_file, pool is None),
            daemon=f"kvtierd {__version__}",
            numbers=itertools.count(first) if pool is not None else itertools.count(-1, -1),
        )

    def _usable(self, tier: str, reason: str, stalled: bool) -> None:
        """Take in whether a tier's storage could be made usable; if so, read what it holds."""
        self.turn([stimuli.Usable(tier, reason, stalled)])
        if reason or self._ladder is None:
            return
        mover = self._movers[tier]
        for namespace, space in self._ladder.stack.primary.spaces.items():
            mover.describe(namespace, space.layout)
        mover.start_scan(
            self._found,
            lambda: self._scanned(tier),
            lambda trouble: self.turn([stimuli.Usable(tier, trouble)]),
        )

    def _found(self, found: stimuli.Found) -> None:
        self.turn([found if self._announcer is None else self._announcer.known(found)])

    def _scanned(self, tier: str) -> None:
        self.turn([stimuli.Found(tier, (), last=True)])
        assert self._ladder is not None
        held = self._ladder.stack.by_name[tier]
        log.info(
            "tier %s: indexed, %d blocks, %d bytes",
            tier,
            len(held.blocks),
            held.used,
            extra=event("tier_indexed", tier=tier, blocks=len(held.blocks), bytes=held.used),
        )

    # -- turns --------------------------------------------------------------------------------------

    def _glance(self, session: int, request: stimuli.Request) -> effects.Reply | None:
        """Answer without a turn what changes nothing, so that there is nothing to record, prove or tell."""
        if self._ladder is None or self._failure is not None or self._trail.wordy:
            return None
        return self._ladder.glance(session, request)

    def turn(self, batch: Sequence[stimuli.Stimulus]) -> None:
        """Run stimuli through the ladder, carry the effects out and publish the events."""
        if self._guard is None or self._ladder is None or self._failure is not None:
            return
        try:
            self._run_turn(self._ladder, self._guard, batch)
        except Exception as error:
            self._fail(error, self._guard)

    def _run_turn(self, ladder: Ladder, guard: Guard, batch: Sequence[stimuli.Stimulus]) -> None:
        began = time.monotonic()
        answers: dict[int, list[effects.Reply]] = {}
        todo: list[effects.Effect] = []
        for stimulus in batch:
            now = self._loop.time()
            guard.note(stimulus, now)
            self._trail.before(ladder.stack, stimulus)
            todo += ladder.handle(stimulus, now)
        guard.check()
        if self._kept is not None:
            self._kept.record()  # before anybody acts on it
        for effect in todo:
            if isinstance(effect, effects.Answer):
                answers.setdefault(effect.session, []).append(effect.reply)
            else:
                self._trail.started(ladder.stack, effect)
                self._movers[effect.tier].submit(effect)
        for session, replies in answers.items():
            self._trail.answered(ladder.sessions, session, replies)
            self._deliver(session, replies)
        events = ladder.take_events()
        scanned = [found.tier for found in batch if isinstance(found, stimuli.Found) and found.last]
        if self._announcer is not None and (events or scanned):
            if self._merged is not None:
                self._merged.committed = any(map(_is_commit, batch))
            self._announcer.publish(events, scanned)
        self.pulse.turned(began)
        self._turned.set()
        self._arm(ladder.next_deadline())

    def _deliver(self, session: int, replies: Sequence[effects.Reply]) -> None:
        """Send answers; sessions of the control socket have numbers below zero."""
        if session < 0:
            assert self._control is not None
            self._control.deliver(session, replies)
            return
        assert self._engine is not None
        for reply in replies:
            if isinstance(reply, effects.Attached):
                assert self._ladder is not None
                assembly.describe(self._ladder, self._movers, reply.namespace)
        self._engine.deliver(session, replies)

    def _fail(self, error: Exception, guard: Guard) -> None:
        """A bug: say all that is known and end. A wrong ledger could serve wrong bytes, a lost event lies."""
        log.critical(
            "a turn failed; the daemon ends so that nothing wrong is served or told",
            exc_info=error,
            extra=event("turn_failed"),
        )
        try:
            log.critical("its story", extra=event("turn_failed", stack=guard.story(error)))
        except Exception:  # the state is broken: whatever can be told of it is a gift
            log.exception("its story cannot be told", extra=event("turn_failed"))
        failure = InvariantBroken(f"a turn failed: {error!r}")
        failure.__cause__ = error
        self._failure = failure
        self._stop.set()
        self._turned.set()

    def _beat(self) -> None:
        self._loop.call_later(BEAT_SECONDS, self._beat)  # first: whatever happens, time goes on
        self.watch.beat()
        if self._ticking:
            self._tick()

    def _tick(self) -> None:
        self.pulse.ticked(BEAT_SECONDS)
        self.turn([stimuli.Tick()])
        self.life.turned()
        self._see_engines()
        self.report.history.tick(time.monotonic())
        if self._announcer is not None:
            self._announcer.tick()
        if self._kept is not None:
            self._kept.tick()
        if self._hub is not None and self._ladder is not None:
            self._hub.set_ranks(self._ladder.sessions.dp_ranks())

    def _see_engines(self) -> None:
        """Begin the end's work early when the last engine has left: the stop may come any moment."""
        there = self._ladder is not None and bool(self._ladder.sessions.mapped)
        if self._engines and not there and self.tier_file.engine.on_last_engine_gone == "drain":
            log.info(
                "the last engine left: what only the pool holds is written down",
                extra=event("pool_written_down"),
            )
            ending.write_down(self)
        self._engines = there

    def _arm(self, deadline: float | None) -> None:
        """Tick exactly when a waiting load is due."""
        if deadline is None or (self._deadline is not None and self._deadline[0] <= deadline):
            return
        if self._deadline is not None:
            self._deadline[1].cancel()
        self._deadline = (deadline, self._loop.call_at(deadline, self._due))

    def _due(self) -> None:
        self._deadline = None
        self.turn([stimuli.Tick()])

    def _begin_survey(self, tier: str | None) -> Survey | str:
        if self._ladder is None:
            return "the tiers are not open yet"
        stack = self._ladder.stack
        if tier is not None and tier not in stack.names:
            return unknown_tier(tier, stack.names)
        return Survey(stack, tier)


def _is_commit(stimulus: stimuli.Stimulus) -> bool:
    return isinstance(stimulus, stimuli.Asked) and isinstance(stimulus.request, stimuli.Commit)
