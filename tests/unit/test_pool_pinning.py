"""Registration with CUDA: all chunks or none, and never torch where there is no device."""

import subprocess
import sys

import pytest

from kvtierd.config.schema import Pool as Settings
from kvtierd.edges import pinning
from kvtierd.edges.pinning import find_cuda, pin
from kvtierd.edges.pool import Pool
from kvtierd.errors import PoolError

MIB = 1 << 20


class FakeRuntime:
    """Keeps the registrations that are in force; refuses the one after ``room`` of them."""

    def __init__(self, room=100, error=None):
        self.registered = {}
        self.room = room
        self.error = error

    def register(self, address, length):
        if len(self.registered) >= self.room:
            if self.error:
                raise self.error
            return 2
        self.registered[address] = length
        return 0

    def unregister(self, address):
        del self.registered[address]
        return 0


@pytest.fixture
def pool(tmp_path):
    pool = Pool.allocate(Settings(bytes="4MiB", lock="off"), tmp_path)
    yield pool
    pool.close()


def test_the_whole_pool_is_registered_in_chunks_until_it_closes(pool, monkeypatch):
    monkeypatch.setattr(pinning, "CHUNK_BYTES", 3 * MIB)
    runtime = FakeRuntime()
    pin(pool, "auto", lambda: runtime)
    assert runtime.registered == {pool.address: 3 * MIB, pool.address + 3 * MIB: MIB}
    assert pool.achieved["pin"] == {"state": "pinned"}
    pool.close()
    assert runtime.registered == {}


def test_no_registration_is_larger_than_64_gib():
    assert pinning.CHUNK_BYTES == 64 << 30


@pytest.mark.parametrize("error", [None, RuntimeError("CUDA error: out of memory")])
def test_a_partial_registration_is_undone(pool, monkeypatch, error):
    monkeypatch.setattr(pinning, "CHUNK_BYTES", MIB)
    runtime = FakeRuntime(room=2, error=error)
    pin(pool, "auto", lambda: runtime)
    assert runtime.registered == {}
    assert pool.achieved["pin"]["state"] == "not pinned"
    assert "cudaHostRegister" in pool.achieved["pin"]["reason"]


def test_without_a_device_auto_says_why_and_require_stops(pool):
    pin(pool, "auto", lambda: "no CUDA device")
    assert pool.achieved["pin"] == {"state": "not pinned", "reason": "no CUDA device"}
    with pytest.raises(PoolError, match=r"pool\.pin: require: no CUDA device"):
        pin(pool, "require", lambda: "no CUDA device")


def test_off_does_not_even_look(pool):
    def look():
        raise AssertionError

    pin(pool, "off", look)
    assert pool.achieved["pin"] == {"state": "off"}


def test_a_container_without_a_device_is_recognised_without_torch(tmp_path):
    assert find_cuda(tmp_path / "nvidiactl") == "no CUDA device in this container"


def test_pool_and_pinning_never_import_torch_at_start():
    code = (
        "import sys, pathlib, kvtierd.edges.pool, kvtierd.edges.pinning as p;"
        "p.find_cuda(pathlib.Path('/nonexistent'));"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
