"""The submitter's environment, without what would leak from the job or the shell that hpcbench was called in."""

from __future__ import annotations

import os
from collections.abc import Mapping

_LEAKING = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "PMI", "PMIX", "OMPI_", "TORCHELASTIC_", "SUBMITIT_")
_KEPT = frozenset({"SLURM_CONF"})
_EXACT = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


def is_leaking(name: str) -> bool:
    """Whether a variable describes a job that is not the one being submitted."""
    return name not in _KEPT and (name in _EXACT or name.startswith(_LEAKING))


def scrubbed_names(environment: Mapping[str, str] | None = None) -> list[str]:
    """The names that ``clean_environment`` takes out."""
    return sorted(name for name in (os.environ if environment is None else environment) if is_leaking(name))


def clean_environment(config_file: str | None = None, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of the environment for sbatch and for local jobs. ``config_file`` becomes SLURM_CONF."""
    source = os.environ if environment is None else environment
    kept = {name: value for name, value in source.items() if not is_leaking(name)}
    if config_file is not None:
        kept["SLURM_CONF"] = config_file
    return kept
