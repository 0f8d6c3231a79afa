"""``python -m kvtierd``."""

from __future__ import annotations

import sys

from kvtierd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
