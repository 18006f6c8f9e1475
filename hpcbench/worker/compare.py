"""Two trainings of one model, compared tensor by tensor: what ``verify`` and the tests of strategies judge with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hpcbench.parallel.bounds import Check
from hpcbench.results.schema import Comparison


@dataclass
class Trained:
    """Mean loss of the global batch per step, the gradients of the first and the last step, the weights afterwards.

    Tensors go by their single-device names, and lie on the host.
    """

    losses: list[float] = field(default_factory=list)
    first_gradients: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers."""


def compare(ours: Trained, reference: Trained, check: Check) -> Comparison:
    """Whether ``ours`` is what ``reference`` is, within the check's tolerances."""
    early = check.tolerance if check.first_tolerance is None else check.first_tolerance
    loss, *losses = _each_loss(ours.losses, reference.losses, check, early)
    first = _each("gradient", "in step 1", ours.first_gradients, reference.first_gradients, early)
    last = _each("gradient", f"in step {check.steps}", ours.gradients, reference.gradients, check.gradient_tolerance)
    after = f"after {check.steps} step{'s' * (check.steps > 1)}"
    weights = _each("weight", after, ours.state, reference.state, check.tolerance) if check.weights else []
    gradients = first + last if check.steps > 1 else first
    everything = [loss, *losses, *gradients, *weights]
    # What is wrong spreads to all tensors with the first update: before it, it can still be told where it began.
    suspects = first if any(one.too_far for one in first) else everything
    worst = max(suspects, key=lambda one: one.value / one.tolerance)
    return Comparison(
        passed=not any(one.too_far for one in everything),
        precision=check.precision,
        tolerance=check.tolerance,
        steps=check.steps,
        loss_max_rel=_largest([loss, *losses]),
        gradient_max_rel=_largest(gradients),
        weight_max_rel=_largest(weights),
        worst=worst.name,
        worst_rel=_finite(worst.value),
        worst_tolerance=worst.tolerance,
    )


def largest_relative_difference(ours: Tensor, reference: Tensor) -> float:
    """max|a - b| / max(1, max|b|), the measure of every comparison; infinite where one is not finite."""
    a, b = ours.detach().double().cpu(), reference.detach().double().cpu()
    if a.shape != b.shape or not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    if a.numel() == 0:
        return 0.0
    return ((a - b).abs().max() / b.abs().max().clamp(min=1.0)).item()


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that no later step changes."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether no number overflowed."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


class _Difference(NamedTuple):
    name: str
    value: float
    tolerance: float

    @property
    def too_far(self) -> bool:
        return not self.value <= self.tolerance


def _each_loss(ours: list[float], reference: list[float], check: Check, early: float) -> list[_Difference]:
    assert len(ours) == len(reference) > 0, "trained for different numbers of steps"
    wide = torch.float64
    return [
        _Difference(
            f"loss of step {step}",
            largest_relative_difference(torch.tensor(a, dtype=wide), torch.tensor(b, dtype=wide)),
            early if step == 1 else check.tolerance,
        )
        for step, (a, b) in enumerate(zip(ours, reference, strict=True), start=1)
    ]


def _each(
    kind: str, when: str, ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], tolerance: float
) -> list[_Difference]:
    """The difference of every tensor of either; infinite where the other lacks it."""
    found = []
    for name in dict.fromkeys([*reference, *ours]):
        both = name in ours and name in reference
        value = largest_relative_difference(ours[name], reference[name]) if both else math.inf
        found.append(_Difference(f"{kind} of {name} {when}", value, tolerance))
    return found


def _largest(differences: list[_Difference]) -> float | None:
    return _finite(max(one.value for one in differences)) if differences else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
