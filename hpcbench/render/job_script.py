"""A job script: the shape of its jobs, directives, the words that launch ranks, and the variables of its template."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hpcbench
from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.profile_tables import ContainerConfig, Environment, Partition
from hpcbench.config.scheduler_kinds import MakeDirectives
from hpcbench.errors import EXIT_NOTHING_TO_DO, EXIT_PREEMPTED
from hpcbench.render.template_engine import TemplateEngine
from hpcbench.units import format_slurm_time

LAUNCH_OVERHEAD_S = 30.0
"""Seconds that starting and ending one launch of a pack may take in addition to the run's own limit."""

BEGIN_PAUSE_S = 30
"""A job that cannot begin holds its node this long: a broken node that is free again at once gets the whole queue."""

PIPELINE_VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
"""A pipeline's receives wait on the device. Streams that share one of CUDA's 8 hardware queues would wait with them; so
would the loading of a kernel at its first use, which synchronises the context (CUDA guide, Lazy Loading)."""


@dataclass(frozen=True)
class JobShape:
    """The values that determine the text of a job script. Runs of one shape share one script.

    ``make_job_shape`` makes it, with the resolved partition and environment.
    """

    profile: ClusterProfile = field(compare=False, repr=False)
    partition: Partition
    environment: Environment
    nodes: int
    tasks_per_node: int
    devices_per_task: int
    time_limit_s: float
    has_nccl_pipeline: bool = False
    """Whether ranks send each other messages of a pipeline over NCCL, which needs variables of its own."""
    node: str | None = None
    """Name of the node that jobs must get."""

    @property
    def ranks(self) -> int:
        """Processes of one launch."""
        return self.nodes * self.tasks_per_node

    @property
    def cpus_per_task(self) -> int:
        """CPUs of one rank: as the profile sets them, else its share of the node's, at least one.

        Jobs on shared nodes leave the other devices their CPUs, so that a rank has as many at every scale.
        """
        request, node = self.partition.request, self.partition.node
        if request.cpus_per_task:
            return request.cpus_per_task
        if request.cpus_per_device:
            return request.cpus_per_device * self.devices_per_task
        asks_for_devices = request.gpus != "none" and request.gpus_on != "step"
        if asks_for_devices and not self.has_whole_nodes and node.devices and self.devices_per_task:
            return max(1, (node.cores or 1) * self.devices_per_task // node.devices)
        return max(1, (node.cores or 1) // self.tasks_per_node)

    @property
    def has_whole_nodes(self) -> bool:
        """Whether jobs share their nodes with no others."""
        return self.partition.whole_nodes or self.partition.request.exclusive

    @property
    def variables(self) -> dict[str, str]:
        """The exported variables: the profile's, before them a pipeline's, and the device order of whole nodes."""
        binding, variables = self.profile.binding, self.environment.env
        if self.has_nccl_pipeline:
            variables = {**PIPELINE_VARIABLES, **variables}
        if self.uses_all_devices and binding.device_order and not self.sees_one_device:
            order = ",".join(map(str, binding.device_order))
            variables = {binding.device_variable: order, **variables}
        return variables

    @property
    def sees_one_device(self) -> bool:
        """Whether each rank is shown its own device alone."""
        is_wanted = self.profile.binding.one_device_per_rank and self.profile.launcher == "srun"
        return is_wanted and self.devices_per_task == 1

    @property
    def uses_all_devices(self) -> bool:
        """Whether the ranks of a node use all of its devices."""
        return self.tasks_per_node * self.devices_per_task == self.partition.node.devices

    def job_limit_s(self, pack: int = 1) -> float:
        """The time limit of a job that carries ``pack`` runs, one after another."""
        return self.time_limit_s if pack == 1 else pack * (self.time_limit_s + LAUNCH_OVERHEAD_S)


def make_job_shape(
    profile: ClusterProfile, nodes: int, tasks_per_node: int, devices_per_task: int = 1,
    time_limit_s: float | None = None, *, partition: str | None = None, environment: str | None = None,
    has_nccl_pipeline: bool = False,
) -> JobShape:  # fmt: skip
    """The shape of jobs in a partition and an environment of ``profile``, or in its default ones.

    Without ``time_limit_s`` the limit is the partition's ``time_limit_min``, at most the longest time that it allows.
    """
    resolved = profile.partition(partition)
    if time_limit_s is None:
        longest_min = resolved.longest_min(nodes)
        limit_min = resolved.time_limit_min
        time_limit_s = 60 * (limit_min if longest_min is None else min(limit_min, longest_min))
    return JobShape(
        profile, resolved, profile.environment(environment), nodes, tasks_per_node, devices_per_task, time_limit_s,
        has_nccl_pipeline,
    )  # fmt: skip


def _container_command(container: ContainerConfig | None) -> list[str]:
    """Return the words before the interpreter."""
    if container is None:
        return []
    if container.command is not None:
        return container.command
    kind, options, image = container.kind, container.options, container.image or ""
    if kind in ("apptainer", "singularity"):
        binds = [word for mount in container.mounts for word in ("--bind", mount)]
        return [kind, "exec", *options, *binds, image]
    if kind == "podman-hpc":
        volumes = [word for mount in container.mounts for word in ("--volume", mount)]
        # Ranks read their number and the profile's variables from the host's environment.
        return ["podman-hpc", "run", "--rm", "--env-host", *options, *volumes, image]
    return ["shifter", *options] if kind == "shifter" else []


def _container_step_options(shape: JobShape) -> list[str]:
    """Return srun's options for a container; the variables of the job are not replaced by those of the image."""
    container = shape.environment.container
    if container is None:
        return []
    if container.kind == "pyxis":
        words = [f"--container-image={container.image}"]
        if container.mounts:
            words.append(f"--container-mounts={','.join(container.mounts)}")
        if shape.variables:
            words.append(f"--container-env={','.join(shape.variables)}")
        return [*words, *container.options]
    if container.kind == "cscs-engine":
        return [f"--environment={container.image}", *container.options]
    return []


def _container_directives(container: ContainerConfig | None) -> dict[str, str]:
    """Directives that prepare the container on the job's nodes."""
    if container is None or container.image is None:
        return {}
    modules = ",".join(container.modules)
    directives = {
        "shifter": {"image": container.image, "volume": ";".join(container.mounts), "module": modules},
        "uenv": {"uenv": container.image, "view": modules},
    }
    return {name: value for name, value in directives.get(container.kind or "", {}).items() if value}


def _gpu_option(shape: JobShape, ranks_per_task: int = 1) -> dict[str, int | str]:
    """Return SLURM's option that requests accelerators, and its value. One task starts ``ranks_per_task`` ranks."""
    per_node = shape.tasks_per_node * shape.devices_per_task
    node, style = shape.partition.node, shape.partition.request.gpus
    values: dict[str, int | str] = {
        "gpus-per-node": per_node,
        "gpus-per-task": shape.devices_per_task * ranks_per_task,
        "gpus": per_node * shape.nodes,
        "gres": f"gpu:{per_node}",
        "gres-typed": f"gpu:{node.gres_type or node.device_type}:{per_node}",
    }
    return {style.removesuffix("-typed"): values[style]} if style in values else {}


def _srun_options(shape: JobShape) -> list[str]:
    """Options of the srun that starts the ranks, or one torchrun a node."""
    binding, is_torchrun = shape.profile.binding, shape.profile.launcher == "torchrun"
    words: list[str] = []
    if shape.partition.request.gpus_on != "job":
        options = _gpu_option(shape, shape.tasks_per_node if is_torchrun else 1)
        words += [f"--{name}={value}" for name, value in options.items()]
    bind = None if is_torchrun else _choose_cpu_bind(shape)
    if bind:
        words.append(f"--cpu-bind={bind}")
    if binding.gpu_bind and not is_torchrun:
        words.append(f"--gpu-bind={binding.gpu_bind}")
    return [*words, *_container_step_options(shape)]


def _rank_wrapper(shape: JobShape) -> list[str]:
    """Words before the interpreter that show a rank its device alone; srun's rank is only known inside of a task."""
    if not shape.sees_one_device:
        return []
    binding = shape.profile.binding
    device, order = "$SLURM_LOCALID", ""
    if binding.device_order and shape.uses_all_devices:
        order = f"order=({' '.join(map(str, binding.device_order))}); "
        device = "${order[SLURM_LOCALID]}"
    return ["bash", "-c", f'{order}export {binding.device_variable}={device}; exec "$@"', "rank"]


def _choose_cpu_bind(shape: JobShape) -> str | None:
    """A map of cores is right on whole nodes with one rank per device; elsewhere the job may have other cores."""
    binding = shape.profile.binding
    if shape.has_whole_nodes and shape.tasks_per_node == shape.partition.node.devices:
        return binding.whole_node_cpu_bind or binding.cpu_bind
    return binding.cpu_bind


DirectiveValue = str | int | bool


def sbatch_directives(
    shape: JobShape, job_name: str, folder: str, number: int, pack: int = 1, _runs: int = 1
) -> list[tuple[str, DirectiveValue]]:
    """Names and values of the #SBATCH lines; ``True`` is a flag without a value.

    ``folder`` is the submission's: jobs run there, and the script's output goes to ``<number>.<job>.<task>.log``.
    """
    partition, request = shape.partition, shape.partition.request
    warning_s = shape.profile.scheduler.warning_s
    # SLURM replaces what follows a percent sign in the names of logs.
    log = f"{folder.replace('%', '%%')}/{number}.%A.%a.log"
    lines: dict[str, DirectiveValue | list[str] | None] = {
        "job-name": job_name,
        "comment": job_name,
        "partition": partition.name,
        "account": shape.profile.account,
        "qos": partition.qos,
        "constraint": partition.constraint,
        "nodes": shape.nodes,
        "ntasks-per-node": shape.tasks_per_node,
        "cpus-per-task": shape.cpus_per_task,
        **(_gpu_option(shape) if request.gpus_on != "step" else {}),
        "mem": _requested_memory(partition),
        "exclusive": request.exclusive or None,
        "nodelist": shape.node,
        "exclude": ",".join(request.exclude_nodes) or None,
        "time": format_slurm_time(shape.job_limit_s(pack)),
        # A job's ranks are told this long before its limit. In a pack each run watches a limit of its own.
        "signal": f"USR2@{math.ceil(warning_s if pack == 1 else min(warning_s, LAUNCH_OVERHEAD_S))}",
        "open-mode": "append",
        "chdir": folder,
        "output": log,
        "error": log,
    }
    lines.update(_container_directives(shape.environment.container))
    return _merged_directives(lines, partition)


def _merged_directives(
    directives: Mapping[str, DirectiveValue | list[str] | None], partition: Partition
) -> list[tuple[str, DirectiveValue]]:
    """Names and values of ``directives`` without dropped ones, and those of the profile; a list gives several lines."""
    own = {name: value for name, value in directives.items() if name not in partition.request.drop}
    merged = {**own, **partition.directives}
    return [
        (name, line)
        for name, value in merged.items()
        if value is not None and value is not False
        for line in (value if isinstance(value, list) else [value])
    ]


def _requested_memory(partition: Partition) -> DirectiveValue | None:
    request, node = partition.request, partition.node
    if request.memory == "all":
        return 0
    wanted = request.memory_bytes or (node.memory_bytes if request.memory == "node" else None)
    return f"{int(wanted // 2**20)}M" if wanted else None


def pbs_directives(
    shape: JobShape, job_name: str, folder: str, _number: int, pack: int = 1, runs: int = 1
) -> list[tuple[str, DirectiveValue]]:
    """Option letters and values; ``True`` is an option without a value, a letter may come several times.

    The range of the array stands in the script: the caller of qsub need not pass it.
    """
    jobs = -(-runs // pack)
    select = f"select={shape.nodes}:mpiprocs={shape.tasks_per_node}{f':host={shape.node}' if shape.node else ''}"
    lines: dict[str, str | bool | int | list[str] | None] = {
        "N": job_name,
        "P": shape.profile.account,
        "q": shape.partition.name,
        "l": [select, f"walltime={_format_walltime(shape.job_limit_s(pack))}"],
        "J": f"0-{jobs - 1}" if jobs > 1 else None,
        # Otherwise the shell that the person logs in with reads the script.
        "S": "/bin/bash",
        "j": "oe",
        "o": f"{folder}/",
    }
    merged = _merged_directives(lines, shape.partition)
    return [(name, value if value is True else str(value)) for name, value in merged]


def _format_walltime(seconds: float) -> str:
    whole = max(1, int(-(-seconds // 1)))
    return f"{whole // 3600:02d}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def render_script(
    engine: TemplateEngine, shape: JobShape, sweep: str, folder: Path, number: int, pack: int = 1, runs: int = 1
) -> str:
    """The text of ``<folder>/<number>.sh``, whose jobs carry ``pack`` of the ``runs`` lines of the task file each."""
    return engine.render("job.sh.j2", template_context(shape, sweep, folder, number, pack, runs))


_DIRECTIVES: dict[str, MakeDirectives] = {"slurm": sbatch_directives, "pbs": pbs_directives}
"""Functions that return the directives of a job script, by kind of scheduler."""


def template_context(
    shape: JobShape, sweep: str, folder: Path, number: int, pack: int = 1, runs: int = 1
) -> dict[str, Any]:
    """The variables of the templates. ``templates/README.md`` describes each; a test keeps it complete."""
    profile, environment, traits = shape.profile, shape.environment, shape.profile.scheduler.traits
    is_slurm = traits.is_slurm
    directives: Sequence[tuple[str, DirectiveValue]] = []
    # Unique, so that a job can be found again by it.
    name = f"hpcbench-{folder.name}-{number}"
    make_directives = traits.directives or _DIRECTIVES.get(profile.scheduler.kind)
    if make_directives is not None:
        directives = make_directives(shape, name, str(folder), number, pack, runs)
    return {
        "sweep": sweep,
        "cluster": profile.name,
        "version": hpcbench.__version__,
        "scheduler": profile.scheduler.kind,
        "launcher": profile.launcher,
        "launcher_args": profile.launcher_args,
        "step_words": _srun_options(shape) if is_slurm else [],
        "container_words": _container_step_options(shape) if is_slurm else [],
        "rank_wrapper": _rank_wrapper(shape) if is_slurm else [],
        # A scheduler signals the ranks itself; without one the script passes on what it is told.
        "forward_signals": not is_slurm,
        "directives": directives,
        "directive_prefix": traits.directive_form[0],
        "directive_separator": traits.directive_form[1],
        "task_file": str(folder / f"{number}.jsonl"),
        "nodes": shape.nodes,
        "tasks_per_node": shape.tasks_per_node,
        "devices_per_task": shape.devices_per_task,
        "ranks": shape.ranks,
        "cpus_per_task": shape.cpus_per_task,
        "time_limit_s": math.ceil(shape.time_limit_s),
        "pack": pack,
        "runs": runs,
        "job_limit_s": math.ceil(shape.job_limit_s(pack)),
        "begin_pause_s": BEGIN_PAUSE_S,
        "modules": environment.modules,
        "modules_start": environment.modules_start,
        "cluster_setup": environment.cluster_setup,
        "setup": environment.setup,
        "env": shape.variables,
        "env_unset": environment.env_unset,
        "container": _container_command(environment.container),
        "python": environment.python,
        "nothing_to_do": EXIT_NOTHING_TO_DO,
        "preempted": EXIT_PREEMPTED,
    }
