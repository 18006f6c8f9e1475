"""``python -m tests.cuda``: step every strategy on fake GPUs and print a table; ``python -m tests.cuda pytest``: test.

Both make the environment first (``environment.py``) and go on in it, under the stub of CUDA.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tests.cuda.environment import is_under_stub, run_under_stub
from tests.cuda.stub import StubError
from tests.environments import EnvironmentMissing

PART = "cuda-stub"
"""The name of this part in HPCBENCH_REQUIRE. Where it is missing, the target fails whether it is named there or not."""


def main(arguments: Sequence[str]) -> int:
    """Print the table, or run pytest with the arguments that follow ``pytest``."""
    if is_under_stub():
        # Imports torch, which only that environment has with CUDA.
        from tests.cuda.table import print_table

        return print_table(arguments)
    command = ["-m", "pytest", *arguments[1:]] if arguments[:1] == ["pytest"] else ["-m", "tests.cuda", *arguments]
    try:
        return run_under_stub(command)
    except (EnvironmentMissing, StubError) as error:
        required = PART in os.environ.get("HPCBENCH_REQUIRE", "").split(",")
        answer = f"{PART} is required by HPCBENCH_REQUIRE, but" if required else "failed:"
        print(f"tests/cuda: {answer} {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
