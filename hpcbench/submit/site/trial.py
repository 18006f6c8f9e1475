"""What the scheduler itself says of a job: sbatch is asked to the last word, and submits nothing."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.validate import Source
from hpcbench.errors import ConfigError, HpcbenchError
from hpcbench.fileio import printable
from hpcbench.render.engine import TemplateEngine
from hpcbench.render.script import render_script
from hpcbench.render.shape import Shape
from hpcbench.submit.answers import Answer, classify
from hpcbench.submit.scheduler import slurm_environment

_NOT_NOW = ("busy", "DOWN, DRAINED", "not available now", "not currently available")
"""Refusals that another hour has not: no fault of a profile."""


def refusals(profile: ClusterProfile, source: Source) -> Iterator[HpcbenchError]:
    """The smallest job with all devices of its nodes, in each partition, through ``sbatch --test-only``.

    The site's own rules count there, too, which nothing but a submission meets. Where the scheduler cannot be asked,
    nothing is said.
    """
    for key in profile.partitions or [None]:
        said = _refused(profile, key)
        if said:
            where = source.where(("partitions", key) if key else ())
            yield ConfigError(f"sbatch refuses a job{f' in {key}' if key else ''}: {said}", where=where)


def _refused(profile: ClusterProfile, key: str | None) -> str | None:
    partition, node = profile.partition(key), profile.node_of(key)
    nodes = partition.min_nodes or 1
    longest_min = partition.longest_min(nodes)
    limit_min = partition.time_limit_min or profile.time_limit_min
    shape = Shape(
        partition=key or profile.default_partition,
        environment=profile.default_environment,
        nodes=nodes,
        tasks_per_node=node.devices or 1,
        devices_per_task=1,
        time_limit_s=60 * (limit_min if longest_min is None else min(limit_min, longest_min)),
    )
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "0.sh"
        text = render_script(TemplateEngine(), profile, shape, "check", script.parent, 0)
        script.write_text(text, encoding="utf-8")
        command = ["sbatch", "--test-only", str(script)]
        try:
            done = subprocess.run(
                command, env=slurm_environment(profile),
                capture_output=True, text=True, errors="replace", timeout=60, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
    said = done.stderr or done.stdout
    if done.returncode == 0 or classify(said) is not Answer.REFUSED or any(words in said for words in _NOT_NOW):
        return None
    lines = (line.removeprefix("sbatch: ").removeprefix("error: ") for line in said.splitlines())
    # Where an option is wrong, sbatch adds an advice that is none here.
    kept = [line for line in lines if line.strip() and not line.startswith('Try "')]
    return printable("; ".join(kept)) or f"exit code {done.returncode}"
