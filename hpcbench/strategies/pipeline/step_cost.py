"""The step time of a pipeline: the durations of its actions, and a simulation of its schedule.

Every rank does its part of the schedule, sums its gradients over its replicas, updates and starts again: a step
is as long as the longest way from a rank's first action to its next first action. 1F1B with four micro-batches::

    rank 0   F0 F1 .. .. B0 F2 B1 F3 B2 .. B3 | reduce | update
    rank 1      F0 B0 F1 B1 F2 B2 F3 B3 ..    | reduce | update
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from hpcbench.predict import placement
from hpcbench.predict.cost_model import (
    FULL_SHARE,
    WAIT_FOR_ALL,
    CostModel,
    RowKernels,
    StepBreakdown,
    first_equal_rows,
    row_kernels,
    update_kernels,
)
from hpcbench.predict.message_prices import slowdowns
from hpcbench.predict.stream_simulator import CommCall, ComputeEvent, StreamEvent
from hpcbench.strategies.catalog import get_strategy
from hpcbench.strategies.gradient_buckets import bucket_payload_bytes, fill_buckets, first_use_rows
from hpcbench.strategies.layer_table import LayerRow
from hpcbench.strategies.pipeline.rank_cost import BUCKET_CAP_BYTES, PipelineRank, TiedWeight
from hpcbench.strategies.pipeline.schedule_simulator import ActionCosts, RankTimes, rank_times
from hpcbench.strategies.pipeline.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    UPDATE,
    Action,
    message_after,
)

_SPLIT_BACKWARD_KINDS = ("Linear", "Conv1d", "Conv2d", "Conv3d")
"""Kinds of layers whose gradients of weights are deferred where backward passes are split."""


class ChunkPassTimes(NamedTuple):
    """A rank's passes through a chunk for one micro-batch: computation in seconds, and the calls within them."""

    forward_s: float
    backward_s: float
    """The backward pass, with the forward pass before it where activations are recomputed."""
    weights_s: float
    """The part of ``backward_s`` that computes gradients of weights and can be deferred."""
    forward_calls: Sequence[CommCall]
    """Calls among ranks that share the chunk's layers."""
    backward_calls: Sequence[CommCall]


def weight_gradient_fraction(layer: LayerRow) -> float:
    """Return the part of a layer's backward pass that computes gradients of its weights.

    The gradients of the weights cost as many FLOPs as the forward pass. The gradient of the input, where it is needed,
    costs as many again.
    """
    if layer.kind not in _SPLIT_BACKWARD_KINDS or not layer.backward_flops:
        return 0.0
    return min(layer.forward_flops / layer.backward_flops, 1.0)


class RankStepTimes(NamedTuple):
    """The seconds that a rank computes and communicates in a step."""

    compute_s: float
    comm_s: float
    latency_s: float
    """The part of ``comm_s`` that no bandwidth would shorten."""

    @classmethod
    def of(cls, compute_s: float, calls: Sequence[tuple[CommCall, int]]) -> RankStepTimes:
        """Add up the calls, each with its number in a step."""
        comm_s = sum(count * call.seconds for call, count in calls)
        return cls(compute_s, comm_s, sum(count * call.latency_s for call, count in calls))


def step_from_schedule(
    cost_model: CostModel, rank_step: RankStepTimes, with_comm_s: float, without_s: float
) -> StepBreakdown:
    """Return a step from the lengths of its schedule with and without communication, and the slowest rank's own times.

    Exposed is the schedule's length with less that without communication. The bubble is the length without it, less
    the slowest rank's computation.
    """
    overhead_s = cost_model.overhead_s()
    exposed_s = max(with_comm_s - without_s, 0.0)
    straggler_s = cost_model.straggler_s(rank_step.compute_s + overhead_s)
    return StepBreakdown(
        step_time_s=without_s + exposed_s + overhead_s + straggler_s,
        compute_s=rank_step.compute_s + overhead_s,
        comm_s=max(rank_step.comm_s, exposed_s),
        exposed_comm_s=exposed_s,
        bubble_s=max(without_s - rank_step.compute_s, 0.0),
        straggler_s=straggler_s,
        latency_s=exposed_s * rank_step.latency_s / rank_step.comm_s if rank_step.comm_s else 0.0,
    )


class PipelineStep:
    """A pipeline of a run with its replicas. Ranks are counted along ``pp``; ``pipeline`` is that of any rank.

    Durations and messages are computed once for each chunk, number of samples and kind of action.
    """

    def __init__(self, pipeline: PipelineRank, cost_model: CostModel) -> None:
        self.pipeline, self.cost_model, self.layout = pipeline, cost_model, pipeline.layout
        self.splits_backward = get_strategy(pipeline.spec.strategy).pipeline.splits_backward
        self.pass_times = lru_cache(maxsize=None)(self._pass_times)
        self.chunk_kernels = lru_cache(maxsize=None)(self._chunk_kernels)
        self._row_kernels = lru_cache(maxsize=None)(self._kernels_of_row)
        self._durations = lru_cache(maxsize=None)(self._action_durations)
        self.send = lru_cache(maxsize=None)(self._send)
        self.replicas = lru_cache(maxsize=None)(self._replicas)
        self.update_s = lru_cache(maxsize=None)(self._update_s)
        self._first_equal_rows = first_equal_rows(pipeline.table)
        self._tensor_group = placement.place_group(pipeline.spec, "tp")
        self._kinds = self.micro_batch_kinds(pipeline.spec.micro_batches)
        self._all_kind_counts = Counter(self._kinds)

    def _pass_times(self, chunk: int, samples: float, recomputed: bool) -> ChunkPassTimes:
        forward_s = backward_s = weights_s = 0.0
        for row, kernels in zip(self.pipeline.rows[chunk], self.chunk_kernels(chunk, samples), strict=True):
            row_backward_s = self.cost_model.kernel_s(kernels.backward)
            forward_s += self.cost_model.kernel_s(kernels.forward)
            backward_s += row_backward_s
            weights_s += row_backward_s * weight_gradient_fraction(self.pipeline.table.layers[row])
        forward_calls, backward_calls = (
            [
                call
                for traffic in self.pipeline.tensor_parallel_traffic(chunk, samples, repeats_forward)
                for call in self.cost_model.calls(traffic, self._tensor_group)
            ]
            for repeats_forward in (False, recomputed)
        )
        if recomputed:
            backward_s += forward_s
        return ChunkPassTimes(forward_s, backward_s, weights_s, forward_calls, backward_calls)

    def _chunk_kernels(self, chunk: int, samples: float) -> list[RowKernels]:
        """Return the kernels of the chunk's rows."""
        return [self._row_kernels(self._first_equal_rows[row], samples) for row in self.pipeline.rows[chunk]]

    def _kernels_of_row(self, row: int, samples: float) -> RowKernels:
        layer, view = self.pipeline.table.layers[row], self.pipeline.tensor_rank
        # Of ranks that share a stage's blocks the first has most heads and features.
        share = FULL_SHARE if view is None else view.row_share(layer)
        return row_kernels(self.pipeline.spec, layer, samples, share)

    def _send(self, kind: str, chunk: int, samples: float) -> CommCall:
        """Return the message after an action for so many samples; one without duration where none is sent.

        Replicas of a stage are taken to lie as far from the next stage's as their first ones do.
        """
        message = message_after(Action(kind, chunk, 0), self.layout)
        if message is None:
            return CommCall(0.0)
        is_far = not placement.are_on_one_node(self.pipeline.spec, "pp", message.source, message.target)
        boundary_bytes = self.pipeline.boundary_bytes(chunk if kind == FORWARD else chunk - 1)
        group = placement.place_neighbour_pair(self.pipeline.spec, "pp", is_far)
        return self.cost_model.collective("send", samples * boundary_bytes, group, "send")

    def _update_s(self, rank: int) -> float:
        """Return the time of the optimizer's pass over the parameters of a rank of the pipeline."""
        sizes = [size for chunk in self.layout.chunks_of(rank) for size in self.pipeline.parameter_bytes(chunk)]
        sizes += self.pipeline.tied_bytes(rank)
        return sum(map(self.cost_model.kernel_s, update_kernels(self.pipeline.spec, sizes)))

    def micro_batch_kinds(self, count: int) -> list[tuple[float, bool]]:
        """Return for each of ``count`` micro-batches its samples, and whether it is computed again.

        If ``count`` is not the run's, the schedule is a short one that stands for it: each micro-batch has the mean
        size.
        """
        spec = self.pipeline.spec
        is_whole = count == spec.micro_batches
        sizes: Sequence[float] = (
            self.pipeline.micro_batch_sizes if is_whole else [spec.batch_size / spec.micro_batches] * count
        )
        return [(size, self.pipeline.is_recomputed(number, count)) for number, size in enumerate(sizes)]

    def schedule_costs(self, count: int, with_comm: bool = True) -> ActionCosts:
        """Return durations and transfers of a schedule of ``count`` micro-batches, see ``micro_batch_kinds``."""
        kinds = self.micro_batch_kinds(count)

        def duration_s(action: Action) -> float:
            return self._durations(action.chunk, *kinds[action.micro_batch], with_comm)[action.kind]

        def transfer_s(action: Action) -> float:
            return self.send(action.kind, action.chunk, kinds[action.micro_batch][0]).seconds if with_comm else 0.0

        return ActionCosts(duration_s, transfer_s)

    def _action_durations(self, chunk: int, samples: float, recomputed: bool, with_comm: bool) -> dict[str, float]:
        times = self.pass_times(chunk, samples, recomputed)
        computed = {
            FORWARD: times.forward_s,
            BACKWARD: times.backward_s,
            BACKWARD_INPUT: times.backward_s - times.weights_s,
            BACKWARD_WEIGHT: times.weights_s,
            UPDATE: 0.0,
        }
        if not with_comm:
            return computed
        calls = dict.fromkeys((BACKWARD, BACKWARD_INPUT), times.backward_calls) | {FORWARD: times.forward_calls}
        return {
            kind: self.overlapped_s(kind, chunk, samples, seconds) + sum(call.seconds for call in calls.get(kind, ()))
            for kind, seconds in computed.items()
        }

    def overlapped_s(self, kind: str, chunk: int, samples: float, compute_s: float) -> float:
        """Return how long ``compute_s`` take beside messages: those that the action waited for and sends."""
        slowdown = slowdowns(self.cost_model.machine.comm, self.pipeline.spec, "send").computation
        if slowdown <= 1.0 or kind in (BACKWARD_WEIGHT, UPDATE):
            return compute_s
        before = chunk - 1 if kind == FORWARD else chunk + 1
        received_s = self.send(kind, before, samples).seconds if 0 <= before < self.layout.chunks else 0.0
        in_flight_s = received_s + self.send(kind, chunk, samples).seconds
        return compute_s + min((1.0 - 1.0 / slowdown) * in_flight_s, (slowdown - 1.0) * compute_s)

    def breakdown(self, schedule: str) -> StepBreakdown:
        """Return the step as the rank sees it that computes longest."""
        slowest = max(range(self.layout.ranks), key=self.compute_s)
        lengths_s = [max(self.step_s_per_rank(schedule, with_comm)) for with_comm in (True, False)]
        return step_from_schedule(self.cost_model, self.rank_times(slowest), *lengths_s)

    def step_s_per_rank(self, schedule: str, with_comm: bool) -> list[float]:
        """Return for each rank the time from its first action to the end of its update."""
        costs = partial(self.schedule_costs, with_comm=with_comm)
        times = rank_times(schedule, self.layout, self.pipeline.spec.micro_batches, costs)
        ends = [self._reduced_at(rank, each) if with_comm else each.end for rank, each in enumerate(times)]
        for stage in range(self.layout.stages):
            members = self.layout.ranks_of(stage)
            latest = max(ends[rank] for rank in members)
            for rank in members:
                ends[rank] = latest
        if with_comm:
            self._exchange_ties(ends)
        return [
            end + self.update_s(rank) - each.begin for rank, (end, each) in enumerate(zip(ends, times, strict=True))
        ]

    def rank_times(self, rank: int) -> RankStepTimes:
        """Return the computation and communication of one rank."""
        backward = BACKWARD_INPUT if self.splits_backward else BACKWARD
        calls = [(call, 1) for call in self._tied_reductions(rank)]
        for chunk in self.layout.chunks_of(rank):
            for (samples, recomputed), count in self._kind_counts(rank).items():
                times = self.pass_times(chunk, samples, recomputed)
                calls += [(call, count) for call in (*times.forward_calls, *times.backward_calls)]
                calls += [(self.send(kind, chunk, samples), count) for kind in (FORWARD, backward)]
            calls += [(call, 1) for call in self.buckets(rank, chunk)]
        calls += [(self._tied_send(tie), tie.sends(rank)) for tie in self.pipeline.ties]
        return RankStepTimes.of(self.compute_s(rank), calls)

    def compute_s(self, rank: int) -> float:
        """Return the computation of one rank in a step."""
        seconds = self.update_s(rank)
        for chunk in self.layout.chunks_of(rank):
            for kind, count in self._kind_counts(rank).items():
                times = self.pass_times(chunk, *kind)
                seconds += count * (times.forward_s + times.backward_s)
        return seconds

    def _kind_counts(self, rank: int) -> Counter[tuple[float, bool]]:
        """Return how many micro-batches of each kind pass through a rank."""
        if max(self.layout.stage_sizes) == 1:
            return self._all_kind_counts
        return Counter(self._kinds[number] for number in self.layout.micro_batches_of(rank, len(self._kinds)))

    def _replicas(self, rank: int) -> placement.GroupPlacement:
        """Return the group of the ranks that hold the same chunks."""
        width, spec = self.layout.stage_sizes[self.layout.stage_of(rank)], self.pipeline.spec
        return placement.place_group(spec, "dp") if width == 1 else placement.place_subgroups(spec, "pp", width)[0]

    def buckets(self, rank: int, chunk: int) -> list[CommCall]:
        """Return the all_reduces of a chunk's gradients, in the order in which they are sent; none without replicas."""
        return self._all_reduces(rank, self.pipeline.parameter_bytes(chunk))

    def _all_reduces(self, rank: int, sizes: Sequence[int]) -> list[CommCall]:
        group = self.replicas(rank)
        payloads = bucket_payload_bytes(sizes, BUCKET_CAP_BYTES) if group.ranks > 1 else []
        return [self.cost_model.collective("all_reduce", payload, group, "bucket") for payload in payloads]

    def _reduced_at(self, rank: int, times: RankTimes) -> float:
        """Return the time at which the gradients of a rank's chunks are summed over their replicas."""
        if self.replicas(rank).ranks < 2:
            return times.end
        begin = min(begin for begin, _ in times.gradients_done.values())
        return begin + self.cost_model.run(self._last_passes(rank, times, begin)).end_s

    def _last_passes(self, rank: int, times: RankTimes, begin: float) -> Iterator[StreamEvent]:
        """Yield the events from the first chunk's last backward pass on: computation, and each bucket as it fills."""
        now = begin
        for chunk, (pass_begin, pass_end) in sorted(times.gradients_done.items(), key=lambda item: item[1]):
            yield ComputeEvent(max(pass_begin - now, 0.0))
            yield from self._last_pass(rank, chunk, pass_end - pass_begin)
            now = pass_end
        yield ComputeEvent(max(times.end - now, 0.0))
        yield WAIT_FOR_ALL

    def _last_pass(self, rank: int, chunk: int, length_s: float) -> Iterator[StreamEvent]:
        """Yield a chunk's last backward pass; deferred gradients of weights are sent all at once behind it."""
        calls = self.buckets(rank, chunk)
        rows, kernels_s, ready_rows = [], [], [-1] * len(calls)
        if not self.splits_backward:
            samples, _ = self._kinds[-1]
            rows, ready_rows = self.pipeline.rows[chunk], self._bucket_rows(chunk)
            kernels = self.chunk_kernels(chunk, samples)
            kernels_s = [self.cost_model.kernel_s(each.backward) for each in kernels]
        yield ComputeEvent(max(length_s - sum(kernels_s), 0.0))
        for row, seconds in zip(reversed(rows), reversed(kernels_s), strict=True):
            yield ComputeEvent(seconds)
            yield from (call for call, ready in zip(calls, ready_rows, strict=True) if ready == row)
        yield from (call for call, ready in zip(calls, ready_rows, strict=True) if ready < 0)

    def _bucket_rows(self, chunk: int) -> list[int]:
        """Return for each bucket the row whose backward pass fills it, or one before it."""
        places, first_uses = self.pipeline.parameter_places[chunk], first_use_rows(self.pipeline.table)
        rows: list[int] = []
        for bucket in fill_buckets(self.pipeline.parameter_bytes(chunk), BUCKET_CAP_BYTES):
            rows.append(min([*rows[-1:], *(first_uses[places[number]] for number in bucket)]))
        return rows

    def _exchange_ties(self, ends: list[float]) -> None:
        """Add the sums of tied weights: over the copies on the first holder and back, then over the replicas."""
        for tie in self.pipeline.ties:
            latest = max(ends[rank] for rank in tie.ranks)
            for rank in tie.ranks:
                ends[rank] = latest + 2 * (len(tie.ranks) - 1) * self._tied_send(tie).seconds
        for rank in range(self.layout.ranks):
            ends[rank] += sum(call.seconds for call in self._tied_reductions(rank))

    def _tied_send(self, tie: TiedWeight) -> CommCall:
        """Return one message with the gradient of ``tie``."""
        is_far = not placement.are_on_one_node(self.pipeline.spec, "pp", tie.ranks[0], tie.ranks[-1])
        return self.cost_model.collective(
            "send", tie.size_bytes, placement.place_neighbour_pair(self.pipeline.spec, "pp", is_far)
        )

    def _tied_reductions(self, rank: int) -> list[CommCall]:
        """Return the all_reduces of tied weights over replicas, once the copies have been summed."""
        return self._all_reduces(rank, self.pipeline.tied_bytes(rank))
