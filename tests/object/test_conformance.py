"""The conformance kit against a real S3-compatible server."""

from __future__ import annotations

import pytest

from kvtierd.testing.object_kit import ObjectKit


class TestObjectServer(ObjectKit):
    @pytest.fixture
    def store(self, server, prefix):
        return server.client("blocks", prefix)
