"""The SLURM box as a cluster of slow nodes, and this machine itself: for scores and the papers' matrices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.slurm.box import Box, Options
from tests.slurm.box.options import MIB

CLUSTER = "oraclebox"


class Shape(NamedTuple):
    """Nodes, and the processors of each. All nodes share two cores, of which the daemons need a part."""

    nodes: int
    cores: float


EIGHT_NODES = Shape(8, 0.22)
"""For the papers' matrices, which have up to eight ranks."""
FOUR_NODES = Shape(4, 0.45)
"""For the oracle's score: a larger quota holds a rank back less often, so that launches differ less."""
MEMORY = 2500 * MIB
RATE_MBIT = 1000
"""Of the links of the reruns."""

_PROFILE = """\
name = "{name}"
extends = "slurmbox"
description = "the box, {nodes} nodes of {cores} cores, links of {rate} Mbit/s"

[partitions.normal]
max_nodes = {nodes}
{limit}

[node]
memory_bytes = {memory}

[request]
memory_bytes = {memory}

[links.inter_node]
latency_s = "100 us"
bandwidth_bytes_per_s = "{rate} Mbit/s"
"""


class Testbed:
    """A project folder with the profile, a results tree, and the box that both are about."""

    __test__ = False
    """No test class, in spite of its name."""
    cluster = CLUSTER

    def __init__(self, work: Path, shape: Shape = EIGHT_NODES) -> None:
        self.shape = shape
        self.work = work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.results = self.work / "results"

    def at(self, rate_mbit: int, jobs: int | None = None) -> None:
        """Have the box with links of that rate, and the profile that says so and has at most ``jobs`` run at once."""
        Box().up(Options(nodes=self.shape.nodes, gpus=0, cpus=self.shape.cores, mem=MEMORY, link=rate_mbit * 10**6))
        self.describe(rate_mbit, jobs)

    def describe(self, rate_mbit: int, jobs: int | None = None) -> None:
        """Write the profile alone."""
        folder = self.work / "clusters"
        folder.mkdir(parents=True, exist_ok=True)
        # All nodes share two cores.
        limit = "" if jobs is None else f"max_running_jobs = {jobs}"
        nodes, cores = self.shape
        text = _PROFILE.format(name=CLUSTER, nodes=nodes, cores=cores, rate=rate_mbit, memory=MEMORY, limit=limit)
        (folder / f"{CLUSTER}.toml").write_text(text)

    def hpcbench(self, *arguments: str) -> int:
        """The command as a user calls it, in the project folder; its exit code."""
        return self.start(*arguments).wait()

    def output(self, *arguments: str) -> bytes:
        """Return its standard output. Raises ``SystemExit`` if it fails."""
        command = self.start(*arguments, stdout=subprocess.PIPE)
        text, _ = command.communicate()
        if command.returncode:
            raise SystemExit(f"hpcbench {' '.join(arguments)} ended with {command.returncode}")
        return text

    def start(self, *arguments: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        """The same, without waiting for it."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        command = [sys.executable, "-m", "hpcbench", *arguments, "--results", str(self.results)]
        return subprocess.Popen(command, cwd=self.work, env=env, stdout=stdout)


class LocalMachine(Testbed):
    """This machine without SLURM: the cluster ``local``."""

    cluster = "local"

    def at(self, rate_mbit: int, jobs: int | None = None) -> None:
        """Change nothing: ranks of one machine use no links."""

    def describe(self, rate_mbit: int, jobs: int | None = None) -> None:
        """Write nothing: the profile is shipped."""
