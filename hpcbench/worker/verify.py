"""``verify = true``: a few steps once more, untimed, as the strategy trains and as one process must, compared."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.bounds import CHAOS_MARGIN, LEARNING_RATE, Check, checks, lossy_bound
from hpcbench.parallel.catalog import resolve_reference, resolve_runtime, strategy
from hpcbench.results.schema import Comparison, Verification
from hpcbench.worker.blocks import arranged
from hpcbench.worker.compare import Trained, all_finite, compare, on_host
from hpcbench.worker.data.feed import Feed, Source, make_feed
from hpcbench.worker.failure import is_out_of_memory
from hpcbench.worker.link import Link
from hpcbench.worker.models.build import build_model
from hpcbench.worker.stop import Stop, Stopped
from hpcbench.worker.strategies.base import Place, Strategy

_PROGRESS = "verify/progress"
_DONE = "verify/done"


class Given(NamedTuple):
    """Where the run's samples and a model of the user's own come from."""

    source: Source
    model_folder: str | None


def verify(
    spec: RunSpec, place: Place, given: Given, stop: Stop, link: Link | None, wait_s: float
) -> Verification | None:
    """Train with a fresh instance of the run's strategy and, on rank 0, the reference; compare.

    Called on every rank, after the timed steps. Rank 0 returns what it found; the others wait for it and return
    ``None``. ``Stopped`` where the run is told to end meanwhile.
    """
    try:
        ours = [_as_the_run(spec, check, place, given, stop) for check in checks(spec)]
        _free(place.device)
        if place.rank == 0:
            return _judge(Reference(spec, place.device, given, _tick(stop, link)), ours, link)
        assert link is not None, "a second rank without a link"
        link.follow(_PROGRESS, _DONE, wait_s, stop.check, "rank 0 to train the reference of verify")
    except Stopped as told:
        raise Stopped(told.status, f"{told}, while it was being verified: all steps had been timed") from told
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise WorkerError(
            f"the run was measured, but verifying it needs more memory: {error}",
            hint="the reference is the whole model in fp64 on one device: verify with a smaller batch_size or "
            "input_size",
        ) from error
    return None


def train(
    strategy: Strategy, feed: Feed, steps: tuple[int, ...], place: Place, check: Callable[[], None] = lambda: None
) -> Trained:
    """What ``strategy``, which is set up, makes of ``steps``; tensors on rank 0 alone. Called on every rank."""
    trained, parts = Trained(), []
    feed.prepare(strategy.replica)
    strategy.announce(steps)
    for step in steps:
        check()
        parts.append(strategy.step(feed, step).double())
        if step == steps[0]:
            trained.first_gradients = _kept(strategy.gradients(), place)
    losses = torch.stack(parts)
    if place.world_size > 1:
        dist.all_reduce(losses, group=place.group)
    trained.losses = losses.tolist()
    trained.gradients = _kept(strategy.gradients(), place)
    trained.state = _kept(strategy.weights(), place)
    return trained


def steps_to_compare(spec: RunSpec, feed: Feed, count: int) -> tuple[int, ...]:
    """The run's first ``count`` steps; the last of them is its first step with a partial batch, where it has one."""
    partial = feed.steps_per_epoch - 1
    own = spec.warmup_steps + spec.steps
    if count <= partial < own and feed.global_count(partial) < feed.global_batch_size:
        return (*range(count - 1), partial)
    return tuple(range(count))


def for_comparison(spec: RunSpec, precision: str) -> RunSpec:
    """``spec`` in that arithmetic, at the learning rate of all comparisons, its model without dropout."""
    options = {name: type(value)(0) if _drops(name, value) else value for name, value in spec.model_options.items()}
    return msgspec.structs.replace(spec, precision=precision, learning_rate=LEARNING_RATE, model_options=options)


def _drops(name: str, value: object) -> bool:
    return "dropout" in name and isinstance(value, int | float) and value > 0


def without_dropout(model: nn.Sequential) -> bool:
    """Set every probability of dropping something to 0, in place; whether there was one.

    Layers keep it under ``p``, attention (torch's and others') in an attribute of its own.
    """
    found = False
    for module in model.modules():
        is_layer = any(word in type(module).__name__.lower() for word in ("dropout", "droppath", "stochasticdepth"))
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and value > 0 and ("drop" in name or (is_layer and name == "p")):
                setattr(module, name, 0.0)
                found = True
    return found


def _as_the_run(spec: RunSpec, check: Check, place: Place, given: Given, stop: Stop) -> Trained:
    chosen = for_comparison(spec, check.precision)
    model = build_model(chosen, given.model_folder)
    without_dropout(model)
    fresh: Strategy = resolve_runtime(chosen.strategy)()
    fresh.setup(arranged(model, chosen), chosen, place)
    with closing(make_feed(chosen, place.device, given.source)) as feed:
        return train(fresh, feed, steps_to_compare(chosen, feed, check.steps), place, stop.check)


def _tick(stop: Stop, link: Link | None) -> Callable[[], None]:
    """Called after every share of a step of the reference: the others are told that it gets on."""
    told = 0

    def tick() -> None:
        nonlocal told
        stop.check()
        told += 1
        if link is not None:
            link.post(_PROGRESS, f"{told} shares of a step are done")

    return tick


def _judge(reference: Reference, ours: list[Trained], link: Link | None) -> Verification:
    found = [reference.judge(trained, check) for check, trained in zip(checks(reference.spec), ours, strict=True)]
    if link is not None:
        link.post(_DONE, "1")
    first, *others = found
    passed = all(one.passed for one in found)
    return Verification(
        **{**msgspec.structs.asdict(first), "passed": passed},
        own_precision=others[0] if others else None,
        notes=reference.notes,
    )


class Reference:
    """Trains what a run is compared with, on rank 0's device alone, and says in ``notes`` what was compared."""

    def __init__(self, spec: RunSpec, device: torch.device, given: Given, tick: Callable[[], None]) -> None:
        self.spec, self._device, self._given, self._tick = spec, device, given, tick
        self.notes: list[str] = []

    def judge(self, ours: Trained, check: Check) -> Comparison:
        """Compare ``ours`` with the reference of ``check``.

        Some networks (BatchNorm over two samples) make of the last bit, within the steps, more than is allowed even
        in fp64. So what differs too much after the first step is measured by what the reference makes of it.
        """
        reference = self._train(check)
        found = judged(ours, reference, check, self.notes)
        if found.passed or check.steps == 1 or not all_finite(reference.state):
            return found
        itself = compare(self._train(check, shaken=True), reference, check._replace(first_tolerance=None))
        grown = max(itself.loss_max_rel or 0.0, itself.weight_max_rel or 0.0)
        grown = max(grown, (itself.gradient_max_rel or 0.0) * LEARNING_RATE)
        if CHAOS_MARGIN * grown <= check.tolerance:
            return found
        wider = check._replace(tolerance=CHAOS_MARGIN * grown)
        self.notes.append(
            f"{check.precision}: of a change in the last bit of its weights the reference itself makes {grown:.1e} in "
            f"{check.steps} steps, so {wider.tolerance:.1e} is allowed there; in the first step {check.first_tolerance}"
        )
        return compare(ours, reference, wider)

    def _train(self, check: Check, shaken: bool = False) -> Trained:
        chosen = for_comparison(self.spec, check.precision)
        model = build_model(chosen, self._given.model_folder)
        had_dropout = without_dropout(model)
        if shaken:
            shake(model)
        with closing(make_feed(chosen, self._device, self._given.source)) as feed:
            steps = steps_to_compare(chosen, feed, check.steps)
            trained: Trained = resolve_reference(chosen.strategy)(model, chosen, feed, steps, self._tick)
            if not self.notes:
                self.notes += _notes(self.spec, feed, steps, had_dropout)
        del model, feed
        _free(self._device)
        return trained


def shake(model: nn.Module) -> None:
    """Change every parameter in its last bit, up or down by a rule."""
    with torch.no_grad():
        for parameter in model.parameters():
            flat = torch.arange(parameter.numel()).reshape(parameter.shape)
            signs = torch.where(flat % 3 == 0, -1.0, 1.0).to(parameter)
            parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)


def judged(ours: Trained, reference: Trained, check: Check, notes: list[str]) -> Comparison:
    """As ``compare``, without what the arithmetic makes meaningless; ``notes`` gets what was left out, and why."""
    if check.precision == "fp16" and not (all_finite(ours.gradients) and all_finite(reference.gradients)):
        notes.append(
            "fp16: the first step overflowed, as it may until the loss scale has settled; only losses compared"
        )
        ours, reference = Trained(ours.losses), Trained(reference.losses)
    if not check.weights:
        notes.append(f"{check.precision}: no weights compared, since adam divides rounding by itself; in fp64 they are")
        ours, reference = replace(ours, state={}), replace(reference, state={})
    found = compare(ours, reference, check)
    if not (all_finite(reference.state) and all_finite(reference.gradients)):
        notes.append(f"{check.precision}: the reference itself is not finite: nothing can be told from it")
    return found


def _notes(spec: RunSpec, feed: Feed, steps: tuple[int, ...], had_dropout: bool) -> list[str]:
    """What was compared, in words."""
    uneven = [step for step in steps if feed.global_count(step) < feed.global_batch_size]
    text = f"steps {', '.join(str(step) for step in steps)} at learning rate {LEARNING_RATE:g}, {spec.optimizer}"
    if uneven:
        text += f"; step {uneven[0]} has {feed.global_count(uneven[0])} of {feed.global_batch_size} samples"
    notes = [text, f"reference: {strategy(spec.strategy).reference}, {feed.replicas} replicas in one process"]
    if had_dropout or any(_drops(name, value) for name, value in spec.model_options.items()):
        notes.append("dropout set to 0")
    if lossy := lossy_bound(spec):
        notes.append(f"gradients of this strategy with these options are not exact: its own bound is {lossy:g}")
    if spec.devices == 1:
        notes.append("on one device the reference is the same training again: that it repeats itself was checked")
    return notes


def _kept(tensors: dict[str, Tensor], place: Place) -> dict[str, Tensor]:
    return on_host(tensors) if place.rank == 0 else {}


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
