"""Hands a running daemon over to another process, without its engines noticing more than one slower call.

The new daemon asks at ``takeover.sock``. While this one still serves, the work of the secondaries is left to
end; then it freezes, sends everything, and ends when the other says that all is ready. If that word does not
come it goes on with its own inheritance, as the other one would have.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvtierd import __version__, assembly, ending
from kvtierd.config.schema import TierFile
from kvtierd.core import handover, stimuli
from kvtierd.core.ladder import Ladder
from kvtierd.edges.connection import EngineConnection
from kvtierd.edges.handover import NAME, READY_SECONDS, Inheritance, Peer, ask
from kvtierd.edges.kept_pool import KeptPool
from kvtierd.edges.systemd import Manager
from kvtierd.edges.unix_socket import Permissions, inode_of, listen, remove_own
from kvtierd.edges.watch import Watch
from kvtierd.logs.events import event
from kvtierd.wire.frames import Unreadable
from kvtierd.wire.handover import FORMAT, Ask, Go, Handed, Offer, Part, Ready, Refusal, Taken, downgrade

if TYPE_CHECKING:
    from kvtierd.daemon import Daemon

log = logging.getLogger(__name__)

STREAM_SECONDS = 0.2
"""For batches on their way to readers; who misses some asks the next daemon for them."""
QUIET_SECONDS = 3.0
"""For the work of the secondaries to end before a takeover is refused."""


class Takeover:
    """Listens for a daemon that wants to take over from ``daemon``."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._path = daemon.tier_file.runtime_dir / NAME
        self._listener: socket.socket | None = None
        self._inode: tuple[int, int] | None = None
        self._task: asyncio.Task[None] | None = None
        self.refused = ""
        """Why the last takeover did not happen."""

    def start(self) -> None:
        """Listen."""
        self._listener = listen(self._path, Permissions(0o600))
        self._inode = inode_of(self._path)
        self._task = asyncio.create_task(self._serve(self._listener))

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            remove_own(self._path, self._inode)

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            peer = Peer(sock)
            try:
                if await self._answer(peer):
                    return
            except (OSError, Unreadable) as error:
                log.warning("takeover: %s", error, extra=event("takeover_refused", reason=str(error)))
            finally:
                peer.close()

    async def _answer(self, peer: Peer) -> bool:
        """Hand over if that may be; whether this daemon is done."""
        asked = await self._aside(peer.receive)
        reason = self._objection(peer, asked) or await self._started()
        if not reason:
            await self._offer(peer)
            reason = await self._quiet()
        if reason:
            self.refused = reason
            log.warning("takeover refused: %s", reason, extra=event("takeover_refused", reason=reason))
            await self._aside(lambda: peer.send(Refusal(reason)))
            return False
        assert isinstance(asked, Ask)
        log.info("handing over to %s", asked.daemon, extra=event("handing_over", to=asked.daemon))
        handed, descriptors, ladder = await self._freeze()
        try:
            await self._aside(lambda: peer.send(handed, descriptors))
            answer = await self._aside(peer.receive)
            if not isinstance(answer, Taken):
                raise Unreadable(f"the other daemon said {type(answer).__name__}")
            await self._aside(lambda: peer.send(Go()))
        except (OSError, Unreadable) as error:
            self.refused = f"the other daemon failed: {error}"
            log.warning(
                "takeover: %s; going on", self.refused, extra=event("takeover_failed", reason=self.refused)
            )
            await _go_on(self._daemon, handed, descriptors, ladder)
            return True  # another of these listens now
        for descriptor in descriptors:
            os.close(descriptor)
        log.info("handed over", extra=event("handed_over"))
        self._daemon.life.hand_over(peer.who()[0])
        self._daemon.handed_over()
        return True

    async def _aside(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, call)

    def _objection(self, peer: Peer, asked: object) -> str:
        daemon, pool = self._daemon, self._daemon.tier_file.pool
        if not isinstance(asked, Ask):
            return "that is no request"
        _, uid = peer.who()
        if uid not in (os.geteuid(), 0):
            return f"user {uid} is another one"
        if reason := downgrade(asked):
            return reason
        if daemon.state != "ready":
            return f"this daemon is {daemon.state}"
        mine = (pool.bytes, pool.backing, str(pool.path or ""))
        theirs = (asked.pool_bytes, asked.backing, asked.pool_path)
        if mine != theirs:
            return f"the pool is another one ({theirs}, not {mine}): that needs a restart"
        return ""

    async def _started(self) -> str:
        """Wait for this daemon's own start to end; return why that is not so."""
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                await self._daemon._up.wait()
        except TimeoutError:
            return "this daemon's own start is not over: it still reads what readers know"
        return ""

    async def _offer(self, peer: Peer) -> None:
        """Give the pool and what is in it while this daemon serves on, and wait for it to be made use of.

        Raises:
            OSError, Unreadable: the other one does not, nothing has happened.
        """
        ladder, kept = self._daemon._ladder, self._daemon._kept
        assert ladder is not None
        assert kept is not None
        owner = kept.pool.owner()
        try:
            await self._aside(lambda: peer.send(Offer(kept.pool.pool_id, kept.recorded), [owner]))
            for part in kept.copy(ladder):
                await self._aside(functools.partial(peer.send, Part(part)))
            await self._aside(lambda: peer.send(Part(b"")))
            answer = await self._aside(lambda: peer.receive(READY_SECONDS))
            if not isinstance(answer, Ready):
                raise Unreadable(f"the other daemon said {type(answer).__name__}")
        except (OSError, Unreadable):
            kept.stop_copy(ladder)
            raise
        finally:
            os.close(owner)

    async def _quiet(self) -> str:
        """Let work for the secondaries end, and begin none; return why it does not."""
        daemon = self._daemon
        assert daemon._ladder is not None
        stack = daemon._ladder.stack
        until = daemon._loop.time() + QUIET_SECONDS
        daemon.turn([stimuli.Usable(tier.name, "handing over") for tier in stack.secondaries])
        while stack.operations and daemon._loop.time() < until:
            daemon._turned.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await daemon._turned.wait()
        if not stack.operations:
            return ""
        count = len(stack.operations)
        assert daemon._kept is not None
        daemon._kept.stop_copy(daemon._ladder)
        daemon.turn([stimuli.Usable(tier.name, "") for tier in stack.secondaries])
        return f"{count} operations of tiers did not end within {QUIET_SECONDS:g} s"

    async def _freeze(self) -> tuple[Handed, list[int], Ladder]:
        """Stop serving; return what the next daemon still needs. From here on only an inheritance goes on."""
        daemon = self._daemon
        ladder, engine, control, kept = daemon._ladder, daemon._engine, daemon._control, daemon._kept
        assert ladder is not None
        assert engine is not None
        assert control is not None
        assert kept is not None
        listeners = {"engine.sock": engine.freeze(), "control.sock": control.freeze()}
        daemon.turn([stimuli.Stop(keep_pool=True)])  # answers loads that wait
        daemon._ladder = None
        kept.pool.presence.retire()  # the connections that go on still look there
        connections = [both for c in engine.connections.values() if (both := c.hand_over()) is not None]
        numbers = {connection.number for connection, _ in connections}
        live = handover.live(ladder, daemon._loop.time())
        changed = kept.changed(ladder)
        gone = [session for session in live.sessions if session.number not in numbers]
        live = _without(live, {session.number for session in gone})
        named = [
            ("lock", os.dup(daemon._lock)),
            *listeners.items(),
            *((f"connection {connection.number}", fd) for connection, fd in connections),
        ]
        handed = Handed(
            format=FORMAT,
            next_number=engine.next_number(),
            table=kept.table(ladder) if changed is None else changed,
            whole=changed is None,
            live=live,
            connections=tuple(connection for connection, _ in connections),
            names=tuple(name for name, _ in named),
            notify=daemon.life.manager.address,
            watchdog=daemon.life.manager.period,
        )
        self._stop_listening()
        await _let_go(daemon)
        return handed, [fd for _, fd in named], ladder


def _without(live: handover.Live, sessions: set[int]) -> handover.Live:
    """Leave out what belongs to connections that end here: it is quarantined, as after a lost connection."""
    return handover.Live(
        sessions=[session for session in live.sessions if session.number not in sessions],
        jobs=[job for job in live.jobs if job.session not in sessions],
        leases=[lease for lease in live.leases if lease.session not in sessions],
    )


async def _let_go(daemon: Daemon) -> None:
    """End what another daemon needs to begin: files, ports, tiers; the pool stays as it is."""
    daemon.state = "handing over"
    assert daemon._openings is not None
    assert daemon._kept is not None
    assert daemon._liveness is not None
    daemon._liveness.close()
    daemon._openings.stop()
    await asyncio.gather(
        _close_tiers(daemon),
        daemon._loop.run_in_executor(None, daemon._trail.close),
        ending.end_stream(daemon, daemon._loop.time() + STREAM_SECONDS, keep=True),
        *([daemon._admin.close()] if daemon._admin is not None else []),
    )
    daemon._kept.stop_recording()
    for server in (daemon._engine, daemon._control):
        assert server is not None
        await server.stop_listening(keep=True)
        server.close()


async def _close_tiers(daemon: Daemon) -> None:
    for mover in daemon._movers.values():
        await mover.close(1.0)
    assert daemon._openings is not None
    await daemon._loop.run_in_executor(None, daemon._openings.close)


async def _go_on(daemon: Daemon, handed: Handed, descriptors: Sequence[int], ladder: Ladder) -> None:
    """Serve on after a takeover that failed, with what had been prepared for it."""
    kept = daemon._kept
    assert kept is not None
    take = functools.partial(
        assembly.take_pool, daemon.tier_file, kept.pool.owner(), kept.pool.pool_id, recorded=kept.recorded
    )
    handed = msgspec.structs.replace(handed, table=kept.table(ladder), whole=True)
    kept.close(keep=True)
    daemon.watch.stop()
    daemon.watch = Watch(daemon.report.ages)
    try:
        kept = await daemon._loop.run_in_executor(None, take)
        inheritance = Inheritance(None, handed, descriptors, kept)
        lock = inheritance.take("lock")
        assert lock is not None
        os.close(lock)
        daemon._backends = assembly.make_backends(daemon.tier_file)
        daemon._trail = await daemon._loop.run_in_executor(None, assembly.make_trail, daemon.tier_file)
        await daemon._start(inheritance)
    except Exception as error:
        daemon._failure = error
        daemon._stop.set()


async def inherit(daemon: Daemon) -> Inheritance:
    """Ask the daemon that runs to hand over; its lock is ``daemon``'s then.

    Raises:
        CannotTakeOver: it does not; it goes on.
    """
    pool = daemon.tier_file.pool
    request = Ask(FORMAT, f"kvtierd {__version__}", pool.bytes, pool.backing, str(pool.path or ""))
    inheritance = await daemon._loop.run_in_executor(None, _accept, daemon.tier_file, request)
    lock = inheritance.take("lock")
    assert lock is not None
    daemon._lock = lock
    return inheritance


def _accept(tier_file: TierFile, request: Ask) -> Inheritance:
    """Ask for all of it; what takes long is done while the other daemon still serves."""
    offered = ask(tier_file.runtime_dir, request)
    kept: KeptPool | None = None
    try:
        owner, offered.owner = offered.owner, -1
        offer = offered.offer
        kept = assembly.take_pool(tier_file, owner, offer.pool_id, recorded=offer.recorded)
        kept.know(offered.table)
        offered.table = b""
        return offered.accept(kept)
    except BaseException:
        if kept is not None:
            kept.close(keep=True)
        offered.close()
        raise


async def serve_on(daemon: Daemon, inheritance: Inheritance) -> None:
    """Serve the connections of the other daemon, once it has let go of them.

    Raises:
        CannotTakeOver: it does not; it goes on.
    """
    engine, control = daemon._engine, daemon._control
    assert engine is not None
    assert control is not None
    await daemon._loop.run_in_executor(None, inheritance.confirm)
    daemon.life.take_over(Manager(inheritance.handed.notify, inheritance.handed.watchdog))
    for connection in inheritance.handed.connections:
        descriptor = inheritance.take(f"connection {connection.number}")
        assert descriptor is not None
        await EngineConnection.adopt(engine, connection, descriptor)
    for server, name in ((engine, "engine.sock"), (control, "control.sock")):
        await server.start(inheritance.take(name))
    inheritance.close()
    daemon.turn([stimuli.Tick()])  # processes that have to acknowledge are told
