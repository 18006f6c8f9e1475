"""The parameters of a machine that whole runs can fit, and the uncertainty that they leave in a prediction.

Each parameter is a factor on a number of the machine, 1 before any run was seen; its logarithm has a normal
prior of mean 0. A number that is 0 stays 0. Prior widths (one standard deviation of the logarithm):

- computation 0.35: vendors' peaks against the 40 to 80 % of them that steps reach; one model against another
  0.15, the spread of such efficiencies between networks on one device;
- bandwidth 0.7: half to a quarter of the nominal number is common where transfers are staged through the host;
  half of that variance is the library's, which all links share: a library that is slow inside a node is as slow
  between nodes;
- latency 0.7: a factor of 2 either way, since vendors publish none;
- a strategy's own computation 0.35, time per step and per sample 1.0: the overhead of its library;
- straggling and delays 1.0: only their order of magnitude is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, hypot, log, log2

from msgspec.structs import replace

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.collective_formulas import HockneyLink
from hpcbench.oracle.cost_model import CostModel
from hpcbench.oracle.machine import Machine, Posterior, StrategyOverhead
from hpcbench.oracle.strategies.base import resolve_cost
from hpcbench.parallel.layer_table import LayerTable

COMPUTE, BANDWIDTH, STRAGGLING, DELAY = "compute", "bandwidth", "straggling", "delay"
DELAY_PRIOR_WIDTH = 1.0
_PRIOR_WIDTHS = {BANDWIDTH: 0.5, "latency": 0.7, STRAGGLING: 1.0, COMPUTE: 0.35}
_STRATEGY_PRIOR_WIDTHS = {"compute": 0.35, "step": 1.0, "sample": 1.0}
_STRATEGY_FIELDS = {"compute": "compute_factor", "step": "step_s", "sample": "sample_s"}
_MODEL_PRIOR_WIDTH = 0.15


def fitted_parameter_widths(
    machine: Machine, models: Iterable[str], strategies: Iterable[str], widths: Mapping[str, float]
) -> dict[str, float]:
    """Return names and prior widths of what runs of these models and strategies may move.

    ``widths`` replaces widths by name; a width of 0 leaves a number as it is. A strategy's own numbers are moved only
    where ``machine.strategies`` names the strategy: else they cannot be separated from the device's.
    """
    prior = {COMPUTE: _PRIOR_WIDTHS[COMPUTE]}
    prior |= {f"{COMPUTE}.{model}": _MODEL_PRIOR_WIDTH for model in sorted(set(models))}
    prior[BANDWIDTH] = _PRIOR_WIDTHS[BANDWIDTH]
    for link, wire in (("intra_node", machine.comm.intra_node), ("inter_node", machine.comm.inter_node)):
        prior[f"{link}.bandwidth"] = _PRIOR_WIDTHS[BANDWIDTH]
        if wire.latency_s:
            prior[f"{link}.latency"] = _PRIOR_WIDTHS["latency"]
    if machine.straggling:
        prior[STRAGGLING] = _PRIOR_WIDTHS[STRAGGLING]
    for strategy in sorted(set(strategies)):
        overhead = machine.strategies.get(strategy)
        for number, width in _STRATEGY_PRIOR_WIDTHS.items():
            if overhead is not None and getattr(overhead, _STRATEGY_FIELDS[number]):
                prior[f"strategy.{strategy}.{number}"] = width
    return {name: widths.get(name, width) for name, width in prior.items() if widths.get(name, width) > 0}


def parameter_affects(name: str, spec: RunSpec) -> bool:
    """Whether the number can change ``spec``'s step."""
    scope, _, rest = name.partition(".")
    if scope == COMPUTE:
        return rest in ("", spec.model)
    if scope == "strategy":
        return rest.rpartition(".")[0] == spec.strategy
    return spec.devices > 1 and (scope != "inter_node" or spec.nodes > 1)


def apply_parameters(machine: Machine, names: Sequence[str], logs: Sequence[float]) -> Machine:
    """Return ``machine`` with the named numbers multiplied by the exponentials of ``logs``."""
    factors = {name: exp(value) for name, value in zip(names, logs, strict=True)}
    fitted_factors, common = machine.compute.factors, factors.get(COMPUTE, 1.0)
    any_model = fitted_factors.get("", 1.0)
    model_factors = {"": any_model * common} | {model: factor * common for model, factor in fitted_factors.items()}
    overheads = dict(machine.strategies)
    for name, factor in factors.items():
        scope, _, rest = name.partition(".")
        if scope == COMPUTE and rest:
            model_factors[rest] = fitted_factors.get(rest, any_model) * common * factor
        elif scope == "strategy":
            strategy, _, number = rest.rpartition(".")
            overhead, field = overheads.get(strategy, StrategyOverhead()), _STRATEGY_FIELDS[number]
            overheads[strategy] = replace(overhead, **{field: getattr(overhead, field) * factor})
    return replace(
        machine,
        compute=replace(machine.compute, factors=model_factors),
        comm=replace(
            machine.comm,
            intra_node=_scaled_link(machine.comm.intra_node, "intra_node", factors),
            inter_node=_scaled_link(machine.comm.inter_node, "inter_node", factors),
        ),
        strategies=overheads,
        straggling=machine.straggling * factors.get(STRAGGLING, 1.0),
        delay_s=machine.delay_s * factors.get(DELAY, 1.0),
    )


def _scaled_link(wire: HockneyLink, link: str, factors: Mapping[str, float]) -> HockneyLink:
    return HockneyLink(
        wire.latency_s * factors.get(f"{link}.latency", 1.0),
        wire.beta_s_per_byte / (factors.get(BANDWIDTH, 1.0) * factors.get(f"{link}.bandwidth", 1.0)),
    )


_DIRECTION_DEVIATIONS = 1.645
"""Standard deviations at which the model is asked: where it is not linear, the ends of the interval are what counts."""
_OVERHEAD_SPREAD_PER_DOUBLING = 0.1
"""Relative uncertainty, for a doubling of the ranks, of the time that a strategy adds to every step: its form is
unknown."""


CostModelFactory = Callable[[Machine, RunSpec], CostModel]
"""Constructor of the cost model of a run on a machine."""


def predicted_step_s(
    machine: Machine, spec: RunSpec, table: LayerTable, clock_of: CostModelFactory = CostModel
) -> float:
    """Return the predicted step time of a run on ``machine``."""
    return resolve_cost(spec.strategy).step(spec, table, clock_of(machine, spec)).step_time_s


def log_step_spreads(
    spec: RunSpec, table: LayerTable, machine: Machine, posterior: Posterior, clock_of: CostModelFactory = CostModel
) -> tuple[float, float]:
    """Standard deviations of the logarithm of ``spec``'s step time, downwards and upwards.

    Along every independent direction of the posterior the model is computed anew on both sides; to that come a run's
    own scatter and, beyond the scale of the runs that were fitted, the uncertainty of the model's form, and of what the
    strategy adds to a step without the model knowing why.
    """
    names, middle_s = [each.name for each in posterior.parameters], predicted_step_s(machine, spec, table, clock_of)
    doublings = max(log2(spec.ranks / posterior.ranks), 0.0)
    added = machine.strategies.get(spec.strategy, StrategyOverhead())
    unknown = _OVERHEAD_SPREAD_PER_DOUBLING * (added.step_s + added.sample_s * spec.batch_size) / middle_s
    below = above = hypot(posterior.run_spread, hypot(posterior.doubling_spread, unknown) * doublings**0.5)
    for direction in zip(*posterior.roots, strict=True):
        ends = [0.0]
        for side in (-_DIRECTION_DEVIATIONS, _DIRECTION_DEVIATIONS):
            moved = apply_parameters(machine, names, [side * value for value in direction])
            ends.append(log(predicted_step_s(moved, spec, table, clock_of) / middle_s) / _DIRECTION_DEVIATIONS)
        below, above = hypot(below, min(ends)), hypot(above, max(ends))
    return below, above
