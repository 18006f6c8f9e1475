"""A release of SLURM beside the machine's own: Debian's packages, unpacked into a folder and run from there.

The programs keep their own C library, so they run on a machine with an older one: each names its loader and its
library folders by absolute path. What a job starts is not changed: it uses the machine's libraries as before.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from pathlib import Path

from . import paths
from .errors import BoxError
from .options import RELEASES
from .shell import run

TOOLS = ("debootstrap", "patchelf")
COMMANDS = (
    "sacct", "sacctmgr", "salloc", "sbatch", "sbcast", "scancel", "scontrol", "sdiag", "sinfo", "squeue", "srun",
    "sstat",
)  # fmt: skip
DAEMONS = {
    "slurmctld": "slurmctld-wlm",
    "slurmd": "slurmd-wlm",
    "slurmstepd": "slurmstepd-wlm",
    "slurmdbd": "slurmdbd",
}

_MIRROR = "http://deb.debian.org/debian"
_LIBRARIES = (paths.RELEASE / "lib" / "slurm-wlm", paths.RELEASE / "lib")


def cache_folder(release: str) -> Path:
    """Folder that keeps the unpacked release between boxes."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "hpcbench" / f"slurm-{release}"


def fetching_tools(release: str) -> tuple[str, ...]:
    """The programs that fetch a release; none where it is cached. Their packages have the same names."""
    return () if cache_folder(release).is_dir() else TOOLS


def install(release: str) -> None:
    """Copy the release to where its programs look for their libraries, and fetch it first where it is not cached.

    The copy, since the folders above a cache are often closed to other users, who submit jobs, too.
    """
    cached = cache_folder(release)
    if not cached.is_dir():
        _fetch(release, cached)
    shutil.copytree(cached, paths.RELEASE, symlinks=True)
    paths.RELEASE.chmod(0o755)


def _fetch(release: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}-") as name:
        work = Path(name)
        packages = work / "packages"
        command = ["debootstrap", "--variant=minbase", "--download-only", "--include=slurm-wlm,slurmdbd,slurm-client"]
        run([*command, RELEASES[release], str(packages), _MIRROR], timeout=900)
        for package in sorted((packages / "var/cache/apt/archives").glob("*.deb")):
            if package.name.startswith(("lib", "slurm")):
                run(["dpkg-deb", "-x", str(package), str(work / "root")])
        ready = work / "ready"
        _arrange(work / "root" / "usr", ready)
        for program in (*(ready / "bin").iterdir(), *(ready / "sbin").iterdir()):
            _bind(program, is_program=True)
        for library in ready.glob("lib/**/*.so*"):
            # A library that names folders of its own would find the machine's libraries there.
            if not library.is_symlink() and run(["patchelf", "--print-rpath", str(library)], check=False)[1].strip():
                _bind(library)
        # Without a race: a second box cannot be fetching, as one lock serves all.
        ready.rename(target)


def _arrange(usr: Path, ready: Path) -> None:
    """Copy the needed files of an unpacked /usr to ``bin``, ``sbin`` and ``lib``."""
    for folder, names in (("bin", COMMANDS), ("sbin", DAEMONS.values())):
        (ready / folder).mkdir(parents=True)
        for name in names:
            shutil.copy2(usr / folder / name, ready / folder / name)
    shutil.copytree(usr / "lib" / f"{platform.machine()}-linux-gnu", ready / "lib", ignore_dangling_symlinks=True)


def _bind(file: Path, is_program: bool = False) -> None:
    """Let a program or a library find its libraries in the release's folder only."""
    options = ["--force-rpath", "--set-rpath", ":".join(map(str, _LIBRARIES))]
    if is_program:
        loader = next((file.parent.parent / "lib").glob("ld-linux*.so.*"), None)
        if loader is None:
            raise BoxError(
                f"the packages for {file.name} have no loader ld-linux*: this machine is {platform.machine()}"
            )
        options += ["--set-interpreter", str(paths.RELEASE / "lib" / loader.name)]
    run(["patchelf", *options, str(file)])


def daemon(program: str) -> str:
    """The program of a daemon of the installed release."""
    return str(paths.RELEASE / "sbin" / DAEMONS[program])


def link_commands() -> None:
    """Link the release's commands into the folder that comes first in the box's search path."""
    for command in COMMANDS:
        (paths.BIN / command).symlink_to(paths.RELEASE / "bin" / command)
