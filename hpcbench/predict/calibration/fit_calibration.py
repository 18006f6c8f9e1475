"""The fit of a machine to finished runs: measured kernels, messages and overlaps, and the overhead of libraries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from math import hypot, log, sqrt
from statistics import fmean, median

from msgspec.structs import replace

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.predict.calibration.calibration_store import (
    Calibration,
    CalibrationRun,
    FitResidual,
    disturbed_spread,
    runs_of_strategy,
    usable_runs,
)
from hpcbench.predict.cost_model import (
    CostModel,
    StepBreakdown,
    expected_normal_maximum,
    kernel_conditions,
    row_kernels,
    update_kernels,
)
from hpcbench.predict.kernel_prices import (
    DeviceCompute,
    Kernel,
    KernelConditions,
    KernelPrices,
    MeasuredKernel,
    crowding_of,
    roofline_s,
)
from hpcbench.predict.machine import Machine, StrategyOverhead, nominal_machine
from hpcbench.predict.message_prices import (
    CommParameters,
    MeasuredMessage,
    MeasuredOverlap,
    MessagePrices,
    workload_key,
)
from hpcbench.predict.prediction import peak_rank_memory
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.results.probe_records import CollectiveProbe, OverlapProbe, ProbeResults
from hpcbench.strategies.catalog import SINGLE_DEVICE, STRATEGIES
from hpcbench.strategies.probes.entry import COLLECTIVES, PROBE_BLOCKS
from hpcbench.strategies.traffic import MessageShape
from hpcbench.workloads.models import is_custom_model

MIN_SPREAD = 0.03
"""Smallest relative uncertainty of the computation of a step that has not run."""
_ONE_MODEL_SPREAD = 0.2
"""Standard deviation with a single measured model: there is no other to test the prices on."""
_MEDIAN_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_BUSY_RATIO = 1.15
"""Passing time over processor time, from which there is a note."""
_MIN_HIDDEN_FRACTION = 0.05
"""Smallest fraction of a computation that overlaps with an all_reduce; smaller ones are noise."""
_STEP_NOISE, _OVERHEAD_PRIOR = 0.03, 0.1
"""Deviation of a step's time; a library's overhead is about a tenth of a step, as a factor or by the step."""
_DATE_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def fit_calibration(
    profile: ClusterProfile, partition: str | None, runs: Sequence[CalibrationRun], newest: Calibration | None = None,
    *, sweep: str = "", environment: str | None = None, environment_key: str = "",
) -> Calibration:  # fmt: skip
    """Return the calibration that ``runs`` give. What they do not measure stays as in ``newest``, else the profile's.

    Args:
        profile: the cluster's.
        partition: on which they ran.
        runs: those that did not end well are ignored.
        newest: the calibration that is extended. It is left out if it is of other software or another machine.
        sweep: the sweep whose own shapes they measured.
        environment: the environment of the runs, by its name in the profile.
        environment_key: hash of the software as the submitter saw it.
    """
    good, nominal, made_at = usable_runs(runs), nominal_machine(profile, partition), _made_after(newest)
    # The digest of a user's own model includes the file of the model.
    digests = {run.result.environment_digest or "" for run in good if not is_custom_model(run.spec.model)} - {""}
    notes = [*busy_notes(good)]
    if newest is not None and digests and newest.environment_digests and not digests & {*newest.environment_digests}:
        notes.append(
            f"the calibration of {newest.made_at[:10]} is of another machine or software: nothing of it was kept"
        )
        newest = None
    base = nominal if newest is None else newest.machine
    outside = disturbed_spread([run.result.warnings for run in good])
    compute, of_kernels = _fit_compute(nominal.compute, base.compute, good, outside)
    comm, of_comm = _fit_comm(nominal.comm, base.comm, good, outside)
    base_bytes, of_memory = fit_base_bytes(good, nominal.device)
    machine = replace(
        base, depth="calibrated", source="", compute=compute, comm=comm, notes=[],
        straggling=fit_straggling(good, base.straggling),
        base_bytes=base.base_bytes if base_bytes is None else base_bytes,
    )  # fmt: skip
    overheads, of_strategies = fit_strategy_overheads(machine, good)
    unmeasured = {
        "no kernel was measured: a step's computation is the profile's": not compute.kernels,
        "no two ranks were measured on one node: they are taken not to be in each other's way": len(compute.crowding)
        < 2,
        "no message was measured: links are the profile's": not comm.messages,
        "nothing was measured between nodes: links between them are the profile's": bool(comm.messages)
        and not any(message.shape.nodes > 1 for message in comm.messages),
    }
    if newest is not None:
        environment, environment_key = environment or newest.environment, environment_key or newest.environment_key
        # A kept measurement is the same object; a new one may be equal to it.
        before = {*map(id, (*base.compute.kernels, *base.comm.messages, *base.comm.overlaps))}
        if not before.isdisjoint(map(id, (*compute.kernels, *comm.messages, *comm.overlaps))):
            notes += [note for note in newest.notes if note not in (*notes, *unmeasured)]
    residuals = [*(newest.residuals if newest else ()), *of_kernels, *of_comm, *of_memory, *of_strategies]
    return Calibration(
        cluster=profile.name,
        made_at=made_at,
        partition=partition or profile.default_partition,
        environment=environment,
        environment_key=environment_key,
        sweeps=[name for name in dict.fromkeys([*(newest.sweeps if newest else ()), sweep]) if name],
        machine=replace(machine, strategies={**base.strategies, **overheads}),
        residuals=list({(one.part, one.what): one for one in residuals}.values()),
        notes=[*notes, *(note for note, applies in unmeasured.items() if applies)],
        run_ids=sorted({run.result.run_id for run in good} | {*(newest.run_ids if newest else ())}),
        environment_digests=sorted(digests) or (newest.environment_digests if newest else []),
    )


def _made_after(newest: Calibration | None) -> str:
    """Return the time, at least a second after ``newest`` was made: the newest one counts."""
    now = datetime.now(timezone.utc)
    if newest is not None and newest.made_at >= now.strftime(_DATE_FORMAT):
        now = datetime.strptime(newest.made_at, _DATE_FORMAT).replace(tzinfo=timezone.utc) + timedelta(seconds=1)
    return now.strftime(_DATE_FORMAT)


def _fit_compute(
    nominal: DeviceCompute, earlier: DeviceCompute, runs: Sequence[CalibrationRun], outside: float
) -> tuple[DeviceCompute, list[FitResidual]]:
    """Return the device with the measured kernels, and the error of prices for a model that was not measured."""
    by_model: dict[str, list[MeasuredKernel]] = defaultdict(list)
    spreads = list[float]()
    for run in runs_of_strategy(runs, PROBE_BLOCKS):
        probe = run.result.probe
        if probe is not None and probe.blocks and probe.pass_s is not None:
            by_model[run.spec.model] += measured_kernels(nominal, run, probe)
            spreads.append(median(block.spread for block in probe.blocks))
    # Models share some kernels, which take the mean.
    new: dict[tuple[Kernel, KernelConditions], list[float]] = defaultdict(list)
    for one in (kernel for own in by_model.values() for kernel in own):
        new[one.kernel, one.conditions].append(one.seconds)
    kept = [one for one in earlier.kernels if (one.kernel, one.conditions) not in new]
    if not new:
        changes = {name: getattr(earlier, name) for name in ("kernels", "crowding", "spread", "measured_spread")}
        return replace(nominal, **changes), []
    kernels = kept + [
        MeasuredKernel(kernel=kernel, conditions=conditions, seconds=fmean(seconds))
        for (kernel, conditions), seconds in new.items()
    ]
    crowding = crowding_of(kernels)
    compute = replace(nominal, kernels=kernels, crowding=crowding if len(crowding) > 1 else nominal.crowding)
    errors = [
        (predicted_s, sum(one.seconds for one in own))
        for model, own in by_model.items()
        if (predicted_s := _price_by_others(compute, model, by_model)) is not None
    ]
    found = [fit_residual("kernels", "passes through a model, by the kernels of the others", errors)] if errors else []
    error = earlier.spread if kept else _ONE_MODEL_SPREAD
    if errors:
        # One kind of layer that no other model has, such as attention, says little of the others.
        error = _MEDIAN_TO_DEVIATION * median(abs(log(predicted / measured)) for predicted, measured in errors)
    return replace(compute, **_spreads(error, spreads, outside, earlier.measured_spread if kept else 0.0)), found


def _spreads(error: float, scatters: Iterable[float], outside: float, kept_spread: float) -> dict[str, float]:
    """Return both uncertainties of prices; prices that were not measured again keep theirs."""
    measured = max(hypot(max(median(scatters), MIN_SPREAD), outside), kept_spread)
    return {"spread": max(hypot(max(error, MIN_SPREAD), outside), measured), "measured_spread": measured}


def _price_by_others(
    compute: DeviceCompute, model: str, by_model: Mapping[str, Sequence[MeasuredKernel]]
) -> float | None:
    """Return the seconds of the kernels of ``model`` by those of the other models; ``None`` without any."""
    others = [one for name, kernels in by_model.items() if name != model for one in kernels]
    if not others:
        return None
    prices = KernelPrices(replace(compute, kernels=others))
    return sum(prices.price(one.kernel, one.conditions).seconds for one in by_model[model])


def measured_kernels(nominal: DeviceCompute, run: CalibrationRun, probe: ProbeResults) -> list[MeasuredKernel]:
    """Return the kernels of a run's blocks and updates, with their wall time within a pass.

    Each block's time is divided among its rows in proportion to their times by the roofline. A kernel of several blocks
    gets the mean, so that all rows together take what all blocks did.
    """
    wall, conditions = wall_ratio(probe), kernel_conditions(run.spec)
    seconds_by_kernel: dict[Kernel, list[float]] = defaultdict(list)
    for block in probe.blocks:
        passes = [row_kernels(run.spec, row, block.samples) for row in run.table.layers if row.block == block.block]
        for direction, block_s in enumerate((block.forward_s, block.backward_s or 0.0)):
            kernels = [both[direction] for both in passes]
            bases_s = [roofline_s(kernel, nominal) for kernel in kernels]
            for kernel, base_s in zip(kernels, bases_s, strict=True):
                if base_s:
                    seconds_by_kernel[kernel].append(block_s * wall * base_s / sum(bases_s))
    for update in probe.updates:
        for kernel in update_kernels(run.spec, [update.parameter_bytes]):
            seconds_by_kernel[kernel].append(update.seconds * wall)
    return [
        MeasuredKernel(kernel=kernel, conditions=conditions, seconds=fmean(seconds))
        for kernel, seconds in seconds_by_kernel.items()
    ]


def wall_ratio(probe: ProbeResults) -> float:
    """Return the time that passed in a pass through all blocks, over the times of the blocks."""
    blocks_s = sum(block.forward_s + (block.backward_s or 0.0) for block in probe.blocks)
    return (probe.pass_s or 0.0) / blocks_s if blocks_s else 1.0


def busy_notes(runs: Sequence[CalibrationRun]) -> list[str]:
    """Return a note where more time passed in blocks than processors or devices worked."""
    probes = [run.result.probe for run in runs_of_strategy(runs, PROBE_BLOCKS)]
    worst = max((wall_ratio(probe) for probe in probes if probe is not None and probe.blocks), default=1.0)
    if worst < _BUSY_RATIO:
        return []
    return [
        f"a pass through the blocks took up to {worst:.2f} times the processors' own time, as a CPU quota, the host of "
        "an accelerator or the work of others makes it; the prices include it"
    ]


def _fit_comm(
    nominal: CommParameters, earlier: CommParameters, runs: Sequence[CalibrationRun], outside: float
) -> tuple[CommParameters, list[FitResidual]]:
    """Return today's links with the measured messages and overlaps, and the error of prices between two sizes."""
    links = (nominal.intra_node, nominal.inter_node)
    calls = [
        (run.spec.tasks_per_node, call)
        for run in runs_of_strategy(runs, COLLECTIVES)
        # Variables such as NCCL_ALGO make other times than trainings without them have.
        for call in (run.result.probe.collectives if run.result.probe and not run.spec.env else ())
    ]
    messages = [*_median_messages(calls)]
    overlaps = [
        MeasuredOverlap(
            workload=workload_key(run.spec), samples=run.spec.batch_size, nodes=run.spec.nodes,
            tasks_per_node=run.spec.tasks_per_node, operation=overlap.operation,
            slowdown=max(1.0, overlap.compute_under_comm_s / overlap.compute_s),
            comm_slowdown=comm_slowdown(overlap),
        )
        for run in runs_of_strategy(runs, PROBE_BLOCKS)
        for overlap in (run.result.probe.overlaps if run.result.probe else ())
    ]  # fmt: skip
    if not messages and not overlaps:
        names = ("messages", "overlaps", "measured_links", "spread", "measured_spread")
        return replace(nominal, **{name: getattr(earlier, name) for name in names}), []
    kept = earlier if earlier.measured_links == links else nominal
    comm = replace(
        nominal,
        messages=list({(one.shape, one.tasks_per_node): one for one in [*kept.messages, *messages]}.values()),
        overlaps=list({one.conditions: one for one in [*kept.overlaps, *overlaps]}.values()),
        measured_links=links,
    )
    if not messages:
        return replace(comm, spread=kept.spread, measured_spread=kept.measured_spread), []
    error = MessagePrices(comm).interpolation_error()
    residual = FitResidual(part="messages", what="between two measured sizes", points=len(comm.messages), error=error)
    kept_spread = kept.measured_spread if len(comm.messages) > len(messages) else 0.0
    return replace(comm, **_spreads(error, (call.spread for _, call in calls), outside, kept_spread)), [residual]


def _median_messages(calls: Iterable[tuple[int, CollectiveProbe]]) -> Iterable[MeasuredMessage]:
    """Yield each message once, with the median of its launches; ``calls`` are with the ranks on a node."""
    launches: dict[tuple[MessageShape, int], list[float]] = defaultdict(list)
    for tasks, call in calls:
        rivals = call.groups if call.nodes > 1 else 1
        shape = MessageShape(call.operation, call.ranks, call.ranks // call.nodes, rivals, call.payload_bytes)
        launches[shape, tasks].append(call.seconds)
    for (shape, tasks), seconds in launches.items():
        yield MeasuredMessage(shape=shape, tasks_per_node=tasks, seconds=median(seconds))


def comm_slowdown(probe: OverlapProbe) -> float:
    """Return the slow-down of a collective while its rank computes, at least 1 and at most 20.

    Of a collective of m seconds that lasts until ``both_s`` beside c seconds of computation, c / lambda are hidden:
    both = c + m - c / lambda.
    """
    if probe.compute_under_comm_s <= 0:
        return 1.0
    hidden = (probe.compute_under_comm_s + probe.comm_s - probe.both_s) / probe.compute_under_comm_s
    return 1.0 / min(max(hidden, _MIN_HIDDEN_FRACTION), 1.0)


def fit_straggling(runs: Sequence[CalibrationRun], earlier: float) -> float:
    """Return the relative scatter of a rank's step around the mean of all.

    Of p ranks on nodes of their own that train without communication the slowest takes 1 + straggling z(p) times as
    long as one, z(p) being the expected largest of p normal draws. Without such runs a lone rank's steps count.
    """
    alone: dict[tuple[str, int], list[float]] = defaultdict(list)
    lone = [run for run in runs_of_strategy(runs, PROBE_BLOCKS, SINGLE_DEVICE) if run.spec.ranks == 1]
    for run in lone:
        alone[workload_key(run.spec), run.spec.batch_size].append(run.step_s)
    scatters = [
        max(run.step_s / median(alone[key]) - 1.0, 0.0) / expected_normal_maximum(run.spec.ranks)
        for run in runs_of_strategy(runs, PROBE_BLOCKS)
        if run.spec.nodes > 1
        and run.spec.tasks_per_node == 1
        and (key := (workload_key(run.spec), run.spec.batch_size)) in alone
    ]
    if not scatters:
        # The 10th and the 90th percentile of a normal distribution are 2.56 deviations apart.
        times = [run.result.metrics.step_time_s for run in lone]
        scatters = [(one.p90 - one.p10) / 2.56 / one.median for one in times if one is not None]
    return median(scatters) if scatters else earlier


def fit_base_bytes(runs: Sequence[CalibrationRun], device: str) -> tuple[float | None, list[FitResidual]]:
    """Return the bytes beside the predicted tensors, as measured peaks count; a probe on cuda has no workspaces."""
    pairs = [
        (float(peak_rank_memory(run.spec, run.table, device).total_bytes), float(peak))
        for run in runs
        if run.spec.strategy not in (PROBE_BLOCKS, COLLECTIVES) and (peak := run.result.metrics.peak_memory_bytes)
    ]
    if not pairs:
        probes = [run.result.probe for run in runs if run.result.probe is not None and device == "cpu"]
        return max((float(probe.base_memory_bytes or 0) for probe in probes), default=None), []
    base = max(median(peak - predicted for predicted, peak in pairs), 0.0)
    return base, [fit_residual("memory", "peak of a rank", [(predicted + base, peak) for predicted, peak in pairs])]


def fit_strategy_overheads(
    machine: Machine, runs: Sequence[CalibrationRun]
) -> tuple[dict[str, StrategyOverhead], list[FitResidual]]:
    """Fit what each strategy's library adds to the prediction of ``machine``, by the step and by its computation.

    Strategies of this project's own code have none: what remains of them are errors of the formulas, which another
    model does not share.
    """
    bare = replace(machine, strategies={})
    by_strategy: dict[str, list[CalibrationRun]] = defaultdict(list)
    for run in runs:
        if run.spec.strategy in STRATEGIES and STRATEGIES[run.spec.strategy].library is not None:
            by_strategy[run.spec.strategy].append(run)
    overheads: dict[str, StrategyOverhead] = {}
    residuals = []
    for strategy, own_runs in sorted(by_strategy.items()):
        steps = [(run, _predicted_step(bare, run)) for run in own_runs]
        overheads[strategy] = _fit_strategy_overhead(steps)
        fitted = replace(machine, strategies={strategy: overheads[strategy]})
        pairs = [(_predicted_step(fitted, run).step_time_s, run.step_s) for run in own_runs]
        residuals.append(fit_residual("strategies", f"{strategy}, with its overhead", pairs))
    return overheads, residuals


def _predicted_step(machine: Machine, run: CalibrationRun) -> StepBreakdown:
    return resolve_cost(run.spec.strategy).step(run.spec, run.table, CostModel(machine, run.spec))


def _fit_strategy_overhead(pairs: Sequence[tuple[CalibrationRun, StepBreakdown]]) -> StrategyOverhead:
    """Return the ridge regression (Hoerl and Kennard 1970) of missing time on (computation, 1), both drawn to 0."""
    scale_s = fmean(step.compute_s for _, step in pairs)
    aa, ab, bb, at, bt = 1 / _OVERHEAD_PRIOR**2, 0.0, 1 / _OVERHEAD_PRIOR**2, 0.0, 0.0
    for run, step in pairs:
        weight = 1 / (hypot(_STEP_NOISE, run.doubt) * run.step_s / scale_s) ** 2
        share, missing = step.compute_s / scale_s, (run.step_s - step.step_time_s) / scale_s
        aa, ab, bb = aa + weight * share * share, ab + weight * share, bb + weight
        at, bt = at + weight * share * missing, bt + weight * missing
    determinant = aa * bb - ab * ab
    factor, by_step = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
    # A library takes time, it gives none: where one part would, it is left out and the other fitted alone.
    if by_step < 0:
        factor, by_step = at / aa, 0.0
    elif factor < 0:
        factor, by_step = 0.0, bt / bb
    return StrategyOverhead(compute_factor=1.0 + max(factor, 0.0), step_s=max(by_step, 0.0) * scale_s)


def fit_residual(part: str, what: str, pairs: Sequence[tuple[float, float]]) -> FitResidual:
    """Return the residual of ``pairs`` of fitted and measured seconds or bytes."""
    error = sqrt(fmean(log(fitted / measured) ** 2 for fitted, measured in pairs))
    return FitResidual(part=part, what=what, points=len(pairs), error=error)
