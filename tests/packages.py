"""Programs of the distribution that tests need, installed where that is allowed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from tests.conftest import absent


def require_programs(part: str, programs: Sequence[str], packages: Sequence[str]) -> None:
    """``absent`` where one of ``programs`` is missing and installing ``packages`` does not bring it."""
    if all(map(shutil.which, programs)):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        absent(part, f"{' and '.join(packages)} are not installed, and only root can with apt-get")
    # Other tests may be installing what they need.
    command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300"]
    install = [*command, "install", "-y", "--no-install-recommends", *packages]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run([*command, "update"], env=env, capture_output=True, timeout=300, check=False)
    done = subprocess.run(install, env=env, capture_output=True, text=True, timeout=900, check=False)
    if not all(map(shutil.which, programs)):
        absent(part, f"apt-get install {' '.join(packages)} failed: {done.stderr[-300:]}")


def require_mpirun() -> None:
    """Open MPI's starter of ranks."""
    require_programs("mpirun", ["mpirun"], ["openmpi-bin"])
