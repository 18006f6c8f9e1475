"""``python -m hpcbench.tools.build_horovod``: build Horovod as a wheel for an interpreter's torch and install it.

The patch beside this file changes the source package: torch's C++ standard, the MPI that was tried, CUDA with NCCL
only, no distutils, no cffi, no debugging symbols.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcbench.errors import HpcbenchError, WorkerError
from hpcbench.paths import cache_folder

HOROVOD_VERSION = "0.28.1"
PATCH = Path(__file__).with_name(f"horovod-{HOROVOD_VERSION}.patch")
_BUILD_TOOLS = ("setuptools>=68", "wheel", "packaging", "cmake>=3.18,<4")
_RUNTIME_PACKAGES = ("cloudpickle", "psutil", "pyyaml", "packaging")
_PROGRAMS = {"g++": "g++", "make": "make", "patch": "patch"}
"""Programs of a build, and the packages that have them."""
_TARGET_SCRIPT = """
import json, os, platform, re, sys, sysconfig, torch
text = open(os.path.join(os.path.dirname(torch.__file__), "utils", "cpp_extension.py"), encoding="utf-8").read()
facts = {"torch": str(torch.__version__), "python": sys.implementation.cache_tag, "machine": platform.machine(),
         "libc": "-".join(platform.libc_ver()), "include": sysconfig.get_path("include"), "cuda_home": "", "nccl": "",
         "cxx": max([int(number) for number in re.findall(r"-std=c\\+\\+(\\d+)'", text)], default=17)}
if torch.version.cuda:
    from torch.utils.cpp_extension import CUDA_HOME
    facts["cuda_home"] = CUDA_HOME or ""
try:
    import nvidia.nccl
    facts["nccl"] = list(nvidia.nccl.__path__)[0]
except ImportError:
    pass
print(json.dumps(facts))
"""


def _run(command: Sequence[str], failure: str, hint: str | None = None, **options: Any) -> str:
    """Run ``command`` and return what it prints; ``WorkerError`` with ``failure`` if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    except OSError as error:
        raise WorkerError(f"{failure}: {command[0]}: {error.strerror}", hint=hint) from error
    if done.returncode != 0:
        raise WorkerError(f"{failure}: {(done.stderr.strip() or done.stdout.strip())[-800:]}", hint=hint)
    return str(done.stdout)


def examine_target(python: str) -> dict[str, Any]:
    """Return the facts of ``python`` that a wheel depends on; ``WorkerError`` names what a build lacks."""
    hint = f"--python takes an interpreter with torch: {python} -m pip install 'torch>=2.6'"
    facts: dict[str, Any] = json.loads(_run([python, "-c", _TARGET_SCRIPT], f"{python} cannot import torch", hint))
    missing = [package for program, package in _PROGRAMS.items() if not shutil.which(program)]
    if not (Path(facts.pop("include")) / "Python.h").exists():
        missing.append("python3-dev")
    if missing:
        hint = f"apt-get install {' '.join(missing)}; on a cluster load its compiler and Python modules"
        raise WorkerError(f"building Horovod needs {', '.join(missing)}, not found here", hint=hint)
    return facts


def find_mpi() -> tuple[str, str]:
    """A digest of how MPI's compiler links, and its folder; both empty where no program can be linked with MPI."""
    mpicxx = shutil.which("mpicxx")
    if not mpicxx:
        return "", ""
    with tempfile.TemporaryDirectory() as folder:
        # A wrapper alone proves nothing: distributions install it without the headers.
        source = Path(folder) / "try.cc"
        source.write_text("#include <mpi.h>\nint main() { MPI_Init(0, 0); return MPI_Finalize(); }\n")
        try:
            _run([mpicxx, str(source), "-o", f"{folder}/try"], "no MPI")
        except WorkerError:
            return "", ""
    return hashlib.sha256(_run([mpicxx, "-show"], "no MPI").encode()).hexdigest()[:8], str(Path(mpicxx).parent)


def find_nccl(facts: dict[str, Any]) -> str:
    """Return the folder with NCCL's ``include`` and ``lib``; empty without it or the toolkit of torch's CUDA."""
    homes = [os.environ.get(name) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT", "EBROOTNCCL")]
    if not facts["cuda_home"] or not (Path(facts["cuda_home"]) / "bin" / "nvcc").exists():
        return ""
    found = (home for home in (*homes, facts["nccl"], "/usr") if home and Path(home, "include", "nccl.h").exists())
    return next(found, "")


def build_variables(facts: dict[str, Any], mpi_bin: str, nccl: str, folder: Path) -> dict[str, str]:
    """Return the variables of a build whose tools lie in ``folder``; the user's HOROVOD_BUILD_CUDA_CC_LIST stays."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "PYTHON"))}
    chosen = f"WITH_GLOO WITH_PYTORCH WITHOUT_TENSORFLOW WITHOUT_MXNET {'WITH' if mpi_bin else 'WITHOUT'}_MPI"
    env = kept | {f"HOROVOD_{name}": "1" for name in chosen.split()}
    env |= {"HOROVOD_CXX_STANDARD": str(facts["cxx"]), "HOROVOD_MPI_BIN": mpi_bin, "HOROVOD_CPU_OPERATIONS": "GLOO"}
    env |= {"PYTHONPATH": str(folder / "tools"), "HOROVOD_CMAKE": str(folder / "tools/cmake/data/bin/cmake")}
    if nccl:
        home, library = Path(nccl), Path(nccl) / "lib"
        if (library / "libnccl.so.2").exists() and not (library / "libnccl.so").exists():
            # torch's own package has only the name that is loaded, not the one that is linked.
            home = folder / "nccl"
            (home / "lib").mkdir(parents=True)
            (home / "lib" / "libnccl.so").symlink_to(library / "libnccl.so.2")
            (home / "include").symlink_to(Path(nccl) / "include")
        cuda = facts["cuda_home"]
        # Horovod asks the first nvcc of PATH for its architectures.
        env |= {"CUDA_PATH": cuda, "PATH": f"{cuda}/bin{os.pathsep}{kept['PATH']}", "HOROVOD_NCCL_LINK": "SHARED"}
        env |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CUDA_HOME": cuda, "HOROVOD_NCCL_HOME": str(home)}
        if "HOROVOD_BUILD_CUDA_CC_LIST" in os.environ:
            env["HOROVOD_BUILD_CUDA_CC_LIST"] = os.environ["HOROVOD_BUILD_CUDA_CC_LIST"]
    return env


def wheel_folder(facts: dict[str, Any], mpi: str, nccl: str) -> Path:
    """Return the folder of the cached wheel of everything that it depends on, outside of any checkout."""
    depends_on = [HOROVOD_VERSION, PATCH.read_text(), mpi, nccl, *(facts[name] for name in sorted(facts))]
    return cache_folder() / "wheels" / hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:16]


def main(words: list[str] | None = None) -> int:
    """Build where the cache has no wheel, install, print what it has; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hpcbench.tools.build_horovod", description=__doc__)
    text = "the interpreter to build for (this one); give a cluster's environment its own"
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help=text)
    parser.add_argument("--without-mpi", action="store_true", help="leave MPI out even where mpicxx works")
    parser.add_argument("--without-nccl", action="store_true", help="leave NCCL out even for a CUDA torch")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="compilers at a time (2)")
    text = f"horovod-{HOROVOD_VERSION}.tar.gz, for a machine without a package index"
    parser.add_argument("--source", type=Path, metavar="FILE", help=text)
    options = parser.parse_args(words)
    try:
        facts = examine_target(options.python)
        mpi, mpi_bin = ("", "") if options.without_mpi else find_mpi()
        nccl = "" if options.without_nccl else find_nccl(facts)
        folder = wheel_folder(facts, mpi, nccl)
        if not list(folder.glob("*.whl")):
            print(f"hpcbench: building Horovod for torch {facts['torch']}: minutes", file=sys.stderr, flush=True)  # noqa: T201
            build_wheel(options, facts, mpi_bin, nccl, folder)
        install = [options.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        wheel = next(folder.glob("*.whl"))
        _run([*install, "--no-deps", "--force-reinstall", str(wheel)], f"pip could not install {wheel}")
        _run([*install, *_RUNTIME_PACKAGES], f"pip could not install {', '.join(_RUNTIME_PACKAGES)}")
        code = "import horovod.torch as h; print('gloo', h.gloo_built(), 'mpi', h.mpi_built(), 'nccl', h.nccl_built())"
        found = _run([options.python, "-c", code], "Horovod was installed, but cannot be imported", cwd=folder)
        print(f"hpcbench: {options.python}: Horovod {HOROVOD_VERSION}: {found.strip()}", file=sys.stderr)  # noqa: T201
    except HpcbenchError as error:
        print(f"hpcbench: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def build_wheel(options: argparse.Namespace, facts: dict[str, Any], mpi_bin: str, nccl: str, cached: Path) -> None:
    """Fetch, patch and build; the wheel lies in ``cached`` at once, so that a second build does no harm."""
    pip = [options.python, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(prefix="hpcbench-horovod-") as name:
        folder = Path(name)
        failure = f"pip could not fetch what the build needs ({', '.join(_BUILD_TOOLS)})"
        _run([*pip, "install", "--quiet", "--target", str(folder / "tools"), *_BUILD_TOOLS], failure)
        env = build_variables(facts, mpi_bin, nccl, folder)
        env |= {"CMAKE_BUILD_PARALLEL_LEVEL": str(options.jobs), "MAKEFLAGS": f"-j{options.jobs}"}
        source = options.source or folder / f"horovod-{HOROVOD_VERSION}.tar.gz"
        if not options.source:
            command = [*pip, "download", f"horovod=={HOROVOD_VERSION}", "--no-binary", "horovod", "--no-deps"]
            hint = f"is a package index reachable? Elsewhere: {' '.join(command)}; then --source {source.name}"
            fetch = [*command, "--no-build-isolation", "--dest", str(folder)]
            _run(fetch, f"cannot download Horovod {HOROVOD_VERSION}'s source package", hint, env=env)
        _run(["tar", "-xzf", str(source), "-C", str(folder)], f"cannot unpack {source}")
        root = folder / f"horovod-{HOROVOD_VERSION}"
        _run(["patch", "-p1", "-i", str(PATCH)], f"{source} is not Horovod {HOROVOD_VERSION}", cwd=root)
        # pip distinguishes builds by what follows the version, and refuses it in a package that it downloads.
        env["HOROVOD_LOCAL_VERSION"] = f"torch{facts['torch'].replace('+', '.')}.{cached.name}"
        flags = ["--no-build-isolation", "--no-deps", "--no-index", "--verbose", "--wheel-dir", str(folder / "out")]
        log = Path(cached.parent) / "horovod-build.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as file:
            build = [*pip, "wheel", *flags, str(root)]
            code = subprocess.run(build, stdout=file, stderr=file, env=env, check=False).returncode
        if code != 0:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            errors = [line for line in lines if "error" in line.lower()] or lines
            raise WorkerError("the build failed:\n" + "\n".join(errors[:8]), hint=f"all of its output: {log}")
        wheel = next((folder / "out").glob("horovod-*.whl"))
        cached.mkdir(parents=True, exist_ok=True)
        partial = shutil.copyfile(wheel, cached / f".{wheel.name}.{os.getpid()}")
        os.replace(partial, cached / wheel.name)


if __name__ == "__main__":
    sys.exit(main())
