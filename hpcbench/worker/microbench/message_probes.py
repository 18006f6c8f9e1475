"""Times of messages in groups of given places, and of collectives and computation under each other.

The root rotates from call to call, and single messages go to and fro: otherwise calls would overlap and hide their
latency."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.results.probe_records import CollectiveProbe, OverlapProbe
from hpcbench.strategies.catalog import options_with_defaults
from hpcbench.strategies.traffic import MessageShape, message_shapes
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


class Collective(NamedTuple):
    """A collective of a group on its buffers, which are one tensor where the operation works in place."""

    call: CollectiveCall
    sent: Tensor
    received: Tensor


def make_collective(team: ProbeGroup, operation: str, payload_bytes: int, *, is_async: bool = False) -> Collective:
    """Make the buffers and one call of ``operation``; payloads as ``strategies.traffic.Traffic`` counts them.

    With ``is_async`` a call of an operation of ``OVERLAPPED_OPERATIONS`` returns the handle to wait for.
    """
    count, size, group, device = payload_bytes // 4, team.size, team.group, team.device
    sent = torch.zeros(-(-count // size) * size if operation != "all_gather" else count, device=device)
    if operation == "all_reduce":
        return Collective(lambda _: dist.all_reduce(sent, group=group, async_op=is_async), sent, sent)
    if operation == "broadcast":
        return Collective(lambda number: dist.broadcast(sent, src=team.ranks[number % size], group=group), sent, sent)
    if operation == "reduce":
        return Collective(lambda number: dist.reduce(sent, dst=team.ranks[number % size], group=group), sent, sent)
    lengths = {"reduce_scatter": len(sent) // size, "all_gather": count * size}
    received = torch.zeros(lengths.get(operation, len(sent)), device=device)
    calls: dict[str, CollectiveCall] = {
        "reduce_scatter": lambda _: dist.reduce_scatter_tensor(received, sent, group=group, async_op=is_async),
        "all_gather": lambda _: dist.all_gather_into_tensor(received, sent, group=group, async_op=is_async),
        "all_to_all": lambda _: dist.all_to_all_single(received, sent, group=group),
        "send": partial(_ping_pong, team, sent, received),
    }
    return Collective(calls[operation], sent, received)


def check_collective(team: ProbeGroup, operation: str, collective: Collective) -> None:
    """Call it once on known values, whose sums are exact in fp32, and leave zeros.

    Raises ``WorkerError`` on all ranks of the group where one of them received other values than it should.
    """
    sent, received, size = collective.sent, collective.received, team.size
    places = torch.arange(len(sent), device=team.device) % 1021

    def values_of(rank: int) -> Tensor:
        return (places + rank).to(sent.dtype)

    received.fill_(-1)
    sent.copy_(values_of(team.own))
    collective.call(0)
    synchronize(team.device)
    part = slice(team.own * len(sent) // size, (team.own + 1) * len(sent) // size)
    total = (size * places + size * (size - 1) // 2).to(sent.dtype)
    if operation in ("all_reduce", "reduce"):
        # The first rank alone has the sum of a reduction to it.
        expected = received.clone() if operation == "reduce" and team.own else total
    elif operation == "reduce_scatter":
        expected = total[part]
    elif operation == "broadcast":
        expected = values_of(0)
    elif operation == "send":
        expected = values_of(1 - team.own)
    else:
        chosen = part if operation == "all_to_all" else slice(None)
        expected = torch.cat([values_of(rank)[chosen] for rank in range(size)])
    wrong = (received != expected).nonzero().flatten()
    found = f"element {int(wrong[0])} is {received[wrong[0]]:g}, {expected[wrong[0]]:g} is right" if len(wrong) else ""
    is_wrong = team.maximum([float(len(wrong))])[0] > 0
    sent.zero_()
    received.zero_()
    if is_wrong:
        what = f"{operation} of {sent.nbytes} bytes over {size} ranks gave a wrong result"
        raise WorkerError(f"{what}: on rank {team.ranks[team.own]} {found or 'all is right, on another it is not'}")


def _ping_pong(team: ProbeGroup, sent: Tensor, received: Tensor, _number: int) -> None:
    other = team.ranks[1 - team.own]
    messages: list[Callable[[], object]] = [
        partial(dist.send, sent, other, team.group),
        partial(dist.recv, received, other, team.group),
    ]
    for message in messages if team.own == 0 else reversed(messages):
        message()


def time_collective(
    team: ProbeGroup, call: CollectiveCall, point_s: float, halves: bool = False, repeats: int | None = None
) -> list[float]:
    """Return the slowest rank's seconds of one call in each repeat, for about ``point_s`` in all.

    ``halves``: a call is two messages, one after the other. ``repeats`` are exactly as many, however long they take.
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
    if repeats is None:
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(point_s / (calls * alone_s))))
    own = [repeat(calls, 3 + calls * number) for number in range(repeats)]
    parts = 2 if halves else 1
    return [seconds / parts for seconds in team.maximum(own)]


def measure_collectives(spec: RunSpec, context: RankContext, check: Callable[[], None]) -> list[CollectiveProbe]:
    """Check and time every message of the run (``message_shapes``); none is left out, however long it takes.

    Groups are neighbours on each node: on one node all of them send at the same time, on several as many as the shape
    has rivals. The messages of ``pairs`` follow each other. ``check`` raises on all ranks where one received a signal
    to stop. Each rank returns what its groups measured; of a pair the first rank alone.
    """
    world = context.members()
    team = ProbeGroup(world, dist.get_process_group_ranks(world), context.rank, context.device)
    shapes = message_shapes(spec)
    if spec.operation == "pairs":
        return _measure_pairs(spec, team, shapes[0], check)
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
        if mine is not None and number < active:
            probes.append(_measure_shape(spec, mine, shape, len(shapes), active))
    return probes


def _measure_shape(spec: RunSpec, team: ProbeGroup, shape: MessageShape, shapes: int, active: int) -> CollectiveProbe:
    """Check and time one message; a run of a single operation keeps ``spec.steps`` readings after its warm-up."""
    collective = make_collective(team, shape.operation, shape.payload_bytes)
    check_collective(team, shape.operation, collective)
    repeats = spec.warmup_steps + spec.steps if spec.operation else None
    budget_s = float(options_with_defaults(spec)["budget_s"]) / shapes
    readings_s = time_collective(team, collective.call, budget_s, shape.operation == "send", repeats)
    kept_s = readings_s[spec.warmup_steps :] if spec.operation else readings_s
    return CollectiveProbe(
        operation=shape.operation, ranks=team.size, nodes=shape.nodes, payload_bytes=shape.payload_bytes, groups=active,
        readings_s=kept_s if spec.operation else [], **reading_statistics(kept_s),
    )  # fmt: skip


def _measure_pairs(
    spec: RunSpec, team: ProbeGroup, shape: MessageShape, check: Callable[[], None]
) -> list[CollectiveProbe]:
    """Measure the first ranks of each two nodes, or each two ranks of one node, while the others wait."""
    places = range(0, team.size, spec.tasks_per_node if spec.nodes > 1 else 1)
    probes = []
    for pair in combinations(places, 2):
        check()
        if team.own in pair:
            ranks = [team.ranks[place] for place in pair]
            group = dist.new_group(ranks, use_local_synchronization=True)
            probe = _measure_shape(spec, ProbeGroup(group, ranks, pair.index(team.own), team.device), shape, 1, 1)
            dist.destroy_process_group(group)
            if team.own == pair[0]:
                probe.pair = [*pair]
                probes.append(probe)
        team.barrier()
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
