"""``verify = true``: a few untimed steps by the strategy and by its reference, compared tensor by tensor."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.results.schema import ReferenceComparison, VerificationResult
from hpcbench.worker.data.feed import DataFeed, DataSource
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.distributed.rendezvous import ControlChannel
from hpcbench.worker.failure import is_out_of_memory
from hpcbench.worker.model_execution import choose_convolution_algorithms, wrap_blocks
from hpcbench.worker.models.build import build_model
from hpcbench.worker.shutdown import StopController, Stopped
from hpcbench.worker.strategy import Strategy, resolve_runtime
from hpcbench.worker.verification.reference import (
    PERTURBATION_MARGIN,
    VERIFICATION_LEARNING_RATE,
    TensorKey,
    TrainingRecord,
    VerificationCheck,
    all_finite,
    compare_training,
    copy_to_host,
    has_nan,
    lossy_tolerance,
    max_relative_difference,
    train_reference,
    verification_checks,
)
from hpcbench.worker.verification.reference_pipelines import resolve_reference_trainer
from hpcbench.worker.verification.rounding import (
    AS_IT_IS,
    FACTOR,
    ORDERS,
    OTHER_KERNELS,
    UNIT,
    bounds,
    distances,
    result_tolerances,
)

_PROGRESS_KEY = "verify/progress"
_DONE_KEY = "verify/done/{}"
"""Key of each attempt; its value is ``_AGAIN`` where another attempt follows."""
_AGAIN = "again"

REPLICAS_BACKWARDS = "replicas backwards"
"""The order in which the data-parallel reference adds its replicas' gradients from the last one on."""

MAX_SEEDS = 3
"""Maximum number of seeds for a comparison in a run's own low precision.

One ReLU or max pool that decides otherwise because of rounding moves a gradient by some hundredths, on one device as
well, and no bound predicts which training has one. A mistake appears with every seed.
"""


class VerificationInputs(NamedTuple):
    """The folders of the run's samples and of a custom model."""

    source: DataSource
    model_folder: str | None


def verify_run(
    spec: RunSpec, context: RankContext, inputs: VerificationInputs, stop: StopController,
    channel: ControlChannel | None, wait_s: float,
) -> VerificationResult | None:  # fmt: skip
    """Train with a fresh instance of the run's strategy and, on rank 0, the reference; compare.

    Called on every rank, after the timed steps. Rank 0 returns what it found; the others wait for it and return
    ``None``. Raises ``Stopped`` if the run is stopped meanwhile.

    cuDNN's search for algorithms is off meanwhile: two trainings could choose different ones by chance, and the bound
    is the rounding of one device's own algorithms.
    """
    by_trial = torch.backends.cudnn.benchmark
    choose_convolution_algorithms(False, context.device)
    comparer = ReferenceComparer(spec, context.device, inputs, _progress_tick(stop, channel))
    try:
        for attempt in range(MAX_SEEDS):
            chosen = msgspec.structs.replace(spec, seed=spec.seed + attempt)
            checks = [check for check in verification_checks(spec) if attempt == 0 or check.by_rounding]
            ours = [_train_like_run(chosen, check, context, inputs, stop) for check in checks]
            _free_memory(context.device)
            if context.rank == 0:
                again = comparer.compare_all(chosen, checks, ours) and attempt + 1 < MAX_SEEDS
                if channel is not None:
                    channel.publish(_DONE_KEY.format(attempt), _AGAIN if again else "done")
            else:
                assert channel is not None, "a second rank without a channel"
                done_key, awaited = _DONE_KEY.format(attempt), "rank 0 to train the reference of verify"
                channel.wait_while_progressing(_PROGRESS_KEY, done_key, wait_s, stop.raise_if_stopped, awaited)
                again = channel.store.get(done_key).decode() == _AGAIN
            if not again:
                break
        return comparer.result() if context.rank == 0 else None
    except Stopped as stopped:
        message = f"{stopped}, while it was being verified: all steps had been timed"
        raise Stopped(stopped.status, message) from stopped
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        hint = "the reference is the whole model in fp64 on one device: verify with a smaller batch_size or input_size"
        raise WorkerError(f"the run was measured, but verifying it needs more memory: {error}", hint=hint) from error
    finally:
        choose_convolution_algorithms(by_trial, context.device)


def train_strategy(
    strategy: Strategy, feed: DataFeed, steps: tuple[int, ...], context: RankContext,
    check: Callable[[], None] = lambda: None,
) -> TrainingRecord:  # fmt: skip
    """Train ``steps`` with a strategy that is set up; return tensors on rank 0 alone. Called on every rank."""
    trained, parts = TrainingRecord(), []

    def kept(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return copy_to_host(tensors) if context.rank == 0 else {}

    feed.prepare(strategy.replica)
    strategy.announce(steps)
    for step in steps:
        check()
        parts.append(strategy.step(feed, step).double())
        if step == steps[0]:
            trained.first_gradients = kept(strategy.gradients())
    losses = torch.stack(parts)
    if context.world_size > 1:
        dist.all_reduce(losses, group=context.group)
    trained.losses = losses.tolist()
    trained.gradients = kept(strategy.gradients())
    trained.state = kept(strategy.weights())
    return trained


def compared_steps(spec: RunSpec, feed: DataFeed, count: int) -> tuple[int, ...]:
    """The run's first ``count`` steps; the last of them is its first step with a partial batch, where it has one."""
    partial = feed.steps_per_epoch - 1
    run_steps = spec.warmup_steps + spec.steps
    if count <= partial < run_steps and feed.global_count(partial) < feed.global_batch_size:
        return (*range(count - 1), partial)
    return tuple(range(count))


def comparison_spec(spec: RunSpec, precision: str) -> RunSpec:
    """``spec`` in that arithmetic, at the learning rate of all comparisons, its model without dropout."""
    options = dict(spec.model_options)
    options |= {name: type(value)(0) for name, value in options.items() if _is_dropout_option(name, value)}
    rate = VERIFICATION_LEARNING_RATE
    return msgspec.structs.replace(spec, precision=precision, learning_rate=rate, model_options=options)


def _is_dropout_option(name: str, value: object) -> bool:
    return "dropout" in name and isinstance(value, int | float) and value > 0


def disable_dropout(model: nn.Sequential) -> bool:
    """Set every probability of dropping something to 0, in place; whether there was one.

    Layers keep it under ``p``, attention (torch's and others') in an attribute of its own.
    """
    had_dropout = False
    for module in model.modules():
        is_layer = any(word in type(module).__name__.lower() for word in ("dropout", "droppath", "stochasticdepth"))
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and value > 0 and ("drop" in name or (is_layer and name == "p")):
                setattr(module, name, 0.0)
                had_dropout = True
    return had_dropout


def _train_like_run(
    spec: RunSpec, check: VerificationCheck, context: RankContext, inputs: VerificationInputs, stop: StopController
) -> TrainingRecord:
    chosen, model, _ = _comparison_model(spec, check, inputs)
    fresh: Strategy = resolve_runtime(chosen.strategy)()
    fresh.setup(wrap_blocks(model, chosen), chosen, context)
    with closing(make_feed(chosen, context.device, inputs.source)) as feed:
        return train_strategy(fresh, feed, compared_steps(chosen, feed, check.steps), context, stop.raise_if_stopped)


def _comparison_model(
    spec: RunSpec, check: VerificationCheck, inputs: VerificationInputs
) -> tuple[RunSpec, nn.Sequential, bool]:
    """Return the spec and the model of one comparison, and whether the model had dropout."""
    chosen = comparison_spec(spec, check.precision)
    model = build_model(chosen, inputs.model_folder)
    return chosen, model, disable_dropout(model)


def _progress_tick(stop: StopController, channel: ControlChannel | None) -> Callable[[], None]:
    """Return what is called after every share of a step of the reference: the other ranks see that it gets on."""
    shares = itertools.count(1)

    def tick() -> None:
        stop.raise_if_stopped()
        if channel is not None:
            channel.publish(_PROGRESS_KEY, f"{next(shares)} shares of a step are done")

    return tick


class ReferenceComparer:
    """Trains what a run is compared with, on rank 0's device alone, and lists in ``notes`` what was compared."""

    def __init__(
        self, spec: RunSpec, device: torch.device, inputs: VerificationInputs, tick: Callable[[], None]
    ) -> None:
        self.spec, self._device, self._inputs, self._tick = spec, device, inputs, tick
        self.notes: list[str] = []
        self._comparisons: dict[str, ReferenceComparison] = {}
        """Comparisons by precision, the decisive one first."""
        self._may_pass = True
        """Whether a failed comparison may pass with another seed."""

    def compare_all(self, spec: RunSpec, checks: list[VerificationCheck], ours: list[TrainingRecord]) -> bool:
        """Compare the trainings ``ours`` of ``spec``, the run with a seed of its own; each is freed afterwards.

        Returns whether another seed may pass: only tensors of a low precision differ too much, and the first loss
        agrees, which no decision of a single ReLU moves.
        """
        self.spec = spec
        for check in checks:
            trained = ours.pop(0)
            earlier = self._comparisons.get(check.precision)
            if earlier is None or not earlier.passed:
                self._comparisons[check.precision] = self.compare(trained, check)
                self._may_pass &= check.by_rounding or self._comparisons[check.precision].passed
        return self._may_pass and not all(comparison.passed for comparison in self._comparisons.values())

    def result(self) -> VerificationResult:
        """The decisive comparison, with that of the run's own precision."""
        comparisons = list(self._comparisons.values())
        fields = msgspec.structs.asdict(comparisons[0])
        fields["passed"] = all(comparison.passed for comparison in comparisons)
        own_precision = comparisons[1] if len(comparisons) > 1 else None
        return VerificationResult(**fields, own_precision=own_precision, notes=self.notes)

    def compare(self, ours: TrainingRecord, check: VerificationCheck) -> ReferenceComparison:
        """Compare ``ours`` with the reference of ``check``.

        Some networks (BatchNorm over two samples) amplify a difference in the last bit beyond the tolerance within five
        steps, even in fp64. A difference after the first step is therefore compared with what the reference itself
        makes of a change in the last bit.
        """
        reference = self._train(check)
        if check.by_rounding:
            return self._compare_by_rounding(ours, reference, check)
        comparison = compare_with_notes(ours, reference, check, self.notes)
        if comparison.passed or check.steps == 1 or has_nan(reference.state):
            return comparison
        itself = compare_training(self._train(check, perturbed=True), reference, check._replace(first_tolerance=None))
        from_gradients = (itself.gradient_max_rel or 0.0) * VERIFICATION_LEARNING_RATE
        grown = max(itself.loss_max_rel or 0.0, itself.weight_max_rel or 0.0, from_gradients)
        if PERTURBATION_MARGIN * grown <= check.tolerance:
            return comparison
        wider = check._replace(tolerance=PERTURBATION_MARGIN * grown)
        self.notes.append(
            f"{check.precision}: of a change in the last bit of its weights the reference itself makes {grown:.1e} in "
            f"{check.steps} steps, so {wider.tolerance:.1e} is allowed there; in the first step {check.first_tolerance}"
        )
        return compare_training(ours, reference, wider)

    def _compare_by_rounding(
        self, ours: TrainingRecord, reference: TrainingRecord, check: VerificationCheck
    ) -> ReferenceComparison:
        """Compare within the bound of one device's own rounding.

        Another order only ever raises a bound, so orders are trained one by one until ``ours`` is within it, or none
        is left: most runs need none but the reference. A run that is wrong in fp64 gets no other.
        """
        exact = self._train(check._replace(precision="fp64"))
        samples, orders, notes = [distances(reference, exact)], [AS_IT_IS], list[str]()
        remaining = self._other_orders() if self._may_pass else []
        while True:
            allowed = result_tolerances(bounds(samples, UNIT[check.precision]), reference)
            comparison = compare_with_notes(ours, reference, check, notes := [], allowed)
            if comparison.passed or not remaining or has_nan(reference.state):
                break
            order = remaining.pop(0)
            try:
                samples.append(distances(self._train(check, order=order), exact))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.notes.append(f"{check.precision}: {order} left out of the orders of summation: out of memory")
                continue
            orders.append(order)
        self.notes += notes
        self.notes.append(
            f"{check.precision}, seed {self.spec.seed}: allowed is {FACTOR:g} times the distance of one device from "
            f"fp64, its sums {', '.join(orders)}"
        )
        if not comparison.passed:
            losses = [torch.tensor(record.losses[:1], dtype=torch.float64) for record in (ours, reference)]
            self._may_pass &= max_relative_difference(*losses) <= max(check.tolerance, allowed["loss", "step 1"])
            differs = "is not finite" if comparison.worst_rel is None else f"differs by {comparison.worst_rel:.1e}"
            self.notes.append(
                f"{check.precision}, seed {self.spec.seed}: the {comparison.worst} {differs}; allowed: "
                f"{comparison.worst_tolerance:.1e}"
            )
        return msgspec.structs.replace(comparison, orders=orders)

    def _other_orders(self) -> list[str]:
        orders = [order for order in ORDERS if order != AS_IT_IS]
        if self._device.type == "cuda":
            # cuDNN chooses by shapes, and a rank's are others than one device's: Winograd here, a product there.
            orders.sort(key=lambda order: order != OTHER_KERNELS)
        is_backwards_possible = resolve_reference_trainer(self.spec.strategy) is train_reference
        return [*orders, REPLICAS_BACKWARDS] if is_backwards_possible and self.spec.dp_degree > 1 else orders

    def _train(self, check: VerificationCheck, perturbed: bool = False, order: str = AS_IT_IS) -> TrainingRecord:
        chosen, model, had_dropout = _comparison_model(self.spec, check, self._inputs)
        if perturbed:
            perturb_last_bit(model)
        train = resolve_reference_trainer(chosen.strategy)
        if order == REPLICAS_BACKWARDS:
            train = partial(train, backwards=True)
        with closing(make_feed(chosen, self._device, self._inputs.source)) as feed, ORDERS.get(order, nullcontext)():
            steps = compared_steps(chosen, feed, check.steps)
            trained = train(model, chosen, feed, steps, self._tick)
            if not self.notes:
                self.notes += _verification_notes(self.spec, feed, steps, had_dropout)
        del model, feed
        _free_memory(self._device)
        return trained


def perturb_last_bit(model: nn.Module) -> None:
    """Change every parameter in its last bit, up or down by a rule."""
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, model.parameters()):
            flat = torch.arange(parameter.numel()).reshape(parameter.shape)
            signs = torch.where(flat % 3 == 0, -1.0, 1.0).to(parameter)
            parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)


def compare_with_notes(
    ours: TrainingRecord, reference: TrainingRecord, check: VerificationCheck, notes: list[str],
    rounding: Mapping[TensorKey, float] = MappingProxyType({}),
) -> ReferenceComparison:  # fmt: skip
    """Compare without the tensors that the arithmetic makes meaningless; ``notes`` gets these with the reason."""
    if check.precision == "fp16" and not (all_finite(ours.gradients) and all_finite(reference.gradients)):
        cause = "the first step overflowed, as it may until the loss scale has settled"
        notes.append(f"fp16: {cause}; only losses compared")
        ours, reference = TrainingRecord(ours.losses), TrainingRecord(reference.losses)
    if not check.weights:
        notes.append(f"{check.precision}: no weights compared, since adam divides rounding by itself; in fp64 they are")
        ours, reference = replace(ours, state={}), replace(reference, state={})
    comparison = compare_training(ours, reference, check, rounding)
    if has_nan(reference.state) or not all_finite(reference.gradients):
        notes.append(f"{check.precision}: the reference itself is not finite: the comparison is impossible")
    return comparison


def _verification_notes(spec: RunSpec, feed: DataFeed, steps: tuple[int, ...], had_dropout: bool) -> list[str]:
    """Return the text of what was compared."""
    uneven = [step for step in steps if feed.global_count(step) < feed.global_batch_size]
    text = f"steps {', '.join(map(str, steps))} at learning rate {VERIFICATION_LEARNING_RATE:g}, {spec.optimizer}"
    if uneven:
        text += f"; step {uneven[0]} has {feed.global_count(uneven[0])} of {feed.global_batch_size} samples"
    notes = [text, f"reference: {resolve_runtime(spec.strategy).reference}, {feed.replicas} replicas in one process"]
    if had_dropout or any(_is_dropout_option(name, value) for name, value in spec.model_options.items()):
        notes.append("dropout set to 0")
    if lossy := lossy_tolerance(spec):
        notes.append(f"gradients of this strategy with these options are not exact: its own bound is {lossy:g}")
    if spec.devices == 1:
        notes.append("on one device the reference is the same training again: that it repeats itself was checked")
    return notes


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
