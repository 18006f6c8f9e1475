"""From layers called by themselves to what any kernel takes, and what whole steps take over the sum of theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.calibration.evidence import PROBE_LAYERS, Evidence, explained, log_error, median, of_strategy
from hpcbench.oracle.calibration.fit_kinds import fit_kinds, seconds_by_kind, within_steps
from hpcbench.oracle.calibration.fit_rest import Workload, workload
from hpcbench.oracle.calibration.store import Residual
from hpcbench.oracle.kernels import Share, row_pass, update_kernels
from hpcbench.oracle.machine import Compute, KernelSample, Machine
from hpcbench.parallel.alike import Alike
from hpcbench.parallel.layers import LayerTable
from hpcbench.results.schema import KernelProbe, Probe

LEAST_SPREAD = 0.03
"""Nobody knows a step's computation better than that before it has run."""
_ONE_MODEL_SPREAD = 0.2
"""Where a single model was measured there is no other to try the fit on."""


def share_of(probe: KernelProbe) -> Share:
    """The part of its row that was called; fewer samples are counted as such."""
    part = 1.0 / probe.parts
    return {
        "outputs": Share(flops=part, outputs=part, weights=part),
        "inputs": Share(flops=part, inputs=part, weights=part),
        "positions": Share(flops=part, inputs=part, outputs=part),
    }.get(probe.split, Share())


def kernel_samples(spec: RunSpec, table: LayerTable, probe: Probe) -> list[KernelSample]:
    """What was measured, in the words in which predictions ask. Rows that the table does not have do nothing."""
    rows = {(layer.name, layer.kind): layer for layer in reversed(table.layers)}
    found = []
    for one in probe.kernels:
        layer = rows.get((one.row, one.kind))
        if layer is None:
            continue
        passes = row_pass(spec, layer, one.samples, share_of(one))
        found.append(KernelSample(kernel=passes.forward, seconds=one.forward_s, spread=one.spread))
        if one.backward_s is not None:
            found.append(KernelSample(kernel=passes.backward, seconds=one.backward_s, spread=one.spread))
    for update in probe.updates:
        for kernel in update_kernels(spec, [update.parameter_bytes]):
            found.append(KernelSample(kernel=kernel, seconds=update.seconds, spread=update.spread))
    return [one for one in found if one.kernel.moved_bytes + one.kernel.flops + one.kernel.weight_bytes > 0]


def fit_kernels(
    machine: Machine, runs: Sequence[Evidence], alone_s: Mapping[Workload, float]
) -> tuple[Compute, list[Residual], list[str]]:
    """The device with measured kernels and every model's factor; without a measured layer as it was.

    ``alone_s`` is what whole steps take.
    """
    probed = [one for one in of_strategy(runs, PROBE_LAYERS) if one.result.probe and one.result.probe.kernels]
    if not probed:
        return machine.compute, [], ["no kernel was measured: a step's computation is the profile's"]
    by_run = {one.result.run_id: _samples_of(one) for one in probed}
    samples = [sample for found in by_run.values() for sample in found]
    plain = msgspec.structs.replace(machine.compute, factors={}, crowding={})
    bare = _within_steps(fit_roofline(plain, samples), probed, alone_s)
    sums = [(_sum_s(bare, one), one) for one in probed]
    factors = _factors([(one, alone_s[workload(one)] / sum_s) for sum_s, one in sums])
    compute = msgspec.structs.replace(bare, factors=factors, crowding=machine.compute.crowding)
    pairs = [(sum_s * factors[one.spec.model], alone_s[workload(one)]) for sum_s, one in sums]
    residuals = [
        Residual(part="kernels", what="whole steps of the models that were measured", points=len(pairs),
                 error=log_error(pairs), r2=explained(pairs)),
    ]  # fmt: skip
    models = sorted({one.spec.model for one in probed})
    notes = []
    if len(models) > 1:
        others = [_by_others(plain, probed, by_run, alone_s, one) for one in probed]
        error = log_error(others)
        residuals.append(Residual(part="kernels", what="whole steps by the kernels and factors of the other models",
                                  points=len(others), error=error, r2=explained(others)))  # fmt: skip
    else:
        error = _ONE_MODEL_SPREAD
        notes.append(f"kernels of {models[0]} alone were measured: what other models compute is guessed from it")
    return msgspec.structs.replace(compute, spread=max(error, LEAST_SPREAD)), residuals, notes


def fit_roofline(compute: Compute, samples: Sequence[KernelSample]) -> Compute:
    """``compute`` with ``samples``, and with those efficiencies and that launch that lie nearest to them.

    What is unlike every measured kernel is judged by these alone. Nearest is the least mean of absolute logarithms,
    which a few odd kernels do not move, looked for along one number after another in ever smaller steps.
    """
    best = msgspec.structs.replace(compute, samples=list(samples))
    least = _miss(best)
    for step in (4.0, 2.0, 1.4, 1.2, 1.1, 1.05):
        moved = True
        while moved:
            moved = False
            for name in ("flops_efficiency", "bandwidth_efficiency", "launch_s"):
                for factor in (step, 1.0 / step):
                    tried = msgspec.structs.replace(best, **{name: getattr(best, name) * factor})
                    miss = _miss(tried)
                    if miss < least * (1 - 1e-9):
                        best, least, moved = tried, miss, True
    return best


def _within_steps(compute: Compute, runs: Iterable[Evidence], alone_s: Mapping[Workload, float]) -> Compute:
    steps = [(_by_kind(compute, one), alone_s[workload(one)]) for one in runs]
    return within_steps(compute, fit_kinds(steps))


def _miss(compute: Compute) -> float:
    judge = Alike(msgspec.structs.replace(compute, samples=[]))
    return sum(abs(log(judge.roofline_s(one.kernel) / one.seconds)) for one in compute.samples)


def _samples_of(run: Evidence) -> list[KernelSample]:
    assert run.result.probe is not None, "a run that was chosen for its probe"
    return kernel_samples(run.spec, run.table, run.result.probe)


def _by_kind(compute: Compute, run: Evidence) -> dict[str, float]:
    return seconds_by_kind(compute, msgspec.structs.replace(run.spec, strategy="single", options={}), run.table)


def _sum_s(compute: Compute, run: Evidence) -> float:
    """All kernels of a step of a lone device."""
    return sum(_by_kind(compute, run).values())


def _factors(ratios: Iterable[tuple[Evidence, float]]) -> dict[str, float]:
    """Of every model the geometric mean of its runs, of any other the median of these: an odd model moves it little."""
    by_model: dict[str, list[float]] = defaultdict(list)
    for one, ratio in ratios:
        by_model[one.spec.model].append(log(ratio))
    means = {model: sum(found) / len(found) for model, found in by_model.items()}
    factors = {model: exp(mean) for model, mean in means.items()}
    return {**factors, "": median(factors.values())}


def _by_others(
    plain: Compute,
    probed: Sequence[Evidence],
    by_run: dict[str, list[KernelSample]],
    alone_s: Mapping[Workload, float],
    left_out: Evidence,
) -> tuple[float, float]:
    """A step as predicted without any kernel of its model, and as measured."""
    others = [one for one in probed if one.spec.model != left_out.spec.model]
    samples = [sample for one in others for sample in by_run[one.result.run_id]]
    compute = _within_steps(fit_roofline(plain, samples), others, alone_s)
    factor = _factors([(one, alone_s[workload(one)] / _sum_s(compute, one)) for one in others])[""]
    return factor * _sum_s(compute, left_out), alone_s[workload(left_out)]
