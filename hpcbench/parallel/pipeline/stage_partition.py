"""Partition of a chain of blocks into pipeline stages.
``minimax_cuts`` and ``balanced_cuts`` cut for a fixed number of stages; ``partition_pipeline`` is PipeDream's dynamic
programme (Narayanan et al. 2019, SOSP, section 3.1), which also chooses the number of stages and their replicas for
links that differ by level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise
from math import ceil, inf
from typing import NamedTuple

from hpcbench.errors import ConfigError
from hpcbench.parallel.layer_table import LayerTable


class BlockCost(NamedTuple):
    """One block of a chain, for one micro-batch."""

    forward_s: float
    backward_s: float
    output_bytes: int
    """What the next block takes; as much comes back as its gradient."""
    parameter_bytes: int
    kept_bytes: int
    """What autograd keeps from the forward pass for the backward pass."""

    @property
    def compute_s(self) -> float:
        """Both passes."""
        return self.forward_s + self.backward_s


class InterconnectLevel(NamedTuple):
    """``groups`` groups of the level below (workers, for the innermost), and what passes between any two of them."""

    groups: int
    bandwidth_bytes_per_s: float


class PartitionStage(NamedTuple):
    """Blocks ``first`` to ``last`` - 1 on ``replicas`` workers, with ``versions`` of them in flight."""

    first: int
    last: int
    replicas: int
    versions: int
    held_bytes: int
    """What each of its workers holds."""


class PipelinePartition(NamedTuple):
    """``bottleneck_s`` is the time per micro-batch of the slowest stage or link: in steady state, the pipeline's."""

    bottleneck_s: float
    stages: tuple[PartitionStage, ...]

    @property
    def cuts(self) -> tuple[int, ...]:
        """First blocks of all stages but the first."""
        return tuple(stage.first for stage in self.stages[1:])


def minimax_cuts(blocks: int, stages: int, cost: Callable[[int, int, int], float]) -> tuple[int, ...]:
    """First blocks of all stages but the first, so that the most expensive stage is as cheap as it can be.

    ``cost(stage, first, last)`` is that of blocks ``first`` to ``last`` - 1 as stage number ``stage``. Every stage has
    a block. Among equals the earliest cuts win. ``ConfigError`` where there are more stages than blocks.

    >>> cut_chain(4, 2, lambda _stage, first, last: sum([3, 1, 1, 1][first:last]))
    (1,)
    """
    if stages > blocks:
        raise ConfigError(f"{stages} stages of {blocks} blocks: every stage needs one", hint=f"{blocks} stages or less")
    # best[first]: the dearest of the stages from this one on, and their cuts, where this one begins at block first.
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
    """As ``minimax_cuts``, for blocks whose costs add up.

    >>> balanced([1, 1, 1, 1, 4], 2)
    (4,)
    """
    sums = [0, *accumulate(costs)]
    return minimax_cuts(len(costs), stages, lambda _stage, first, last: sums[last] - sums[first])


def block_ranges(cuts: Sequence[int], blocks: int) -> list[range]:
    """The blocks of every stage.

    >>> ranges((1, 3), 4)
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
    """The pipeline with the smallest bottleneck that uses all workers; ``levels`` go from the innermost one outwards.

    On level k (of m_k groups with bandwidth B_k), with A^0 the sum of both passes' times, w the parameters of a stage
    and a_s what block s hands on (equation 1 of the paper, and the one after it):

        T^k(i..j, m) = max(A^{k-1}(i..j, m_{k-1}), 2 (m - 1) w / B_k) / m
        A^k(i..j, m) = min over s, m' of max(A^k(i..s, m - m'), 2 a_s / B_k, T^k(s+1..j, m'))

    Unlike the paper's programme, every stage keeps to ``machine_memory_bytes``, the last and a lone one too: a stage
    has
    1 + ceil(workers behind it / its own) micro-batches in flight, never none, each with weights of its own of which
    the newest are the live ones; gradients and the optimizer's ``optimizer_states`` tensors per parameter come on top.
    Without ``replicated`` every stage is one worker's. Among equals the most replicated, with the fewest stages, wins.
    ``ConfigError`` where nothing fits: it names the stage that is too large in the smallest plan.
    """
    assert chain, "a chain without blocks"
    found = _PartitionSearch(chain, levels, memory_bytes, replicated, optimizer_states).best()
    if found is not None:
        return found
    workers = _worker_count(levels)
    if not replicated and workers > len(chain):
        raise ConfigError(
            f"{workers} workers without replicas need as many stages, and there are {len(chain)} blocks",
            hint="let stages be replicated, or use fewer workers",
        )
    smallest = _PartitionSearch(chain, levels, inf, replicated, optimizer_states, by_memory=True).best()
    assert smallest is not None, "without a limit some plan fits"
    number, worst = max(enumerate(smallest.stages), key=lambda entry: entry[1].held_bytes)
    raise ConfigError(
        f"no partition over {workers} workers fits: even in the one that needs least, stage {number} (blocks "
        f"{worst.first} to {worst.last - 1}, {worst.versions} micro-batches in flight) needs {worst.held_bytes} bytes, "
        f"and the limit is {memory_bytes:.0f}",
        hint="a smaller micro-batch, more workers, or recomputation of activations",
    )


def _worker_count(levels: Sequence[InterconnectLevel]) -> int:
    total = 1
    for level in levels:
        total *= level.groups
    return total


_StagePlan = tuple[float, tuple[PartitionStage, ...]]
_INFEASIBLE_PLAN: _StagePlan = (inf, ())


class _PartitionSearch:
    """The recursion, from the first stage on, so that what lies behind a stage is known when it is chosen."""

    def __init__(
        self, chain: Sequence[BlockCost], levels: Sequence[InterconnectLevel], memory_bytes: float, replicated: bool,
        optimizer_states: int, by_memory: bool = False,
    ) -> None:  # fmt: skip
        self._chain, self._levels = chain, levels
        self._memory_bytes = memory_bytes
        self._replicated = replicated
        self._states = optimizer_states
        self._by_memory = by_memory
        self._seconds = [0.0, *accumulate(block.compute_s for block in chain)]
        self._parameters = [0, *accumulate(block.parameter_bytes for block in chain)]
        self._kept = [0, *accumulate(block.kept_bytes for block in chain)]
        self._stages_of = cache(self._best_stages)

    def best(self) -> PipelinePartition | None:
        """The plan for the whole chain over all workers."""
        groups = self._levels[-1].groups if self._levels else 1
        cost, stages = self._stages_of(len(self._levels), 0, len(self._chain), groups, Fraction(0))
        return PipelinePartition(cost, self._with_memory(stages)) if stages else None

    def _best_stages(self, level: int, first: int, last: int, groups: int, behind: Fraction) -> _StagePlan:
        """A^level: blocks ``first`` to ``last`` - 1 over ``groups`` groups.

        ``behind`` is the number of workers behind the whole, for each copy of it.
        """
        if level == 0:
            return self._lone(first, last, behind)
        best = _INFEASIBLE_PLAN
        below = self._levels[level - 2].groups if level > 1 else 1
        size = _worker_count(self._levels[: level - 1])
        for copies in range(groups if self._replicated else 1, 0, -1):
            left = groups - copies
            # Where no limit asks for it, what lies behind makes no difference, and every range is searched once.
            inner_behind = (behind + left * size) / copies if self._is_limited() else behind
            for cut in range(first + 1, last) if left else (last,):
                own = self._stages_of(level - 1, first, cut, below, inner_behind)
                cost = self._copied(own[0], first, cut, copies, level)
                if cost >= best[0]:
                    continue
                rest = self._stages_of(level, cut, last, left, behind) if left else (0.0, ())
                cost = max(cost, rest[0], self._link(cut, level) if left else 0.0)
                if cost < best[0]:
                    repeated = tuple(stage._replace(replicas=stage.replicas * copies) for stage in own[1])
                    best = (cost, repeated + rest[1])
        return best

    def _copied(self, own: float, first: int, last: int, copies: int, level: int) -> float:
        """T^level: of a stage with ``copies``, each of which costs ``own``."""
        if self._by_memory:
            return own
        parameters = self._parameters[last] - self._parameters[first]
        bandwidth = self._levels[level - 1].bandwidth_bytes_per_s
        return max(own, 2 * (copies - 1) * parameters / bandwidth) / copies

    def _link(self, cut: int, level: int) -> float:
        """The activations of the block before ``cut``, and their gradients."""
        if self._by_memory:
            return 0.0
        return 2 * self._chain[cut - 1].output_bytes / self._levels[level - 1].bandwidth_bytes_per_s

    def _lone(self, first: int, last: int, behind: Fraction) -> _StagePlan:
        held = self._held(first, last, 1 + ceil(behind))
        if held > self._memory_bytes:
            return _INFEASIBLE_PLAN
        cost = float(held) if self._by_memory else self._seconds[last] - self._seconds[first]
        return cost, (PartitionStage(first, last, 1, 0, 0),)

    def _held(self, first: int, last: int, versions: int) -> int:
        parameters = self._parameters[last] - self._parameters[first]
        return parameters * (versions + 1 + self._states) + (self._kept[last] - self._kept[first]) * versions

    def _is_limited(self) -> bool:
        return self._by_memory or self._memory_bytes < inf

    def _with_memory(self, stages: Sequence[PartitionStage]) -> tuple[PartitionStage, ...]:
        found: list[PartitionStage] = []
        behind = 0
        for stage in reversed(stages):
            versions = 1 + ceil(Fraction(behind, stage.replicas))
            held = self._held(stage.first, stage.last, versions)
            found.append(stage._replace(versions=versions, held_bytes=held))
            behind += stage.replicas
        return tuple(reversed(found))


FP32_BYTES = 4


def parse_cuts(text: str) -> tuple[int, ...] | None:
    """``"3,7"`` as ``(3, 7)``; ``None`` where it is no ascending list of blocks after the first."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        return None
    cuts = tuple(int(part) for part in parts)
    return cuts if all(low < high for low, high in pairwise((0, *cuts))) else None


def block_costs(table: LayerTable, balance: str) -> list[int]:
    """What each block costs.

    The FLOPs of both passes for ``time`` (and for ``measured``: what a run will measure is not known here);
    ``parameters``; or 1 for ``blocks``.
    """
    costs = [1 if balance == "blocks" else 0] * table.blocks
    for layer in table.layers:
        # The loss is computed where the last block is.
        block = min(layer.block, table.blocks - 1)
        if balance in ("time", "measured"):
            costs[block] += layer.forward_flops + layer.backward_flops
        elif balance == "parameters":
            costs[block] += layer.parameters
    return costs
