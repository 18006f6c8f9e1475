"""The environment of these tests: torch's CUDA build beside the project's own, and the stub of CUDA in front of it.

It lies outside the tree, in ``~/.cache/hpcbench/cuda-env-<torch version>``, and is made again if ``constraints.txt`` or
the interpreter changes. hpcbench itself is taken from the tree. ``.venv`` stays as it is.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cuda.stub import StubError, build_stub, stub_environment

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
ROOT = Path(__file__).resolve().parents[2]
STUB_FOLDER = "HPCBENCH_CUDA_STUB"
"""The variable that names the folder of the stub in the processes that run under it."""
_READY = "hpcbench-ready.txt"


class EnvironmentMissing(Exception):
    """The environment cannot be made here; the message names the command that mends it."""


def torch_version() -> str:
    """Return the version of torch in ``constraints.txt``."""
    lines = CONSTRAINTS.read_text().splitlines()
    return next(line.removeprefix("torch==") for line in lines if line.startswith("torch=="))


def environment_folder() -> Path:
    """Return the folder of the environment, whether it is there or not."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hpcbench" / f"cuda-env-{torch_version()}"


def make_environment(python: str = sys.executable) -> Path:
    """Return the folder of the environment, installed if it is missing or of other versions.

    Raises:
        EnvironmentMissing: pip could not install what ``constraints.txt`` lists.
    """
    folder = environment_folder()
    folder.mkdir(parents=True, exist_ok=True)
    state = f"{sys.version}\n{CONSTRAINTS.read_text()}"
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = folder / _READY
        if ready.is_file() and ready.read_text() == state:
            return folder
        print(f"tests/cuda: installing torch {torch_version()} with CUDA into {folder} (about 6 GB)", flush=True)
        _run([python, "-m", "venv", "--clear", str(folder)])
        _run([str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(CONSTRAINTS)])
        ready.write_text(state)
    return folder


def cuda_package(folder: Path) -> Path:
    """Return the CUDA package that the environment's torch was built with.

    Raises:
        EnvironmentMissing: That torch is no CUDA build.
    """
    packages = sorted((folder / "lib").glob("python*/site-packages/nvidia/cu13"))
    libraries = sorted((folder / "lib").glob("python*/site-packages/torch/lib/libtorch_cuda.so"))
    if not packages or not libraries:
        missing = "nvidia/cu13" if not packages else "torch/lib/libtorch_cuda.so"
        raise EnvironmentMissing(
            f"{folder} holds no CUDA build of torch {torch_version()} ({missing} is missing): "
            f"remove {folder}, and run make test-cuda again with an index that has the build for CUDA (PyPI's is)"
        )
    return packages[-1]


def run_under_stub(arguments: Sequence[str]) -> int:
    """Run the environment's Python with ``arguments`` under the stub, in the root of the tree; return its exit code.

    Raises:
        EnvironmentMissing, StubError: What is missing here.
    """
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        # Before 6 GB are installed for nothing.
        raise StubError("the stub of CUDA is compiled with gcc, which is missing here: apt-get install gcc libc6-dev")
    folder = make_environment()
    stub = build_stub(cuda_package(folder), folder)
    environment = {**os.environ, **stub_environment(stub), STUB_FOLDER: str(stub), "PYTHONPATH": str(ROOT)}
    for name in ("CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV", "PYTHONHOME"):
        environment.pop(name, None)
    return subprocess.run([str(folder / "bin/python"), *arguments], env=environment, cwd=ROOT, check=False).returncode


def is_under_stub() -> bool:
    """Return whether this process was started by ``run_under_stub``."""
    return bool(os.environ.get(STUB_FOLDER))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise EnvironmentMissing(
            f"the environment of tests/cuda cannot be installed: {done.stdout.strip()[-600:]}\n"
            f"it needs a package index with the CUDA build of torch: {' '.join(command)}"
        )
