"""The recorded verdicts of Dynamo are those of the real indexer; the table in ROUTERS.md rests on them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.clock import wait_for
from kvtierd.testing.fake_publisher import FakePublisher
from kvtierd.testing.local_daemon import free_port
from kvtierd.wire.kvevents import BlockStored

from .conftest import PATIENCE

pytestmark = [pytest.mark.router, pytest.mark.slow, pytest.mark.timeout(120)]

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "router_verdicts.json").read_text())["vectors"]
MARK = BlockStored((0xF2 << 56,), None, (9, 9, 9, 9), 4, None, "GPU", None)


def test_dynamo_makes_of_every_recorded_batch_what_it_did(start_indexer: Callable[[], Any]) -> None:
    """Each is fed to a worker of its own; a store after it shows when it has been taken."""
    indexer = start_indexer()
    with contextlib.ExitStack() as stack:
        publishers = {}
        for instance, vector in enumerate(VECTORS, 1):
            ends = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
            publishers[instance] = stack.enter_context(FakePublisher(*ends, topic=""))
            publishers[instance].publish(payload=bytes.fromhex(vector["hex"]))
            publishers[instance].publish(MARK)
            indexer.register(*ends, block_size=vector["block_size"], instance=instance)
        for instance, vector in enumerate(VECTORS, 1):

            def marked(instance: int = instance) -> bool:
                publishers[instance].publish()  # whoever joined late asks for what it missed
                return bool(indexer.tiers(MARK.token_ids, instance=instance)[0])

            wait_for(marked, f"{vector['name']} to be taken", timeout=PATIENCE, poll=0.05)

        def judged() -> dict[str, list[int]]:
            return {
                vector["name"]: list(indexer.tiers(vector["query_tokens"], instance=instance))
                for instance, vector in enumerate(VECTORS, 1)
            }

        # Dynamo's index takes batches in on several threads: the mark may be there before what came first.
        expected = {vector["name"]: vector["dynamo"]["tokens"] or [0, 0, 0] for vector in VECTORS}
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: judged() == expected, "Dynamo's verdicts", timeout=PATIENCE)
        assert judged() == expected
