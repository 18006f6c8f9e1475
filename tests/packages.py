"""Programs of the distribution that tests need, installed where that is allowed.

``python -m tests.packages mpi``: MPI's compiler, with which Horovod is built with MPI; ``shells``: those that complete
commands besides bash.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

from hpcbench.tools.build_horovod import find_mpi
from tests.conftest import absent


def install(is_there: Callable[[], bool], packages: Sequence[str]) -> str | None:
    """Why something is missing that installing ``packages`` did not bring, else ``None``."""
    if is_there():
        return None
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return f"{' and '.join(packages)} are not installed, and only root can with apt-get"
    # Other tests may be installing what they need.
    command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300"]
    wanted = [*command, "install", "-y", "--no-install-recommends", *packages]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run([*command, "update"], env=env, capture_output=True, timeout=300, check=False)
    done = subprocess.run(wanted, env=env, capture_output=True, text=True, timeout=900, check=False)
    return None if is_there() else f"{' '.join(wanted)} failed: {done.stderr[-300:]}"


def require_programs(part: str, programs: Sequence[str], packages: Sequence[str]) -> None:
    """``absent`` where one of ``programs`` is missing and installing ``packages`` does not bring it."""
    if reason := install(lambda: all(map(shutil.which, programs)), packages):
        absent(part, reason)


def require_mpirun() -> None:
    """Open MPI's starter of ranks."""
    require_programs("mpirun", ["mpirun"], ["openmpi-bin"])


PARTS: dict[str, tuple[Callable[[], bool], list[str]]] = {
    "mpi": (lambda: bool(find_mpi()[1]), ["libopenmpi-dev", "openmpi-bin"]),
    "shells": (lambda: all(map(shutil.which, ["zsh", "fish"])), ["zsh", "fish"]),
}

if __name__ == "__main__":
    sys.exit(install(*PARTS[sys.argv[1]]))
