"""Whether this is a child of the process that made a connection; asking the system takes 0.2 us a verb."""

from __future__ import annotations

import os

count = 0
"""How many forks lie between this process and the one that imported the client."""


def _forked() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_forked)
