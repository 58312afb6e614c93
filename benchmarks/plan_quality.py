"""Measure plans side by side with peers and the bound: ``make bench``, or with options ``make bench ARGS=--quick``."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # run as a script, the folder of this file would be there
    from benchmarks.command import main

    raise SystemExit(main())
