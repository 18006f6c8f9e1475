"""The shape of a job, and the words that launch its ranks: devices, binding, container and variables."""

from __future__ import annotations

from dataclasses import dataclass

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.profile_tables import ContainerConfig, ResourceRequest
from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.catalog import get_strategy

LAUNCH_OVERHEAD_S = 30.0
"""Seconds that starting and ending one launch of a pack may take in addition to the run's own limit."""

BEGIN_PAUSE_S = 30
"""A job that cannot begin holds its node this long: a broken node that is free again at once gets the whole queue."""


@dataclass(frozen=True)
class JobShape:
    """The values that determine the text of a job script. Runs of one shape share one script."""

    partition: str | None
    environment: str | None
    nodes: int
    tasks_per_node: int
    devices_per_task: int
    time_limit_s: float
    has_nccl_pipeline: bool = False
    """Whether ranks send each other messages of a pipeline over NCCL, which needs variables of its own."""

    @property
    def ranks(self) -> int:
        """Processes of one launch."""
        return self.nodes * self.tasks_per_node


PIPELINE_VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
"""A pipeline's receives wait on the device. Streams that share one of CUDA's 8 hardware queues would wait with them; so
would the loading of a kernel at its first use, which synchronises the context (CUDA guide, Lazy Loading)."""


def has_nccl_pipeline(spec: RunSpec, profile: ClusterProfile) -> bool:
    """Return whether the run's ranks form a pipeline over NCCL."""
    entry = get_strategy(spec.strategy)
    return profile.device == "cuda" and entry.pipeline.schedule is not None and not entry.drives_several_devices


def make_job_shape(spec: RunSpec, profile: ClusterProfile) -> JobShape:
    """The shape of a run, its time limit filled in from the partition or the cluster, as far as such a job is allowed.

    A limit that the run itself names stays: resolving the sweep has checked it.
    """
    partition = profile.partition(spec.partition)
    longest_min = partition.longest_min(spec.nodes)
    limit_min = spec.time_limit_min
    if limit_min is None:
        limit_min = partition.time_limit_min or profile.time_limit_min
        limit_min = limit_min if longest_min is None else min(limit_min, longest_min)
    return JobShape(
        partition=spec.partition or profile.default_partition,
        environment=spec.environment or profile.default_environment,
        nodes=spec.nodes,
        tasks_per_node=spec.tasks_per_node,
        devices_per_task=spec.devices_per_task,
        time_limit_s=limit_min * 60,
        has_nccl_pipeline=has_nccl_pipeline(spec, profile),
    )


def job_time_limit_s(shape: JobShape, pack: int = 1) -> float:
    """The limit of a job that carries ``pack`` runs, one after another."""
    return shape.time_limit_s if pack == 1 else pack * (shape.time_limit_s + LAUNCH_OVERHEAD_S)


def cpus_per_task(shape: JobShape, profile: ClusterProfile) -> int:
    """CPUs of one rank: as the profile sets them, else the node's shared among its ranks, at least one."""
    request = profile.request_of(shape.partition)
    if request.cpus_per_task:
        return request.cpus_per_task
    if request.cpus_per_device:
        return request.cpus_per_device * shape.devices_per_task
    cores = profile.node_of(shape.partition).cores
    return max(1, cores // shape.tasks_per_node) if cores else 1


def container_command(container: ContainerConfig | None) -> list[str]:
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
        # The ranks are told who they are, and what the profile sets, by variables of the host.
        return ["podman-hpc", "run", "--rm", "--env-host", *options, *volumes, image]
    return ["shifter", *options] if kind == "shifter" else []


def container_step_options(container: ContainerConfig | None, variables: list[str]) -> list[str]:
    """Return srun's options for a container; ``variables`` are not replaced by those of the image."""
    if container is None:
        return []
    if container.kind == "pyxis":
        words = [f"--container-image={container.image}"]
        if container.mounts:
            words.append(f"--container-mounts={','.join(container.mounts)}")
        if variables:
            words.append(f"--container-env={','.join(variables)}")
        return [*words, *container.options]
    if container.kind == "cscs-engine":
        return [f"--environment={container.image}", *container.options]
    return []


def container_directives(container: ContainerConfig | None) -> dict[str, str]:
    """Directives that prepare the container on the job's nodes."""
    if container is None or container.image is None:
        return {}
    modules = ",".join(container.modules)
    directives = {
        "shifter": {"image": container.image, "volume": ";".join(container.mounts), "module": modules},
        "uenv": {"uenv": container.image, "view": modules},
    }
    return {name: value for name, value in directives.get(container.kind or "", {}).items() if value}


def gpu_option(
    shape: JobShape, request: ResourceRequest, profile: ClusterProfile, ranks_per_task: int = 1
) -> dict[str, int | str]:
    """Return SLURM's option that requests accelerators, and its value. One task starts ``ranks_per_task`` ranks."""
    per_node = shape.tasks_per_node * shape.devices_per_task
    node = profile.node_of(shape.partition)
    values: dict[str, int | str] = {
        "gpus-per-node": per_node,
        "gpus-per-task": shape.devices_per_task * ranks_per_task,
        "gpus": per_node * shape.nodes,
        "gres": f"gpu:{per_node}",
        "gres-typed": f"gpu:{node.gres_type or node.device_type}:{per_node}",
    }
    style = request.gpus
    return {style.removesuffix("-typed"): values[style]} if style in values else {}


def srun_options(shape: JobShape, profile: ClusterProfile) -> list[str]:
    """Options of the srun that starts the ranks, or one torchrun a node."""
    request, binding = profile.request_of(shape.partition), profile.binding
    is_torchrun = profile.launcher == "torchrun"
    words: list[str] = []
    if request.gpus_on != "job":
        options = gpu_option(shape, request, profile, shape.tasks_per_node if is_torchrun else 1)
        words += [f"--{name}={value}" for name, value in options.items()]
    bind = None if is_torchrun else _choose_cpu_bind(shape, profile)
    if bind:
        words.append(f"--cpu-bind={bind}")
    if binding.gpu_bind and not is_torchrun:
        words.append(f"--gpu-bind={binding.gpu_bind}")
    return [*words, *srun_container_options(shape, profile)]


def srun_container_options(shape: JobShape, profile: ClusterProfile) -> list[str]:
    """Options of every srun of the job whose command runs in the container."""
    environment = profile.environment(shape.environment)
    return container_step_options(environment.container, list(job_variables(shape, profile)))


def job_variables(shape: JobShape, profile: ClusterProfile) -> dict[str, str]:
    """Return the exported variables: the profile's, before them a pipeline's, and the device order of whole nodes."""
    binding = profile.binding
    variables = profile.variables(shape.environment)
    if shape.has_nccl_pipeline:
        variables = {**PIPELINE_VARIABLES, **variables}
    if _uses_all_devices(shape, profile) and binding.device_order and not _sees_one_device(shape, profile):
        order = ",".join(map(str, binding.device_order))
        variables = {binding.device_variable: order, **variables}
    return variables


def rank_wrapper(shape: JobShape, profile: ClusterProfile) -> list[str]:
    """Words before the interpreter that show a rank its device alone; srun's rank is only known inside of a task."""
    if not _sees_one_device(shape, profile):
        return []
    binding = profile.binding
    device, order = "$SLURM_LOCALID", ""
    if binding.device_order and _uses_all_devices(shape, profile):
        order = f"order=({' '.join(map(str, binding.device_order))}); "
        device = "${order[SLURM_LOCALID]}"
    return ["bash", "-c", f'{order}export {binding.device_variable}={device}; exec "$@"', "rank"]


def _sees_one_device(shape: JobShape, profile: ClusterProfile) -> bool:
    return profile.binding.one_device_per_rank and profile.launcher == "srun" and shape.devices_per_task == 1


def _uses_all_devices(shape: JobShape, profile: ClusterProfile) -> bool:
    return shape.tasks_per_node * shape.devices_per_task == profile.node_of(shape.partition).devices


def _choose_cpu_bind(shape: JobShape, profile: ClusterProfile) -> str | None:
    """A map of cores is right on whole nodes with one rank per device; elsewhere the job may have other cores."""
    binding, partition = profile.binding, profile.partition(shape.partition)
    has_whole_nodes = partition.whole_nodes or profile.request_of(shape.partition).exclusive
    if has_whole_nodes and shape.tasks_per_node == profile.node_of(shape.partition).devices:
        return binding.whole_node_cpu_bind or binding.cpu_bind
    return binding.cpu_bind
