"""``python -m hpcbench.tools.build_horovod``: build Horovod as a wheel for an interpreter's torch, cache and install
it.

Only the standard library is used: the target interpreter needs torch and nothing of hpcbench."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpcbench.errors import HpcbenchError, WorkerError
from hpcbench.paths import cache_folder

HOROVOD_VERSION = "0.28.1"
_ARCHIVE_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
PATCH_REVISION = 1
"""Raised whenever what is mended below changes, so that a cached wheel of other source is not taken."""


def _run(
    command: Sequence[str], failure: str = "", hint: str | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``command``; if it fails and ``failure`` is given, raise ``WorkerError`` with it and what was printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if failure and done.returncode != 0:
        raise WorkerError(f"{failure}: {done.stderr.strip()[-800:]}", hint=hint)
    return done


class SourceEdit(NamedTuple):
    """One change of text; ``pattern`` (a regular expression) must match in ``file``."""

    file: str
    pattern: str
    replacement: str
    why: str


_CMAKE, _TORCH_CMAKE, _SETUP = "CMakeLists.txt", "horovod/torch/CMakeLists.txt", "setup.py"
_NO_DISTUTILS = "Python 3.12 has no distutils"
_INCLUDE_QUERY = r"from distutils\.sysconfig import get_python_inc; print\(get_python_inc\(\)\)"
_INCLUDE_ANSWER = "import sysconfig; print(sysconfig.get_path('include'))"
_FIND_EXECUTABLE, _WHICH = (
    r"from distutils\.spawn import find_executable",
    "from shutil import which as find_executable",
)


def source_edits(cxx_standard: int, cuda: bool, mpicxx: str = "") -> list[SourceEdit]:
    """Return the changes for a torch whose headers want C++ ``cxx_standard``; ``mpicxx`` is MPI's compiler, if any."""
    old, standard = r"set\(CMAKE_CXX_STANDARD 14\)", f"set(CMAKE_CXX_STANDARD {cxx_standard})"
    flag = f'-std=c++{cxx_standard}")\n        endif'
    edits = [
        SourceEdit(_CMAKE, old, standard, "torch's headers"),
        SourceEdit(_TORCH_CMAKE, old, standard, "torch's headers"),
        SourceEdit(_CMAKE, r"-std=c\+\+11\"\)\n        endif", flag, "CUDA"),
        SourceEdit(_TORCH_CMAKE, _INCLUDE_QUERY, _INCLUDE_ANSWER, _NO_DISTUTILS),
        SourceEdit("horovod/runner/js_run.py", _FIND_EXECUTABLE, _WHICH, _NO_DISTUTILS),
        SourceEdit(_SETUP, r"setup_requires=.*", "setup_requires=[],", "nothing is fetched while it builds"),
        SourceEdit(_SETUP, r"else 'RelWithDebInfo'", "else 'Release'", "debugging symbols cost time and space"),
        SourceEdit(_SETUP, r"require_list\.append\('cffi>=1\.4\.0'\)", "pass", "the extension does not use cffi"),
    ]
    if not cuda:
        # A compiler for CUDA on PATH would otherwise be tried, and must work, for a wheel that holds no CUDA.
        edits.append(SourceEdit(_CMAKE, r"\nif\(CMAKE_CUDA_COMPILER\)", "\nif(FALSE)", "no CUDA in this wheel"))
    if mpicxx:
        compilers = (("CXX", mpicxx), ("C", Path(mpicxx).with_name("mpicc")))
        chosen = "".join(f'set(MPI_{key}_COMPILER "{path}" CACHE FILEPATH "" FORCE)\n    ' for key, path in compilers)
        package = "find_package(MPI "
        edits.append(SourceEdit(_CMAKE, r"find_package\(MPI ", chosen + package, "cmake looks beside mpirun first"))
    return edits


def patch_source(source: Path, cxx_standard: int, cuda: bool, mpicxx: str = "") -> None:
    """Apply ``edits`` to the unpacked package; ``WorkerError`` where one finds nothing to change."""
    for edit in source_edits(cxx_standard, cuda, mpicxx):
        path = source / edit.file
        text, count = re.subn(edit.pattern, lambda _, edit=edit: edit.replacement, path.read_text(encoding="utf-8"))  # type: ignore[misc]
        if count == 0:
            raise WorkerError(
                f"{path}: {edit.pattern!r} is not there: is this Horovod {HOROVOD_VERSION}? (for: {edit.why})"
            )
        path.write_text(text, encoding="utf-8")


def fetch_source(pip: Sequence[str], folder: Path, env: dict[str, str]) -> Path:
    """Download the source package with ``pip`` into ``folder`` and unpack it there; returns its root."""
    words = "download --no-binary horovod --no-deps --no-build-isolation --quiet"
    command = [*pip, *words.split(), f"horovod=={HOROVOD_VERSION}"]
    hint = f"is the package index reachable from here? Elsewhere: {' '.join(command)}; then --source {_ARCHIVE_NAME}"
    failure = f"cannot download Horovod {HOROVOD_VERSION}'s source package"
    _run([*command, "--dest", str(folder)], failure, hint, env=env)
    return unpack_source(folder / _ARCHIVE_NAME, folder)


def unpack_source(archive: Path, folder: Path) -> Path:
    """Unpack the source package ``archive`` into ``folder`` and return its root; ``WorkerError`` if it has another."""
    with tarfile.open(archive) as package:
        # The filter came with security releases of Python 3.10 and 3.11, and is the default from 3.14 on.
        if hasattr(tarfile, "data_filter"):
            package.extractall(folder, filter="data")
        else:
            package.extractall(folder)  # noqa: S202 - a released package, built and run in the next moment
    root = folder / f"horovod-{HOROVOD_VERSION}"
    if not root.is_dir():
        raise WorkerError(f"{archive} is not the source package of Horovod {HOROVOD_VERSION}")
    return root


_SYSTEM_PACKAGES = {"g++": "g++", "make": "make", "Python.h": "python3-dev"}
_BUILD_TOOLS = ("setuptools>=68", "wheel", "packaging", "cmake>=3.18,<4")

_TARGET_SCRIPT = """
import importlib.util, json, os, platform, re, sys, sysconfig
facts = {"tag": sys.implementation.cache_tag, "machine": platform.machine(), "libc": "-".join(platform.libc_ver()),
         "include": sysconfig.get_path("include"), "cxx_standard": 17, "cuda_home": None, "nccl_package": None,
         "torch": None, "torch_error": None, "has_pip": importlib.util.find_spec("pip") is not None}
try:
    import torch
    facts["torch"] = str(torch.__version__)
    text = open(os.path.join(os.path.dirname(torch.__file__), "utils", "cpp_extension.py"), encoding="utf-8").read()
    facts["cxx_standard"] = max([int(number) for number in re.findall(r"-std=c\\+\\+(\\d+)'", text)], default=17)
    if torch.version.cuda:
        from torch.utils.cpp_extension import CUDA_HOME
        facts["cuda_home"] = CUDA_HOME
except ImportError as error:
    facts["torch_error"] = str(error)
try:
    import nvidia.nccl
    facts["nccl_package"] = list(nvidia.nccl.__path__)[0]
except ImportError:
    pass
print("facts:" + json.dumps(facts))
"""


@dataclass(frozen=True)
class BuildTarget:
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
class BuildFeatures:
    """Parts of the wheel beside Gloo; empty where it lacks them."""

    mpi: str = ""
    """Identifies an MPI: a digest of how its compiler links."""
    mpicxx: str = ""
    """The path of that compiler."""
    nccl: str = ""
    """The folder with NCCL's ``include`` and ``lib``."""

    @property
    def listed(self) -> str:
        """``gloo, mpi``."""
        return ", ".join(["gloo", *(["mpi"] if self.mpi else []), *(["nccl"] if self.nccl else [])])


def examine_target(python: str) -> BuildTarget:
    """Ask ``python`` what it is; ``WorkerError`` names what a build lacks and the command that installs it."""
    try:
        done = _run([python, "-c", _TARGET_SCRIPT])
    except OSError as error:
        raise WorkerError(f"{python}: {error.strerror}", hint="--python takes the path of an interpreter") from error
    answers = [line for line in done.stdout.splitlines() if line.startswith("facts:")]
    if not answers:
        raise WorkerError(f"{python} does not run: {done.stderr.strip()[-400:]}")
    facts = json.loads(answers[-1].removeprefix("facts:"))
    torch_error, has_pip = facts.pop("torch_error"), facts.pop("has_pip")
    if not facts["torch"]:
        message = f"{python} cannot import torch ({torch_error}), and Horovod is built against it"
        raise WorkerError(message, hint=f"{python} -m pip install 'torch>=2.6'")
    if not has_pip:
        raise WorkerError(f"{python} has no pip", hint=f"{python} -m ensurepip")
    _require_compiler(facts["include"], facts["cxx_standard"])
    return BuildTarget(python, **facts)


def _require_compiler(include: str, standard: int) -> None:
    # cmake takes the same one.
    compiler = os.environ.get("CXX") or "g++"
    missing = [name for name in (compiler, "make") if not shutil.which(name)]
    if not (Path(include) / "Python.h").exists():
        missing.append("Python.h")
    if missing:
        packages = " ".join(sorted({_SYSTEM_PACKAGES.get(name, "g++") for name in missing}))
        header = f" ({include}/Python.h)" if "Python.h" in missing else ""
        hint = f"apt-get install {packages}; on a cluster load its compiler and Python modules"
        raise WorkerError(f"building Horovod needs {', '.join(missing)}, not found here{header}", hint=hint)
    error = compile_error([compiler, f"-std=c++{standard}"], "#include <string_view>\nint main() { return 0; }\n")
    if error:
        hint = "g++ 10 or newer does: apt-get install g++, or load a newer compiler's module (CXX names another)"
        raise WorkerError(f"{compiler} does not compile C++{standard}, which torch's headers need: {error}", hint=hint)


def compile_error(command: Sequence[str], source: str) -> str:
    """Return the error of ``command`` for ``source``; empty if it compiles and links."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "try.cc"
        file.write_text(source, encoding="utf-8")
        try:
            done = _run([*command, str(file), "-o", str(Path(folder) / "try")])
        except OSError as error:
            return str(error)
        return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no output"])[0]


def find_features(target: BuildTarget, mpi: bool, nccl: bool) -> BuildFeatures:
    """MPI where a program can be linked with it, NCCL where torch has CUDA and its toolkit and headers are here."""
    digest, mpicxx = find_mpi() if mpi else ("", "")
    return BuildFeatures(digest, mpicxx, _find_nccl(target) if nccl else "")


def find_mpi() -> tuple[str, str]:
    """A digest of how MPI's compiler links, and its path; both empty where no program can be linked with MPI."""
    # A wrapper alone proves nothing: distributions install it without the headers.
    source = "#include <mpi.h>\nint main() { MPI_Init(0, 0); return MPI_Finalize(); }\n"
    mpicxx = shutil.which("mpicxx")
    if not mpicxx or compile_error([mpicxx], source):
        return "", ""
    done = _run([mpicxx, "-show"])
    return hashlib.sha256(done.stdout.encode()).hexdigest()[:8], mpicxx


def _find_nccl(target: BuildTarget) -> str:
    if not target.cuda_home or not (Path(target.cuda_home) / "bin" / "nvcc").exists():
        return ""
    variables = [os.environ.get(name) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT", "EBROOTNCCL")]
    homes = (*variables, target.nccl_package, "/usr")
    return next((home for home in homes if home and (Path(home) / "include" / "nccl.h").exists()), "")


def make_build_environment(target: BuildTarget, parts: BuildFeatures, folder: Path) -> dict[str, str]:
    """A private build environment in ``folder``; returns the variables to build with."""
    tools = folder / "tools"
    failure = f"pip could not fetch what the build needs ({', '.join(_BUILD_TOOLS)})"
    _run([*target.pip, "install", "--quiet", "--target", str(tools), *_BUILD_TOOLS], failure)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "PYTHON"))}
    env |= {
        "PYTHONPATH": str(tools),
        "HOROVOD_CMAKE": str(tools / "cmake" / "data" / "bin" / "cmake"),
        "HOROVOD_CPU_OPERATIONS": "GLOO",
    }
    with_or_without = (
        f"WITH_GLOO WITH_PYTORCH WITHOUT_TENSORFLOW WITHOUT_MXNET {'WITH' if parts.mpi else 'WITHOUT'}_MPI"
    )
    env |= {f"HOROVOD_{name}": "1" for name in with_or_without.split()}
    if parts.nccl:
        env |= cuda_build_variables(target.cuda_home or "", _linkable_nccl(Path(parts.nccl), folder), os.environ)
    return env


def cuda_build_variables(cuda_home: str, nccl_home: Path, user_environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a build with CUDA in ``cuda_home`` and NCCL in ``nccl_home``.

    cmake's FindCUDA looks at ``CUDA_PATH``. Horovod builds for all architectures that the first ``nvcc`` of ``PATH``
    lists, or for those in the user's ``HOROVOD_BUILD_CUDA_CC_LIST`` (such as "80,90").
    """
    variables = {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_CUDA_HOME": cuda_home,
        "HOROVOD_NCCL_HOME": str(nccl_home),
        "CUDA_PATH": cuda_home,
        "PATH": f"{cuda_home}/bin{os.pathsep}{user_environment.get('PATH', os.defpath)}",
    }
    variable = "HOROVOD_BUILD_CUDA_CC_LIST"
    return variables | ({variable: user_environment[variable]} if variable in user_environment else {})


def _linkable_nccl(home: Path, folder: Path) -> Path:
    """NCCL's home with a ``libnccl.so``: torch's own package has only the name that is loaded, ``libnccl.so.2``."""
    library = home / "lib"
    if not (library / "libnccl.so.2").exists() or (library / "libnccl.so").exists():
        return home
    linkable = folder / "nccl"
    (linkable / "lib").mkdir(parents=True)
    (linkable / "lib" / "libnccl.so").symlink_to(library / "libnccl.so.2")
    (linkable / "include").symlink_to(home / "include")
    return linkable


_RUNTIME_PACKAGES = ("cloudpickle", "psutil", "pyyaml", "packaging")


def main(words: list[str] | None = None) -> int:
    """Build where the cache has no wheel, install, print its content; returns the exit code."""
    options = _parse_options(words)
    try:
        target = examine_target(options.python)
        parts = find_features(target, not options.without_mpi, not options.without_nccl)
        wheel = find_cached_wheel(wheel_cache_folder(), target, parts)
        if wheel is None:
            what = f"Horovod {HOROVOD_VERSION} for torch {target.torch} ({parts.listed})"
            _print_progress(f"building {what}, {options.jobs} jobs: minutes")
            wheel = _build_wheel(options.source, max(1, options.jobs), target, parts)
        else:
            _print_progress(f"from the cache: {wheel}")
        install_wheel(target, wheel)
        _print_progress(f"{target.python}: Horovod {describe_installed(target)}")
    except HpcbenchError as error:
        _print_progress(str(error))
        return 1
    return 0


def wheel_cache_folder() -> Path:
    """Return the folder of the wheels, outside of any checkout or environment."""
    return cache_folder() / "wheels"


def wheel_cache_key(target: BuildTarget, parts: BuildFeatures) -> str:
    """A name for everything that a wheel depends on: another value of any of these is another wheel."""
    inputs = {"horovod": HOROVOD_VERSION, "patch": PATCH_REVISION, "torch": target.torch, "python": target.tag,
             "machine": target.machine, "libc": target.libc, "mpi": parts.mpi, "nccl": parts.nccl}  # fmt: skip
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def wheel_local_version(target: BuildTarget, parts: BuildFeatures) -> str:
    """Return the part of the wheel's version behind ``+``, by which pip distinguishes builds."""
    torch = target.torch.replace("+", ".").replace("-", ".").replace("_", ".")
    return f"patch{PATCH_REVISION}.torch{torch}.{parts.listed.replace(', ', '.')}"


def find_cached_wheel(folder: Path, target: BuildTarget, parts: BuildFeatures) -> Path | None:
    """Return the path of the wheel that was built before; ``None`` if there is none."""
    return next(iter(sorted((folder / wheel_cache_key(target, parts)).glob("horovod-*.whl"))), None)


def store_wheel(folder: Path, wheel: Path, name: str) -> Path:
    """Move ``wheel`` into the cache under ``name``, at once: a second build at the same time does no harm."""
    cached = folder / name / wheel.name
    cached.parent.mkdir(parents=True, exist_ok=True)
    partial = cached.with_name(f".{cached.name}.{os.getpid()}")
    shutil.copyfile(wheel, partial)
    os.replace(partial, cached)
    return cached


def install_wheel(target: BuildTarget, wheel: Path) -> None:
    """Install ``wheel`` and what it imports; torch and everything else that is there stays."""
    for packages in (["--no-deps", str(wheel)], _RUNTIME_PACKAGES):
        _run([*target.pip, "install", "--quiet", *packages], f"pip could not install {wheel}")


def describe_installed(target: BuildTarget) -> str:
    """Return the installed version and its parts; ``WorkerError`` where the target's interpreter cannot import it."""
    text = (
        "import horovod, horovod.torch as h; built = {'gloo': h.gloo_built(), 'mpi': h.mpi_built(), "
        "'nccl': h.nccl_built()}; print(horovod.__version__, 'with', ', '.join(k for k, v in built.items() if v))"
    )
    with tempfile.TemporaryDirectory() as elsewhere:
        failure = "Horovod was built and installed, but cannot be imported"
        return _run([target.python, "-c", text], failure, cwd=elsewhere).stdout.strip().splitlines()[-1]


def _build_wheel(source: Path | None, jobs: int, target: BuildTarget, parts: BuildFeatures) -> Path:
    with tempfile.TemporaryDirectory(prefix="hpcbench-horovod-") as name:
        folder = Path(name)
        env = make_build_environment(target, parts, folder)
        root = unpack_source(source, folder) if source else fetch_source(target.pip, folder, env)
        env |= {"HOROVOD_LOCAL_VERSION": wheel_local_version(target, parts), "MAKEFLAGS": f"-j{jobs}",
                "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}  # fmt: skip
        patch_source(root, target.cxx_standard, cuda=bool(parts.nccl), mpicxx=parts.mpicxx)
        log = folder / "log"
        nice = ["nice", "-n", "10"] if shutil.which("nice") else []
        command = [*nice, *target.pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--verbose",
                   "--wheel-dir", str(folder / "out"), str(root)]  # fmt: skip
        with open(log, "wb") as file:
            code = subprocess.run(command, stdout=file, stderr=file, env=env, check=False).returncode
        wheels = sorted((folder / "out").glob("horovod-*.whl"))
        if code != 0 or not wheels:
            kept_log = wheel_cache_folder() / "horovod-build.log"
            kept_log.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(log, kept_log)
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            errors = [line for line in lines if "error" in line.lower()] or lines
            raise WorkerError("the build failed:\n" + "\n".join(errors[:8]), hint=f"all of its output: {kept_log}")
        return store_wheel(wheel_cache_folder(), wheels[0], wheel_cache_key(target, parts))


def _print_progress(text: str) -> None:
    print(f"hpcbench: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _parse_options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hpcbench.tools.build_horovod", description=__doc__)
    text = "the interpreter to build for (this one); give a cluster's environment its own"
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help=text)
    parser.add_argument("--without-mpi", action="store_true", help="leave MPI out even where mpicxx works")
    parser.add_argument("--without-nccl", action="store_true", help="leave NCCL out even for a CUDA torch")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="compilers at a time (2)")
    text = f"{_ARCHIVE_NAME}, for a machine without a package index"
    parser.add_argument("--source", type=Path, metavar="FILE", help=text)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
