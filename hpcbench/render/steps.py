"""What a job step is told beside its size: devices, binding, container, and the variables that depend on them."""

from __future__ import annotations

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.jobs import Request
from hpcbench.render.container import step_options as container_options
from hpcbench.render.shape import Shape


def gpu_option(
    shape: Shape, request: Request, profile: ClusterProfile, ranks_per_task: int = 1
) -> dict[str, int | str]:
    """The name and value by which accelerators are asked for; ``ranks_per_task`` where a task starts several ranks."""
    per_node = shape.tasks_per_node * shape.devices_per_task
    node = profile.node_of(shape.partition)
    style = request.gpus
    if style == "gpus-per-node":
        return {"gpus-per-node": per_node}
    if style == "gpus-per-task":
        return {"gpus-per-task": shape.devices_per_task * ranks_per_task}
    if style == "gpus":
        return {"gpus": per_node * shape.nodes}
    if style == "gres":
        return {"gres": f"gpu:{per_node}"}
    if style == "gres-typed":
        return {"gres": f"gpu:{node.gres_type or node.device_type}:{per_node}"}
    return {}


def step_words(shape: Shape, profile: ClusterProfile) -> list[str]:
    """Options of the srun that starts the ranks, or one torchrun a node."""
    request, binding = profile.request_of(shape.partition), profile.binding
    is_torchrun = profile.launcher == "torchrun"
    words: list[str] = []
    if request.gpus_on != "job":
        asked = gpu_option(shape, request, profile, shape.tasks_per_node if is_torchrun else 1)
        words += [f"--{name}={value}" for name, value in asked.items()]
    bind = None if is_torchrun else _cpu_bind(shape, profile)
    if bind:
        words.append(f"--cpu-bind={bind}")
    if binding.gpu_bind and not is_torchrun:
        words.append(f"--gpu-bind={binding.gpu_bind}")
    return [*words, *container_words(shape, profile)]


def container_words(shape: Shape, profile: ClusterProfile) -> list[str]:
    """Options of every srun of the job whose command runs in the container."""
    environment = profile.environment(shape.environment)
    return container_options(environment.container, list(job_variables(shape, profile)))


def job_variables(shape: Shape, profile: ClusterProfile) -> dict[str, str]:
    """What the script exports: the profile's variables, and the order of the devices where the job has all of them."""
    binding = profile.binding
    variables = profile.variables(shape.environment)
    if _has_all_devices(shape, profile) and binding.device_order and not _is_shown_one(shape, profile):
        order = ",".join(str(device) for device in binding.device_order)
        variables = {binding.device_variable: order, **variables}
    return variables


def rank_wrapper(shape: Shape, profile: ClusterProfile) -> list[str]:
    """Words before the interpreter that show a rank its device alone; srun's rank is only known inside of a task."""
    if not _is_shown_one(shape, profile):
        return []
    binding = profile.binding
    device = "$SLURM_LOCALID"
    order = ""
    if binding.device_order and _has_all_devices(shape, profile):
        order = f"order=({' '.join(str(one) for one in binding.device_order)}); "
        device = "${order[SLURM_LOCALID]}"
    return ["bash", "-c", f'{order}export {binding.device_variable}={device}; exec "$@"', "rank"]


def _is_shown_one(shape: Shape, profile: ClusterProfile) -> bool:
    return profile.binding.one_device_per_rank and profile.launcher == "srun" and shape.devices_per_task == 1


def _has_all_devices(shape: Shape, profile: ClusterProfile) -> bool:
    return shape.tasks_per_node * shape.devices_per_task == profile.node_of(shape.partition).devices


def _cpu_bind(shape: Shape, profile: ClusterProfile) -> str | None:
    """A map of cores is right on whole nodes with one rank per device; elsewhere the job may have other cores."""
    binding, partition = profile.binding, profile.partition(shape.partition)
    has_whole_nodes = partition.whole_nodes or profile.request_of(shape.partition).exclusive
    if has_whole_nodes and shape.tasks_per_node == profile.node_of(shape.partition).devices:
        return binding.whole_node_cpu_bind or binding.cpu_bind
    return binding.cpu_bind
