"""The processes that ``kvtierd bench events`` measures between: a publisher and two kinds of readers.

Each is ``python -m kvtierd.testing.events_bench ROLE SETTINGS`` (a JSON object); it prints one JSON object a
line and takes its commands from stdin the same way. Times are of ``time.monotonic``, which all share.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from kvtierd.core.model import Block, BlockId, BlockMeta, EventKind, Medium, TierEvent, block_key
from kvtierd.wire.kvevents import BlockStored, decode_batch
from kvtierd.wire.stream import END, encode_sequence

TOKENS = 16
"""In a block, as vLLM's default."""
CHAIN = 64
"""Blocks of a prompt."""
FILL = 1024
"""Blocks in a batch before the measurement."""
_HASHES = 1 << 63
ANSWER_SECONDS = 600.0


def stored(number: int) -> TierEvent:
    """Return the store of block ``number`` of an endless row of prompts."""
    meta = BlockMeta(
        hashes=(_HASHES + number,),
        parent=_HASHES + number - 1 if number % CHAIN else None,
        token_ids=tuple(range(number * TOKENS % 100_000 + 1000, number * TOKENS % 100_000 + 1000 + TOKENS)),
        block_size=TOKENS,
        spec_kind="full_attention",
    )
    key = block_key(number.to_bytes(32, "big"))
    return TierEvent(
        EventKind.STORED, "cpu", Medium.CPU, None, Block.of(BlockId("bench", key), 1 << 20, meta)
    )


class Child:
    """One of the processes, ended by ``with``."""

    def __init__(self, role: str, **settings: Any) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "kvtierd.testing.events_bench", role, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        """Wait for its next line.

        Raises:
            RuntimeError: it ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended with {self._process.wait(10)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.tell(**command)
        return self.hear()

    def tell(self, **command: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def stop_reading(self) -> None:
        """Stop the process, as a reader that hangs."""
        self._process.send_signal(signal.SIGSTOP)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201 - the pipe to the parent


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


# -- the publisher


class _Publisher:
    """A hub as in the daemon, and a bare PUB socket that sends the same bytes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from kvtierd.config.audiences import Audience, Events
        from kvtierd.edges.hub import EventHub

        audience = {"name": "bench", "bind": "tcp://127.0.0.1:0", "replay": "tcp://127.0.0.1:0"}
        folder = Path(settings["folder"])
        if settings.get("first"):
            (folder / "sequence-bench").write_text(f"{settings['first']}\n")
        made = Audience.model_validate({**audience, **settings.get("audience", {})}, strict=False)
        self._hub = EventHub(
            Events.model_validate({"audiences": (made,), "model": "m", "heartbeat": "500ms"}),
            tiers={"cpu": "cpu"},
            state_dir=folder,
            clock=time.time,
            environ={"POD_IP": "127.0.0.1"},
        )
        self._next = 0
        self._blocks = int(settings.get("blocks", 0))

    async def run(self) -> None:
        """Fill it, then carry out commands until there are none."""
        loop = asyncio.get_running_loop()
        self._hub.start(loop)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._bare = context.socket(zmq.PUB)
        self._bare.setsockopt(zmq.SNDHWM, 100_000)
        self._bare.bind("tcp://127.0.0.1:0")
        began = time.monotonic()
        while self._next < self._blocks:
            self._hub.publish(self._events(FILL))
            await asyncio.sleep(0)
        _say(
            **self._hub.bound_endpoints(),
            bare=self._bare.getsockopt_string(zmq.LAST_ENDPOINT),
            fill_seconds=time.monotonic() - began,
            peak_bytes=_peak_bytes(),
        )
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            await self._obey(json.loads(line))
        context.destroy(linger=0)
        await self._hub.close(0.1)

    async def _obey(self, command: dict[str, Any]) -> None:
        send: Callable[[], object]
        if command["do"] == "hub":
            send = functools.partial(self._publish, command["blocks"])
            _say(sent=await self._paced(command["rate"], command["seconds"], send))
        elif command["do"] == "bare":
            payload = bytes(command["bytes"])
            send = functools.partial(self._send_bare, (b"", encode_sequence(7), payload))
            _say(sent=await self._paced(command["rate"], command["seconds"], send))
        else:
            statistics = self._hub.statistics()
            shown = {name: statistics[name] for name in ("sequence", "announced", "renumbered")}
            _say(peak_bytes=_peak_bytes(), **shown)

    def _publish(self, blocks: int) -> None:
        self._hub.publish(self._events(blocks))

    def _send_bare(self, frames: tuple[bytes, ...]) -> None:
        self._bare.send_multipart(frames, zmq.NOBLOCK)

    async def _paced(self, rate: float, seconds: float, send: Callable[[], object]) -> list[float]:
        """Send evenly; what is late leaves at once. Returns when each send began."""
        loop = asyncio.get_running_loop()
        start, times = time.monotonic(), list[float]()
        for index in range(int(rate * seconds)):
            due = start + index / rate
            if due > time.monotonic():
                woken = loop.create_future()
                loop.call_later(due - time.monotonic(), woken.set_result, None)
                await woken
            elif index % 16 == 0:
                await asyncio.sleep(0)  # others have work as well
            times.append(time.monotonic())
            send()
        return times

    def _events(self, count: int) -> list[TierEvent]:
        first, self._next = self._next, self._next + count
        return [stored(number) for number in range(first, self._next)]


# -- the readers


def _subscribe(settings: dict[str, Any]) -> None:
    """Note when each message with events comes from each endpoint; a line of input asks for it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [_connected(context, zmq.SUB, endpoint) for endpoint in settings["endpoints"]]
    for socket in sockets:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    arrived: list[list[tuple[float, bytes]]] = [[] for _ in sockets]
    poller = zmq.Poller()
    for readable in (*sockets, sys.stdin.fileno()):
        poller.register(readable, zmq.POLLIN)
    _say(ready=True)
    while True:
        ready = dict(poller.poll())
        for socket, messages in zip(sockets, arrived, strict=True):
            if socket in ready:
                _receive(socket, messages)
        if sys.stdin.fileno() in ready:
            if not sys.stdin.readline():
                break
            if settings["decode"]:
                _say(told=[_first_hashes(messages) for messages in arrived])
            else:
                sizes = [max((len(body) for _, body in messages), default=0) for messages in arrived]
                _say(arrived=[[at for at, _ in messages] for messages in arrived], sizes=sizes)
            for messages in arrived:
                messages.clear()
    context.destroy(linger=0)


def _receive(socket: zmq.Socket[bytes], messages: list[tuple[float, bytes]]) -> None:
    with contextlib.suppress(zmq.Again):
        while True:
            _, _, payload = socket.recv_multipart(zmq.NOBLOCK)
            if len(payload) > 32:  # an empty batch has 12 bytes
                messages.append((time.monotonic(), payload))


def _first_hashes(messages: Sequence[tuple[float, bytes]]) -> list[tuple[float, int]]:
    """Return when the first store of each batch came, and of which hash."""
    found = []
    for at, payload in messages:
        first = next((e for e in decode_batch(payload).events if isinstance(e, BlockStored)), None)
        if first is not None and isinstance(first.block_hashes[0], int):
            found.append((at, first.block_hashes[0]))
    return found


def _replay(settings: dict[str, Any]) -> None:
    """Ask for everything from 0, as a router that joins late, and check that no number is missing."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = _connected(context, zmq.DEALER, settings["endpoint"])
    began = time.monotonic()
    dealer.send_multipart([b"", encode_sequence(0)])
    payloads: list[bytes] = []
    first = last = None
    batches = size = holes = 0
    while dealer.poll(int(ANSWER_SECONDS * 1000)):
        frames = dealer.recv_multipart()
        if frames[-2] == END:
            break
        number = int.from_bytes(frames[-2], "big")
        first = number if first is None else first
        holes += last is not None and number != last + 1
        last = number
        batches, size = batches + 1, size + len(frames[-1])
        if len(frames[-1]) > 32:
            payloads.append(frames[-1])
    seconds = time.monotonic() - began
    context.destroy(linger=0)
    known = {
        h
        for payload in payloads
        for event in decode_batch(payload).events
        if isinstance(event, BlockStored)
        for h in event.block_hashes
    }
    _say(seconds=seconds, batches=batches, bytes=size, blocks=len(known), first=first, holes=holes)


def _connected(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(endpoint)
    return socket


@contextlib.contextmanager
def subscriber(*endpoints: str, decode: bool = False) -> Iterator[Child]:
    """Give a reader that has connected (its subscription follows within a moment)."""
    with Child("subscribe", endpoints=endpoints, decode=decode) as child:
        child.hear()
        yield child


def main() -> None:
    """Be the process that the arguments say."""
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    if role == "publish":
        import uvloop

        from kvtierd.cli.serve import tame_collector

        tame_collector()
        uvloop.run(_Publisher(settings).run())
    else:
        {"subscribe": _subscribe, "replay": _replay}[role](settings)


if __name__ == "__main__":
    main()
