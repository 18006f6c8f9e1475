"""The step time of a pipeline: the durations of its actions, and a walk through its schedule.

Every rank does its part of the schedule, sums its gradients over its replicas, updates and starts again: a step
is as long as the longest way from a rank's first action to its next first action."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

from hpcbench.oracle.cost_model import (
    FULL_SHARE,
    CostModel,
    RowKernels,
    RowShare,
    first_equal_rows,
    row_kernels,
    update_kernels,
)
from hpcbench.oracle.pipeline_rank import PipelineRank, TiedWeightRanks
from hpcbench.oracle.placement import (
    GroupPlacement,
    are_on_one_node,
    place_group,
    place_neighbour_pair,
    place_subgroups,
)
from hpcbench.oracle.step_time import WAIT_FOR_ALL, StepBreakdown
from hpcbench.oracle.stream_simulator import CommCall, ComputeEvent, StreamEvent
from hpcbench.oracle.tensor_rank import tensor_row_share
from hpcbench.parallel.catalog import get_strategy
from hpcbench.parallel.gradient_buckets import (
    DEFAULT_BUCKET_CAP_MB,
    MIB,
    bucket_payload_bytes,
    fill_buckets,
    first_use_rows,
)
from hpcbench.parallel.layer_table import LayerRow
from hpcbench.parallel.pipeline.schedule_simulator import ActionCosts, RankTimes, rank_times
from hpcbench.parallel.pipeline.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    UPDATE,
    Action,
    message_after,
)

_SPLIT_BACKWARD_KINDS = ("Linear", "Conv1d", "Conv2d", "Conv3d")
"""Kinds of layers whose gradients of weights are put off where backward passes come in halves."""


class ChunkPassTimes(NamedTuple):
    """What a rank computes in one micro-batch's passes through a chunk, in seconds, and what it waits for in them."""

    forward_s: float
    backward_s: float
    """With the forward pass before it where that is done again."""
    weights_s: float
    """Of ``backward_s``, the gradients of weights that can be put off."""
    shared_forward: Sequence[CommCall]
    """Calls among ranks that share its layers."""
    shared_backward: Sequence[CommCall]

    @property
    def shared(self) -> list[CommCall]:
        """In both passes."""
        return [*self.shared_forward, *self.shared_backward]


class PipelineActionCosts:
    """Of all chunks of one pipeline. Remembers what it was asked."""

    def __init__(self, plan: PipelineRank, clock: CostModel) -> None:
        self.plan, self.clock = plan, clock
        self.splits = get_strategy(plan.spec.strategy).splits_backward
        self.busy = lru_cache(maxsize=None)(self._busy)
        self.passes = lru_cache(maxsize=None)(self._passes)
        self._pass = lru_cache(maxsize=None)(self._row_pass)
        self.sends = lru_cache(maxsize=None)(self._sends)
        self.update_s = lru_cache(maxsize=None)(self._update_s)
        self._alike = first_equal_rows(plan.table)
        self._tensor = place_group(plan.spec, "tp")

    def _busy(self, chunk: int, samples: float, again: bool) -> ChunkPassTimes:
        forward = backward = weights = 0.0
        for row, one in zip(self.plan.rows[chunk], self.passes(chunk, samples), strict=True):
            spent = self.clock.kernel_s(one.backward)
            forward += self.clock.kernel_s(one.forward)
            backward += spent
            weights += spent * weight_gradient_fraction(self.plan.table.layers[row])
        shared = [
            [call for one in self.plan.shared(chunk, samples, repeats) for call in self.clock.calls(one, self._tensor)]
            for repeats in (False, again)
        ]
        return ChunkPassTimes(forward, backward + (forward if again else 0.0), weights, *shared)

    def _passes(self, chunk: int, samples: float) -> list[RowKernels]:
        """Of the chunk's rows."""
        return [self._pass(self._alike[row], samples) for row in self.plan.rows[chunk]]

    def _row_pass(self, row: int, samples: float) -> RowKernels:
        layer = self.plan.table.layers[row]
        return row_kernels(self.plan.spec, layer, samples, self._share(layer))

    def _share(self, layer: LayerRow) -> RowShare:
        """Of ranks that share a stage's transformer blocks the one with most heads and features."""
        if self.plan.split is None:
            return FULL_SHARE
        return tensor_row_share(self.plan.split, layer)

    def _sends(self, kind: str, chunk: int, samples: float) -> CommCall | None:
        """The message after an action for so many samples.

        Replicas of a stage are taken to lie as far from the next stage's as their first ones do.
        """
        message = message_after(Action(kind, chunk, 0), self.plan.layout)
        if message is None:
            return None
        is_far = not are_on_one_node(self.plan.spec, "pp", message.source, message.target)
        boundary = chunk if kind == FORWARD else chunk - 1
        group = place_neighbour_pair(self.plan.spec, "pp", is_far)
        return self.clock.call("send", samples * self.plan.boundary_bytes(boundary), group, "send")

    def _update_s(self, place: int) -> float:
        """The optimizer's pass over what the rank at ``place`` of the pipeline holds."""
        sizes = [size for chunk in self.plan.layout.chunks_of(place) for size in self.plan.own_tensors(chunk)]
        sizes += [tie.bytes for tie in self.plan.ties if place in tie.places]
        return sum(self.clock.kernel_s(kernel) for kernel in update_kernels(self.plan.spec, sizes))

    def kinds(self, count: int) -> list[tuple[float, bool]]:
        """Of each of ``count`` micro-batches: its samples, and whether it is computed again.

        Another number than the run's is of a schedule that stands for a longer one: all micro-batches are the mean one.
        """
        mean = self.plan.spec.batch_size / self.plan.spec.micro_batches
        is_own = count == self.plan.spec.micro_batches
        sizes: Sequence[float] = self.plan.sizes if is_own else [mean] * count
        return [(size, self.plan.is_recomputed(number, count)) for number, size in enumerate(sizes)]

    def prices(self, count: int, with_comm: bool = True) -> ActionCosts:
        """Durations and transfers of a schedule of ``count`` micro-batches; of another than the run's see ``kinds``."""
        kinds = self.kinds(count)
        distinct = list(dict.fromkeys(kinds))
        of = [distinct.index(kind) for kind in kinds]
        chunks = range(self.plan.layout.chunks)
        durations = [[self._durations(chunk, *kind, with_comm) for kind in distinct] for chunk in chunks]
        if not with_comm:
            return ActionCosts(
                lambda action: durations[action.chunk][of[action.micro_batch]][action.kind], lambda _: 0.0
            )
        transfers = [[self._transfers(chunk, samples) for samples, _ in distinct] for chunk in chunks]
        return ActionCosts(
            lambda action: durations[action.chunk][of[action.micro_batch]][action.kind],
            lambda action: transfers[action.chunk][of[action.micro_batch]][action.kind],
        )

    def _transfers(self, chunk: int, samples: float) -> dict[str, float]:
        calls = {kind: self.sends(kind, chunk, samples) for kind in (FORWARD, BACKWARD, BACKWARD_INPUT)}
        return {kind: 0.0 if call is None else call.seconds for kind, call in calls.items()}

    def _durations(self, chunk: int, samples: float, again: bool, with_comm: bool) -> dict[str, float]:
        busy = self.busy(chunk, samples, again)
        computed = {
            FORWARD: busy.forward_s,
            BACKWARD: busy.backward_s,
            BACKWARD_INPUT: busy.backward_s - busy.weights_s,
            BACKWARD_WEIGHT: busy.weights_s,
            UPDATE: 0.0,
        }
        if not with_comm:
            return computed
        shared = dict.fromkeys((BACKWARD, BACKWARD_INPUT), busy.shared_backward) | {FORWARD: busy.shared_forward}
        return {
            kind: self.beside_messages_s(kind, chunk, samples, seconds)
            + sum(call.seconds for call in shared.get(kind, ()))
            for kind, seconds in computed.items()
        }

    def beside_messages_s(self, kind: str, chunk: int, samples: float, computed_s: float) -> float:
        """What is computed in ``computed_s``, with messages under way meanwhile: those that it waited for and sends."""
        slowdown = self.clock.machine.comm.overlap_slowdown
        if slowdown <= 1.0 or kind in (BACKWARD_WEIGHT, UPDATE):
            return computed_s
        before = chunk - 1 if kind == FORWARD else chunk + 1
        received = self.sends(kind, before, samples) if 0 <= before < self.plan.layout.chunks else None
        calls = (received, self.sends(kind, chunk, samples))
        under_way_s = sum(call.seconds for call in calls if call is not None)
        return computed_s + min((1.0 - 1.0 / slowdown) * under_way_s, (slowdown - 1.0) * computed_s)


def weight_gradient_fraction(layer: LayerRow) -> float:
    """Of a layer's backward pass, the share that is the gradients of its weights: it has the forward pass's products,
    and so has the gradient of the input, where that is asked for."""
    if layer.kind not in _SPLIT_BACKWARD_KINDS or not layer.backward_flops:
        return 0.0
    return min(layer.forward_flops / layer.backward_flops, 1.0)


_BUCKET_CAP_BYTES = int(DEFAULT_BUCKET_CAP_MB * MIB)


def pipeline_step(clock: CostModel, plan: PipelineRank, schedule: str) -> StepBreakdown:
    """One step, as the rank sees it that computes longest; ``plan`` is of any rank."""
    pipeline = PipelineStep(PipelineActionCosts(plan, clock))
    place = max(range(plan.layout.ranks), key=pipeline.compute_s)
    return step_from_schedule(
        clock, pipeline.spent(place), max(pipeline.paces(schedule, True)), max(pipeline.paces(schedule, False))
    )


class RankStepTimes(NamedTuple):
    """One rank's own seconds in a step."""

    compute_s: float
    comm_s: float
    latency_s: float
    """Of ``comm_s``, what no bandwidth would shorten."""


def step_from_schedule(clock: CostModel, spent: RankStepTimes, with_comm_s: float, without_s: float) -> StepBreakdown:
    """A step by how long the schedule takes with communication and without, and what the rank does meanwhile.

    What the schedule loses by communication is exposed, on whichever rank; the rest of the time in which the rank
    does not compute is the bubble.
    """
    overhead_s = clock.overhead_s()
    exposed_s = max(with_comm_s - without_s, 0.0)
    straggler_s = clock.straggler_s(spent.compute_s + overhead_s)
    return StepBreakdown(
        step_time_s=without_s + exposed_s + overhead_s + straggler_s,
        compute_s=spent.compute_s + overhead_s,
        comm_s=max(spent.comm_s, exposed_s),
        exposed_comm_s=exposed_s,
        bubble_s=max(without_s - spent.compute_s, 0.0),
        straggler_s=straggler_s,
        latency_s=exposed_s * spent.latency_s / spent.comm_s if spent.comm_s else 0.0,
    )


class PipelineStep:
    """One pipeline of a run, with its replicas around it. Places count its ranks."""

    def __init__(self, times: PipelineActionCosts) -> None:
        self.times, self.plan, self.clock = times, times.plan, times.clock
        self.layout = self.plan.layout

    def paces(self, schedule: str, with_comm: bool) -> list[float]:
        """Of every place: from its first action to the end of its update."""
        prices = partial(self.times.prices, with_comm=with_comm)
        found = rank_times(schedule, self.layout, self.plan.spec.micro_batches, prices)
        ends = [self._summed(place, one) if with_comm else one.end for place, one in enumerate(found)]
        for stage in range(self.layout.stages):
            members = self.layout.ranks_of(stage)
            for place in members:
                ends[place] = max(ends[one] for one in members)
        if with_comm:
            self._exchange_ties(ends)
        return [
            end + self.times.update_s(place) - one.begin
            for place, (end, one) in enumerate(zip(ends, found, strict=True))
        ]

    def spent(self, place: int) -> RankStepTimes:
        """What the rank there does by itself."""
        times, backward = self.times, BACKWARD_INPUT if self.times.splits else BACKWARD
        calls: list[tuple[CommCall | None, int]] = [(call, 1) for call in self._late(place)]
        for chunk in self.layout.chunks_of(place):
            for (samples, again), count in self._own(place).items():
                calls += [(call, count) for call in times.busy(chunk, samples, again).shared]
                calls += [(times.sends(kind, chunk, samples), count) for kind in (FORWARD, backward)]
            calls += [(call, 1) for call in self.buckets(place, chunk)]
        for tie in self.plan.ties:
            sent = tie.holders - 1 if place == tie.first else 1
            calls.append((self._tied(tie), sent if place in tie.places else 0))
        made = [(call, count) for call, count in calls if call is not None]
        return RankStepTimes(
            self.compute_s(place),
            sum(count * call.seconds for call, count in made),
            sum(count * call.latency_s for call, count in made),
        )

    def compute_s(self, place: int) -> float:
        """What the rank there computes in a step."""
        found = self.times.update_s(place)
        for chunk in self.layout.chunks_of(place):
            for kind, count in self._own(place).items():
                busy = self.times.busy(chunk, *kind)
                found += count * (busy.forward_s + busy.backward_s)
        return found

    def _own(self, place: int) -> Counter[tuple[float, bool]]:
        """How many micro-batches of each kind pass through the rank there."""
        kinds = self._kinds
        if max(self.layout.stage_sizes) == 1:
            return self._every
        return Counter(kinds[number] for number in self.layout.micro_batches_of(place, len(kinds)))

    @cached_property
    def _kinds(self) -> list[tuple[float, bool]]:
        return self.times.kinds(self.plan.spec.micro_batches)

    @cached_property
    def _every(self) -> Counter[tuple[float, bool]]:
        return Counter(self._kinds)

    def replicas(self, place: int) -> GroupPlacement:
        """The ranks that hold the same chunks."""
        width = self.layout.stage_sizes[self.layout.stage_of(place)]
        return place_group(self.plan.spec, "dp") if width == 1 else place_subgroups(self.plan.spec, "pp", width)[0]

    def buckets(self, place: int, chunk: int) -> list[CommCall]:
        """Of a chunk's gradients, in the order in which they are sent; none without replicas."""
        return [] if self.replicas(place).ranks < 2 else self._all_reduces(place, self.plan.own_tensors(chunk))

    def _all_reduces(self, place: int, sizes: Sequence[int]) -> list[CommCall]:
        group = self.replicas(place)
        return [
            self.clock.call("all_reduce", payload, group, "bucket")
            for payload in bucket_payload_bytes(sizes, _BUCKET_CAP_BYTES)
        ]

    def _summed(self, place: int, course: RankTimes) -> float:
        """When the gradients of the chunks there are summed over their replicas."""
        if self.replicas(place).ranks < 2:
            return course.end
        begin = min(begin for begin, _ in course.gradients_done.values())
        return begin + self.clock.run(self._ending(place, course, begin)).end_s

    def _ending(self, place: int, course: RankTimes, begin: float) -> Iterator[StreamEvent]:
        """From the first chunk's last backward pass on: what is computed, and each bucket as it fills."""
        now = begin
        for chunk, (its_begin, its_end) in sorted(course.gradients_done.items(), key=lambda item: item[1]):
            yield ComputeEvent(max(its_begin - now, 0.0))
            yield from self._last_pass(place, chunk, its_end - its_begin)
            now = its_end
        yield ComputeEvent(max(course.end - now, 0.0))
        yield WAIT_FOR_ALL

    def _last_pass(self, place: int, chunk: int, length_s: float) -> Iterator[StreamEvent]:
        """A chunk's last backward pass; gradients of weights that come by themselves are sent all at once."""
        calls = self.buckets(place, chunk)
        rows = [] if self.times.splits else self.plan.rows[chunk]
        samples, _ = self._kinds[-1]
        spent = [self.clock.kernel_s(one.backward) for one in self.times.passes(chunk, samples)] if rows else []
        filled = self._filled(chunk) if rows else [-1] * len(calls)
        yield ComputeEvent(max(length_s - sum(spent), 0.0))
        for row, seconds in zip(reversed(rows), reversed(spent), strict=True):
            yield ComputeEvent(seconds)
            yield from (call for call, at in zip(calls, filled, strict=True) if at == row)
        yield from (call for call, at in zip(calls, filled, strict=True) if at < 0)

    def _filled(self, chunk: int) -> list[int]:
        """Of every bucket the row whose backward pass fills it, or one before it."""
        places = self.plan.own_places(chunk)
        found: list[int] = []
        for bucket in fill_buckets(self.plan.own_tensors(chunk), _BUCKET_CAP_BYTES):
            found.append(min([*found[-1:], *(self._made_at[places[one]] for one in bucket)]))
        return found

    @cached_property
    def _made_at(self) -> list[int]:
        return first_use_rows(self.plan.table)

    def _exchange_ties(self, ends: list[float]) -> None:
        """Copies of a weight are summed on its first holder and sent back, then summed over the replicas."""
        for tie in self.plan.ties:
            latest = max(ends[place] for place in tie.places)
            for place in tie.places:
                ends[place] = latest + 2 * (tie.holders - 1) * self._tied(tie).seconds
        for place in range(self.layout.ranks):
            ends[place] += sum(call.seconds for call in self._late(place))

    def _tied(self, tie: TiedWeightRanks) -> CommCall:
        """One message with the gradient of ``tie``."""
        is_far = not are_on_one_node(self.plan.spec, "pp", tie.places[0], tie.places[-1])
        return self.clock.call("send", tie.bytes, place_neighbour_pair(self.plan.spec, "pp", is_far))

    def _late(self, place: int) -> list[CommCall]:
        """What is summed over replicas once copies have been."""
        held = [tie.bytes for tie in self.plan.ties if place in tie.places]
        return self._all_reduces(place, held) if held and self.replicas(place).ranks > 1 else []
