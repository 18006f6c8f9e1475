"""Whether this machine can carry the box: system, packages, cores and memory."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import BoxError
from .options import GIB, Options
from .shell import PATH, run

PACKAGES = ("slurm-wlm", "slurmdbd", "mariadb-server", "munge", "iproute2", "util-linux")
TOOLS = (
    "slurmctld", "slurmd", "slurmstepd", "slurmdbd", "sacctmgr", "scontrol", "sinfo", "munged", "munge",
    "mariadbd", "mariadb-install-db", "ip", "tc", "nsenter", "unshare",
)  # fmt: skip

# Left to the machine: the daemons, the database and whoever works there.
RESERVED_MEM = 3.5 * GIB
CORE_SHARE = 0.9

_POLICY = Path("/usr/sbin/policy-rc.d")


def check_system() -> None:
    """Refuse what cannot work at all."""
    if platform.system() != "Linux":
        raise BoxError(f"the box needs Linux, this is {platform.system()}: use a Linux machine or a virtual one")
    if os.geteuid() != 0:
        raise BoxError(f"the box needs root for namespaces and cgroups, this is user {os.geteuid()}: use sudo")


def check_capacity(options: Options, cores: int, mem: int) -> None:
    """Refuse a box that is larger than the machine."""
    wanted_cpus, most_cpus = options.nodes * options.cpus, CORE_SHARE * cores
    if wanted_cpus > most_cpus + 1e-9:
        raise BoxError(
            f"{options.nodes} nodes x {options.cpus:g} cores = {wanted_cpus:g} cores, this machine of {cores} can give "
            f"{most_cpus:g}: ask for at most CPUS={_down(most_cpus / options.nodes):g}, or for fewer nodes"
        )
    wanted_mem, most_mem = options.nodes * options.mem, mem - RESERVED_MEM
    if wanted_mem > most_mem:
        raise BoxError(
            f"{options.nodes} nodes x {options.mem / GIB:.3g} GiB = {wanted_mem / GIB:.3g} GiB, this machine of "
            f"{mem / GIB:.3g} GiB can give {max(most_mem, 0) / GIB:.3g} GiB: ask for less MEM, or for fewer nodes"
        )


def _down(value: float) -> float:
    """Rounded down to two digits, so that the proposed value is accepted."""
    return int(value * 100 + 1e-6) / 100


def cores() -> int:
    return len(os.sched_getaffinity(0))


def memory() -> int:
    """Bytes of memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def find(program: str) -> str | None:
    """Return the path of a program; daemons are in sbin, which the caller's PATH may lack."""
    return shutil.which(program, path=PATH)


def real_daemon(program: str) -> str:
    """The real SLURM daemon: Debian's emulator package takes over the plain names through update-alternatives."""
    path = find(f"{program}-wlm") or find(program)
    if path is None:
        raise BoxError(f"{program} is not installed: install {' '.join(PACKAGES)}")
    return path


def missing_tools(tools: Sequence[str]) -> list[str]:
    return [tool for tool in tools if find(tool) is None]


def install_packages(fetching: Sequence[str] = ()) -> None:
    """Install the distribution's SLURM where something is missing, and missing tools for ``fetching``."""
    tools, packages = (*TOOLS, *fetching), (*PACKAGES, *fetching)
    missing = missing_tools(tools)
    if not missing:
        return
    if find("apt-get") is None:
        raise BoxError(
            f"missing: {', '.join(missing)}, and there is no apt-get: install SLURM with slurmdbd, MariaDB, munge and "
            "iproute2 with this system's own package manager"
        )
    print(f"slurm box: installing {' '.join(packages)} (missing: {', '.join(missing)})", file=sys.stderr, flush=True)
    run(["apt-get", "-q", "update"], timeout=300)
    # The box starts its own daemons: the packages' services must stay down.
    own_policy = not _POLICY.exists()
    if own_policy:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    try:
        # Other tests may be installing what they need.
        install = [
            "apt-get",
            "-q",
            "-o",
            "DPkg::Lock::Timeout=300",
            "install",
            "-y",
            "--no-install-recommends",
            *packages,
        ]
        run(["env", "DEBIAN_FRONTEND=noninteractive", *install], timeout=900)
    finally:
        if own_policy:
            _POLICY.unlink()
    missing = missing_tools(tools)
    if missing:
        raise BoxError(f"still missing after installing {' '.join(packages)}: {', '.join(missing)}")


def slurm_version(daemon: Path) -> tuple[int, int]:
    """(22, 5) of `slurm-wlm 22.05.8`."""
    text = run([str(daemon), "-V"])[1].split()[-1]
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
