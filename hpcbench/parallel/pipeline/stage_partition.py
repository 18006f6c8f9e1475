"""Partition of a chain of blocks into pipeline stages.
``minimax_cuts`` and ``balanced_cuts`` cut for a fixed number of stages; ``partition_pipeline`` is PipeDream's dynamic
programme (Narayanan et al. 2019, SOSP, section 3.1), which also chooses the number of stages and their replicas for
links that differ by level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise
from math import ceil, inf, prod
from typing import NamedTuple

from hpcbench.errors import ConfigError
from hpcbench.parallel.layer_table import LayerTable


class BlockCost(NamedTuple):
    """Cost of one block of a chain, for one micro-batch."""

    forward_s: float
    backward_s: float
    output_bytes: int
    """Activations for the next block; their gradient has the same size."""
    parameter_bytes: int
    kept_bytes: int
    """Activations that autograd keeps for the backward pass."""

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward pass."""
        return self.forward_s + self.backward_s


class InterconnectLevel(NamedTuple):
    """``groups`` groups of the inner level (workers, for the innermost), and the bandwidth between any two of them."""

    groups: int
    bandwidth_bytes_per_s: float


class PartitionStage(NamedTuple):
    """Blocks ``first`` to ``last`` - 1 on ``replicas`` workers, with ``versions`` of them in flight."""

    first: int
    last: int
    replicas: int
    versions: int
    held_bytes: int
    """Memory of each of its workers."""


class PipelinePartition(NamedTuple):
    """``bottleneck_s`` is the time per micro-batch of the slowest stage or link, which paces the pipeline."""

    bottleneck_s: float
    stages: tuple[PartitionStage, ...]

    @property
    def cuts(self) -> tuple[int, ...]:
        """First blocks of all stages but the first."""
        return tuple(stage.first for stage in self.stages[1:])


def minimax_cuts(blocks: int, stages: int, cost: Callable[[int, int, int], float]) -> tuple[int, ...]:
    """Return the first blocks of all stages but the first that minimise the cost of the most expensive stage.

    ``cost(stage, first, last)`` is that of blocks ``first`` to ``last`` - 1 as stage number ``stage``. Every stage has
    a block. Among equals the earliest cuts win. ``ConfigError`` if there are more stages than blocks.

    >>> minimax_cuts(4, 2, lambda _stage, first, last: sum([3, 1, 1, 1][first:last]))
    (1,)
    """
    if stages > blocks:
        raise ConfigError(f"{stages} stages of {blocks} blocks: every stage needs one", hint=f"{blocks} stages or less")
    # best[first]: the largest cost of this and all later stages, and their cuts, if this one begins at block first.
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        first: (cost(stages - 1, first, blocks), ()) for first in range(stages - 1, blocks)
    }
    for stage in range(stages - 2, -1, -1):
        ends = blocks - (stages - 1 - stage)
        best = {
            first: min(
                (max(cost(stage, first, last), best[last][0]), (last, *best[last][1]))
                for last in range(first + 1, ends + 1)
            )
            for first in range(stage, ends)
        }
    return best[0][1]


def balanced_cuts(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return ``minimax_cuts`` for blocks whose costs add up.

    >>> balanced_cuts([1, 1, 1, 1, 4], 2)
    (4,)
    """
    sums = [0, *accumulate(costs)]
    return minimax_cuts(len(costs), stages, lambda _stage, first, last: sums[last] - sums[first])


def block_ranges(cuts: Sequence[int], blocks: int) -> list[range]:
    """Return the blocks of every stage.

    >>> block_ranges((1, 3), 4)
    [range(0, 1), range(1, 3), range(3, 4)]
    """
    return [range(first, last) for first, last in zip([0, *cuts], [*cuts, blocks], strict=True)]


def partition_pipeline(
    chain: Sequence[BlockCost],
    levels: Sequence[InterconnectLevel],
    memory_bytes: float = inf,
    replicated: bool = True,
    optimizer_states: int = 1,
) -> PipelinePartition:
    """Return the pipeline with the smallest bottleneck that uses all workers.

    ``levels`` go from the innermost one outwards::

        levels = [8 workers per node, 2 nodes]      stage 0 (blocks 0-4, 2 replicas)  ->  stage 1 (blocks 5-9, ...)

    On level k (of m_k groups with bandwidth B_k), with A^0 the sum of both passes' times, w the parameters of a stage
    and a_s the output of block s (equation 1 of the paper, and the one after it):

        T^k(i..j, m) = max(A^{k-1}(i..j, m_{k-1}), 2 (m - 1) w / B_k) / m
        A^k(i..j, m) = min over s, m' of max(A^k(i..s, m - m'), 2 a_s / B_k, T^k(s+1..j, m'))

    Unlike the paper's programme, every stage keeps to ``memory_bytes``, the last and a single one too: a stage has
    1 + ceil(workers behind it / its own) micro-batches in flight, each with its own weight version, of which the
    newest are the live weights; gradients and ``optimizer_states`` tensors per parameter are added. Without
    ``replicated`` every stage has one worker. Among equals the most replicated plan with the fewest stages wins.
    ``ConfigError`` if nothing fits: it names the stage that is too large in the smallest plan.
    """
    assert chain, "a chain without blocks"
    partition = _PartitionSearch(chain, levels, memory_bytes, replicated, optimizer_states).best()
    if partition is not None:
        return partition
    workers = prod(level.groups for level in levels)
    if not replicated and workers > len(chain):
        message = f"{workers} workers without replicas need as many stages, and there are {len(chain)} blocks"
        raise ConfigError(message, hint="let stages be replicated, or use fewer workers")
    smallest = _PartitionSearch(chain, levels, inf, replicated, optimizer_states, by_memory=True).best()
    assert smallest is not None, "without a limit some plan fits"
    number, worst = max(enumerate(smallest.stages), key=lambda entry: entry[1].held_bytes)
    raise ConfigError(
        f"no partition over {workers} workers fits: even in the one that needs least, stage {number} (blocks "
        f"{worst.first} to {worst.last - 1}, {worst.versions} micro-batches in flight) needs {worst.held_bytes} bytes, "
        f"and the limit is {memory_bytes:.0f}",
        hint="a smaller micro-batch, more workers, or recomputation of activations",
    )


_StagePlan = tuple[float, tuple[PartitionStage, ...]]
_INFEASIBLE_PLAN: _StagePlan = (inf, ())


@dataclass
class _PartitionSearch:
    """The recursion, from the first stage on: the workers behind a stage are then known when it is chosen.

    With ``by_memory`` a stage costs its bytes instead of its time, and links and replicas cost nothing.
    """

    chain: Sequence[BlockCost]
    levels: Sequence[InterconnectLevel]
    memory_bytes: float
    is_replicated: bool
    optimizer_states: int
    by_memory: bool = False

    def __post_init__(self) -> None:
        self._seconds = [0.0, *accumulate(block.compute_s for block in self.chain)]
        self._parameters = [0, *accumulate(block.parameter_bytes for block in self.chain)]
        self._kept = [0, *accumulate(block.kept_bytes for block in self.chain)]
        self._stages_of = cache(self._best_stages)

    def best(self) -> PipelinePartition | None:
        """Return the plan for the whole chain over all workers, or ``None`` if none fits."""
        groups = self.levels[-1].groups if self.levels else 1
        cost, stages = self._stages_of(len(self.levels), 0, len(self.chain), groups, Fraction(0))
        if not stages:
            return None
        sized: list[PartitionStage] = []
        workers_behind = 0
        for stage in reversed(stages):
            versions = 1 + ceil(Fraction(workers_behind, stage.replicas))
            held = self._held_bytes(stage.first, stage.last, versions)
            sized.append(stage._replace(versions=versions, held_bytes=held))
            workers_behind += stage.replicas
        return PipelinePartition(cost, tuple(reversed(sized)))

    def _best_stages(self, level: int, first: int, last: int, groups: int, behind: Fraction) -> _StagePlan:
        """A^level: blocks ``first`` to ``last`` - 1 over ``groups`` groups.

        ``behind`` is the number of workers behind all of them, per copy.
        """
        if level == 0:
            held = self._held_bytes(first, last, 1 + ceil(behind))
            if held > self.memory_bytes:
                return _INFEASIBLE_PLAN
            cost = float(held) if self.by_memory else self._seconds[last] - self._seconds[first]
            return cost, (PartitionStage(first, last, 1, 0, 0),)
        best = _INFEASIBLE_PLAN
        inner_groups = self.levels[level - 2].groups if level > 1 else 1
        group_workers = prod(inner.groups for inner in self.levels[: level - 1])
        bandwidth = inf if self.by_memory else self.levels[level - 1].bandwidth_bytes_per_s
        is_limited = self.by_memory or self.memory_bytes < inf
        for copies in range(groups if self.is_replicated else 1, 0, -1):
            remaining = groups - copies
            # Without a limit the workers behind make no difference, and every range is searched once.
            inner_behind = (behind + remaining * group_workers) / copies if is_limited else behind
            for cut in range(first + 1, last) if remaining else (last,):
                cost, stages = self._stages_of(level - 1, first, cut, inner_groups, inner_behind)
                if not self.by_memory:
                    # T^level
                    parameters = self._parameters[cut] - self._parameters[first]
                    cost = max(cost, 2 * (copies - 1) * parameters / bandwidth) / copies
                if cost >= best[0]:
                    continue
                rest_cost, rest = self._stages_of(level, cut, last, remaining, behind) if remaining else (0.0, ())
                link = 2 * self.chain[cut - 1].output_bytes / bandwidth if remaining else 0.0
                cost = max(cost, rest_cost, link)
                if cost < best[0]:
                    repeated = tuple(stage._replace(replicas=stage.replicas * copies) for stage in stages)
                    best = (cost, repeated + rest)
        return best

    def _held_bytes(self, first: int, last: int, versions: int) -> int:
        parameters = self._parameters[last] - self._parameters[first]
        return parameters * (versions + 1 + self.optimizer_states) + (self._kept[last] - self._kept[first]) * versions


FP32_BYTES = 4


def parse_cuts(text: str) -> tuple[int, ...] | None:
    """Parse ``"3,7"`` as ``(3, 7)``; ``None`` if it is no ascending list of blocks after the first."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        return None
    cuts = tuple(int(part) for part in parts)
    return cuts if all(low < high for low, high in pairwise((0, *cuts))) else None


def block_costs(table: LayerTable, balance: str) -> list[int]:
    """Return the cost of each block by which ``options.balance`` balances stages.

    FLOPs of both passes for ``time`` (and for ``measured``, whose times are not known before the run), parameters for
    ``parameters``, and 1 for ``blocks``.
    """
    if balance == "blocks":
        return [1] * table.blocks
    if balance == "parameters":
        return [sum(row.parameters for row in rows) for rows in table.rows_by_block()]
    return [sum(row.forward_flops + row.backward_flops for row in rows) for rows in table.rows_by_block()]
