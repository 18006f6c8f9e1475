"""Fits of kernel times: a roofline through measured layers, a factor per kind of layer and a factor per model.

The factor of a kind is the time of a kernel within a step over its time alone: in a step, caches hold other
data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from math import exp, log
from statistics import fmean, median

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.calibration.calibration_runs import CalibrationRun, fit_residual, runs_of_strategy
from hpcbench.oracle.calibration.calibration_store import FitResidual
from hpcbench.oracle.calibration.fit_overheads import WorkloadKey, workload_key
from hpcbench.oracle.calibration.least_squares import find_mode
from hpcbench.oracle.cost_model import RowShare, row_kernels, unsharded_row_kernels, update_kernels
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.tensor_sizes import parameter_bytes
from hpcbench.parallel.catalog import SINGLE_DEVICE
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.roofline import DeviceCompute, KernelSample, RooflineModel
from hpcbench.parallel.strategies.probes import PROBE_LAYERS
from hpcbench.results.probe_records import KernelProbe, ProbeResults

_STEP_NOISE = 0.03
"""Standard deviation of a step's logarithm."""
_KIND_PRIOR_SPREAD = 0.3
"""Standard deviation of the factors of kinds before any measurement, as a logarithm."""


def _seconds_by_kind(compute: DeviceCompute, run: CalibrationRun) -> dict[str, float]:
    """Return the time of the kernels of a step on one device, by kind of layer, for the update by its optimizer."""
    spec, roofline = msgspec.structs.replace(run.spec, strategy=SINGLE_DEVICE, options={}), RooflineModel.of(compute)
    updates = update_kernels(spec, parameter_bytes(spec, run.table))
    seconds: dict[str, float] = defaultdict(float)
    for kernel in chain(*unsharded_row_kernels(spec, run.table), updates):
        seconds[kernel.kind] += roofline.seconds(kernel)
    return dict(seconds)


def fit_kind_factors(steps: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Return a factor for each kind of layer, after which the kernels of all steps are too short by the same ratio.

    ``steps``: seconds by kind, and the time of the whole step. Robust ridge regression of the logarithms; kinds that no
    two models distinguish are drawn to 1, as all are where one model alone was measured.
    """
    names = sorted({name for parts, _ in steps for name in parts})
    common = median(whole_s / sum(parts.values()) for parts, whole_s in steps)

    def misses(logs: list[float]) -> list[float]:
        factors = dict(zip(names, map(exp, logs), strict=True))
        return [
            log(common * sum(factors[name] * seconds for name, seconds in parts.items()) / whole_s) / _STEP_NOISE
            for parts, whole_s in steps
        ]

    mode = find_mode(misses, [_KIND_PRIOR_SPREAD] * len(names))
    return dict(zip(names, map(exp, mode.at), strict=True))


MIN_COMPUTE_SPREAD = 0.03
"""Smallest relative uncertainty of the computation of a step that has not run."""
_ONE_MODEL_SPREAD = 0.2
"""Standard deviation with a single measured model: there is no other to test the fit on."""


def probed_share(probe: KernelProbe) -> RowShare:
    """The part of its row that was called; fewer samples are counted as such."""
    return part_share(probe.split, probe.parts)


def part_share(split: str, parts: int) -> RowShare:
    """Return one of ``parts`` of a row that is cut by ``split``."""
    part = 1.0 / parts
    return {
        "outputs": RowShare(flops=part, outputs=part, weights=part),
        "inputs": RowShare(flops=part, inputs=part, weights=part),
        "positions": RowShare(flops=part, inputs=part, outputs=part),
        "channels": RowShare(flops=part, inputs=part, outputs=part, weights=part),
    }.get(split, RowShare())


def kernel_samples(spec: RunSpec, table: LayerTable, probe: ProbeResults) -> list[KernelSample]:
    """Return the measured kernels as predictions request them. Rows that the table lacks are ignored."""
    rows = {(layer.name, layer.kind): layer for layer in reversed(table.layers)}
    samples = []
    for probed in probe.kernels:
        row = rows.get((probed.row, probed.kind))
        if row is None:
            continue
        passes = row_kernels(spec, row, probed.samples, probed_share(probed))
        samples.append(KernelSample(kernel=passes.forward, seconds=probed.forward_s, spread=probed.spread))
        if probed.backward_s is not None:
            samples.append(KernelSample(kernel=passes.backward, seconds=probed.backward_s, spread=probed.spread))
    for update in probe.updates:
        for kernel in update_kernels(spec, [update.parameter_bytes]):
            samples.append(KernelSample(kernel=kernel, seconds=update.seconds, spread=update.spread))
    return [each for each in samples if each.kernel.moved_bytes + each.kernel.flops + each.kernel.weight_bytes > 0]


def fit_kernels(
    machine: Machine, runs: Sequence[CalibrationRun], alone_s: Mapping[WorkloadKey, float]
) -> tuple[DeviceCompute, list[FitResidual], list[str]]:
    """Return the device with measured kernels and every model's factor, its residuals and notes.

    Without a measured layer the device is returned unchanged.

    ``alone_s`` are the times of whole steps on one device.
    """
    probed = [run for run in runs_of_strategy(runs, PROBE_LAYERS) if run.result.probe and run.result.probe.kernels]
    if not probed:
        return machine.compute, [], ["no kernel was measured: a step's computation is the profile's"]
    samples_of = {
        run.result.run_id: kernel_samples(run.spec, run.table, run.result.probe) for run in probed if run.result.probe
    }
    plain = msgspec.structs.replace(machine.compute, factors={}, crowding={})

    def fit(chosen: Sequence[CalibrationRun]) -> tuple[DeviceCompute, dict[str, float]]:
        """Return the device by the kernels and steps of these runs, and its factor by model."""
        bare = fit_roofline(plain, [sample for run in chosen for sample in samples_of[run.result.run_id]])
        steps = [(_seconds_by_kind(bare, run), alone_s[workload_key(run)]) for run in chosen]
        kinds = fit_kind_factors(steps)
        samples = [
            msgspec.structs.replace(sample, seconds=sample.seconds * kinds.get(sample.kernel.kind, 1.0))
            for sample in bare.samples
        ]
        compute = msgspec.structs.replace(bare, samples=samples)
        logs: dict[str, list[float]] = defaultdict(list)
        for run in chosen:
            logs[run.spec.model].append(log(alone_s[workload_key(run)] / _single_device_kernels_s(compute, run)))
        # By model the geometric mean of its runs, for any other the median of these: an odd model moves it little.
        factors = {model: exp(fmean(values)) for model, values in logs.items()}
        return compute, {**factors, "": median(factors.values())}

    compute, factors = fit(probed)
    pairs = [
        (_single_device_kernels_s(compute, run) * factors[run.spec.model], alone_s[workload_key(run)]) for run in probed
    ]
    residuals = [fit_residual("kernels", "whole steps of the models that were measured", pairs)]
    models = sorted({run.spec.model for run in probed})
    error, notes = _ONE_MODEL_SPREAD, []
    if len(models) > 1:
        others = []
        for left_out in probed:
            compute_of_others, factors_of_others = fit([run for run in probed if run.spec.model != left_out.spec.model])
            predicted_s = factors_of_others[""] * _single_device_kernels_s(compute_of_others, left_out)
            others.append((predicted_s, alone_s[workload_key(left_out)]))
        residuals.append(fit_residual("kernels", "whole steps by the kernels and factors of the other models", others))
        error = residuals[-1].error
    else:
        notes.append(f"kernels of {models[0]} alone were measured: what other models compute is guessed from it")
    changes = {"factors": factors, "crowding": machine.compute.crowding, "spread": max(error, MIN_COMPUTE_SPREAD)}
    return msgspec.structs.replace(compute, **changes), residuals, notes


def fit_roofline(compute: DeviceCompute, samples: Sequence[KernelSample]) -> DeviceCompute:
    """Return ``compute`` with ``samples``, and with the efficiencies and the launch time that fit them best.

    Kernels unlike every measured one are priced by these alone. The best fit has the least mean of absolute logarithms,
    which a few outliers do not move; it is searched along one number after another in ever smaller steps.
    """
    best = msgspec.structs.replace(compute, samples=list(samples))
    least = _roofline_error(best)
    for step in (4.0, 2.0, 1.4, 1.2, 1.1, 1.05):
        moved = True
        while moved:
            moved = False
            for name in ("flops_efficiency", "bandwidth_efficiency", "launch_s"):
                for factor in (step, 1.0 / step):
                    tried = msgspec.structs.replace(best, **{name: getattr(best, name) * factor})
                    miss = _roofline_error(tried)
                    if miss < least * (1 - 1e-9):
                        best, least, moved = tried, miss, True
    return best


def _roofline_error(compute: DeviceCompute) -> float:
    judge = RooflineModel(msgspec.structs.replace(compute, samples=[]))
    return sum(abs(log(judge.roofline_s(sample.kernel) / sample.seconds)) for sample in compute.samples)


def _single_device_kernels_s(compute: DeviceCompute, run: CalibrationRun) -> float:
    """Return the time of all kernels of a step on one device."""
    return sum(_seconds_by_kind(compute, run).values())
