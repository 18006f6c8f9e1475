"""``verify = true``: a few untimed steps by the strategy and by its reference, compared tensor by tensor."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.catalog import get_strategy
from hpcbench.results.schema import ReferenceComparison, VerificationResult
from hpcbench.worker.data.feed import DataFeed, DataSource
from hpcbench.worker.data.open_feed import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.distributed.rendezvous import ControlChannel
from hpcbench.worker.failure import is_out_of_memory
from hpcbench.worker.model_execution import wrap_blocks
from hpcbench.worker.models.build import build_model
from hpcbench.worker.shutdown import StopController, Stopped
from hpcbench.worker.strategies.base import Strategy, resolve_runtime
from hpcbench.worker.verification.reference import (
    PERTURBATION_MARGIN,
    VERIFICATION_LEARNING_RATE,
    TrainingRecord,
    VerificationCheck,
    all_finite,
    compare_training,
    copy_to_host,
    lossy_tolerance,
    resolve_reference_trainer,
    verification_checks,
)

_PROGRESS_KEY = "verify/progress"
_DONE_KEY = "verify/done"


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
    """
    try:
        ours = [_train_like_run(spec, check, context, inputs, stop) for check in verification_checks(spec)]
        _free_memory(context.device)
        if context.rank == 0:
            comparer = ReferenceComparer(spec, context.device, inputs, _progress_tick(stop, channel))
            return _verification_result(comparer, ours, channel)
        assert channel is not None, "a second rank without a channel"
        channel.wait_while_progressing(
            _PROGRESS_KEY, _DONE_KEY, wait_s, stop.raise_if_stopped, "rank 0 to train the reference of verify"
        )
    except Stopped as stopped:
        message = f"{stopped}, while it was being verified: all steps had been timed"
        raise Stopped(stopped.status, message) from stopped
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        hint = "the reference is the whole model in fp64 on one device: verify with a smaller batch_size or input_size"
        raise WorkerError(f"the run was measured, but verifying it needs more memory: {error}", hint=hint) from error
    return None


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
    own = spec.warmup_steps + spec.steps
    if count <= partial < own and feed.global_count(partial) < feed.global_batch_size:
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


def _verification_result(
    reference: ReferenceComparer, ours: list[TrainingRecord], channel: ControlChannel | None
) -> VerificationResult:
    checks = verification_checks(reference.spec)
    comparisons = [reference.compare(trained, check) for check, trained in zip(checks, ours, strict=True)]
    if channel is not None:
        channel.publish(_DONE_KEY, "1")
    fields = msgspec.structs.asdict(comparisons[0])
    fields["passed"] = all(comparison.passed for comparison in comparisons)
    own_precision = comparisons[1] if len(comparisons) > 1 else None
    return VerificationResult(**fields, own_precision=own_precision, notes=reference.notes)


class ReferenceComparer:
    """Trains what a run is compared with, on rank 0's device alone, and says in ``notes`` what was compared."""

    def __init__(
        self, spec: RunSpec, device: torch.device, inputs: VerificationInputs, tick: Callable[[], None]
    ) -> None:
        self.spec, self._device, self._inputs, self._tick = spec, device, inputs, tick
        self.notes: list[str] = []

    def compare(self, ours: TrainingRecord, check: VerificationCheck) -> ReferenceComparison:
        """Compare ``ours`` with the reference of ``check``.

        Some networks (BatchNorm over two samples) make of the last bit, within the steps, more than is allowed even
        in fp64. So what differs too much after the first step is measured by what the reference makes of it.
        """
        reference = self._train(check)
        comparison = compare_with_notes(ours, reference, check, self.notes)
        if comparison.passed or check.steps == 1 or not all_finite(reference.state):
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

    def _train(self, check: VerificationCheck, perturbed: bool = False) -> TrainingRecord:
        chosen, model, had_dropout = _comparison_model(self.spec, check, self._inputs)
        if perturbed:
            perturb_last_bit(model)
        with closing(make_feed(chosen, self._device, self._inputs.source)) as feed:
            steps = compared_steps(chosen, feed, check.steps)
            trained = resolve_reference_trainer(chosen.strategy)(model, chosen, feed, steps, self._tick)
            if not self.notes:
                self.notes += _verification_notes(self.spec, feed, steps, had_dropout)
        del model, feed
        _free_memory(self._device)
        return trained


def perturb_last_bit(model: nn.Module) -> None:
    """Change every parameter in its last bit, up or down by a rule."""
    with torch.no_grad():
        for parameter in model.parameters():
            flat = torch.arange(parameter.numel()).reshape(parameter.shape)
            signs = torch.where(flat % 3 == 0, -1.0, 1.0).to(parameter)
            parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)


def compare_with_notes(
    ours: TrainingRecord, reference: TrainingRecord, check: VerificationCheck, notes: list[str]
) -> ReferenceComparison:
    """Compare without the tensors that the arithmetic makes meaningless; ``notes`` gets these with the reason."""
    if check.precision == "fp16" and not (all_finite(ours.gradients) and all_finite(reference.gradients)):
        cause = "the first step overflowed, as it may until the loss scale has settled"
        notes.append(f"fp16: {cause}; only losses compared")
        ours, reference = TrainingRecord(ours.losses), TrainingRecord(reference.losses)
    if not check.weights:
        notes.append(f"{check.precision}: no weights compared, since adam divides rounding by itself; in fp64 they are")
        ours, reference = replace(ours, state={}), replace(reference, state={})
    comparison = compare_training(ours, reference, check)
    if not (all_finite(reference.state) and all_finite(reference.gradients)):
        notes.append(f"{check.precision}: the reference itself is not finite: nothing can be told from it")
    return comparison


def _verification_notes(spec: RunSpec, feed: DataFeed, steps: tuple[int, ...], had_dropout: bool) -> list[str]:
    """Return the text of what was compared."""
    uneven = [step for step in steps if feed.global_count(step) < feed.global_batch_size]
    text = f"steps {', '.join(map(str, steps))} at learning rate {VERIFICATION_LEARNING_RATE:g}, {spec.optimizer}"
    if uneven:
        text += f"; step {uneven[0]} has {feed.global_count(uneven[0])} of {feed.global_batch_size} samples"
    notes = [text, f"reference: {get_strategy(spec.strategy).reference}, {feed.replicas} replicas in one process"]
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
