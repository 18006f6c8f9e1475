"""The reference training of data-parallel runs in one process, the comparison of two trainings, and
the differences between them that rounding explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.schema import ReferenceComparison
from hpcbench.strategies.catalog import get_strategy, options_with_defaults
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.model_execution import MixedPrecision, summed_loss
from hpcbench.worker.strategy import make_optimizer, resolve_runtime

VERIFIED_STEPS = 5
VERIFICATION_LEARNING_RATE = 0.01

EXACT_TOLERANCE = 1e-9
"""Tolerance in fp64 before the first update, where only the order of sums differs (1e-16 each)."""

MULTI_STEP_TOLERANCE = 1e-7
"""Tolerance in fp64 over ``VERIFIED_STEPS`` steps: a network with BatchNorm over 4 samples amplifies a difference in
the last bit up to 1e7 times."""

PERTURBATION_MARGIN = 16.0
"""Maximum distance of a run from the reference, in multiples of the distance that the reference moves when its weights
change in the last bit."""

TensorKey = tuple[str, str]
"""Kind (``loss``, ``first gradient``, ``last gradient``, ``weight``) and name; of a loss ``step 1``."""


class VerificationCheck(NamedTuple):
    """One comparison of a run with its reference."""

    precision: str
    steps: int
    tolerance: float
    first_tolerance: float | None = None
    """Tolerance of the first step's loss and gradients; ``tolerance`` where absent."""
    weights: bool = True
    """Whether weights are compared, too."""
    by_rounding: bool = False
    """Whether the tolerance of a tensor is at least the rounding error that one device shows (``rounding.bounds``)."""

    @property
    def gradient_tolerance(self) -> float:
        """Tolerance of the last gradients: an update adds their difference times the learning rate to the weights."""
        return self.tolerance / VERIFICATION_LEARNING_RATE


def verification_checks(spec: RunSpec) -> list[VerificationCheck]:
    """Return the comparisons of ``verify``: first the decisive one, then the run's own arithmetic unless that is it."""
    lossy = lossy_tolerance(spec)
    widest = resolve_runtime(spec.strategy).widest
    if lossy:
        # A network amplifies what a lossy strategy leaves out, so the bound is held against the gradient itself.
        decisive = VerificationCheck(widest, 1, lossy)
    elif widest == "fp64":
        decisive = VerificationCheck("fp64", VERIFIED_STEPS, MULTI_STEP_TOLERANCE, EXACT_TOLERANCE)
    else:
        decisive = VerificationCheck(widest, VERIFIED_STEPS, 0.0, by_rounding=True)
    if spec.precision == widest:
        return [decisive]
    # Adam divides a gradient by its own size: of one that is nothing but rounding it makes a whole step.
    weights = spec.optimizer == "sgd"
    return [decisive, VerificationCheck(spec.precision, 1, lossy, weights=weights, by_rounding=True)]


def lossy_tolerance(spec: RunSpec) -> float:
    """The largest difference that the strategy, with these options, makes by definition; 0 where it is exact."""
    entry = get_strategy(spec.strategy)
    values = options_with_defaults(spec)
    stated = [option.lossy.get(values[name], 0.0) for name, option in entry.options.items()]
    return max([*stated, resolve_runtime(spec.strategy).lossy])


@dataclass
class TrainingRecord:
    """Mean loss of the global batch per step, the gradients of the first and the last step, the weights afterwards.

    Tensors go by their single-device names, and lie on the host.
    """

    losses: list[float] = field(default_factory=list)
    first_gradients: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers."""

    def add_step(self, loss: float, model: nn.Module) -> None:
        """Record a step that ``model`` has just been updated by."""
        self.losses.append(loss)
        if len(self.losses) == 1:
            self.first_gradients = _host_gradients(model)

    def finish(self, model: nn.Module) -> TrainingRecord:
        """Record the last step's gradients and the state after it."""
        self.gradients = _host_gradients(model)
        self.state = copy_to_host(model.state_dict())
        return self


def _host_gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return copy_to_host({name: parameter.grad for name, parameter in named if parameter.grad is not None})


def compare_training(
    ours: TrainingRecord, reference: TrainingRecord, check: VerificationCheck,
    rounding: Mapping[TensorKey, float] = MappingProxyType({}),
) -> ReferenceComparison:  # fmt: skip
    """Whether ``ours`` is what ``reference`` is.

    A tensor may differ by the check's tolerance, or by that of ``rounding`` where it is larger; both in the measure of
    ``max_relative_difference``.
    """

    def limit(kind: str, constant: float) -> Callable[[str], float]:
        return lambda name: max(constant, rounding.get((kind, name), 0.0))

    early = check.tolerance if check.first_tolerance is None else check.first_tolerance
    pairs = zip(_wide(ours.losses), _wide(reference.losses), strict=True)
    losses = [
        _Difference(
            f"loss of step {step}", max_relative_difference(a, b) if torch.isfinite(b) else math.inf,
            limit("loss", early if step == 1 else check.tolerance)(f"step {step}"),
        )
        for step, (a, b) in enumerate(pairs, start=1)
    ]  # fmt: skip
    assert losses, "trained for no step"
    first = _tensor_differences(
        "gradient of {} in step 1", ours.first_gradients, reference.first_gradients, limit("first gradient", early)
    )
    last = _tensor_differences(
        f"gradient of {{}} in step {check.steps}", ours.gradients, reference.gradients,
        limit("last gradient", check.gradient_tolerance),
    )  # fmt: skip
    after = f"weight of {{}} after {check.steps} step{'s' * (check.steps > 1)}"
    weights = _tensor_differences(after, ours.state, reference.state, limit("weight", check.tolerance), False)
    weights = weights if check.weights else []
    gradients = first + last if check.steps > 1 else first
    everything = [*losses, *gradients, *weights]
    # The first update spreads an error to all tensors. Only the gradients before it show where the error began.
    suspects = first if any(difference.too_far for difference in first) else everything
    worst = max(suspects, key=lambda difference: difference.part_of_tolerance)
    by_tensor = check.by_rounding and rounding
    return ReferenceComparison(
        passed=not any(difference.too_far for difference in everything),
        precision=check.precision,
        tolerance=_max_tolerance([*losses, *weights]) if by_tensor else check.tolerance,
        gradient_tolerance=_max_tolerance(gradients) if by_tensor else None,
        steps=check.steps,
        loss_max_rel=_max_finite(losses),
        gradient_max_rel=_max_finite(gradients),
        weight_max_rel=_max_finite(weights),
        worst=worst.name,
        worst_rel=_max_finite([worst]),
        worst_tolerance=worst.tolerance,
    )


def _wide(losses: list[float]) -> Tensor:
    return torch.tensor(losses, dtype=torch.float64)


def max_relative_difference(ours: Tensor, reference: Tensor) -> float:
    """max|a - b| / max(1, max|b|), the measure of every comparison.

    Infinite where the tensors have other shapes, or numbers that are not finite and differ: a mask may hold infinities.
    """
    a, b = widened(ours).cpu(), widened(reference).cpu()
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 0:
        return 0.0
    largest = (absolute_difference(a, b).max() / finite_part(b).abs().max().clamp(min=1.0)).item()
    if not is_exact(reference):
        return math.inf if math.isnan(largest) else largest
    # fp64 has not all integers.
    return 0.0 if torch.equal(ours.cpu(), reference.cpu()) else max(largest, torch.finfo(torch.float64).eps)


def is_exact(tensor: Tensor) -> bool:
    """Whether ``tensor`` holds booleans or integers, which no order of summation changes: they must be equal."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def widened(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in fp64, of a complex one real and imaginary parts."""
    detached = tensor.detach()
    return (torch.view_as_real(detached.resolve_conj()) if detached.is_complex() else detached).double()


def finite_part(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with 0 in place of infinities and NaN."""
    return tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def absolute_difference(a: Tensor, b: Tensor) -> Tensor:
    """|a - b|, 0 where both are the same infinity."""
    return (a - b).abs().masked_fill(a == b, 0.0)


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that no later step changes."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether no number overflowed."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def has_nan(tensors: Mapping[str, Tensor]) -> bool:
    """Whether one is no number. Infinities may belong to a model: masks hold them."""
    return any(bool(torch.isnan(tensor).any()) for tensor in tensors.values())


class _Difference(NamedTuple):
    name: str
    value: float
    tolerance: float

    @property
    def too_far(self) -> bool:
        return not (self.value <= self.tolerance and math.isfinite(self.value))

    @property
    def part_of_tolerance(self) -> float:
        if self.tolerance > 0 or self.value == 0:
            return self.value / (self.tolerance or 1.0)
        return math.inf


def _tensor_differences(
    text: str, ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], tolerance: Callable[[str], float],
    are_gradients: bool = True,
) -> list[_Difference]:  # fmt: skip
    """Compare every tensor of either side; the difference is infinite where the other side lacks it.

    A gradient of zeros is equal to none: some libraries reduce zeros for a parameter that no output depends on.
    ``text`` names a tensor in messages, ``tolerance`` gives the largest difference of the tensor of a name.
    """
    differences = []
    for name in dict.fromkeys([*reference, *ours]):
        pair = [side[name] for side in (ours, reference) if name in side]
        is_comparable = len(pair) == 2 and (not are_gradients or bool(torch.isfinite(pair[1]).all()))
        value = max_relative_difference(*pair) if is_comparable else math.inf
        if len(pair) == 1 and are_gradients and not pair[0].any():
            value = 0.0
        differences.append(_Difference(text.format(name), value, 0.0 if is_exact(pair[-1]) else tolerance(name)))
    return differences


def _max_tolerance(differences: list[_Difference]) -> float:
    return max((difference.tolerance for difference in differences), default=0.0)


def _max_finite(differences: list[_Difference]) -> float | None:
    """Return the largest difference; ``None`` if it is infinite or there is none."""
    largest = max((difference.value for difference in differences), default=math.inf)
    return largest if math.isfinite(largest) else None


def train_reference(
    model: nn.Module, spec: RunSpec, feed: DataFeed, steps: Iterable[int], tick: Callable[[], None] = lambda: None,
    backwards: bool = False,
) -> TrainingRecord:  # fmt: skip
    """Train ``model`` in place on the steps numbered ``steps`` as ``spec.dp_degree`` replicas would.

    Each replica's share (and each micro-batch of it) is forwarded by itself, so that BatchNorm sees what it would see
    there; the losses' sum is divided by the true global sample count; one update follows. Running statistics are those
    of replica 0. ``tick`` is called after every replica. ``backwards`` sums the replicas from the last one on: what
    differs then is rounding alone.
    """
    model.to(feed.device).train()
    optimizer = make_optimizer(spec, model)
    arithmetic = MixedPrecision(spec.precision, feed.device)
    trained = TrainingRecord()
    order = range(feed.replicas)[:: -1 if backwards else 1]
    for step in steps:
        loss = 0.0
        summed: dict[nn.Parameter, Tensor] = {}
        for replica in order:
            # Summed replica by replica, as an all_reduce does: of two replicas the sum is the same to the last bit.
            optimizer.zero_grad(set_to_none=True)
            loss += _accumulate_replica(model, feed, step, replica, arithmetic)
            for parameter in model.parameters():
                if parameter.grad is not None and parameter in summed:
                    summed[parameter].add_(parameter.grad)
                elif parameter.grad is not None:
                    summed[parameter] = parameter.grad
            feed.free()
            tick()
        for parameter in model.parameters():
            parameter.grad = summed.get(parameter)
        arithmetic.update(optimizer)
        trained.add_step(loss, model)
    return trained.finish(model)


ReferenceTrainer = Callable[..., TrainingRecord]
"""A training in one process that a strategy's run must equal; arguments are those of ``train_reference``."""


@contextmanager
def restored_buffers(model: nn.Module, restore: bool) -> Iterator[None]:
    """Undo changes of the model's buffers (running statistics) at the end, if ``restore``."""
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()} if restore else {}
    yield
    for name, buffer in model.named_buffers():
        if name in saved:
            buffer.data.copy_(saved[name])


def _accumulate_replica(model: nn.Module, feed: DataFeed, step: int, replica: int, arithmetic: MixedPrecision) -> float:
    """Add the gradients of a replica's share and return its part of the loss; buffers become those of replica 0."""
    inputs, labels = feed.batch(step, replica)
    total = 0.0
    with restored_buffers(model, restore=replica > 0):
        for part in feed.micro_batch_ranges(step, replica):
            chosen = slice(part.start, part.stop)
            with arithmetic.autocast():
                outputs = model(inputs[chosen])
            loss = summed_loss(outputs, labels[chosen]) / feed.global_count(step)
            arithmetic.backward(loss)
            total += loss.item()
    return total
