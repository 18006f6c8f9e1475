"""Times of every block of a model, forward and backward as wholes, on ranks that compute side by side.

All blocks run forward and then backward, each from its own stored input: once with a clock around each, once without,
so that what the machine holds back between them is in a time of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import ceil
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.errors import unsupported
from hpcbench.parallel.traffic import MessageShape
from hpcbench.results.probe_records import BlockProbe, OverlapProbe
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.measure.clocks import CallTimer, relative_spread, synchronize
from hpcbench.worker.microbench.collective_probes import (
    CollectiveCall,
    ProbeGroup,
    make_collective_call,
    overlap_record,
    read_overlap,
)
from hpcbench.worker.microbench.kernel_probes import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    CapturedModule,
    LayerCall,
    make_layer_call,
    replay_tensor,
    time_passes,
)
from hpcbench.worker.strategies.base import DataParallelStrategy


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
    *,
    accumulates: bool = False,
) -> BlockReadings:
    """Time every block of the strategy's model on ``batch``, until ``budget_s`` have passed.

    Args:
        batch: inputs [n, *sample shape] and targets of one micro-batch.
        check: called before each round by all ranks, which wait for each other in it.
        agree: whether the time is up on any rank.
        accumulates: add gradients to those of an earlier micro-batch.

    Raises:
        WorkerError: ``unsupported`` where the model calls more than its blocks in order.
    """
    device, calls = batch[0].device, _capture_blocks(strategy, batch)
    passes_s: list[float] = []
    ends, done, timer = time.perf_counter() + budget_s, 0, CallTimer(device)
    while done < MIN_ROUNDS + 1 or (done < MAX_ROUNDS and not agree(time.perf_counter() >= ends)):
        check()
        _clear(calls, accumulates)
        time_passes(calls, timer)
        timer.flush()
        _clear(calls, accumulates)
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
            accumulates=accumulates,
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
        _clear(calls, accumulates=False)
        _run_pass(calls)

    probes = []
    for shape in shapes:
        check()
        # Two calls may run at the same time.
        begins = [make_collective_call(team, shape.operation, shape.payload_bytes, is_async=True) for _ in range(2)]

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


def _capture_blocks(strategy: DataParallelStrategy, batch: tuple[Tensor, Tensor]) -> list[LayerCall]:
    """Return a call of every block on what the one before gives, and of the loss."""
    model, samples = strategy.module, len(batch[0])
    if type(model).forward is not nn.Sequential.forward:
        message = f"{strategy.spec.model} has a forward of its own: its blocks cannot be measured one by one"
        raise unsupported(message, "put what it does into a block")
    calls, x = [], batch[0]
    for name, block in model.named_children():
        # A block may write over its input, which must then be no leaf of the graph.
        captured = CapturedModule(name, "Block", block, [x.detach().clone()], [x.requires_grad])
        calls.append(make_layer_call(strategy, captured, block, captured.inputs, "whole", 1, samples))
        with strategy.arithmetic.autocast():
            y: Tensor = block(x.clone())
        x = y.detach().requires_grad_(y.requires_grad)
    source = replay_tensor(x.detach())
    loss = LayerCall("loss", "Loss", "whole", 1, samples, lambda: strategy.loss_sum(source(), batch[1]) / samples)
    return [*calls, loss]


def _clear(calls: Sequence[LayerCall], accumulates: bool) -> None:
    for call in calls:
        if not accumulates:
            call.clear()
        call.output = None


def _whole_pass_s(calls: Sequence[LayerCall], device: torch.device) -> float:
    """Run forward and backward without a clock in between; return the seconds that passed."""
    synchronize(device)
    began = time.perf_counter()
    _run_pass(calls)
    synchronize(device)
    return time.perf_counter() - began


def _run_pass(calls: Sequence[LayerCall]) -> None:
    for call in calls:
        call.forward()
    for call in reversed(calls):
        if call.prepare_backward():
            call.backward()
        call.output = None


def _means_over_ranks(values: list[float], context: RankContext) -> list[float]:
    if context.world_size == 1:
        return values
    sums = torch.tensor(values, dtype=torch.float64, device=context.device)
    dist.all_reduce(sums, group=context.members())
    return [float(value) / context.world_size for value in sums.tolist()]
