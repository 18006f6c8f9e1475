"""One job script: the variables that templates may use, and the rendering of ``job.sh.j2``."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hpcbench
from hpcbench.config.cluster import ClusterProfile, Environment
from hpcbench.render import pbs
from hpcbench.render.container import command_prefix
from hpcbench.render.directives import directives
from hpcbench.render.engine import TemplateEngine
from hpcbench.render.shape import Shape, cpus_per_task, job_limit_s
from hpcbench.render.steps import container_words, job_variables, rank_wrapper, step_words

NOTHING_TO_DO = 10
"""Exit code of the worker's ``begin`` where the run needs no attempt."""
PREEMPTED = 11
"""Exit code of the worker's ``end`` where the job is being preempted and the run is to be run again."""


def render_script(
    engine: TemplateEngine,
    profile: ClusterProfile,
    shape: Shape,
    sweep: str,
    folder: Path,
    number: int,
    pack: int = 1,
    runs: int = 1,
) -> str:
    """The text of ``<folder>/<number>.sh``, whose jobs carry ``pack`` of the ``runs`` lines of the task file each."""
    return engine.render("job.sh.j2", context(profile, shape, sweep, folder, number, pack, runs))


def context(
    profile: ClusterProfile, shape: Shape, sweep: str, folder: Path, number: int, pack: int = 1, runs: int = 1
) -> dict[str, Any]:
    """The variables of the templates. ``templates/README.md`` describes each; a test keeps it complete."""
    environment = profile.environment(shape.environment)
    is_slurm = profile.scheduler.kind == "slurm"
    name = job_name(folder, number)
    return {
        "sweep": sweep,
        "cluster": profile.name,
        "version": hpcbench.__version__,
        "scheduler": profile.scheduler.kind,
        "launcher": profile.launcher,
        "launcher_args": profile.launcher_args,
        "step_words": step_words(shape, profile) if is_slurm else [],
        "container_words": container_words(shape, profile) if is_slurm else [],
        "rank_wrapper": rank_wrapper(shape, profile) if is_slurm else [],
        # A scheduler signals the ranks itself; without one the script passes on what it is told.
        "forward_signals": not is_slurm,
        "directives": _directives(shape, profile, name, folder, number, pack, runs),
        "task_file": str(folder / f"{number}.jsonl"),
        "nodes": shape.nodes,
        "tasks_per_node": shape.tasks_per_node,
        "devices_per_task": shape.devices_per_task,
        "ranks": shape.ranks,
        "cpus_per_task": cpus_per_task(shape, profile),
        "time_limit_s": math.ceil(shape.time_limit_s),
        "pack": pack,
        "runs": runs,
        "job_limit_s": math.ceil(job_limit_s(shape, pack)),
        "modules": environment.modules,
        "modules_start": environment.modules_start,
        "cluster_setup": profile.setup,
        "setup": environment.setup,
        "env": job_variables(shape, profile),
        "env_unset": [*profile.env_unset, *environment.env_unset],
        "container": command_prefix(environment.container),
        "python": python_of(environment),
        "nothing_to_do": NOTHING_TO_DO,
        "preempted": PREEMPTED,
    }


def _directives(
    shape: Shape, profile: ClusterProfile, name: str, folder: Path, number: int, pack: int, runs: int
) -> Sequence[tuple[str, str | int | bool]]:
    if profile.scheduler.kind == "slurm":
        return directives(shape, profile, name, str(folder), number, pack)
    if profile.scheduler.kind == "pbs":
        return pbs.directives(shape, profile, name, str(folder), pack, runs)
    return []


def python_of(environment: Environment) -> str:
    """The interpreter that runs the ranks: the environment's, else the image's or the submitter's own."""
    if environment.python:
        return environment.python
    if environment.venv:
        return f"{environment.venv}/bin/python"
    if environment.container and environment.container.kind:
        return "python3"
    return sys.executable


def job_name(folder: Path, number: int) -> str:
    """``hpcbench-<submission>-<number>``: unique, so that a job can be found again by it."""
    return f"hpcbench-{folder.name}-{number}"
