"""`python3 -m tests.slurm.box ...` and `python3 tests/slurm/box ...`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def _main() -> int:
    if __package__:
        module = importlib.import_module(".cli", __package__)
    else:
        # Run as a folder: its parent makes the package importable.
        here = Path(__file__).resolve().parent
        sys.path[0] = str(here.parent)
        module = importlib.import_module(f"{here.name}.cli")
    return int(module.main())


sys.exit(_main())
