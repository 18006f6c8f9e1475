"""Times of every collective at many sizes: alone, beside other groups, and overlapped with computation; and of given
messages in groups of given places.

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
from hpcbench.parallel.traffic import COMM_OPERATIONS, MessageShape
from hpcbench.results.probe_records import CollectiveProbe, OverlapProbe
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.measure.clocks import reading_statistics, synchronize

_OVERLAP_REPEATS = 7
_COMPUTE_SHARE = 0.7
"""Fraction of the all_reduce's time that the computation takes, so that all of the computation overlaps with it."""
_SHORTEST_KERNEL_S = 5e-4
"""A hundred times the launch of a kernel: with shorter ones the time of launches would be measured."""
_MAX_IMAGES = 4096

SIZE_COUNT = 12
MIN_MESSAGE_BYTES = 1024
EXCHANGE = "exchange"
MIN_REPEATS, MAX_REPEATS = 3, 30
_BURST_S = 2e-3
"""Calls follow each other for so long before the clock is read, unless one takes longer."""
_PAIRWISE = ("send", EXCHANGE)
_CONTENDED_BYTES = (2**18, 2**20, 2**22, 2**25, 2**28)
_MAX_BUDGET_FACTOR = 8
"""A size that takes so many times its part of the budget is left out, and all larger ones."""

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


def measure_overlap(group: ProbeGroup, spec: RunSpec, payload_bytes: int, budget_s: float) -> OverlapProbe:
    """Time an all_reduce of ``payload_bytes`` beside a repeated convolution; medians of the slowest rank."""
    device = group.device
    buffer = torch.zeros(payload_bytes // 4, device=device)
    layer = torch.nn.Conv2d(64, 64, 3, padding=1, device=device).requires_grad_(False)
    images = torch.zeros(8, 64, 32, 32, device=device)

    def compute(times: int) -> None:
        for _ in range(times):
            layer(images)

    def begin(_number: int) -> Any:
        return dist.all_reduce(buffer, group=group.group, async_op=True)

    read_overlap(group, partial(compute, 1), begin, 1)
    # All ranks read the same maxima, so all of them enlarge the batch as often.
    while (once_s := read_overlap(group, partial(compute, 10), begin, 0).computed_s / 10) < _SHORTEST_KERNEL_S and len(
        images
    ) < _MAX_IMAGES:
        images = torch.zeros(2 * len(images), 64, 32, 32, device=device)
    comm_s = read_overlap(group, None, begin, 1).ended_s
    times = max(1, int(_COMPUTE_SHARE * comm_s / once_s))
    repeats = max(3, min(_OVERLAP_REPEATS, int(budget_s / max(3 * comm_s, 1e-6))))
    return overlap_record(group, spec, ("all_reduce", payload_bytes, 1), partial(compute, times), begin, repeats)


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


def measure_collectives(
    spec: RunSpec, context: RankContext, largest_bytes: int, budget_s: float, check: Callable[[], None]
) -> tuple[list[CollectiveProbe], list[OverlapProbe]]:
    """Measure what the placement allows: all operations if ranks are placed evenly, contention if nodes hold several.

    ``check`` raises on all ranks where one received a signal to stop.
    """
    group = context.members()
    team = ProbeGroup(group, dist.get_process_group_ranks(group), context.rank, context.device)
    if spec.nodes > 1 and spec.tasks_per_node > 1:
        return _measure_contention(team, spec, largest_bytes, budget_s, check), []
    probes = []
    operations = [name for name in (*COMM_OPERATIONS, EXCHANGE) if team.size == 2 or name not in _PAIRWISE]
    sizes = message_sizes(largest_bytes)
    point_s = budget_s / (len(operations) * len(sizes))
    for operation in operations:
        for payload_bytes in sizes:
            check()
            call = make_collective_call(team, operation, payload_bytes)
            readings = time_collective(team, call, point_s, halves=operation == "send")
            if not readings:
                break
            probes.append(collective_probe(operation, team, spec.nodes, payload_bytes, 1, readings))
    check()
    # A message that takes long enough to compute beside it, and not too long.
    fitting = [probe.payload_bytes for probe in probes if probe.operation == "all_reduce" and probe.seconds <= 0.1]
    overlap = measure_overlap(team, spec, max(fitting, default=MIN_MESSAGE_BYTES), budget_s / 10)
    return probes, [overlap]


def message_sizes(largest_bytes: int) -> list[int]:
    """``SIZE_COUNT`` sizes in about equal ratios, from ``MIN_MESSAGE_BYTES`` on."""
    unit = MIN_MESSAGE_BYTES
    ratio = (max(largest_bytes, 2 * unit) / unit) ** (1 / (SIZE_COUNT - 1))
    return sorted({round(ratio**number) * unit for number in range(SIZE_COUNT)})


def make_collective_call(
    team: ProbeGroup, operation: str, payload_bytes: int, *, is_async: bool = False
) -> CollectiveCall:
    """Makes one call of ``operation``; payloads as ``parallel.traffic.Traffic`` counts them.

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
    return partial(_ping_pong if operation == "send" else _exchange_both_ways, team, tensor, torch.zeros_like(tensor))


def _ping_pong(team: ProbeGroup, sent: Tensor, received: Tensor, _number: int) -> None:
    other = team.ranks[1 - team.own]
    messages: list[Callable[[], object]] = [
        partial(dist.send, sent, other, team.group),
        partial(dist.recv, received, other, team.group),
    ]
    for message in messages if team.own == 0 else reversed(messages):
        message()


def _exchange_both_ways(team: ProbeGroup, sent: Tensor, received: Tensor, _number: int) -> None:
    other = team.ranks[1 - team.own]
    operations = [
        dist.P2POp(dist.isend, sent, other, group=team.group),
        dist.P2POp(dist.irecv, received, other, group=team.group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def time_collective(
    team: ProbeGroup,
    call: CollectiveCall,
    point_s: float,
    halves: bool = False,
    is_active: bool = True,
    is_required: bool = False,
) -> list[float]:
    """Return the slowest rank's seconds of one call in each repeat; none where it takes far longer than ``point_s``.

    ``halves``: a call is two messages, one after the other. A rank that is not active waits for the others. A size that
    is required is repeated as few times as any, however long it takes.
    """

    def repeat(calls: int, first: int) -> float:
        synchronize(team.device)
        began = time.perf_counter()
        for number in range(first, first + calls):
            call(number)
        synchronize(team.device)
        return (time.perf_counter() - began) / calls

    if is_active:
        repeat(1, 0)
    team.barrier()
    alone_s = team.maximum([repeat(2, 1) if is_active else 0.0])[0]
    if alone_s * MIN_REPEATS > point_s * _MAX_BUDGET_FACTOR and not is_required:
        return []
    calls = max(1, min(50, round(_BURST_S / alone_s)))
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(point_s / (calls * alone_s))))
    own = [repeat(calls, 3 + calls * number) if is_active else 0.0 for number in range(repeats)]
    parts = 2 if halves else 1
    return [seconds / parts for seconds in team.maximum(own)]


def collective_probe(
    operation: str, team: ProbeGroup, nodes: int, payload_bytes: int, groups: int, readings_s: list[float]
) -> CollectiveProbe:
    """Return the record of one size, from the readings of its repeats."""
    return CollectiveProbe(
        operation=operation,
        ranks=team.size,
        nodes=nodes,
        payload_bytes=payload_bytes,
        groups=groups,
        **reading_statistics(readings_s),
    )


def _measure_contention(
    team: ProbeGroup, spec: RunSpec, largest_bytes: int, budget_s: float, check: Callable[[], None]
) -> list[CollectiveProbe]:
    """all_reduce among the ranks of one place on every node: one such group alone, then more of them together."""
    tasks = spec.tasks_per_node
    members = [team.ranks[local_rank::tasks] for local_rank in range(tasks)]
    groups = [dist.new_group(ranks) for ranks in members]
    node, local_rank = divmod(team.own, tasks)
    mine = ProbeGroup(groups[local_rank], members[local_rank], node, team.device)
    counts = sorted({1, *(2**power for power in range(1, 10) if 2**power < tasks), tasks})
    sizes = [size for size in _CONTENDED_BYTES if size <= largest_bytes]
    probes = []
    for payload_bytes in sizes:
        call = make_collective_call(mine, "all_reduce", payload_bytes)
        for count in counts:
            check()
            # Groups whose turn it is not wait for those whose it is.
            team.barrier()
            readings = time_collective(team, call, budget_s / (len(counts) * len(sizes)), is_active=local_rank < count)
            if readings:
                probes.append(collective_probe("all_reduce", mine, spec.nodes, payload_bytes, count, readings))
    return probes


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
        if mine is None:
            continue
        readings = time_collective(
            mine,
            make_collective_call(mine, shape.operation, shape.payload_bytes),
            budget_s / len(shapes),
            halves=shape.operation == "send",
            is_active=number < active,
            is_required=True,
        )
        probes.append(collective_probe(shape.operation, mine, spec.nodes, shape.payload_bytes, active, readings))
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
