"""Times of every block of a model, forward and backward as wholes, on ranks that compute side by side.

All blocks run forward and then backward, each from its own stored input: once with a clock around each, once without,
so that what the machine holds back between them is in a time of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.results.probe_records import BlockProbe, OverlapProbe, UpdateProbe
from hpcbench.strategies.traffic import MessageShape
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.measure.clocks import CallTimer, reading_statistics, relative_spread, synchronize
from hpcbench.worker.microbench.message_probes import (
    CollectiveCall,
    ProbeGroup,
    make_collective,
    overlap_record,
    read_overlap,
)
from hpcbench.worker.strategy import DataParallelStrategy, optimizer_class_and_arguments

_MIN_ROUNDS, _MAX_ROUNDS = 3, 60


class _ReplayedTensor(torch.autograd.Function):
    """A tensor that is there already, as if it had just been computed: nothing is done in its backward pass."""

    @staticmethod
    def forward(_ctx: Any, _trigger: Tensor, holder: list[Tensor]) -> Tensor:
        return holder[0].detach()

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, _gradient: Tensor) -> tuple[None, None]:
        return None, None


def replay_tensor(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that hands ``tensor`` over, with a gradient wanted, as another layer would."""
    trigger, holder = torch.zeros((), requires_grad=True), [tensor]
    return lambda: _ReplayedTensor.apply(trigger, holder)  # type: ignore[no-untyped-call]


@dataclass
class _BlockCall:
    """One block on its input, and the times of its passes."""

    call: Callable[[], Tensor]
    parameters: list[nn.Parameter] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    output: Tensor | None = None
    gradient: Tensor | None = None

    def forward(self) -> None:
        """Keep what the backward pass needs."""
        self.output = self.call()

    def prepare_backward(self) -> bool:
        """Return whether anything flows back; make the gradient that comes in from behind, once."""
        if self.output is None or not self.output.requires_grad:
            return False
        if self.gradient is None:
            self.gradient = torch.randn_like(self.output.detach())
        return True

    def backward(self) -> None:
        """Leave the parameters' gradients; the memory of the output is free for the next block."""
        assert self.output is not None, "the forward pass comes first"
        torch.autograd.backward(self.output, self.gradient)
        self.output = None

    def clear(self) -> None:
        """Clear gradients as the training loop does before each step."""
        self.output = None
        for parameter in self.parameters:
            parameter.grad = None


class BlockReadings(NamedTuple):
    """All blocks and the loss, and the wall time of their passes."""

    blocks: list[BlockProbe]
    pass_s: float


def measure_blocks(
    strategy: DataParallelStrategy,
    batch: tuple[Tensor, Tensor],
    budget_s: float,
    check: Callable[[], None],
    agree: Callable[[bool], bool] = bool,
) -> BlockReadings:
    """Time every block of the strategy's model on ``batch``, until ``budget_s`` have passed.

    Args:
        batch: inputs [n, *sample shape] and targets of one micro-batch.
        check: called before each round by all ranks, which wait for each other in it.
        agree: whether the time is up on any rank.

    Raises:
        WorkerError: ``unsupported`` where the model calls more than its blocks in order.
    """
    device, calls = batch[0].device, _capture_blocks(strategy, batch)
    passes_s: list[float] = []
    ends, done, timer = time.perf_counter() + budget_s, 0, CallTimer(device)
    while done < _MIN_ROUNDS + 1 or (done < _MAX_ROUNDS and not agree(time.perf_counter() >= ends)):
        check()
        _clear(calls)
        timer.time_all([(call.forward, call.forward_s) for call in calls], len(calls), "forward")
        back = [call for call in reversed(calls) if call.prepare_backward()]
        timer.time_all([(call.backward, call.backward_s) for call in back], len(back), "backward")
        timer.flush()
        _clear(calls)
        passes_s.append(_whole_pass_s(calls, device))
        done += 1
    # In the first round memory is taken, and libraries choose their algorithms.
    forward_s = [median(call.forward_s[1:]) for call in calls]
    backward_s = [median(call.backward_s[1:]) if call.backward_s else 0.0 for call in calls]
    means = _means_over_ranks([*forward_s, *backward_s, median(passes_s[1:])], strategy.context)
    blocks = [
        BlockProbe(
            block=place,
            samples=len(batch[0]),
            forward_s=means[place],
            backward_s=means[len(calls) + place] if call.backward_s else None,
            spread=max(relative_spread(own[1:]) for own in (call.forward_s, call.backward_s) if own),
            repeats=done - 1,
        )
        for place, call in enumerate(calls)
    ]
    return BlockReadings(blocks, means[-1])


_HIDING_RATIO = 1.4
"""Duration of the collectives over that of a pass, so that all of the pass overlaps with them."""
_MIN_OVERLAP_ROUNDS, _MAX_OVERLAP_ROUNDS, _MAX_CALLS = 3, 15, 64


def measure_pass_overlaps(
    strategy: DataParallelStrategy,
    batch: tuple[Tensor, Tensor],
    shapes: Sequence[MessageShape],
    budget_s: float,
    check: Callable[[], None],
) -> list[OverlapProbe]:
    """Time a pass through all blocks, forward and backward, beside collectives of each of ``shapes``.

    Args:
        batch: inputs [n, *sample shape] and targets of one micro-batch.
        shapes: of operations in ``OVERLAPPED_OPERATIONS``, among all ranks.
        budget_s: for all shapes, about.
        check: called before each shape by all ranks, which wait for each other in it.
    """
    calls, group = _capture_blocks(strategy, batch), strategy.context.members()
    team = ProbeGroup(group, dist.get_process_group_ranks(group), strategy.context.rank, batch[0].device)

    def compute() -> None:
        _clear(calls)
        _run_pass(calls)

    probes = []
    for shape in shapes:
        check()
        # Two calls may run at the same time.
        begins = [make_collective(team, shape.operation, shape.payload_bytes, is_async=True).call for _ in range(2)]

        def begin(number: int, begins: Sequence[CollectiveCall] = begins) -> object:
            return begins[number % len(begins)](number)

        # In the first round memory is taken.
        for _ in range(2):
            pass_s, call_s = read_overlap(team, compute, begin, 0).ended_s, read_overlap(team, None, begin, 1).ended_s
        count = max(1, min(_MAX_CALLS, ceil(_HIDING_RATIO * pass_s / call_s)))
        round_s = 2 * pass_s + 2 * count * call_s
        rounds = max(_MIN_OVERLAP_ROUNDS, min(_MAX_OVERLAP_ROUNDS, int(budget_s / len(shapes) / round_s)))
        message = (shape.operation, shape.payload_bytes, count)
        probes.append(overlap_record(team, strategy.spec, message, compute, begin, rounds))
    return probes


def _capture_blocks(strategy: DataParallelStrategy, batch: tuple[Tensor, Tensor]) -> list[_BlockCall]:
    """Return a call of every block on what the one before gives, and of the loss."""
    model, samples = strategy.module, len(batch[0])
    if type(model).forward is not nn.Sequential.forward:
        message = f"{strategy.spec.model} has a forward of its own: its blocks cannot be measured one by one"
        raise unsupported(message, "put what it does into a block")

    def run(block: nn.Module, source: Callable[[], Tensor]) -> Tensor:
        with strategy.arithmetic.autocast():
            output: Tensor = block(source())
        return output

    calls, x = [], batch[0]
    for block in model.children():
        # A block may write over its input.
        kept = x.detach().clone()
        source = replay_tensor(kept) if x.requires_grad else partial(_itself, kept)
        calls.append(_BlockCall(partial(run, block, source), list(block.parameters())))
        y = run(block, x.clone)
        x = y.detach().requires_grad_(y.requires_grad)
    source = replay_tensor(x.detach())
    return [*calls, _BlockCall(lambda: strategy.loss_sum(source(), batch[1]) / samples)]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _clear(calls: Sequence[_BlockCall]) -> None:
    for call in calls:
        call.clear()


def _whole_pass_s(calls: Sequence[_BlockCall], device: torch.device) -> float:
    """Run forward and backward without a clock in between; return the seconds that passed."""
    synchronize(device)
    began = time.perf_counter()
    _run_pass(calls)
    synchronize(device)
    return time.perf_counter() - began


def _run_pass(calls: Sequence[_BlockCall]) -> None:
    for call in calls:
        call.forward()
    for call in reversed(calls):
        if call.prepare_backward():
            call.backward()


def _means_over_ranks(values: list[float], context: RankContext) -> list[float]:
    if context.world_size == 1:
        return values
    sums = torch.tensor(values, dtype=torch.float64, device=context.device)
    dist.all_reduce(sums, group=context.members())
    return [float(value) / context.world_size for value in sums.tolist()]


def measure_optimizer_updates(spec: RunSpec, module: nn.Module, repeats: int = 5) -> list[UpdateProbe]:
    """The run's optimizer on tensors of every size that the model has, all tensors of a size together.

    With what the next step begins with: giving back the gradients, which the allocator may return to the system.
    """
    by_size: dict[int, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        by_size.setdefault(parameter.numel() * parameter.element_size(), []).append(parameter)
    device = next(module.parameters()).device
    kind, arguments = optimizer_class_and_arguments(spec, device)
    make: Callable[..., torch.optim.Optimizer] = kind
    optimizers = {size: make(parameters, **arguments) for size, parameters in by_size.items()}
    readings: dict[int, list[float]] = {size: [] for size in by_size}
    timer = CallTimer(device)
    for _ in range(repeats + 1):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        updates = [(partial(_optimizer_step, optimizer), readings[size]) for size, optimizer in optimizers.items()]
        timer.time_all(updates, len(updates), "updates")
        timer.flush()
    # The optimizer's state is made in its first step. Tensors of a size share their reading.
    shares = {size: [seconds / len(by_size[size]) for seconds in readings[size][1:]] for size in by_size}
    return [
        UpdateProbe(optimizer=spec.optimizer, parameter_bytes=size, **reading_statistics(seconds))
        for size, seconds in shares.items()
    ]


def _optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
