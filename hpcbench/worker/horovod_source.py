"""Horovod's source package, fetched and mended so that it builds against today's torch.

Only the standard library is used here: the interpreter that Horovod is built for needs torch and nothing of ours.
"""

from __future__ import annotations

import re
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hpcbench.errors import WorkerError

VERSION = "0.28.1"
PATCH = 1
"""Raised whenever what is mended below changes, so that a cached wheel of other source is not taken."""


class Edit(NamedTuple):
    """One change of text; ``pattern`` (a regular expression) must be found in ``file``."""

    file: str
    pattern: str
    replacement: str
    why: str


def edits(cxx_standard: int, cuda: bool, mpicxx: str = "") -> list[Edit]:
    """What is changed for a torch whose headers want C++ ``cxx_standard``; ``mpicxx`` is MPI's compiler, if any."""
    standard = f"set(CMAKE_CXX_STANDARD {cxx_standard})"
    found = [
        Edit("CMakeLists.txt", r"set\(CMAKE_CXX_STANDARD 14\)", standard, "torch's headers"),
        Edit("horovod/torch/CMakeLists.txt", r"set\(CMAKE_CXX_STANDARD 14\)", standard, "torch's headers"),
        Edit("CMakeLists.txt", r"-std=c\+\+11\"\)\n        endif", f'-std=c++{cxx_standard}")\n        endif', "CUDA"),
        Edit(
            "horovod/torch/CMakeLists.txt",
            r"from distutils\.sysconfig import get_python_inc; print\(get_python_inc\(\)\)",
            "import sysconfig; print(sysconfig.get_path('include'))",
            "Python 3.12 has no distutils",
        ),
        Edit(
            "horovod/runner/js_run.py",
            r"from distutils\.spawn import find_executable",
            "from shutil import which as find_executable",
            "Python 3.12 has no distutils",
        ),
        Edit("setup.py", r"setup_requires=.*", "setup_requires=[],", "nothing is fetched while it builds"),
        Edit("setup.py", r"else 'RelWithDebInfo'", "else 'Release'", "debugging symbols cost time and space"),
        Edit("setup.py", r"require_list\.append\('cffi>=1\.4\.0'\)", "pass", "the extension does not use cffi"),
    ]
    if not cuda:
        # A compiler for CUDA on PATH would otherwise be tried, and must work, for a wheel that holds no CUDA.
        found.append(Edit("CMakeLists.txt", r"\nif\(CMAKE_CUDA_COMPILER\)", "\nif(FALSE)", "no CUDA in this wheel"))
    if mpicxx:
        both = {"CXX": mpicxx, "C": str(Path(mpicxx).with_name("mpicc"))}
        chosen = "".join(
            f'set(MPI_{key}_COMPILER "{path}" CACHE FILEPATH "" FORCE)\n    ' for key, path in both.items()
        )
        chosen += "find_package(MPI "
        found.append(Edit("CMakeLists.txt", r"find_package\(MPI ", chosen, "cmake looks beside mpirun first"))
    return found


def mend(source: Path, cxx_standard: int, cuda: bool, mpicxx: str = "") -> None:
    """Apply ``edits`` to the unpacked package; ``WorkerError`` where one finds nothing to change."""
    for edit in edits(cxx_standard, cuda, mpicxx):
        path = source / edit.file
        text, count = re.subn(edit.pattern, lambda _, edit=edit: edit.replacement, path.read_text(encoding="utf-8"))  # type: ignore[misc]
        if count == 0:
            raise WorkerError(f"{path}: {edit.pattern!r} is not there: is this Horovod {VERSION}? (for: {edit.why})")
        path.write_text(text, encoding="utf-8")


def fetch(pip: Sequence[str], folder: Path, env: dict[str, str]) -> Path:
    """Download the source package with ``pip`` into ``folder`` and unpack it there; returns its root."""
    command = [*pip, "download", f"horovod=={VERSION}", "--no-binary", "horovod", "--no-deps", "--no-build-isolation",
               "--quiet", "--dest", str(folder)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    archive = folder / f"horovod-{VERSION}.tar.gz"
    if done.returncode != 0 or not archive.exists():
        raise WorkerError(
            f"cannot download Horovod {VERSION}'s source package: {done.stderr.strip()[-400:]}",
            hint=f"is the package index reachable from here? Elsewhere: {' '.join(command[:-2])}; "
            f"then --source horovod-{VERSION}.tar.gz",
        )
    return unpack(archive, folder)


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the source package ``archive`` into ``folder``; returns its root."""
    with tarfile.open(archive) as package:
        # The filter came with security releases of Python 3.10 and 3.11, and is the default from 3.14 on.
        if hasattr(tarfile, "data_filter"):
            package.extractall(folder, filter="data")
        else:
            package.extractall(folder)  # noqa: S202 - a released package, built and run in the next moment
    root = folder / f"horovod-{VERSION}"
    if not root.is_dir():
        raise WorkerError(f"{archive} is not the source package of Horovod {VERSION}")
    return root
