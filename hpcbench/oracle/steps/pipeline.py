"""Steps of synchronous pipelines: the very schedule that runs, walked through with and without communication.

Every rank does its part of the schedule, adds up its gradients over its replicas, updates, and begins anew: a step is
as long as the longest way from a rank's first action to its next first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

from hpcbench.oracle.chunks import ChunkTimes
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.pipeline_run import PipelineRun, Tie
from hpcbench.oracle.placement import Group, group_of, is_within_node, pair_of, parts_of
from hpcbench.oracle.step import ALL, StepTime
from hpcbench.oracle.streams import Call, Compute, Event
from hpcbench.parallel.buckets import BUCKET_CAP_MB, MIB, bucket_bytes, buckets
from hpcbench.parallel.course import Course, courses
from hpcbench.parallel.gradients import first_rows
from hpcbench.parallel.schedule import BACKWARD, FORWARD, INPUT

_CAP_BYTES = int(BUCKET_CAP_MB * MIB)


def step_of_pipeline(clock: Clock, plan: PipelineRun, schedule: str) -> StepTime:
    """One step, as the rank sees it that computes longest; ``plan`` is of any rank."""
    pipeline = Pipeline(ChunkTimes(plan, clock))
    place = max(range(plan.layout.ranks), key=pipeline.compute_s)
    return step_of(
        clock, pipeline.spent(place), max(pipeline.paces(schedule, True)), max(pipeline.paces(schedule, False))
    )


class Spent(NamedTuple):
    """One rank's own seconds in a step."""

    compute_s: float
    comm_s: float
    latency_s: float
    """Of ``comm_s``, what no bandwidth would shorten."""


def step_of(clock: Clock, spent: Spent, with_comm_s: float, without_s: float) -> StepTime:
    """A step by how long the schedule takes with communication and without, and what the rank does meanwhile.

    What the schedule loses by communication is exposed, on whichever rank; the rest of the time in which the rank
    does not compute is the bubble.
    """
    overhead_s = clock.overhead_s()
    exposed_s = max(with_comm_s - without_s, 0.0)
    straggler_s = clock.straggler_s(spent.compute_s + overhead_s)
    return StepTime(
        step_time_s=without_s + exposed_s + overhead_s + straggler_s,
        compute_s=spent.compute_s + overhead_s,
        comm_s=max(spent.comm_s, exposed_s),
        exposed_comm_s=exposed_s,
        bubble_s=max(without_s - spent.compute_s, 0.0),
        straggler_s=straggler_s,
        latency_s=exposed_s * spent.latency_s / spent.comm_s if spent.comm_s else 0.0,
    )


class Pipeline:
    """One pipeline of a run, with its replicas around it. Places count its ranks."""

    def __init__(self, times: ChunkTimes) -> None:
        self.times, self.plan, self.clock = times, times.plan, times.clock
        self.layout = self.plan.layout

    def paces(self, schedule: str, with_comm: bool) -> list[float]:
        """Of every place: from its first action to the end of its update."""
        prices = partial(self.times.prices, with_comm=with_comm)
        found = courses(schedule, self.layout, self.plan.spec.micro_batches, prices)
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

    def spent(self, place: int) -> Spent:
        """What the rank there does by itself."""
        times, backward = self.times, INPUT if self.times.splits else BACKWARD
        calls: list[tuple[Call | None, int]] = [(call, 1) for call in self._late(place)]
        for chunk in self.layout.chunks_of(place):
            for (samples, again), count in self._own(place).items():
                calls += [(call, count) for call in times.busy(chunk, samples, again).shared]
                calls += [(times.sends(kind, chunk, samples), count) for kind in (FORWARD, backward)]
            calls += [(call, 1) for call in self.buckets(place, chunk)]
        for tie in self.plan.ties:
            sent = tie.holders - 1 if place == tie.first else 1
            calls.append((self._tied(tie), sent if place in tie.places else 0))
        made = [(call, count) for call, count in calls if call is not None]
        return Spent(
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
        if max(self.layout.widths) == 1:
            return self._every
        return Counter(kinds[number] for number in self.layout.micro_batches_of(place, len(kinds)))

    @cached_property
    def _kinds(self) -> list[tuple[float, bool]]:
        return self.times.kinds(self.plan.spec.micro_batches)

    @cached_property
    def _every(self) -> Counter[tuple[float, bool]]:
        return Counter(self._kinds)

    def replicas(self, place: int) -> Group:
        """The ranks that hold the same chunks."""
        width = self.layout.widths[self.layout.stage_of(place)]
        return group_of(self.plan.spec, "dp") if width == 1 else parts_of(self.plan.spec, "pp", width)[0]

    def buckets(self, place: int, chunk: int) -> list[Call]:
        """Of a chunk's gradients, in the order in which they are sent; none without replicas."""
        return [] if self.replicas(place).ranks < 2 else self._all_reduces(place, self.plan.own_tensors(chunk))

    def _all_reduces(self, place: int, sizes: Sequence[int]) -> list[Call]:
        group = self.replicas(place)
        return [self.clock.call("all_reduce", payload, group, "bucket") for payload in bucket_bytes(sizes, _CAP_BYTES)]

    def _summed(self, place: int, course: Course) -> float:
        """When the gradients of the chunks there are summed over their replicas."""
        if self.replicas(place).ranks < 2:
            return course.end
        begin = min(begin for begin, _ in course.last.values())
        return begin + self.clock.run(self._ending(place, course, begin)).end_s

    def _ending(self, place: int, course: Course, begin: float) -> Iterator[Event]:
        """From the first chunk's last backward pass on: what is computed, and each bucket as it fills."""
        now = begin
        for chunk, (its_begin, its_end) in sorted(course.last.items(), key=lambda item: item[1]):
            yield Compute(max(its_begin - now, 0.0))
            yield from self._last_pass(place, chunk, its_end - its_begin)
            now = its_end
        yield Compute(max(course.end - now, 0.0))
        yield ALL

    def _last_pass(self, place: int, chunk: int, length_s: float) -> Iterator[Event]:
        """A chunk's last backward pass; gradients of weights that come by themselves are sent all at once."""
        calls = self.buckets(place, chunk)
        rows = [] if self.times.splits else self.plan.rows[chunk]
        samples, _ = self._kinds[-1]
        spent = [self.clock.kernel_s(one.backward) for one in self.times.passes(chunk, samples)] if rows else []
        filled = self._filled(chunk) if rows else [-1] * len(calls)
        yield Compute(max(length_s - sum(spent), 0.0))
        for row, seconds in zip(reversed(rows), reversed(spent), strict=True):
            yield Compute(seconds)
            yield from (call for call, at in zip(calls, filled, strict=True) if at == row)
        yield from (call for call, at in zip(calls, filled, strict=True) if at < 0)

    def _filled(self, chunk: int) -> list[int]:
        """Of every bucket the row whose backward pass fills it, or one before it."""
        places = self.plan.own_places(chunk)
        found: list[int] = []
        for bucket in buckets(self.plan.own_tensors(chunk), _CAP_BYTES):
            found.append(min([*found[-1:], *(self._made_at[places[one]] for one in bucket)]))
        return found

    @cached_property
    def _made_at(self) -> list[int]:
        return first_rows(self.plan.table)

    def _exchange_ties(self, ends: list[float]) -> None:
        """Copies of a weight are summed on its first holder and sent back, then summed over the replicas."""
        for tie in self.plan.ties:
            latest = max(ends[place] for place in tie.places)
            for place in tie.places:
                ends[place] = latest + 2 * (tie.holders - 1) * self._tied(tie).seconds
        for place in range(self.layout.ranks):
            ends[place] += sum(call.seconds for call in self._late(place))

    def _tied(self, tie: Tie) -> Call:
        """One message with the gradient of ``tie``."""
        is_far = not is_within_node(self.plan.spec, "pp", tie.places[0], tie.places[-1])
        return self.clock.call("send", tie.bytes, pair_of(self.plan.spec, "pp", is_far))

    def _late(self, place: int) -> list[Call]:
        """What is summed over replicas once copies have been."""
        held = [tie.bytes for tie in self.plan.ties if place in tie.places]
        return self._all_reduces(place, held) if held and self.replicas(place).ranks > 1 else []
