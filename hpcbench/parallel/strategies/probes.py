"""Runs that measure a machine instead of a strategy: what a calibration is made of, planned and kept as any other run.

Their timed steps are those of replicas that pass nothing to each other; what they measure beside is in the result's
``probe``.
"""

from __future__ import annotations

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.entry import Option, Strategy

_BUDGET = Option(float, 20.0, "seconds that the measurements may take, about")

PROBES = {
    "probe_layers": Strategy(
        own_degree=None,
        runtime="hpcbench.worker.strategies.probes:ProbeLayers",
        cost="hpcbench.oracle.strategies.data:Single",
        description="calibration: every kernel of the model by itself, whole and in the parts that ranks get",
        options={
            "shares": Option(
                str, "1,2,4", "layers are also cut into so many parts, by samples and by what ranks share"
            ),
            "budget_s": _BUDGET,
        },
        limit="hpcbench.parallel.strategies.probes:kernels_alone",
    ),
    "probe_collectives": Strategy(
        own_degree="dp_degree",
        runtime="hpcbench.worker.strategies.probes:ProbeCollectives",
        cost="hpcbench.oracle.strategies.data:Single",
        description="calibration: every collective at many sizes, alone, beside others and under computation",
        options={
            "largest_mb": Option(float, 16.0, "largest message in MiB"),
            "budget_s": _BUDGET,
        },
        limit="hpcbench.parallel.strategies.probes:messages",
    ),
}


def kernels_alone(spec: RunSpec) -> str | None:
    """Layers are called one by one; parts are whole numbers."""
    if spec.compile or spec.activation_checkpointing:
        return "probe_layers calls layers one by one: compile and activation_checkpointing would change nothing"
    if spec.micro_batches > 1:
        return f"probe_layers takes a batch as it is: micro_batches {spec.micro_batches}, 1 is right"
    shares = str(spec.options.get("shares", "1"))
    if not all(one.strip().isdecimal() and int(one) >= 1 for one in shares.split(",")):
        return f'probe_layers with shares {shares!r}: whole numbers between commas are right, "1,2,4" for instance'
    return _measures(spec)


def messages(spec: RunSpec) -> str | None:
    """A lone rank has nobody to send to."""
    if spec.ranks == 1:
        return "probe_collectives needs 2 ranks or more"
    return _measures(spec)


def _measures(spec: RunSpec) -> str | None:
    if spec.verify:
        return f"{spec.strategy} is no training that could be verified"
    if spec.rehearse:
        return f"{spec.strategy} measures this machine: it rehearses no other"
    budget_s = spec.options.get("budget_s", _BUDGET.default)
    return None if isinstance(budget_s, int | float) and budget_s > 0 else f"{spec.strategy} with budget_s {budget_s}"
