"""Every rig of a core test is validated when the test ends."""

from collections.abc import Callable, Iterator

import pytest

from kvtierd.testing.rig import LadderRig


@pytest.fixture
def rigged() -> Iterator[Callable[..., LadderRig]]:
    """Make rigs; at teardown all invariants hold and each stream equals its inventory."""
    rigs: list[LadderRig] = []

    def make(*args: object, **options: object) -> LadderRig:
        rigs.append(LadderRig(*args, **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.run_held()
        rig.check()
