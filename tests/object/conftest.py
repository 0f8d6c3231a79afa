"""One real object server for all of these tests; each test has a bucket or prefix of its own."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import obstore
import pytest

from kvtierd.config.schema import ObjectTier
from kvtierd.edges.backends.object_tier import make_object_backend
from kvtierd.testing.fault_proxy import FaultProxy
from kvtierd.testing.local_daemon import short_folder
from kvtierd.testing.object_server import ACCESS_KEY, SECRET_KEY, ObjectServer, find_weed

WEED_FOLDER = Path(__file__).parents[2] / ".venvs" / "seaweedfs" / "bin"
_numbers = itertools.count()


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker("object")


@pytest.fixture(scope="session")
def server():
    weed = find_weed(WEED_FOLDER, Path(sys.executable).parent)
    if weed is None:
        if os.environ.get("CI"):
            pytest.fail("no object server: make object")
        pytest.skip("no object server: make object")
    with short_folder("s3") as folder, ObjectServer(weed, folder) as running:
        running.make_bucket("blocks")
        obstore.put(running.client("blocks"), "first", b"makes the server grow the bucket's volumes")
        yield running


@pytest.fixture
def prefix():
    """A prefix of the bucket that no other test uses."""
    return f"t{next(_numbers)}"


@pytest.fixture
def proxy(server):
    with FaultProxy(server.port) as running:
        yield running
        running.release()


@pytest.fixture
def keys(monkeypatch):
    """The right keys, in the variables that the tier names."""
    monkeypatch.setenv("LAKE_ACCESS_KEY", ACCESS_KEY)
    monkeypatch.setenv("LAKE_SECRET_KEY", SECRET_KEY)


@pytest.fixture
def open_tier(server, prefix, keys):
    """A function from an object tier's settings to its opened backend; short timeouts unless given."""
    backends = []

    def make(endpoint=server.endpoint, **settings):
        values = {
            "name": "lake",
            "type": "object",
            "url": f"s3://blocks/{prefix}",
            "endpoint": endpoint,
            "credentials": {
                "access_key_variable": "LAKE_ACCESS_KEY",
                "secret_key_variable": "LAKE_SECRET_KEY",
            },
            "connect_timeout": "200ms",
            "request_timeout": "300ms",
            "deadline": "700ms",
        }
        backends.append(make_object_backend(ObjectTier.model_validate(values | settings)))
        backends[-1].open()
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()
