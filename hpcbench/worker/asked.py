"""What memory a job asked for and what was there: the words that a run which ran out of it leaves. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpcbench.units import format_bytes
from hpcbench.worker.cgroup import memory_limit_bytes

_MIB = 2**20


def memory_words(env: Mapping[str, str], limit_bytes: int | None, machine_bytes: int | None) -> str:
    """``asked for 1.4 GiB a node; the job's limit is 1.4 GiB; the machine has 377 GiB``, as far as it is known.

    ``env`` is the job's: SLURM gives what was asked for in MiB, per node or per core.
    """
    found = []
    for name, of in (("SLURM_MEM_PER_NODE", "a node"), ("SLURM_MEM_PER_CPU", "a core"), ("SLURM_MEM_PER_GPU", "a GPU")):
        if env.get(name, "").isdecimal():
            asked = int(env[name]) * _MIB
            found.append(f"asked for {format_bytes(asked)} {of}" if asked else "asked for all memory of the node")
    if limit_bytes is not None:
        found.append(f"the limit of its memory group is {format_bytes(limit_bytes)}")
    if machine_bytes is not None:
        found.append(f"the machine has {format_bytes(machine_bytes)}")
    return "; ".join(found)


def memory_here() -> str:
    """The words for this process on this machine."""
    try:
        machine_bytes: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        machine_bytes = None
    return memory_words(os.environ, memory_limit_bytes(), machine_bytes)
