"""The runs of a calibration: the sweep that measures a cluster, and the finished runs from which it is fitted.

Runs that other work on their machine disturbed widen the intervals of predictions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log, sqrt
from statistics import median
from typing import Any, NamedTuple

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.oracle.calibration.calibration_store import FitResidual
from hpcbench.parallel.catalog import SINGLE_DEVICE, STRATEGIES
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.strategies.probes import PROBE_COLLECTIVES, PROBE_LAYERS
from hpcbench.parallel.strategy_entry import CalibrationRuns
from hpcbench.results.schema import STATUS_OK, RunResult

_Z95 = 1.96


class CalibrationRun(NamedTuple):
    """The result of a run, with the layer table of its model."""

    result: RunResult
    table: LayerTable

    @property
    def spec(self) -> RunSpec:
        """The specification of the run."""
        return self.result.spec

    @property
    def step_s(self) -> float:
        """The median of its timed steps, of which each time the slowest rank counts."""
        times = self.result.metrics.step_time_s
        return times.median if times is not None else 0.0

    @property
    def doubt(self) -> float:
        """Relative uncertainty of ``step_s`` within the launch: one deviation."""
        times = self.result.metrics.step_time_s
        return 0.0 if times is None else (times.ci95_high - times.ci95_low) / (2 * _Z95 * times.median)


def usable_runs(runs: Iterable[CalibrationRun]) -> list[CalibrationRun]:
    """Return the runs that ended well and have timed steps."""
    return [run for run in runs if run.result.status == STATUS_OK and run.step_s > 0]


def runs_of_strategy(runs: Sequence[CalibrationRun], *keys: str) -> list[CalibrationRun]:
    """Return the runs of the strategies ``keys``."""
    return [run for run in runs if run.spec.strategy in keys]


def rms_log_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Root mean square of the logarithms of fitted over measured."""
    squares = [log(fitted / measured) ** 2 for fitted, measured in pairs]
    return sqrt(sum(squares) / len(squares)) if squares else 0.0


def r_squared(pairs: Sequence[tuple[float, float]]) -> float | None:
    """R2 of pairs of fitted and measured, in the measured unit; ``None`` where all measured are equal."""
    if not pairs:
        return None
    mean = sum(measured for _, measured in pairs) / len(pairs)
    total = sum((measured - mean) ** 2 for _, measured in pairs)
    return 1 - sum((fitted - measured) ** 2 for fitted, measured in pairs) / total if total else None


def fit_residual(part: str, what: str, pairs: Sequence[tuple[float, float]]) -> FitResidual:
    """Return the residual of ``pairs`` of fitted and measured seconds or bytes."""
    return FitResidual(part=part, what=what, points=len(pairs), error=rms_log_error(pairs), r2=r_squared(pairs))


_SEEDS_PER_CALIBRATION = 100
_MAX_NODES = 4
"""Latency and bandwidth between more nodes are extrapolated by the structure of the algorithms."""
_LAUNCHES = 3
PROBE_STEPS = {"warmup_steps": 2, "steps": 8, "profile_steps": 0, "learning_rate": 0.001}
"""Steps of a run of a calibration, before its measurements."""
_PACK = 8


class CalibrationWorkload(NamedTuple):
    """A model with its data set and batch size."""

    model: str
    dataset: str
    batch_size: int
    precision: str = "fp32"
    input_size: int | None = None

    def keys(self, times: int = 1) -> dict[str, Any]:
        """Return the parameters, with ``times`` the batch size."""
        point: dict[str, Any] = {"model": self.model, "dataset": self.dataset, "batch_size": times * self.batch_size}
        if self.input_size is not None:
            point["input_size"] = self.input_size
        return point | ({"precision": self.precision} if self.precision != "fp32" else {})


class DeviceWorkloads(NamedTuple):
    """The workloads for a kind of device: a step is long enough to be timed and short enough to be repeated."""

    layers: tuple[CalibrationWorkload, ...]
    """Workloads whose layers are of every kind that a shipped model has, in two and in three dimensions."""
    transformer: CalibrationWorkload
    """Workload of the strategies that do not split channels; it is one of ``layers``."""
    convolutional: CalibrationWorkload


_VIT, _VGG = CalibrationWorkload("vit", "cifar10", 32), CalibrationWorkload("vgg11", "cifar10", 16)
_IMAGES = (CalibrationWorkload("resnet18", "cifar10", 8), CalibrationWorkload("mobilenetv2", "cifar10", 8))
_VOLUMES = CalibrationWorkload("cosmoflow", "cosmoflow", 8, input_size=16)
_VIT_B16, _VGG_LARGE = CalibrationWorkload("vit_b16", "imagenet", 32), CalibrationWorkload("vgg11", "imagenet", 32)
_IMAGES_LARGE = (CalibrationWorkload("resnet18", "imagenet", 64), CalibrationWorkload("mobilenetv2", "imagenet", 64))
_VOLUMES_LARGE = CalibrationWorkload("cosmoflow", "cosmoflow", 4, input_size=64)
_HALF = (_VIT_B16._replace(precision="bf16"), CalibrationWorkload("resnet18", "imagenet", 64, "bf16"))
WORKLOADS = {
    "cpu": DeviceWorkloads((_VIT, _VGG, *_IMAGES, _VOLUMES), _VIT, _VGG),
    "cuda": DeviceWorkloads((_VIT_B16, _VGG_LARGE, *_IMAGES_LARGE, _VOLUMES_LARGE, *_HALF), _VIT_B16, _VGG_LARGE),
}


class CalibrationScale(NamedTuple):
    """Nodes and ranks on each."""

    nodes: int
    tasks_per_node: int

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.tasks_per_node

    def keys(self) -> dict[str, int]:
        """Return the parameters."""
        return {name: value for name, value in self._asdict().items() if value > 1}


def cluster_size(profile: ClusterProfile, partition: str | None, local_cores: int) -> CalibrationScale:
    """Nodes, at most ``_MAX_NODES``, and ranks that a node takes: a GPU each, or a core. This machine is one node."""
    node, queue = profile.node_of(partition), profile.partition(partition)
    runs_here = profile.scheduler.traits.runs_here
    tasks = node.devices if profile.device == "cuda" else local_cores if runs_here else node.cores
    return CalibrationScale(1 if runs_here else min(queue.max_nodes or _MAX_NODES, _MAX_NODES), tasks or 1)


def calibration_sweep_name(number: int, partition: str | None) -> str:
    """``calibration-3``, ``calibration-high-3``."""
    return f"calibration-{f'{partition}-' if partition else ''}{number}"


def calibration_sweep_toml(
    profile: ClusterProfile, partition: str | None, local_cores: int, number: int, budget_s: float = 20.0
) -> str:
    """The sweep of calibration ``number`` of a cluster: every number has its own runs.

    ``budget_s`` is what the measurements of one run take.
    """
    size, workloads = cluster_size(profile, partition, local_cores), WORKLOADS[profile.device]
    fixed: dict[str, Any] = {**PROBE_STEPS, "seed": _SEEDS_PER_CALIBRATION * number, "time_limit_min": 10}
    if partition is not None:
        fixed["partition"] = partition
    points = [
        *_probe_points(size, workloads, fixed["seed"], budget_s),
        *_training_points(strategy_scales(size, profile.device), workloads, profile.device),
        # A library whose one process drives two devices.
        *(
            {"strategy": key, "devices_per_task": 2, **_micro_batched_keys(runs, workloads.transformer, times)}
            for key, runs in _calibrated_strategies(one_process=True)
            for times in (1, 2)
            if size.tasks_per_node >= 2
        ),
    ]
    name, description = calibration_sweep_name(number, partition), f"what predictions for {profile.name} are made from"
    return probe_sweep_toml({"name": name, "description": description}, profile, fixed, points)


def probe_sweep_toml(
    settings: Mapping[str, str], profile: ClusterProfile, fixed: Mapping[str, Any], points: Sequence[Mapping[str, Any]]
) -> str:
    """Return the text of a sweep that measures a cluster, from its settings, common parameters and points."""
    lines = [f"{key} = {_toml_value(value)}" for key, value in settings.items()]
    lines += ["", "[fixed]", *(f"{key} = {_toml_value(value)}" for key, value in fixed.items())]
    if not profile.scheduler.traits.runs_here:
        lines += ["", "[submit]", f"pack = {_PACK}"]
    for point in points:
        lines += ["", "[[include]]", *(f"{key} = {_toml_value(value)}" for key, value in point.items())]
    return "\n".join(lines) + "\n"


def _probe_points(
    size: CalibrationScale, workloads: DeviceWorkloads, seed: int, budget_s: float
) -> Iterator[dict[str, Any]]:
    for workload in workloads.layers:
        yield {"strategy": PROBE_LAYERS, **workload.keys(), "options": {"budget_s": budget_s}}
        # Launches differ by more than steps do, and all other figures are fitted relative to the time of a lone rank.
        for launch in range(1, _LAUNCHES):
            yield {"strategy": SINGLE_DEVICE, **workload.keys(), "seed": seed + launch}
    for world in collective_scales(size):
        is_between = world.nodes > 1 and world.tasks_per_node == 1
        for launch in range(_LAUNCHES if is_between else 1):
            point = {"strategy": PROBE_COLLECTIVES, **workloads.transformer.keys(), **world.keys()}
            yield point | {"options": {"budget_s": budget_s}} | ({"seed": seed + launch} if launch else {})


def collective_scales(size: CalibrationScale) -> list[CalibrationScale]:
    """Return scales for a group inside a node, a group between nodes, and several groups on the same nodes."""
    scales = [(1, 2), (1, 4), (2, 1), (4, 1), (2, max(min(size.tasks_per_node, 4), 2))]
    fitting = [(nodes, tasks) for nodes, tasks in scales if nodes <= size.nodes and tasks <= size.tasks_per_node]
    return [CalibrationScale(nodes, tasks) for nodes, tasks in fitting]


def strategy_scales(size: CalibrationScale, device: str) -> list[CalibrationScale]:
    """Two and four ranks: cores of a node are in each other's way, so on cpus each rank has its own node if it can."""
    per_node = min(size.tasks_per_node, 4) if device == "cuda" or size.nodes == 1 else 1
    worlds = []
    for ranks in (2, 4):
        tasks = min(ranks, per_node)
        if ranks % tasks == 0 and ranks // tasks <= size.nodes:
            worlds.append(CalibrationScale(ranks // tasks, tasks))
    return worlds


def _training_points(
    worlds: Sequence[CalibrationScale], workloads: DeviceWorkloads, device: str
) -> Iterator[dict[str, Any]]:
    """Every strategy in every world; a larger world with a larger batch, which separates a library's time per
    step from its time per computation. A pipeline's micro-batch is as large as the others' batch."""
    strategies = _calibrated_strategies(one_process=False)
    for number, world in enumerate(worlds):
        for key, runs in strategies:
            workload = workloads.transformer if runs.workload == "transformer" else workloads.convolutional
            options = {"options": dict(runs.cpu_options)} if runs.cpu_options and device == "cpu" else {}
            if runs.batch_factor == 1:
                yield {"strategy": key, **workload.keys(number + 1), **world.keys(), **options}
            else:
                yield {"strategy": key, **world.keys(), **_micro_batched_keys(runs, workload, number + 1)}


def _calibrated_strategies(*, one_process: bool) -> list[tuple[str, CalibrationRuns]]:
    """Key and runs of each strategy; first those that train transformers, plain batches before micro-batches."""
    chosen = [
        (key, entry.calibration)
        for key, entry in STRATEGIES.items()
        if entry.calibration is not None and entry.calibration.one_process == one_process
    ]
    return sorted(chosen, key=lambda item: (item[1].workload != "transformer", item[1].batch_factor))


def _micro_batched_keys(runs: CalibrationRuns, workload: CalibrationWorkload, times: int) -> dict[str, Any]:
    count = {} if runs.micro_batches == 1 else {"micro_batches": runs.micro_batches}
    return workload.keys(times * runs.batch_factor) | count


def _toml_value(value: Any) -> str:
    """Words, numbers and flat tables of them."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml_value(entry)}" for key, entry in value.items()) + " }"
    # JSON's words and numbers are TOML's, too.
    return msgspec.json.encode(value).decode()


DISTURBANCES = (
    "other runs of hpcbench used the cores", "other processes used the cores", "other processes computed on the device",
)  # fmt: skip
"""Beginnings of the warnings that mark a run as disturbed by others."""
DISTURBED_NOTE = "are marked as disturbed"
_USED_SHARE = re.compile(r"(\d+)% of the \d+ core")
_SHARE_OF_DEVICE, _MAX_SHARE = 0.5, 0.95
_NORMAL_90 = 1.645


def disturbances(warnings: Iterable[str]) -> list[str]:
    """Return those of the warnings of a run that mark it as disturbed by others."""
    return [warning for warning in warnings if warning.startswith(DISTURBANCES)]


def check_disturbed(runs: Sequence[Iterable[str]], what: str, then: str, *, takes_disturbed: bool) -> list[str]:
    """Return a note with the number of disturbed runs; none if no run was disturbed.

    Args:
        runs: The warnings of each run.
        what: The runs, for the message, such as ``runs of snellius``.
        then: The consequence, for the message.
        takes_disturbed: Whether runs that were all disturbed are accepted.

    Raises:
        ConfigError: All runs were disturbed, and ``takes_disturbed`` is not set.
    """
    marks = [texts for texts in map(disturbances, runs) if texts]
    if marks and len(marks) == len(runs) and not takes_disturbed:
        raise ConfigError(
            f"all {len(runs)} {what} {DISTURBED_NOTE}: {marks[0][0]}; {then}",
            hint="measure again when the machine is quiet; --busy takes them as they are",
        )
    return [f"{len(marks)} of {len(runs)} runs {DISTURBED_NOTE}"] if marks else []


def disturbed_spread(runs: Sequence[Iterable[str]]) -> float:
    """Return the relative uncertainty by which a 90 % interval includes a machine as busy as it was during ``runs``.

    If others use a share of the cores, steps may take 1 / (1 - share) times as long. Others on the same device are
    assumed to use half of it. The median run counts, so the result is 0 if less than half of the runs were disturbed.
    """
    stretches = []
    for texts in map(disturbances, runs):
        used = (max(map(int, _USED_SHARE.findall(text)), default=100 * _SHARE_OF_DEVICE) / 100 for text in texts)
        stretches.append(1 / (1 - min(sum(used), _MAX_SHARE)))
    return log(median(stretches or [1.0])) / _NORMAL_90
