"""The conformance kit for object stores: what they promise otherwise, and what they promise more.

Subclass :class:`ObjectKit` in a pytest module with one fixture, ``store``: an empty client of obstore's.
"""

# ruff: noqa: D102 - the name of a test is its promise; it needs no docstring
from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvtierd.core.model import BlockId, group_of, hash_of
from kvtierd.core.stimuli import Status
from kvtierd.edges.backends.base import Backend, Maintained, Probing
from kvtierd.edges.backends.object import ObjectBackend
from kvtierd.testing.backend_kit import (
    LAYOUT,
    NAMESPACE,
    BackendKit,
    RawGet,
    RawPut,
    block,
    payload,
    read,
    write,
)

PREFIX = "some/where"


def key_of(block_id: BlockId) -> str:
    """Where OBJECT.md says that a block lies."""
    name = f"{hash_of(block_id.key).hex()}.{group_of(block_id.key)}"
    return f"{PREFIX}/v1/{block_id.namespace}/{hash_of(block_id.key).hex()[-2:]}/{name}"


def make(store: Any, **settings: Any) -> ObjectBackend:
    """Return an opened backend over a client."""
    chosen: dict[str, Any] = {"prefix": PREFIX, "list_at_start": True, "place": "the kit's store"} | settings
    backend = ObjectBackend("lake", lambda: store, **chosen)
    backend.open()
    return backend


class ObjectKit(BackendKit):
    """Conformance tests; see the module for the fixture to override."""

    @pytest.fixture
    def store(self) -> Any:
        """Return a client of an empty store; override."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _remember(self, store: Any) -> None:
        self.client = store

    @pytest.fixture
    def backend(self, store: Any) -> Backend:
        return make(store)

    def reopen(self, backend: Backend) -> Backend:
        return make(self.client)

    @pytest.fixture
    def raw_get(self, store: Any) -> RawGet:
        import obstore

        def get(block_id: BlockId) -> bytes | None:
            try:
                return bytes(obstore.get(store, key_of(block_id)).bytes())
            except FileNotFoundError:
                return None

        return get

    @pytest.fixture
    def raw_put(self, store: Any) -> RawPut:
        import obstore

        def put(block_id: BlockId, data: bytes | None) -> None:
            if data is None:
                obstore.delete(store, key_of(block_id))
            else:
                obstore.put(store, key_of(block_id), data, use_multipart=False)

        return put

    def test_a_second_write_replaces_the_first(self, backend: Backend) -> None:
        """Here the first writer of a key wins: its object is proved, and the bytes are not sent twice."""
        write(backend, block(1), payload(1))
        assert write(backend, block(1), payload(2)).status is Status.OK
        assert read(backend, block(1)) == payload(1)

    def test_a_scan_is_in_order_of_last_use(self, backend: Backend) -> None:
        """A bucket keeps no order of use: a scan finds all, in the order of names."""
        for number in (3, 1, 2):
            write(backend, block(number), payload(number))
        (found,) = self.reopen(backend).scan()
        assert [one.block.id for one in found] == [block(number).id for number in (1, 2, 3)]

    def test_a_write_replaces_an_object_that_proves_to_be_bad(
        self, backend: Backend, raw_put: RawPut, raw_get: RawGet
    ) -> None:
        write(backend, block(2), payload(2))
        for bad in (b"", b"junk", raw_get(block(2).id), (raw_get(block(2).id) or b"")[:-1]):
            raw_put(block(1).id, bad)
            assert write(backend, block(1), payload(1)).status is Status.OK
            assert read(backend, block(1)) == payload(1)

    def test_a_probe_finds_what_proves_itself_and_nothing_else(
        self, backend: Backend, raw_put: RawPut
    ) -> None:
        for number in range(20):
            write(backend, block(number), payload(number))
        raw_put(block(3).id, b"junk")
        raw_put(block(4).id, None)
        raw_put(block(5).id, b"")
        assert isinstance(backend, Probing)
        found = backend.probe([block(number).id for number in range(25)])
        assert [one.block for one in found] == [block(n) for n in range(20) if n not in (3, 4, 5)]
        assert {one.stored_bytes for one in found} == {backend.estimate(block(0))}

    def test_a_shared_store_is_not_listed_at_start(self, backend: Backend, store: Any) -> None:
        write(backend, block(1), payload(1))
        shared = make(store, list_at_start=False)
        assert list(shared.scan()) == []
        assert [one.block for batch in shared.list_blocks() for one in batch] == [block(1)]

    def test_many_blocks_are_deleted_at_once(self, backend: Backend) -> None:
        for number in range(10):
            write(backend, block(number), payload(number))
        assert isinstance(backend, ObjectBackend)
        requests = backend.statistics()["requests"]
        assert all(one.status is Status.OK for one in backend.delete([block(n).id for n in range(12)]))
        assert backend.statistics()["requests"] == requests + 1
        assert backend.probe([block(n).id for n in range(10)]) == []

    def test_a_namespace_has_a_readable_record(self, backend: Backend, store: Any) -> None:
        import obstore

        backend.describe(NAMESPACE, LAYOUT)
        record = json.loads(bytes(obstore.get(store, f"{PREFIX}/v1/{NAMESPACE}/namespace.json").bytes()))
        assert record["layout"]["model"] == "kit"
        assert record["payload_bytes"] == [5000]

    @pytest.mark.parametrize("name", ["../../etc", "", "F" * 32, "a" * 31, "a" * 32 + "/x"])
    def test_a_namespace_that_is_none_leads_nowhere(self, backend: Backend, store: Any, name: str) -> None:
        """L126."""
        import obstore

        assert isinstance(backend, ObjectBackend)
        odd = block(1, namespace=name)
        backend.describe(name, LAYOUT)
        assert write(backend, odd, payload(1)).status is Status.FAILED
        assert read(backend, odd) is Status.FAILED
        assert backend.delete([odd.id])[0].status is Status.FAILED
        assert backend.probe([odd.id]) == []
        assert obstore.list(store).collect() == []

    def test_of_racing_writers_all_succeed_and_one_object_is_left(self, backend: Backend, store: Any) -> None:
        """L64; sixteen daemons, one key."""
        import obstore

        start = threading.Barrier(16, timeout=30)

        def work(number: int) -> Status:
            start.wait()
            return write(make(store), block(1), payload(number)).status

        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(work, range(16))) == [Status.OK] * 16
        assert read(backend, block(1)) in [payload(number) for number in range(16)]
        assert len(obstore.list(store).collect()) == 1

    def test_tools_see_namespaces_and_remove_one(self, backend: Backend, raw_put: RawPut) -> None:
        assert isinstance(backend, Maintained)
        other = "e" * 32
        for number in range(3):
            write(backend, block(number), payload(number))
        write(backend, block(1, namespace=other), payload(1))
        backend.describe(NAMESPACE, LAYOUT)
        found = {one.namespace: one for one in backend.namespaces()}
        assert found.keys() == {NAMESPACE, other}
        assert (found[NAMESPACE].model, found[NAMESPACE].blocks) == ("kit", 3)
        assert (found[other].model, found[other].blocks) == ("", 1)
        assert found[NAMESPACE].bytes == 3 * backend.estimate(block(1))
        assert found[NAMESPACE].used_at > 1.7e9
        backend.remove_namespace(NAMESPACE)
        assert [one.namespace for one in backend.namespaces()] == [other]
        assert read(backend, block(1, namespace=other)) == payload(1)
        assert (backend.stale_temporaries(remove=True), backend.quarantined(remove=True)) == ([], [])

    def test_tools_prove_every_byte(
        self, backend: Backend, raw_corrupt: Callable[[BlockId, int], None], raw_put: RawPut
    ) -> None:
        assert isinstance(backend, Maintained)
        for number in range(20):
            write(backend, block(number), payload(number))
        raw_corrupt(block(3).id, -1)
        raw_corrupt(block(4).id, 100)
        raw_put(block(5).id, b"")
        outcomes = {one.id: one.status for batch in backend.verify() for one in batch}
        bad = {block_id for block_id, status in outcomes.items() if status is Status.CORRUPT}
        assert bad == {block(3).id, block(4).id, block(5).id}
        assert len(outcomes) == 20
        assert set(outcomes.values()) == {Status.OK, Status.CORRUPT}
