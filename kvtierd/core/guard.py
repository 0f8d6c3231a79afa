"""Stops a ladder whose promises broke before it answers: proves all after each turn, or a part at times."""

from __future__ import annotations

from typing import Any

from kvtierd.core.invariants import validate
from kvtierd.core.ladder import Ladder
from kvtierd.core.patrol import Patrol
from kvtierd.core.stimuli import Stimulus
from kvtierd.core.story import Story
from kvtierd.errors import InvariantBroken

PATROL_TURNS = 64
"""A patrol looks after so many turns; a daemon has at least ten turns a second."""
PARANOID_KEYS = 1 << 16


class Guard:
    """Watches one ladder. ``paranoid``: prove everything after every turn, which is linear in the state."""

    def __init__(self, ladder: Ladder, *, paranoid: bool) -> None:
        self._ladder = ladder
        self._paranoid = paranoid
        self._patrol = Patrol(ladder)
        self._story = Story(keys=PARANOID_KEYS) if paranoid else Story()
        self._turns = 0

    def note(self, stimulus: Stimulus, now: float) -> None:
        """Remember what is about to be handled."""
        self._story.note(stimulus, now)

    def check(self) -> None:
        """Prove what is due; to be called between handling a turn and telling anybody of it.

        Raises:
            InvariantBroken: a promise does not hold.
        """
        self._turns += 1
        if self._paranoid:
            validate(self._ladder)
        elif self._turns % PATROL_TURNS == 0:
            self._patrol.look()

    def story(self, error: BaseException) -> str:
        """Return all that is known about what broke, line by line."""
        block = error.block if isinstance(error, InvariantBroken) else None
        return "\n".join(self._story.tell(self._ladder, block))

    def statistics(self) -> dict[str, Any]:
        """Return plain values by name; a round has looked at every block of the pool once."""
        patrol = self._patrol
        return {
            "paranoid": self._paranoid,
            "looks": patrol.looks,
            "rounds": patrol.rounds,
            "blocks": patrol.blocks,
        }
