"""``python -m tests.cuda pytest``: make the environment (``environment.py``), and test in it, under the stub of CUDA."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tests.cuda.environment import run_under_stub
from tests.cuda.stub import StubError
from tests.environments import EnvironmentMissing

PART = "cuda-stub"
"""The name of this part in HPCBENCH_REQUIRE. Where it is missing, the target fails whether it is named there or not."""


def main(arguments: Sequence[str]) -> int:
    """Run a module of Python with its arguments, such as pytest."""
    try:
        return run_under_stub(["-m", *arguments])
    except (EnvironmentMissing, StubError) as error:
        required = PART in os.environ.get("HPCBENCH_REQUIRE", "").split(",")
        answer = f"{PART} is required by HPCBENCH_REQUIRE, but" if required else "failed:"
        print(f"tests/cuda: {answer} {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
