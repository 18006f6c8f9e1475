"""Tolerances of `verify`: the largest difference between a run and its single-device reference that rounding
explains.
"""

from __future__ import annotations

from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.catalog import get_strategy, options_with_defaults

VERIFIED_STEPS = 5
VERIFICATION_LEARNING_RATE = 0.01

EXACT_TOLERANCE = 1e-9
"""In fp64 before the first update, where nothing but the order of sums differs (1e-16 each)."""

MULTI_STEP_TOLERANCE = 1e-7
"""In fp64 over ``VERIFIED_STEPS`` steps: a network with BatchNorm over 4 samples makes up to 1e7 times its last bit
of it.
"""

PERTURBATION_MARGIN = 16.0
"""How many times farther than the reference from itself, when its weights are changed in the last bit, a run may be."""

ONE_STEP_TOLERANCES = {"fp32": 1e-5, "tf32": 2.0**-7, "fp16": 2.0**-7, "bf16": 2.0**-4}
"""In the run's own arithmetic, over one step. Of the lower ones 16 unit roundoffs: what a random walk of 256 roundings,
one per layer and direction in a network of 128 layers, comes to."""


class VerificationCheck(NamedTuple):
    """One comparison of a run with its reference."""

    precision: str
    steps: int
    tolerance: float
    first_tolerance: float | None = None
    """Of the first step's loss and gradients; as ``tolerance`` where absent."""
    weights: bool = True
    """Whether weights are compared, too."""

    @property
    def gradient_tolerance(self) -> float:
        """Tolerance of the last gradients: an update adds their difference times the learning rate to the weights."""
        return self.tolerance / VERIFICATION_LEARNING_RATE


def verification_checks(spec: RunSpec) -> list[VerificationCheck]:
    """Return the comparisons of ``verify``: first the decisive one, then the run's own arithmetic unless that is it."""
    lossy = lossy_tolerance(spec)
    widest = get_strategy(spec.strategy).widest
    if lossy:
        # A network amplifies what a lossy strategy leaves out, so the bound is held against the gradient itself.
        decisive = VerificationCheck(widest, 1, lossy)
    elif widest == "fp64":
        decisive = VerificationCheck("fp64", VERIFIED_STEPS, MULTI_STEP_TOLERANCE, EXACT_TOLERANCE)
    else:
        decisive = VerificationCheck(widest, VERIFIED_STEPS, ONE_STEP_TOLERANCES[widest])
    if spec.precision == widest:
        return [decisive]
    # Adam divides a gradient by its own size: of one that is nothing but rounding it makes a whole step.
    own = VerificationCheck(
        spec.precision, 1, max(ONE_STEP_TOLERANCES[spec.precision], lossy), weights=spec.optimizer == "sgd"
    )
    return [decisive, own]


def lossy_tolerance(spec: RunSpec) -> float:
    """The largest difference that the strategy, with these options, says it may make; 0 where it is exact."""
    entry = get_strategy(spec.strategy)
    values = options_with_defaults(spec)
    stated = [option.lossy.get(values[name], 0.0) for name, option in entry.options.items()]
    return max([*stated, entry.lossy or 0.0])
