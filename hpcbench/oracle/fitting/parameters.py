"""Which of a machine's numbers whole runs can move, and how far they may lie from what was known before.

Every one is a factor on a number of the machine, 1 before any run was seen; its logarithm has a normal prior of mean 0.
What is 0 stays 0. Widths (one standard deviation of the logarithm):

- computation 0.35: vendors' peaks against the 40 to 80 % of them that steps reach; one model against another 0.15, the
  spread of such efficiencies between networks on one device;
- bandwidth 0.7: half to a quarter of the nominal number is common where transfers are staged through the host; half of
  that variance is the library's, which all links share: one that is slow inside a node is no better between nodes;
- latency 0.7: a factor of 2 either way, vendors state none;
- a strategy's own computation 0.35, time per step and per sample 1.0: what its library adds;
- straggling and delays 1.0: known by their order of magnitude.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp

from msgspec.structs import replace

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.collectives import Wire
from hpcbench.oracle.machine import Machine, Strategy

COMPUTE, BANDWIDTH, STRAGGLING, DELAY = "compute", "bandwidth", "straggling", "delay"
DELAY_WIDTH = 1.0
_WIDTHS = {BANDWIDTH: 0.5, "latency": 0.7, STRAGGLING: 1.0, COMPUTE: 0.35}
_OWN_WIDTHS = {"compute": 0.35, "step": 1.0, "sample": 1.0}
_FIELDS = {"compute": "compute_factor", "step": "step_s", "sample": "sample_s"}
_MODEL_WIDTH = 0.15


def parameters_of(
    machine: Machine, models: Iterable[str], strategies: Iterable[str], widths: Mapping[str, float]
) -> dict[str, float]:
    """Names and prior widths of what runs of these models and strategies may move.

    ``widths`` replaces widths by name; a width of 0 leaves a number as it is. A strategy's own numbers are moved only
    where ``machine.strategies`` names the strategy: else they cannot be told from the device's.
    """
    found = {COMPUTE: _WIDTHS[COMPUTE]}
    found |= {f"{COMPUTE}.{model}": _MODEL_WIDTH for model in sorted(set(models))}
    found[BANDWIDTH] = _WIDTHS[BANDWIDTH]
    for link, wire in (("intra_node", machine.comm.intra_node), ("inter_node", machine.comm.inter_node)):
        found[f"{link}.bandwidth"] = _WIDTHS[BANDWIDTH]
        if wire.latency_s:
            found[f"{link}.latency"] = _WIDTHS["latency"]
    if machine.straggling:
        found[STRAGGLING] = _WIDTHS[STRAGGLING]
    for strategy in sorted(set(strategies)):
        own = machine.strategies.get(strategy)
        for number, width in _OWN_WIDTHS.items():
            if own is not None and getattr(own, _FIELDS[number]):
                found[f"strategy.{strategy}.{number}"] = width
    return {name: widths.get(name, width) for name, width in found.items() if widths.get(name, width) > 0}


def concerns(name: str, spec: RunSpec) -> bool:
    """Whether the number can change ``spec``'s step."""
    scope, _, rest = name.partition(".")
    if scope == COMPUTE:
        return rest in ("", spec.model)
    if scope == "strategy":
        return rest.rpartition(".")[0] == spec.strategy
    return spec.devices > 1 and (scope != "inter_node" or spec.nodes > 1)


def applied(machine: Machine, names: Sequence[str], logs: Sequence[float]) -> Machine:
    """``machine`` with the named numbers multiplied by the exponentials of ``logs``."""
    factors = {name: exp(value) for name, value in zip(names, logs, strict=True)}
    return replace(
        machine,
        compute=replace(machine.compute, factors=_model_factors(machine.compute.factors, factors)),
        comm=replace(
            machine.comm,
            intra_node=_wire(machine.comm.intra_node, "intra_node", factors),
            inter_node=_wire(machine.comm.inter_node, "inter_node", factors),
        ),
        strategies=_strategies(machine.strategies, factors),
        straggling=machine.straggling * factors.get(STRAGGLING, 1.0),
        delay_s=machine.delay_s * factors.get(DELAY, 1.0),
    )


def _model_factors(known: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
    common, any_model = factors.get(COMPUTE, 1.0), known.get("", 1.0)
    found = {"": any_model * common} | {model: own * common for model, own in known.items()}
    for name, factor in factors.items():
        scope, _, model = name.partition(".")
        if scope == COMPUTE and model:
            found[model] = known.get(model, any_model) * common * factor
    return found


def _wire(wire: Wire, link: str, factors: Mapping[str, float]) -> Wire:
    return Wire(
        wire.latency_s * factors.get(f"{link}.latency", 1.0),
        wire.beta_s_per_byte / (factors.get(BANDWIDTH, 1.0) * factors.get(f"{link}.bandwidth", 1.0)),
    )


def _strategies(known: Mapping[str, Strategy], factors: Mapping[str, float]) -> dict[str, Strategy]:
    found = dict(known)
    for name, factor in factors.items():
        scope, _, rest = name.partition(".")
        if scope != "strategy":
            continue
        strategy, _, number = rest.rpartition(".")
        own, field = found.get(strategy, Strategy()), _FIELDS[number]
        found[strategy] = replace(own, **{field: getattr(own, field) * factor})
    return found
