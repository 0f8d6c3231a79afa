"""The daemon's own sockets: modes, stale ones, liveness pipes, probes."""

import asyncio
import json
import os
import socket
import stat

import pytest
import zmq

from kvtierd.edges.addresses import CannotBind
from kvtierd.edges.admin import AdminServer
from kvtierd.edges.liveness import Liveness
from kvtierd.edges.outlet import Outlet, OutletPlan
from kvtierd.edges.unix_socket import CannotCreate, listen, make_folder
from kvtierd.errors import ExitCode


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_socket_has_its_mode_whatever_the_umask(tmp_path, umask):
    """L110"""
    before = os.umask(umask)
    try:
        with listen(tmp_path / "s"):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660
            assert os.listdir(tmp_path) == ["s"], "nothing is left of the name it was bound under"
    finally:
        assert os.umask(before) == umask


def test_a_stale_socket_is_replaced_and_a_living_one_is_not(tmp_path):
    listen(tmp_path / "s").close()
    with listen(tmp_path / "s"), pytest.raises(CannotCreate, match="another daemon"):
        listen(tmp_path / "s")


def test_a_folder_that_cannot_be_made_names_its_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotCreate, match="runtime_dir"):
        make_folder("runtime_dir", tmp_path / "file" / "run")
    with pytest.raises(CannotCreate):
        listen(tmp_path / "missing" / "s")


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 10))


def test_a_process_is_dead_when_its_last_pipe_hangs_up():
    async def scene():
        died = asyncio.Queue()
        liveness = Liveness(asyncio.get_running_loop(), died.put_nowait)
        first, second = liveness.hand_out(b"p"), liveness.hand_out(b"p")
        other = liveness.hand_out(b"q")
        os.write(first, b"noise")
        os.close(second)
        os.close(other)
        assert await died.get() == b"q"
        assert died.empty()
        os.close(first)
        assert await died.get() == b"p"
        assert len(liveness) == 0
        os.close(liveness.hand_out(b"r"))
        liveness.close()

    run(scene())


def test_a_process_that_was_never_given_the_pool_is_dead_at_once():
    """It attached, so slots wait for it; no pipe will ever hang up for it."""

    async def scene():
        died = asyncio.Queue()
        liveness = Liveness(asyncio.get_running_loop(), died.put_nowait)
        pipe = liveness.hand_out(b"p")
        liveness.not_handed_out(b"p")
        liveness.not_handed_out(b"q")
        assert await died.get() == b"q"
        assert died.empty(), "another pipe speaks for the other one"
        os.close(pipe)
        assert await died.get() == b"p"

    run(scene())


async def ask(port, request):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    reply = await reader.read()
    writer.close()
    await writer.wait_closed()
    return reply


@pytest.mark.parametrize(
    ("state", "age", "codes"),
    [
        ("starting", 0.0, {"/startupz": 503, "/readyz": 503, "/livez": 200}),
        ("ready", 0.0, {"/startupz": 200, "/readyz": 200, "/livez": 200, "/statusz": 200, "/x": 404}),
        ("ready", 60.0, {"/readyz": 200, "/livez": 503}),
        ("stopping", 0.0, {"/startupz": 200, "/readyz": 503, "/livez": 200}),
    ],
)
def test_probes_tell_the_state(state, age, codes):
    async def scene():
        admin = AdminServer(
            "127.0.0.1:0",
            lambda: {"state": state, "turn_age_seconds": age, "ready": state == "ready"},
            lambda: {"version": "x"},
        )
        await admin.start()
        got = {}
        for path in codes:
            reply = await ask(admin.port, f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            head, _, body = reply.partition(b"\r\n\r\n")
            got[path] = int(head.split()[1])
            json.loads(body)
        assert got == codes
        await admin.close()

    run(scene())


def test_the_probe_port_answers_nothing_but_get_and_survives_garbage():
    """L129"""

    async def scene():
        admin = AdminServer("127.0.0.1:0", lambda: {"state": "ready", "turn_age_seconds": 0}, dict)
        await admin.start()
        for method in (b"POST", b"DELETE", b"PUT", b"HEAD"):
            reply = await ask(
                admin.port, method + b" /statusz HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
            )
            assert b" 405 " in reply.split(b"\r\n")[0]
        for garbage in (b"\x16\x03\x01\x02\0\x01", b"\0" * 20000, b"GET / HTTP/9.9\r\n\r\n"):
            await ask(admin.port, garbage + b"\r\n\r\n")
        taken = AdminServer(f"127.0.0.1:{admin.port}", dict, dict)
        with pytest.raises(Exception, match=r"admin\.listen"):
            await taken.start()
        await admin.close()

    run(scene())


def test_a_taken_port_is_told_in_one_way_whoever_wants_it():
    """The probes' listener and the event stream say the same and end with the same code."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(CannotBind) as admin:
            run(AdminServer(address, dict, dict).start())
        outlet, loop = (
            Outlet(OutletPlan("a", "", f"tcp://{address}", None, None, 10)),
            asyncio.new_event_loop(),
        )
        context = zmq.Context()
        try:
            with pytest.raises(CannotBind) as events:
                outlet.open(context, loop)
        finally:
            context.destroy(linger=0)
            loop.close()
    advice = "is taken by another process: choose another address or stop it (Address already in use)"
    assert str(admin.value) == f"admin.listen {address} {advice}"
    assert str(events.value) == f"events audience 'a': bind tcp://{address} {advice}"
    assert admin.value.exit_code == events.value.exit_code == ExitCode.CANT_CREATE


def test_an_address_of_another_machine_is_told_without_a_system_tuple():
    with pytest.raises(CannotBind, match=r"^admin.listen 192\.0\.2\.1:1 cannot be bound: [A-Z][a-z ]+$"):
        run(AdminServer("192.0.2.1:1", dict, dict).start())
