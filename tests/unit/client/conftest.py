"""A small daemon on a real Unix socket for the clients' tests, and one face for both clients."""

import asyncio
import contextlib
import inspect
import os
import secrets
import selectors
import socket
import threading
import time

import pytest
import uvloop

from kvtierd.client import AsyncClient, AsyncSession, Client
from kvtierd.core import effects
from kvtierd.core.effects import ErrorCode, Refused
from kvtierd.core.geometry import UNIT, Geometry
from kvtierd.core.model import Group, KeyState, Layout, SkipReason, hash_of
from kvtierd.errors import RemoteProtocolError
from kvtierd.wire.framing import frame
from kvtierd.wire.messages import StatusReport, StatusRequest
from kvtierd.wire.session import ServerConnection

POOL_BYTES = 64 * UNIT
# Two groups and two ranks, so that parts do not lie side by side: 1000 bytes align to 1024.
LAYOUT = Layout(
    model="tiny",
    dtype="float32",
    layout="test",
    groups=(Group(tokens_per_block=16, block_bytes=1000), Group(tokens_per_block=16, block_bytes=512)),
    ranks=2,
)


def wait_until(condition, timeout=10.0):
    """Wait for a condition of another thread or process; returns what it gave."""
    pause = threading.Event()
    until = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < until, f"not within {timeout} s: {inspect.getsource(condition)}"
        pause.wait(0.002)
    return value


class FakeDaemon:
    """Keeps blocks in a dictionary over a real memfd. Faults are switched on by attributes.

    ``mute``: requests of these types get no answer until :meth:`answer_late`. ``refuse``: type to code.
    ``cut``: close the connection after that many bytes of the next answer.
    """

    def __init__(self, path, versions=(1, 1)):
        self.path, self.versions = str(path), versions
        self.pool_id = secrets.token_hex(8)
        self.pool_fd = os.memfd_create("fake-pool")
        os.ftruncate(self.pool_fd, POOL_BYTES)
        self.requests, self.mute, self.refuse, self.cut, self.extra = [], set(), {}, None, {}
        self.attached_bytes, self.fence, self.descriptors = POOL_BYTES, 0, 2
        self.blocks, self.jobs, self.leases = {}, {}, set()
        self._late, self._numbers, self._liveness = [], iter(range(1, 1 << 30)), []
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe()
        self._commands = []
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        self.connections = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    # what tests call, from their own thread

    def run(self, command):
        """Run a callable on the daemon's thread and wait for it."""
        done = threading.Event()
        self._commands.append((command, done))
        os.write(self._wake_w, b"x")
        assert done.wait(5)

    def notice(self, fence):
        self.fence = fence
        self.run(lambda: [self._send(sock, effects.Revoked(id=0, fence=fence)) for sock in self.connections])

    def raw(self, payload):
        """Send a payload of any content on every connection."""
        self.run(lambda: [sock.sendall(frame(payload)) for sock in self.connections])

    def answer_late(self):
        def answer():
            self.mute.clear()
            late, self._late = self._late, []
            for sock, request in late:
                self._answer(sock, request)

        self.run(answer)

    def drop_connections(self):
        self.run(lambda: [self._close(sock) for sock in list(self.connections)])

    def close(self):
        if self._thread is None:
            return
        self._commands.append((None, None))
        os.write(self._wake_w, b"x")
        self._thread.join(5)
        self._thread = None
        for sock in list(self.connections):
            self._close(sock)
        self._listener.close()
        self._selector.close()
        for descriptor in (self._wake_r, self._wake_w, self.pool_fd, *self._liveness):
            os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def of_type(self, kind):
        return [request for request in self.requests if isinstance(request, kind)]

    def liveness_hung_up(self):
        """Whether every liveness descriptor that was handed out is closed."""
        for descriptor in self._liveness:
            os.set_blocking(descriptor, False)
            try:
                os.read(descriptor, 1)
            except BlockingIOError:
                return False
        return True

    # the daemon's thread

    def _serve(self):
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._wake_r:
                    os.read(self._wake_r, 1)
                    command, done = self._commands.pop(0)
                    if command is None:
                        return
                    command()
                    done.set()
                elif key.fileobj is self._listener:
                    sock, _ = self._listener.accept()
                    self.connections[sock] = ServerConnection(daemon="fake", versions=self.versions)
                    self._selector.register(sock, selectors.EVENT_READ, None)
                elif key.fileobj in self.connections:
                    self._read(key.fileobj)

    def _read(self, sock):
        connection = self.connections[sock]
        try:
            data = sock.recv(1 << 16)
            requests = connection.receive(data) if data else None
        except (OSError, RemoteProtocolError):
            requests = None
        if requests is None:
            self._close(sock)
            return
        with contextlib.suppress(OSError):
            for output in connection.take_output():
                sock.sendall(output)
        if connection.closed:
            self._close(sock)
            return
        for request in requests:
            self.requests.append(request)
            if type(request) in self.mute:
                self._late.append((sock, request))
            elif sock in self.connections:
                self._answer(sock, request)

    def _close(self, sock):
        if self.connections.pop(sock, None) is not None:
            self._selector.unregister(sock)
            sock.close()

    def _answer(self, sock, request):
        code = self.refuse.get(type(request))
        reply = Refused(id=request.id, code=code, message="as told") if code else self._reply(request)
        try:
            self._send(sock, reply)
        except OSError:  # the client is gone already
            self._close(sock)

    def _send(self, sock, reply):
        connection = self.connections[sock]
        data = connection.send(reply)
        if self.cut is not None:
            sock.sendall(data[: self.cut])
            self.cut = None
            self._close(sock)
            return
        if isinstance(reply, effects.Attached):
            read_end, write_end = os.pipe()
            self._liveness.append(read_end)
            try:
                socket.send_fds(sock, [data], [self.pool_fd, write_end][: self.descriptors])
            finally:
                os.close(write_end)
            return
        sock.sendall(data)
        if connection.closed:
            self._close(sock)

    def _reply(self, request):
        method = getattr(self, "_" + type(request).__name__.lower(), None)
        return (
            method(request)
            if method
            else effects.Done(id=request.id, count=len(getattr(request, "keys", ())))
        )

    def _statusrequest(self, request: StatusRequest):
        return StatusReport(id=request.id, body={"daemon": "fake", "blocks": len(self.blocks)})

    def _attach(self, request):
        geometry = Geometry.of(request.layout)
        return effects.Attached(
            id=request.id,
            session=next(self._numbers),
            namespace=request.layout.namespace(),
            pool_id=self.pool_id,
            pool_bytes=self.attached_bytes,
            unit_bytes=UNIT,
            slot_bytes=geometry.slot_bytes,
            payload_bytes=geometry.payload_bytes,
            rank_offsets=geometry.rank_offsets,
            fence=self.fence,
            tiers=("cpu",),
        )

    def _lookup(self, request):
        states = tuple(KeyState.HIT if key in self.blocks else KeyState.MISS for key in request.keys)
        prefix = states.index(KeyState.MISS) if KeyState.MISS in states else len(states)
        lease = self._lease() if request.lease and prefix else None
        return effects.LookedUp(
            id=request.id, found=bytes(states), prefix=prefix, lease=lease, leased=prefix if lease else 0
        )

    def _lease(self):
        lease = next(self._numbers)
        self.leases.add(lease)
        return lease

    def _preparestore(self, request):
        keys = tuple(key for key in request.keys if key not in self.blocks)
        slots = tuple(next(self._numbers) % (POOL_BYTES // UNIT) for _ in keys)
        job = next(self._numbers) if keys else 0
        if keys:
            self.jobs[job] = dict(zip(keys, slots, strict=True))
        skipped = tuple(
            effects.Skipped(key, SkipReason.RESIDENT) for key in request.keys if key in self.blocks
        )
        return effects.Prepared(
            id=request.id,
            job=job,
            generation=7,
            pool_id=self.pool_id,
            keys=keys,
            slots=slots,
            skipped=skipped,
        )

    def _commit(self, request):
        job = self.jobs.pop(request.job, None)
        if job is None:
            return Refused(id=request.id, code=ErrorCode.UNKNOWN_JOB, message="no such job")
        if request.pool_id != self.pool_id:
            return Refused(id=request.id, code=ErrorCode.STALE_POOL, message="another pool")
        stored = {key: slot for key, slot in job.items() if key not in request.failed}
        self.blocks.update(stored)
        return effects.Committed(id=request.id, stored=tuple(stored))

    def _abort(self, request):
        self.jobs.pop(request.job, None)
        return effects.Done(id=request.id)

    def _fail(self, request):
        job = self.jobs.get(request.job, {})
        for key in request.keys:
            job.pop(key, None)
        return effects.Done(id=request.id, count=len(request.keys))

    def _load(self, request):
        keys = []
        for key in request.keys:
            if key not in self.blocks:
                break
            keys.append(key)
        count = len(keys)
        return effects.Loaded(
            id=request.id,
            lease=self._lease() if keys else 0,
            pool_id=self.pool_id,
            keys=tuple(keys),
            slots=tuple(self.blocks[key] for key in keys),
            generations=(7,) * count,
            sources=("cpu",) * count,
        )

    def _release(self, request):
        self.leases.discard(request.lease)
        return effects.Done(id=request.id)

    def _evict(self, request):
        return effects.Done(
            id=request.id, count=sum(bool(self.blocks.pop(key, None)) for key in request.keys)
        )

    def _reset(self, request):
        count = len(self.blocks)
        self.blocks.clear()
        return effects.Done(id=request.id, count=count)

    def _inventory(self, request):
        if request.tier not in (None, "cpu"):
            return Refused(id=request.id, code=ErrorCode.UNKNOWN_TIER, message=f"no tier {request.tier}")
        entries = [
            effects.InventoryEntry("cpu", "CPU", None, key, (int.from_bytes(hash_of(key)[-8:], "big"),), 0)
            for key in self.blocks
        ]
        page = tuple(entries[request.cursor : request.cursor + 2])
        after = request.cursor + 2
        return effects.InventoryPage(
            id=request.id, entries=page, cursor=after if after < len(entries) else 0, total=len(entries)
        )


class Clock:
    """A clock that stands until told to run; then each look at it is ``step`` seconds later."""

    now, step = 1000.0, 0.0

    def __call__(self):
        self.now += self.step
        return self.now

    def run(self, step=3.0):
        self.step = step


class Face:
    """An async object with the manners of its blocking twin: every call runs on the test's loop."""

    def __init__(self, target, loop):
        self._target, self._loop = target, loop

    def __getattr__(self, name):
        value = getattr(self._target, name)
        return self._on_loop(value) if inspect.ismethod(value) else value

    def __enter__(self):
        self._on_loop(self._target.__aenter__)()
        return self

    def __exit__(self, *info):
        self._on_loop(self._target.__aexit__)(*info)

    def _on_loop(self, method):
        async def call(*args, **kwargs):
            result = method(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        def run(*args, **kwargs):
            result = self._loop.run_until_complete(call(*args, **kwargs))
            wrap = isinstance(result, AsyncSession) or hasattr(result, "session")
            return Face(result, self._loop) if wrap else result

        return run


@pytest.fixture(params=["blocking", "asyncio", "uvloop"])
def connect(request, socket_path):
    """Return what makes a client of each kind; all are closed in the end."""
    made, loop = [], None
    if request.param != "blocking":
        loop = uvloop.new_event_loop() if request.param == "uvloop" else asyncio.new_event_loop()

    def make(**options):
        kind = Client if loop is None else AsyncClient
        client = kind(socket_path, **options)
        made.append(client if loop is None else Face(client, loop))
        return made[-1]

    yield make
    for client in made:
        client.close()
    if loop is not None:
        loop.close()


@pytest.fixture
def socket_path(tmp_path):
    return str(tmp_path / "engine.sock")


@pytest.fixture
def start(socket_path):
    """Return what starts a daemon at the socket; all are closed in the end."""
    started = []

    def make(**options):
        started.append(FakeDaemon(socket_path, **options))
        return started[-1]

    yield make
    for daemon in started:
        daemon.close()


@pytest.fixture
def daemon(start):
    return start()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def layout():
    return LAYOUT


@pytest.fixture
def attach(connect, layout):
    """Return what attaches with the usual parameters, through a new client."""

    def make(deadline=5.0, **options):
        return connect(deadline=deadline, **options).attach(layout, engine_id="e0")

    return make


@pytest.fixture
def wait_for():
    return wait_until
