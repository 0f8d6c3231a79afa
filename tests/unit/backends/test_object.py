"""The object backend over obstore's own in-memory store: the conformance kit without a server."""

from __future__ import annotations

import obstore.store
import pytest

from kvtierd.testing.object_kit import ObjectKit


class TestObject(ObjectKit):
    @pytest.fixture
    def store(self):
        return obstore.store.MemoryStore()
