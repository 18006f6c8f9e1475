"""Times of messages in groups of given places, and of collectives and computation under each other.

The root rotates from call to call, and single messages go to and fro: otherwise calls would overlap and hide their
latency."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.probe_records import CollectiveProbe, OverlapProbe
from hpcbench.strategies.traffic import MessageShape
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.measure.clocks import reading_statistics, synchronize

MIN_REPEATS, MAX_REPEATS = 3, 30
_BURST_S = 2e-3
"""Calls follow each other for so long before the clock is read, unless one takes longer."""
CollectiveCall = Callable[[int], object]
"""Function that calls the operation once; its argument is the number of calls before it."""


class ProbeGroup(NamedTuple):
    """The ranks of one group, this one among them."""

    group: dist.ProcessGroup
    ranks: list[int]
    """Ranks in the default group."""
    own: int
    """Place of this rank."""
    device: torch.device

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.ranks)

    def maximum(self, values: list[float]) -> list[float]:
        """Return the maximum of each value over all ranks."""
        # Doubles, which every backend reduces.
        maxima = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in maxima.tolist()]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.maximum([0.0])


class OverlapReading(NamedTuple):
    """Seconds from the beginning: the collectives were begun, the computation done, both done."""

    issued_s: float
    computed_s: float
    ended_s: float


def read_overlap(
    group: ProbeGroup, compute: Callable[[], None] | None, begin: CollectiveCall, calls: int
) -> OverlapReading:
    """Begin ``calls`` collectives, compute, and wait for all; the maxima over ranks."""
    group.barrier()
    synchronize(group.device)
    began = time.perf_counter()
    works: list[Any] = [begin(number) for number in range(calls)]
    issued_s = time.perf_counter() - began
    if compute is not None:
        compute()
    # The stream that computes, not the library's: its end is that of the computation alone.
    if group.device.type == "cuda":
        torch.cuda.current_stream(group.device).synchronize()
    computed_s = time.perf_counter() - began
    for work in works:
        work.wait()
    synchronize(group.device)
    return OverlapReading(*group.maximum([issued_s, computed_s, time.perf_counter() - began]))


def overlap_record(
    group: ProbeGroup,
    spec: RunSpec,
    message: tuple[str, int, int],
    compute: Callable[[], None],
    begin: CollectiveCall,
    repeats: int,
) -> OverlapProbe:
    """Read computation, collectives and both together in turns.

    Args:
        group: of the collectives, all ranks of the run.
        spec: the run.
        message: operation, payload in bytes, and the number of calls.
        compute: the computation.
        begin: begins a call and returns the handle to wait for.
        repeats: of each of the three.
    """
    operation, payload_bytes, calls = message
    readings = [
        (read_overlap(group, compute, begin, 0), read_overlap(group, None, begin, calls),
         read_overlap(group, compute, begin, calls))
        for _ in range(repeats)
    ]  # fmt: skip
    alone, sent, both = (
        OverlapReading(*(median(values) for values in zip(*kind, strict=True))) for kind in zip(*readings, strict=True)
    )
    return OverlapProbe(
        operation=operation,
        calls=calls,
        ranks=spec.ranks,
        nodes=spec.nodes,
        payload_bytes=payload_bytes,
        compute_s=alone.computed_s,
        comm_s=sent.ended_s,
        compute_under_comm_s=both.computed_s - both.issued_s,
        both_s=both.ended_s,
        issue_s=sent.issued_s,
        repeats=repeats,
    )


def make_collective_call(
    team: ProbeGroup, operation: str, payload_bytes: int, *, is_async: bool = False
) -> CollectiveCall:
    """Makes one call of ``operation``; payloads as ``strategies.traffic.Traffic`` counts them.

    With ``is_async`` a call of an operation of ``OVERLAPPED_OPERATIONS`` returns the handle to wait for.
    """
    count, size, group, device = payload_bytes // 4, team.size, team.group, team.device
    tensor = torch.zeros(-(-count // size) * size, device=device)
    if operation == "all_reduce":
        return lambda _: dist.all_reduce(tensor, group=group, async_op=is_async)
    if operation == "reduce_scatter":
        part = torch.zeros(len(tensor) // size, device=device)
        return lambda _: dist.reduce_scatter_tensor(part, tensor, group=group, async_op=is_async)
    if operation == "all_gather":
        whole = torch.zeros(count * size, device=device)
        return lambda _: dist.all_gather_into_tensor(whole, tensor[:count], group=group, async_op=is_async)
    if operation == "all_to_all":
        received = torch.zeros_like(tensor)
        return lambda _: dist.all_to_all_single(received, tensor, group=group)
    if operation == "broadcast":
        return lambda number: dist.broadcast(tensor, src=team.ranks[number % size], group=group)
    if operation == "reduce":
        return lambda number: dist.reduce(tensor, dst=team.ranks[number % size], group=group)
    return partial(_ping_pong, team, tensor, torch.zeros_like(tensor))


def _ping_pong(team: ProbeGroup, sent: Tensor, received: Tensor, _number: int) -> None:
    other = team.ranks[1 - team.own]
    messages: list[Callable[[], object]] = [
        partial(dist.send, sent, other, team.group),
        partial(dist.recv, received, other, team.group),
    ]
    for message in messages if team.own == 0 else reversed(messages):
        message()


def time_collective(team: ProbeGroup, call: CollectiveCall, point_s: float, halves: bool = False) -> list[float]:
    """Return the slowest rank's seconds of one call in each repeat, for about ``point_s`` in all.

    ``halves``: a call is two messages, one after the other.
    """

    def repeat(calls: int, first: int) -> float:
        synchronize(team.device)
        began = time.perf_counter()
        for number in range(first, first + calls):
            call(number)
        synchronize(team.device)
        return (time.perf_counter() - began) / calls

    repeat(1, 0)
    team.barrier()
    alone_s = team.maximum([repeat(2, 1)])[0]
    calls = max(1, min(50, round(_BURST_S / alone_s)))
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(point_s / (calls * alone_s))))
    own = [repeat(calls, 3 + calls * number) for number in range(repeats)]
    parts = 2 if halves else 1
    return [seconds / parts for seconds in team.maximum(own)]


def measure_messages(
    spec: RunSpec, context: RankContext, shapes: Sequence[MessageShape], budget_s: float, check: Callable[[], None]
) -> list[CollectiveProbe]:
    """Time every one of ``shapes``; none is left out, however long it takes.

    Groups are neighbours on each node: on one node all of them send at the same time, on several as many as the shape
    has rivals. ``check`` raises on all ranks where one received a signal to stop.
    """
    world = context.members()
    team = ProbeGroup(world, dist.get_process_group_ranks(world), context.rank, context.device)
    widths = sorted({shape.ranks_per_node for shape in shapes})
    own_groups = {width: _own_group(team, spec, width) for width in widths}
    probes = []
    for shape in shapes:
        check()
        # Ranks of other groups wait here, not in the measured calls.
        team.barrier()
        count = spec.tasks_per_node // shape.ranks_per_node
        active = count if spec.nodes == 1 else min(shape.rivals, count)
        mine, number = own_groups[shape.ranks_per_node]
        if mine is None or number >= active:
            continue
        call = make_collective_call(mine, shape.operation, shape.payload_bytes)
        readings_s = time_collective(mine, call, budget_s / len(shapes), halves=shape.operation == "send")
        probes.append(
            CollectiveProbe(
                operation=shape.operation,
                ranks=mine.size,
                nodes=spec.nodes,
                payload_bytes=shape.payload_bytes,
                groups=active,
                **reading_statistics(readings_s),
            )
        )
    return probes


def _own_group(team: ProbeGroup, spec: RunSpec, width: int) -> tuple[ProbeGroup | None, int]:
    """Return this rank's group of ``width`` neighbours on every node, and its number; all ranks make all groups."""
    own_group: tuple[ProbeGroup | None, int] = (None, -1)
    for number in range(spec.tasks_per_node // width):
        places = [
            node * spec.tasks_per_node + number * width + place for node in range(spec.nodes) for place in range(width)
        ]
        members = [team.ranks[place] for place in places]
        group = dist.new_group(members)
        if team.own in places:
            own_group = ProbeGroup(group, members, places.index(team.own), team.device), number
    return own_group
