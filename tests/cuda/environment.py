"""The environment of these tests: torch's CUDA build beside the project's own, and the stub of CUDA in front of it.

It lies outside the tree, in ``~/.cache/hpcbench/cuda-env-<torch version>``, and is made again if ``constraints.txt`` or
the interpreter changes. hpcbench itself is taken from the tree. ``.venv`` stays as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cuda.stub import StubError, build_stub, stub_environment
from tests.environments import EnvironmentMissing, cached_folder, make_cached_environment, run_or_refuse

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
ROOT = Path(__file__).resolve().parents[2]
STUB_FOLDER = "HPCBENCH_CUDA_STUB"
"""The variable that names the folder of the stub in the processes that run under it."""


def torch_version() -> str:
    """Return the version of torch in ``constraints.txt``."""
    lines = CONSTRAINTS.read_text().splitlines()
    return next(line.removeprefix("torch==") for line in lines if line.startswith("torch=="))


def environment_folder() -> Path:
    """Return the folder of the environment, whether it is there or not."""
    return cached_folder(f"cuda-env-{torch_version()}")


def make_environment(python: str = sys.executable) -> Path:
    """Return the folder of the environment, installed if it is missing or of other versions.

    Raises:
        EnvironmentMissing: pip could not install what ``constraints.txt`` lists.
    """
    folder = environment_folder()
    make_cached_environment(
        folder,
        python,
        ["--no-deps", "-r", str(CONSTRAINTS)],
        f"{sys.version}\n{CONSTRAINTS.read_text()}",
        (),
        f"tests/cuda: installing torch {torch_version()} with CUDA into {folder} (about 6 GB)",
        _run,
    )
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
    run_or_refuse(command, "tests/cuda")
