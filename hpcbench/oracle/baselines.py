"""Simpler predictors, beside which the oracle is scored: each says a step time of a run, or why it says nothing."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from statistics import linear_regression, median

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.estimates import Asked, Estimate, Known, serial_step
from hpcbench.oracle.published.ddlbench_runs import ddlbench
from hpcbench.oracle.published.paradl_runs import paradl

_ALIKE = (
    "model", "model_options", "dataset", "input_size", "strategy", "options", "batch_size", "micro_batches",
    "precision", "compile", "activation_checkpointing", "channels_last", "optimizer", "momentum", "data",
)  # fmt: skip
"""Parameters in which a run and a smaller one must agree to be the same at two scales."""
_PAIR = 2
"""Ranks from which perfect scaling is reckoned."""


def compute_only(asked: Asked) -> Estimate:
    """A replica's computation on one device, shared evenly by its devices: as if nothing had to be passed."""
    spec = asked.spec
    compute_s = serial_step(asked).compute_s / (spec.devices / spec.dp_degree)
    return Estimate(compute_s, compute_s, 0.0)


def flat(asked: Asked) -> Estimate:
    """The step time of the largest scale that was measured stays."""
    known = smaller(asked)
    if not known:
        return Estimate(reason=_none(asked))
    largest = max(one.spec.devices for one in known)
    return Estimate(median(one.step_time_s for one in known if one.spec.devices == largest))


def perfect(asked: Asked) -> Estimate:
    """The samples per second and device of two devices stay."""
    known = [one for one in smaller(asked) if one.spec.devices == _PAIR]
    if not known:
        return Estimate(reason=f"{_none(asked)} on {_PAIR} devices")
    device_s = median(one.step_time_s * _PAIR / one.spec.global_batch_size for one in known)
    return Estimate(device_s * asked.spec.global_batch_size / asked.spec.devices)


def log_p(asked: Asked) -> Estimate:
    """A straight line of the step time over the logarithm of the number of devices, by least squares."""
    known = smaller(asked)
    if len({one.spec.devices for one in known}) < _PAIR:
        return Estimate(reason=f"{_none(asked)} at two scales")
    line = linear_regression([log2(one.spec.devices) for one in known], [one.step_time_s for one in known])
    step_time_s = line.intercept + line.slope * log2(asked.spec.devices)
    if step_time_s <= 0:
        return Estimate(reason=f"the line through {len(known)} smaller runs is below zero at {asked.spec.devices}")
    return Estimate(step_time_s)


def smaller(asked: Asked) -> list[Known]:
    """The runs that are known of the same on fewer devices."""
    return [one for one in asked.known if one.spec.devices < asked.spec.devices and _is_alike(one.spec, asked.spec)]


def _is_alike(one: RunSpec, other: RunSpec) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _ALIKE)


def _none(asked: Asked) -> str:
    spec = asked.spec
    return f"no smaller run of {spec.strategy}, {spec.model}, batch {spec.batch_size} was measured"


BASELINES: dict[str, Callable[[Asked], Estimate]] = {
    "paradl": paradl,
    "ddlbench": ddlbench,
    "compute_only": compute_only,
    "flat": flat,
    "perfect": perfect,
    "log_p": log_p,
}
"""By name. ``docs/formulas.md`` has a section on each."""
