"""What a build of Horovod finds: the interpreter and its torch, compilers, MPI, NCCL; and what is missing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcbench.errors import WorkerError

_PACKAGES = {"g++": "g++", "make": "make", "Python.h": "python3-dev"}
_TOOLS = ("setuptools>=68", "wheel", "packaging")
_CMAKE = "cmake>=3.18,<4"

_PROBE = """
import json, os, platform, sys, sysconfig
found = {"tag": f"{sys.implementation.cache_tag}", "machine": platform.machine(), "libc": "-".join(platform.libc_ver()),
         "include": sysconfig.get_path("include"), "torch": None, "cuda": None, "cuda_home": None, "standards": []}
try:
    import re, torch
    found["torch"], found["cuda"] = str(torch.__version__), torch.version.cuda
    text = open(os.path.join(os.path.dirname(torch.__file__), "utils", "cpp_extension.py"), encoding="utf-8").read()
    found["standards"] = [int(number) for number in re.findall(r"-std=c\\+\\+(\\d+)'", text)]
    if torch.version.cuda:
        from torch.utils.cpp_extension import CUDA_HOME
        found["cuda_home"] = CUDA_HOME
except ImportError as error:
    found["why"] = str(error)
try:
    import nvidia.nccl
    found["nccl"] = list(nvidia.nccl.__path__)[0]
except ImportError:
    pass
try:
    import pip
    found["pip"] = pip.__version__
except ImportError:
    pass
print("found:" + json.dumps(found))
"""


@dataclass(frozen=True)
class Target:
    """The interpreter that Horovod is built for."""

    python: str
    torch: str
    tag: str
    machine: str
    libc: str
    include: str
    cxx_standard: int
    cuda_home: str | None
    nccl_package: str | None

    @property
    def pip(self) -> list[str]:
        """The command that installs into it."""
        return [self.python, "-m", "pip", "--disable-pip-version-check"]


@dataclass(frozen=True)
class Parts:
    """What goes into the wheel beside Gloo; empty where it does not."""

    mpi: str = ""
    """Tells one MPI from another: a digest of how its compiler links."""
    mpicxx: str = ""
    """The path of that compiler."""
    nccl: str = ""
    """The folder with NCCL's ``include`` and ``lib``."""

    @property
    def listed(self) -> str:
        """``gloo, mpi``."""
        return ", ".join(["gloo", *(["mpi"] if self.mpi else []), *(["nccl"] if self.nccl else [])])


def examine(python: str) -> Target:
    """Ask ``python`` what it is; ``WorkerError`` names what a build lacks and the command that installs it."""
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=False)
    except OSError as error:
        raise WorkerError(f"{python}: {error.strerror}", hint="--python takes the path of an interpreter") from error
    answer = [line for line in done.stdout.splitlines() if line.startswith("found:")]
    if not answer:
        raise WorkerError(f"{python} does not run: {done.stderr.strip()[-400:]}")
    found = json.loads(answer[-1].removeprefix("found:"))
    if not found["torch"]:
        raise WorkerError(
            f"{python} cannot import torch ({found.get('why')}), and Horovod is built against it",
            hint=f"{python} -m pip install 'torch>=2.6'",
        )
    if "pip" not in found:
        raise WorkerError(f"{python} has no pip", hint=f"{python} -m ensurepip")
    standard = max(found["standards"], default=17)
    _refuse_without_compiler(found["include"], standard)
    return Target(
        python, found["torch"], found["tag"], found["machine"], found["libc"], found["include"], standard,
        found["cuda_home"], found.get("nccl"),
    )  # fmt: skip


def compiler() -> str:
    """The C++ compiler that cmake will take, too."""
    return os.environ.get("CXX") or "g++"


def _refuse_without_compiler(include: str, standard: int) -> None:
    missing = [name for name in (compiler(), "make") if not shutil.which(name)]
    if not (Path(include) / "Python.h").exists():
        missing.append("Python.h")
    if missing:
        packages = " ".join(sorted({_PACKAGES.get(name, "g++") for name in missing}))
        places = "".join(f" ({include}/Python.h)" for name in missing if name == "Python.h")
        raise WorkerError(
            f"building Horovod needs {', '.join(missing)}, not found here{places}",
            hint=f"apt-get install {packages}; on a cluster load its compiler and Python modules",
        )
    said = compiles([compiler(), f"-std=c++{standard}"], "#include <string_view>\nint main() { return 0; }\n")
    if said:
        raise WorkerError(
            f"{compiler()} does not compile C++{standard}, which torch's headers need: {said}",
            hint="g++ 10 or newer does: apt-get install g++, or load a newer compiler's module (CXX names another)",
        )


def compiles(command: Sequence[str], source: str) -> str:
    """What ``command`` says when it fails to compile and link ``source``; empty where it can."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "try.cc"
        file.write_text(source, encoding="utf-8")
        try:
            done = subprocess.run(
                [*command, str(file), "-o", str(Path(folder) / "try")], capture_output=True, text=True, check=False
            )
        except OSError as error:
            return str(error)
        return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it says nothing"])[0]


def find_parts(target: Target, mpi: bool, nccl: bool) -> Parts:
    """MPI where a program can be linked with it, NCCL where torch has CUDA and its toolkit and headers are here."""
    digest, mpicxx = find_mpi() if mpi else ("", "")
    return Parts(digest, mpicxx, _find_nccl(target) if nccl else "")


def find_mpi() -> tuple[str, str]:
    """A digest of how MPI's compiler links, and its path; both empty where no program can be linked with MPI."""
    # A wrapper alone proves nothing: distributions install it without the headers.
    source = "#include <mpi.h>\nint main() { MPI_Init(0, 0); return MPI_Finalize(); }\n"
    mpicxx = shutil.which("mpicxx")
    if not mpicxx or compiles([mpicxx], source):
        return "", ""
    done = subprocess.run([mpicxx, "-show"], capture_output=True, text=True, check=False)
    return hashlib.sha256(done.stdout.encode()).hexdigest()[:8], mpicxx


def _find_nccl(target: Target) -> str:
    if not target.cuda_home or not (Path(target.cuda_home) / "bin" / "nvcc").exists():
        return ""
    given = [os.environ.get(name) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT", "EBROOTNCCL")]
    places = [place for place in (*given, target.nccl_package, "/usr") if place]
    return next((place for place in places if (Path(place) / "include" / "nccl.h").exists()), "")


def make_tools(target: Target, parts: Parts, folder: Path) -> dict[str, str]:
    """A private build environment in ``folder``; returns the variables to build with."""
    tools = folder / "tools"
    cmake = _own_cmake()
    wanted = [*_TOOLS, *([] if cmake else [_CMAKE])]
    command = [*target.pip, "install", "--quiet", "--target", str(tools), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise WorkerError(
            f"pip could not fetch what the build needs ({', '.join(wanted)}): {done.stderr.strip()[-400:]}",
            hint="apt-get install cmake, or load its module (3.13 to 3.31)" if not cmake else None,
        )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "PYTHON"))}
    env |= {
        "PYTHONPATH": str(tools),
        "HOROVOD_CMAKE": cmake or str(tools / "cmake" / "data" / "bin" / "cmake"),
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_CPU_OPERATIONS": "GLOO",
        "HOROVOD_WITH_MPI" if parts.mpi else "HOROVOD_WITHOUT_MPI": "1",
    }
    if parts.nccl:
        env |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_CUDA_HOME": target.cuda_home or "",
            "HOROVOD_NCCL_HOME": str(_linkable_nccl(Path(parts.nccl), folder)),
        }
    return env


def _own_cmake() -> str | None:
    """The machine's cmake, where it is of a version that Horovod's files still work with."""
    path = shutil.which("cmake")
    if path is None:
        return None
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"version (\d+)\.(\d+)", said)
    return path if version and (3, 13) <= (int(version[1]), int(version[2])) < (4, 0) else None


def _linkable_nccl(home: Path, folder: Path) -> Path:
    """NCCL's home with a ``libnccl.so``: torch's own package has only the name that is loaded, ``libnccl.so.2``."""
    library = home / "lib"
    if not (library / "libnccl.so.2").exists() or (library / "libnccl.so").exists():
        return home
    made = folder / "nccl"
    (made / "lib").mkdir(parents=True)
    (made / "lib" / "libnccl.so").symlink_to(library / "libnccl.so.2")
    (made / "include").symlink_to(home / "include")
    return made
