"""Every collective at many sizes: calls that follow each other, alone, beside other groups and under computation.

Of operations in which the root does not wait for the others the root moves on from call to call, and single messages
go to and fro: otherwise calls would overlap, and their latency would not be seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.traffic import OPERATIONS
from hpcbench.results.schema import CollectiveProbe, OverlapProbe
from hpcbench.worker.probes.overlap import measure_overlap
from hpcbench.worker.probes.watches import median, spread
from hpcbench.worker.strategies.base import Place
from hpcbench.worker.timers import synchronize

SIZES = 12
SMALLEST_BYTES = 1024
EXCHANGE = "exchange"
LEAST_REPEATS, MOST_REPEATS = 3, 30
_REPEAT_S = 2e-3
"""Calls follow each other for so long before the clock is read, unless one takes longer."""
_PAIRWISE = ("send", EXCHANGE)
_CONTENDED_BYTES = (2**18, 2**20, 2**22)
_PATIENCE = 8
"""A size that takes so many times its part of the budget is left out, and all larger ones."""

Call = Callable[[int], object]
"""One call of the operation, given how many came before it."""


class Team(NamedTuple):
    """The ranks of one group, this one among them."""

    group: dist.ProcessGroup
    ranks: list[int]
    """Of the default group."""
    own: int
    """Place of this rank."""
    device: torch.device

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.ranks)

    def largest(self, values: list[float]) -> list[float]:
        """Of every value the largest of all ranks."""
        # Doubles, which every backend reduces.
        all_of_them = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(all_of_them, op=dist.ReduceOp.MAX, group=self.group)
        return [float(one) for one in all_of_them.tolist()]

    def meet(self) -> None:
        """Wait for all of them."""
        self.largest([0.0])


def measure_collectives(
    spec: RunSpec, place: Place, largest_bytes: int, budget_s: float, check: Callable[[], None]
) -> tuple[list[CollectiveProbe], list[OverlapProbe]]:
    """What the run's placement can tell: all operations where ranks lie alike, contention where nodes hold several.

    ``check`` raises on all ranks where one was told to stop.
    """
    group = place.members()
    team = Team(group, dist.get_process_group_ranks(group), place.rank, place.device)
    if spec.nodes > 1 and spec.tasks_per_node > 1:
        return _contention(team, spec, largest_bytes, budget_s, check), []
    found = []
    operations = [*OPERATIONS, EXCHANGE] if team.size == 2 else [one for one in OPERATIONS if one not in _PAIRWISE]
    sizes = message_sizes(largest_bytes)
    point_s = budget_s / (len(operations) * len(sizes))
    for operation in operations:
        for payload_bytes in sizes:
            check()
            call = calls_of(team, operation, payload_bytes)
            readings = timed(team, call, point_s, halves=operation == "send")
            if not readings:
                break
            found.append(_probe(operation, team.size, spec.nodes, payload_bytes, 1, readings))
    check()
    return found, [measure_overlap(team.group, team.device, spec, _calm_size(found), budget_s / 10)]


def message_sizes(largest_bytes: int) -> list[int]:
    """``SIZES`` sizes in about equal ratios, from ``SMALLEST_BYTES`` on."""
    unit = SMALLEST_BYTES
    ratio = (max(largest_bytes, 2 * unit) / unit) ** (1 / (SIZES - 1))
    return sorted({round(ratio**number) * unit for number in range(SIZES)})


def calls_of(team: Team, operation: str, payload_bytes: int) -> Call:
    """Makes one call of ``operation``; payloads as ``parallel.traffic.Traffic`` counts them."""
    count, size, group, device = payload_bytes // 4, team.size, team.group, team.device
    own = torch.zeros(-(-count // size) * size, device=device)
    if operation == "all_reduce":
        return lambda _: dist.all_reduce(own, group=group)
    if operation == "reduce_scatter":
        part = torch.zeros(len(own) // size, device=device)
        return lambda _: dist.reduce_scatter_tensor(part, own, group=group)
    if operation == "all_gather":
        whole = torch.zeros(count * size, device=device)
        return lambda _: dist.all_gather_into_tensor(whole, own[:count], group=group)
    if operation == "all_to_all":
        received = torch.zeros_like(own)
        return lambda _: dist.all_to_all_single(received, own, group=group)
    if operation == "broadcast":
        return lambda number: dist.broadcast(own, src=team.ranks[number % size], group=group)
    if operation == "reduce":
        return lambda number: dist.reduce(own, dst=team.ranks[number % size], group=group)
    return partial(_to_and_fro if operation == "send" else _both_ways, team, own, torch.zeros_like(own))


def _to_and_fro(team: Team, own: Tensor, received: Tensor, _number: int) -> None:
    other = team.ranks[1 - team.own]
    if team.own == 0:
        dist.send(own, dst=other, group=team.group)
        dist.recv(received, src=other, group=team.group)
    else:
        dist.recv(received, src=other, group=team.group)
        dist.send(own, dst=other, group=team.group)


def _both_ways(team: Team, own: Tensor, received: Tensor, _number: int) -> None:
    other = team.ranks[1 - team.own]
    operations = [
        dist.P2POp(dist.isend, own, other, group=team.group),
        dist.P2POp(dist.irecv, received, other, group=team.group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def timed(team: Team, call: Call, point_s: float, halves: bool = False, is_active: bool = True) -> list[float]:
    """Seconds of one call in each repeat, of the slowest rank; empty where it takes far longer than ``point_s``.

    ``halves``: a call is two messages, one after the other. A rank that is not active waits for the others.
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
    team.meet()
    alone_s = team.largest([repeat(2, 1) if is_active else 0.0])[0]
    if alone_s * LEAST_REPEATS > point_s * _PATIENCE:
        return []
    calls = max(1, min(50, round(_REPEAT_S / alone_s)))
    repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(point_s / (calls * alone_s))))
    own = [repeat(calls, 3 + calls * number) if is_active else 0.0 for number in range(repeats)]
    return [one / 2 if halves else one for one in team.largest(own)]


def _probe(
    operation: str, ranks: int, nodes: int, payload_bytes: int, groups: int, readings: list[float]
) -> CollectiveProbe:
    return CollectiveProbe(
        operation=operation,
        ranks=ranks,
        nodes=nodes,
        payload_bytes=payload_bytes,
        groups=groups,
        seconds=median(readings),
        spread=spread(readings),
        repeats=len(readings),
    )


def _calm_size(found: list[CollectiveProbe]) -> int:
    """A message that takes long enough to compute under it, and not too long."""
    reduced = [one for one in found if one.operation == "all_reduce"]
    fitting = [one.payload_bytes for one in reduced if one.seconds <= 0.1]
    return max(fitting, default=SMALLEST_BYTES)


def _contention(
    team: Team, spec: RunSpec, largest_bytes: int, budget_s: float, check: Callable[[], None]
) -> list[CollectiveProbe]:
    """all_reduce among the ranks of one place on every node: one such group alone, then more of them together."""
    tasks = spec.tasks_per_node
    groups = [
        dist.new_group([team.ranks[node * tasks + place] for node in range(spec.nodes)]) for place in range(tasks)
    ]
    place, node = team.own % tasks, team.own // tasks
    members = [team.ranks[one * tasks + place] for one in range(spec.nodes)]
    mine = Team(groups[place], members, node, team.device)
    counts = sorted({1, *(2**power for power in range(1, 10) if 2**power < tasks), tasks})
    sizes = [size for size in _CONTENDED_BYTES if size <= largest_bytes]
    found = []
    for payload_bytes in sizes:
        call = calls_of(mine, "all_reduce", payload_bytes)
        for count in counts:
            check()
            # Groups whose turn it is not wait for those whose it is.
            team.meet()
            readings = timed(team, call, budget_s / (len(counts) * len(sizes)), is_active=place < count)
            if readings:
                found.append(_probe("all_reduce", spec.nodes, spec.nodes, payload_bytes, count, readings))
    return found
