"""``python -m hpcbench.worker.build_horovod``: Horovod as a wheel for an interpreter's torch, cached and installed.

Horovod has no wheels, and its last release does not build against a current torch as it stands. The build takes some
minutes; the wheel is kept per user, so that the next environment gets it within seconds. torch is left as it is.
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
from pathlib import Path
from typing import Any, NamedTuple

from hpcbench.errors import HpcbenchError, WorkerError
from hpcbench.worker.horovod_source import PATCH, VERSION, fetch, mend, unpack
from hpcbench.worker.horovod_tools import Parts, Target, examine, find_parts, make_tools

_NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging")


class Wish(NamedTuple):
    """What was asked for on the command line."""

    python: str
    mpi: bool
    nccl: bool
    jobs: int
    source: Path | None


def main(words: list[str] | None = None) -> int:
    """Build where the cache has no wheel, install, say what is in it; returns the exit code."""
    wish = _parse(sys.argv[1:] if words is None else words)
    try:
        target = examine(wish.python)
        parts = find_parts(target, wish.mpi, wish.nccl)
        wheel = cached(cache_folder(), target, parts)
        if wheel is None:
            _say(f"building Horovod {VERSION} for torch {target.torch} ({parts.listed}), {wish.jobs} jobs: minutes")
            wheel = _build(wish, target, parts)
        else:
            _say(f"from the cache: {wheel}")
        install(target, wheel)
        _say(f"{target.python}: Horovod {installed(target)}")
    except HpcbenchError as error:
        print(f"hpcbench: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def cache_folder() -> Path:
    """Where wheels are kept: outside of any checkout or environment."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hpcbench" / "wheels"


def slot(target: Target, parts: Parts) -> str:
    """A name for everything that a wheel depends on: another value of any of these is another wheel."""
    known = {"horovod": VERSION, "patch": PATCH, "torch": target.torch, "python": target.tag,
             "machine": target.machine, "libc": target.libc, "mpi": parts.mpi, "nccl": parts.nccl}  # fmt: skip
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def local_version(target: Target, parts: Parts) -> str:
    """What stands behind the ``+`` of the wheel's version, so that pip, too, tells one build from the next."""
    torch = target.torch.replace("+", ".").replace("-", ".").replace("_", ".")
    return f"patch{PATCH}.torch{torch}.{parts.listed.replace(', ', '.')}"


def cached(folder: Path, target: Target, parts: Parts) -> Path | None:
    """The wheel that was built before, if there is one."""
    return next(iter(sorted((folder / slot(target, parts)).glob("horovod-*.whl"))), None)


def keep(folder: Path, wheel: Path, name: str) -> Path:
    """Move ``wheel`` into the cache under ``name``, at once: a second build at the same time harms nobody."""
    kept = folder / name / wheel.name
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_name(f".{kept.name}.{os.getpid()}")
    shutil.copyfile(wheel, partial)
    os.replace(partial, kept)
    return kept


def install(target: Target, wheel: Path) -> None:
    """Install ``wheel`` and what it imports; torch and everything else that is there stays."""
    done = subprocess.run(
        [*target.pip, "install", "--quiet", "--no-deps", str(wheel)], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        command = [*target.pip, "install", "--quiet", *_NEEDS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise WorkerError(f"pip could not install {wheel}: {done.stderr.strip()[-600:]}")


def installed(target: Target) -> str:
    """What the target's interpreter finds; ``WorkerError`` where it cannot import it."""
    text = (
        "import horovod, horovod.torch as h; built = {'gloo': h.gloo_built(), 'mpi': h.mpi_built(), "
        "'nccl': h.nccl_built()}; print(horovod.__version__, 'with', ', '.join(k for k, v in built.items() if v))"
    )
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [target.python, "-c", text]
        done = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere, check=False)
    if done.returncode != 0:
        raise WorkerError(f"Horovod was built and installed, but cannot be imported:\n{done.stderr.strip()[-800:]}")
    return done.stdout.strip().splitlines()[-1]


def _build(wish: Wish, target: Target, parts: Parts) -> Path:
    with tempfile.TemporaryDirectory(prefix="hpcbench-horovod-") as name:
        folder = Path(name)
        env = make_tools(target, parts, folder)
        root = unpack(wish.source, folder) if wish.source else fetch(target.pip, folder, env)
        env |= {"HOROVOD_LOCAL_VERSION": local_version(target, parts), "MAKEFLAGS": f"-j{wish.jobs}",
                "CMAKE_BUILD_PARALLEL_LEVEL": str(wish.jobs)}  # fmt: skip
        mend(root, target.cxx_standard, cuda=bool(parts.nccl), mpicxx=parts.mpicxx)
        log = folder / "log"
        nice = ["nice", "-n", "10"] if shutil.which("nice") else []
        command = [*nice, *target.pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--verbose",
                   "--wheel-dir", str(folder / "out"), str(root)]  # fmt: skip
        with open(log, "wb") as file:
            code = subprocess.run(command, stdout=file, stderr=file, env=env, check=False).returncode
        wheels = sorted((folder / "out").glob("horovod-*.whl"))
        if code != 0 or not wheels:
            kept = cache_folder() / "horovod-build.log"
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(log, kept)
            raise WorkerError(f"the build failed:\n{_errors(log)}", hint=f"all of its output: {kept}")
        return keep(cache_folder(), wheels[0], slot(target, parts))


def _errors(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    telling = [line for line in lines if "error" in line.lower()]
    return "\n".join((telling or lines)[:8])


def _say(text: str) -> None:
    print(f"hpcbench: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _parse(words: list[str]) -> Wish:
    parser = argparse.ArgumentParser(prog="python -m hpcbench.worker.build_horovod", description=__doc__)
    text = "the interpreter to build for (this one); give a cluster's environment its own"
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help=text)
    parser.add_argument("--without-mpi", action="store_true", help="leave MPI out even where mpicxx works")
    parser.add_argument("--without-nccl", action="store_true", help="leave NCCL out even for a CUDA torch")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="compilers at a time (2)")
    text = f"horovod-{VERSION}.tar.gz, for a machine without a package index"
    parser.add_argument("--source", type=Path, metavar="FILE", help=text)
    given: Any = parser.parse_args(words)
    return Wish(given.python, not given.without_mpi, not given.without_nccl, max(1, given.jobs), given.source)


if __name__ == "__main__":
    sys.exit(main())
