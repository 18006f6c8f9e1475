"""The check of the tool on a cluster's GPUs: a sweep of every strategy with ``verify``, and the document that is made
from its results and from predictions, to be sent to the authors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import RunSpec
from hpcbench.config.sweep_file import settings_lines
from hpcbench.config.sweep_loader import Sweep, parse_sweep
from hpcbench.config.toml_tables import TomlSource
from hpcbench.errors import StorageError
from hpcbench.forecast.forecast import Forecast
from hpcbench.oracle.prediction import Prediction
from hpcbench.parallel.catalog import STRATEGIES
from hpcbench.parallel.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.parallel.strategies.probes import PROBE_LOOPS
from hpcbench.parallel.strategy_entry import StrategyEntry
from hpcbench.results.probe_records import LoopProbe
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_OK, HostSyncs, RunResult, VerificationResult
from hpcbench.submit.plan import SweepPlan, partition_limits
from hpcbench.submit.run_state import RunState
from hpcbench.units import format_bytes, format_seconds

FORMAT_VERSION = 1
SWEEP_NAME = "gpu-check"
MAX_RANKS = 8
MAX_MEMORY_DEVIATION = 0.2
"""Largest accepted deviation of a measured peak, as a fraction of the predicted one."""
MAX_LOOP_RATIO = 1.05
"""Largest accepted ratio of hpcbench's step time to that of another loop."""

CheckOutcome = Literal["ok", "findings", "failed", "no_gpu"]
INFEASIBLE, DIFFERS = "infeasible", "differs"
"""Outcomes of a strategy beside the statuses of results and the state ``lost``."""
_HARMLESS_OUTCOMES = frozenset({STATUS_OK, "unsupported", INFEASIBLE})

_VERSION_KEYS = (
    "hpcbench", "hpcbench_commit", "python", "torch", "torch_git", "cuda", "cudnn", "nccl", "driver", "packages",
    "kernel", "machine", "cpu_model", "launcher",
)  # fmt: skip

_MODELS = ({"model": "resnet18"}, {"model": "vit"})
"""The first that a strategy can split; small, as ``verify`` trains them in fp64."""
_WORKLOADS: dict[str, dict[str, Any]] = {
    "cpu": {"dataset": "digits", "batch_size": 16},
    "cuda": {"dataset": "cifar10", "batch_size": 64},
}
_LOOP_WORKLOADS: dict[str, dict[str, Any]] = {
    "cpu": {"model": "resnet18", "input_size": 64, "batch_size": 8, "options": {"budget_s": 5.0}},
    "cuda": {
        "model": "resnet50", "batch_size": 64, "precision": "bf16", "channels_last": True,
        "options": {"budget_s": 30.0},
    },
}  # fmt: skip
"""Training on ImageNet's shape; ResNets of smaller images differ from the libraries'."""
_TIME_LIMITS_MIN = {"cpu": 10, "cuda": 5}
_RUNS_PER_JOB = 8


class StrategyCheck(msgspec.Struct, kw_only=True):
    """The run of a strategy, and its outcome."""

    strategy: str
    outcome: str
    """``ok``; ``differs``: it does not train as one device does; ``infeasible``; else the run's status or state."""
    reason: str | None = None
    """Reason of the outcome; absent for ``ok``."""
    run_id: str | None = None
    spec: RunSpec | None = None
    """Specification of the run; absent for ``infeasible``."""
    verification: VerificationResult | None = None
    step_time_s: float | None = None
    """Median of the timed steps."""
    predicted_step_time_s: float | None = None
    peak_memory_bytes: int | None = None
    """Peak of the rank that uses most, over the timed steps; on a cpu of its whole process."""
    predicted_peak_memory_bytes: int | None = None
    host_syncs: HostSyncs | None = None
    """Waits of the rank with most of them."""
    warnings: list[str] = []


class LoopsCheck(msgspec.Struct, kw_only=True):
    """The run that compares a step of one device with other loops."""

    outcome: str
    reason: str | None = None
    run_id: str | None = None
    spec: RunSpec | None = None
    step_time_s: float | None = None
    """Median of the run's timed steps."""
    loops: list[LoopProbe] = []
    ratios: dict[str, float] = {}
    """Step time of ``hpcbench`` over that of the other loops, by their names."""


class GpuCheck(msgspec.Struct, kw_only=True):
    """The file that is sent. Reasons in it may name people, machines and folders."""

    format_version: int = FORMAT_VERSION
    cluster: str
    outcome: CheckOutcome
    on_gpu: bool
    """Whether a run ended well on a GPU."""
    gpus: list[str]
    """Distinct names of the GPUs that were used."""
    versions: dict[str, Any]
    """Parts of a result's provenance."""
    strategies: list[StrategyCheck]
    loops: LoopsCheck
    findings: list[str]
    """Sentences on what differs from the expectation although the training is right."""

    def failed_parts(self) -> list[str]:
        """Return the strategies that could have run and did not end well; ``loops`` for the comparison of loops."""
        parts = [(check.strategy, check.outcome) for check in self.strategies] + [("loops", self.loops.outcome)]
        return [name for name, outcome in parts if outcome not in _HARMLESS_OUTCOMES]


def make_check_sweep(profile: ClusterProfile, strategies: Mapping[str, StrategyEntry] = STRATEGIES) -> Sweep:
    """Return the sweep that runs each of ``strategies`` once with ``verify``, and one comparison of loops.

    Each strategy gets the largest power of two of a node's devices, at most ``MAX_RANKS``, and the first model with
    which it is feasible; on CPUs two ranks.
    """
    limits = partition_limits(profile, profile.default_partition)
    devices = min(profile.node_of(None).devices or 1, MAX_RANKS) if profile.device == "cuda" else 2
    points = [_strategy_point(key, entry, profile.device, devices, limits) for key, entry in strategies.items()]
    points.append({"strategy": PROBE_LOOPS, "dataset": "imagenet", **_LOOP_WORKLOADS[profile.device]})
    data: dict[str, Any] = {
        "name": SWEEP_NAME,
        "description": f"every strategy on the devices of one node of {profile.name}, verified",
        "fixed": {
            "learning_rate": 0.001, "warmup_steps": 3, "steps": 10, "profile_steps": 2,
            "time_limit_min": _TIME_LIMITS_MIN[profile.device],
        },
    }  # fmt: skip
    if not profile.scheduler.traits.runs_here:
        data["submit"] = {"pack": _RUNS_PER_JOB}
    lines = [*settings_lines(data)]
    for point in points:
        lines += ["", "[[include]]", *settings_lines(point)]
    data["include"] = points
    return parse_sweep(data, TomlSource(Path("gpu check"), "\n".join([*lines, ""])))


def _strategy_point(
    key: str, entry: StrategyEntry, device: str, devices: int, limits: PartitionLimits
) -> dict[str, Any]:
    """The first feasible point; the first of all if none is, which the plan then drops with the reason."""
    candidates = [
        {"strategy": key, **model, **_WORKLOADS[device], "verify": True, **_device_parameters(entry, count)}
        for count in _device_counts(entry, devices)
        for model in _MODELS
    ]
    feasible = (point for point in candidates if not isinstance(resolve_point(dict(point), limits), InfeasiblePoint))
    return next(feasible, candidates[0])


def _device_counts(entry: StrategyEntry, devices: int) -> Iterator[int]:
    """Powers of two, the largest first; two at least where a strategy has devices to divide something among."""
    if entry.own_degree is None:
        yield 1
        return
    count = 2 ** (max(devices, 2).bit_length() - 1)
    while count > 1:
        yield count
        count //= 2


def _device_parameters(entry: StrategyEntry, count: int) -> dict[str, int]:
    parameters = {"devices_per_task" if entry.drives_several_devices else "tasks_per_node": count} if count > 1 else {}
    return parameters | ({"micro_batches": 2 * count} if entry.schedule is not None else {})


def evaluate_check(plan: SweepPlan, tree: ClusterTree, states: Mapping[str, RunState], forecast: Forecast) -> GpuCheck:
    """Return the document of a check whose runs have ended.

    Args:
        plan: Plan of the sweep that ``make_check_sweep`` returns.
        tree: Results tree of the cluster.
        states: The runs' states, by ``run_id``.
        forecast: Source of the predictions, which use the machine's numbers alone.
    """
    results = {key: result for key in plan.runs if (result := _read_result(tree, key)) is not None}
    checks, loops = [], LoopsCheck(outcome="lost", reason="the run is not in the plan")
    for key, spec in plan.runs.items():
        outcome, reason = _run_outcome(results.get(key), states.get(key))
        if spec.strategy == PROBE_LOOPS:
            loops = _check_loops(key, spec, outcome, reason, results.get(key))
        else:
            checks.append(_check_strategy(key, spec, outcome, reason, results.get(key), forecast))
    for point in plan.dropped:
        if point.point["strategy"] == PROBE_LOOPS:
            loops = LoopsCheck(outcome=INFEASIBLE, reason=point.reason)
        else:
            checks.append(StrategyCheck(strategy=point.point["strategy"], outcome=INFEASIBLE, reason=point.reason))
    well_ended = [result for result in results.values() if result.status == STATUS_OK]
    on_gpu = any(str(rank.get("device")).startswith("cuda") for result in well_ended for rank in result.ranks)
    findings = [*_find_deviations(checks, loops, on_gpu=on_gpu)]
    check = GpuCheck(
        cluster=plan.profile.name, outcome="ok", on_gpu=on_gpu, gpus=_gpu_names(well_ended),
        versions=_versions(well_ended), strategies=checks, loops=loops, findings=findings,
    )  # fmt: skip
    if check.failed_parts():
        check.outcome = "failed"
    elif not on_gpu:
        check.outcome = "no_gpu"
    elif findings:
        check.outcome = "findings"
    return check


def _read_result(tree: ClusterTree, key: str) -> RunResult | None:
    """The result; ``None`` without one, and if its file is broken, which the run's state reports."""
    with contextlib.suppress(StorageError, msgspec.MsgspecError):
        return tree.read_result(key)
    return None


def _run_outcome(result: RunResult | None, state: RunState | None) -> tuple[str, str | None]:
    if result is None:
        return (state.state, state.reason or None) if state is not None else ("lost", "it left no result")
    if result.status == STATUS_OK:
        return STATUS_OK, None
    error = result.error
    outcome = DIFFERS if error is not None and error.type == "VerificationFailed" else result.status
    return outcome, error.message if error is not None else "it left no reason"


def _check_strategy(
    key: str, spec: RunSpec, outcome: str, reason: str | None, result: RunResult | None, forecast: Forecast
) -> StrategyCheck:
    check = StrategyCheck(strategy=spec.strategy, outcome=outcome, reason=reason, run_id=key, spec=spec)
    prediction = forecast.predict_alone(spec)
    if isinstance(prediction, Prediction):
        check.predicted_step_time_s = prediction.step_time_s
        check.predicted_peak_memory_bytes = prediction.peak_memory_bytes
    if result is not None:
        metrics = result.metrics
        check.verification, check.warnings = result.verification, result.warnings
        check.step_time_s = metrics.step_time_s.median if metrics.step_time_s is not None else None
        check.peak_memory_bytes = metrics.steady_peak_memory_bytes or metrics.peak_memory_bytes
        syncs = [msgspec.convert(rank["host_syncs"], HostSyncs) for rank in result.ranks if rank.get("host_syncs")]
        check.host_syncs = max(syncs, key=lambda counts: (counts.per_step, counts.pageable_copies or 0), default=None)
    return check


def _check_loops(key: str, spec: RunSpec, outcome: str, reason: str | None, result: RunResult | None) -> LoopsCheck:
    check = LoopsCheck(outcome=outcome, reason=reason, run_id=key, spec=spec)
    if result is not None:
        times = result.metrics.step_time_s
        check.step_time_s = times.median if times is not None else None
        check.loops = result.probe.loops if result.probe is not None else []
        seconds = {loop.loop: loop.seconds for loop in check.loops}
        if "hpcbench" in seconds:
            own_s = seconds.pop("hpcbench")
            check.ratios = {name: own_s / other_s for name, other_s in seconds.items() if other_s > 0}
    return check


def _find_deviations(checks: Iterable[StrategyCheck], loops: LoopsCheck, *, on_gpu: bool) -> Iterator[str]:
    """Sentences on waits of the host, peaks of memory and step times; the latter two are judged on GPUs only."""
    for check in checks:
        syncs = check.host_syncs
        if syncs is not None and (syncs.per_step or syncs.pageable_copies):
            calls = ", ".join(f"{name} {count}" for name, count in syncs.calls.items()) or "none of the runtime's"
            library = STRATEGIES[check.strategy].library if check.strategy in STRATEGIES else None
            is_known = library is not None and syncs.sites and all(f"/{library}/" in site for site in syncs.sites)
            text = f"{check.strategy}: " + f"known waits inside {library}: " * bool(is_known)
            text += f"the host waits {syncs.per_step} times in a step for the device ({calls})"
            text += f", with {syncs.pageable_copies} copies of memory that is not pinned" * bool(syncs.pageable_copies)
            yield text + (f": {', '.join(syncs.sites)}" if syncs.sites else "")
        measured_bytes, predicted_bytes = check.peak_memory_bytes, check.predicted_peak_memory_bytes
        if on_gpu and measured_bytes and predicted_bytes:
            deviation = measured_bytes / predicted_bytes - 1
            if abs(deviation) > MAX_MEMORY_DEVIATION:
                yield (
                    f"{check.strategy}: a rank's peak of {format_bytes(measured_bytes)} is {abs(deviation):.0%} "
                    f"{'above' if deviation > 0 else 'below'} the predicted {format_bytes(predicted_bytes)}"
                )
    seconds = {loop.loop: loop.seconds for loop in loops.loops}
    for name, ratio in loops.ratios.items():
        if on_gpu and ratio > MAX_LOOP_RATIO:
            yield (
                f"one device: the step of hpcbench takes {format_seconds(seconds['hpcbench'])}, {ratio:.2f} times the "
                f"{format_seconds(seconds[name])} of the loop {name}"
            )


def _gpu_names(results: Iterable[RunResult]) -> list[str]:
    names = {rank.get("gpu_model") for result in results for rank in result.ranks}
    return sorted(name for name in names if isinstance(name, str))


def _versions(results: Iterable[RunResult]) -> dict[str, Any]:
    for result in results:
        return {key: result.provenance[key] for key in _VERSION_KEYS if key in result.provenance}
    return {}
