"""A profile against the scheduler that is here, if one is."""

from __future__ import annotations

import subprocess

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.validate import Source
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean
from hpcbench.submit.scheduler import slurm_environment


def live_problems(profile: ClusterProfile, source: Source) -> bool:
    """Ask the scheduler whether it has the partitions that ``profile`` names.

    ``False`` where there is none to ask. Raises ``ConfigErrors`` with each partition that it does not know.
    """
    if profile.scheduler.kind != "slurm":
        return False
    partitions = live_partitions(profile)
    if partitions is None:
        return False
    problems: list[HpcbenchError] = [
        ConfigError(
            f"the scheduler has no partition {(partition.name or key)!r}",
            where=source.where(("partitions", key)),
            hint=did_you_mean(partition.name or key, partitions),
        )
        for key, partition in profile.partitions.items()
        if (partition.name or key) not in partitions
    ]
    if problems:
        raise ConfigErrors(problems)
    return True


def live_partitions(profile: ClusterProfile) -> set[str] | None:
    """Names of the scheduler's partitions; ``None`` where sinfo is absent or does not answer."""
    try:
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%R"],
            env=slurm_environment(profile), capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return set(done.stdout.split()) if done.returncode == 0 else None
