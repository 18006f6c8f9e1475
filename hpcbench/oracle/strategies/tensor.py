"""Tensor parallelism of transformers (Shoeybi et al. 2019; Korthikanti et al. 2022): what a rank passes and holds."""

from __future__ import annotations

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.live import Kept, held_at_peak, in_turn, sent_at_once
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.split_model import SplitModel
from hpcbench.oracle.step import StepTime
from hpcbench.oracle.steps.tensor import step_of_tensor
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.traffic import Traffic, merged


class TensorCost:
    """Exact traffic, and the parts of memory that are largest at different moments of a step."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Collectives of the forward and backward passes, micro-batch by micro-batch, and the gradients' buckets."""
        model = SplitModel(spec, table, rank)
        calls = list(model.activations_sent()) * spec.micro_batches if model.ranks > 1 else []
        return merged([*calls, *model.gradients_sent()])

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """Parts of what is split, all of the rest, at the moment at which they are most."""
        model = SplitModel(spec, table, rank)
        sizes = [model.parameter_bytes(name, shape) for name, shape, _ in table.parameter_tensors]
        kept = Kept(sum(sizes), sizes, in_turn(spec, table), sizes)
        underway = [0] * len(table.layers)
        for is_sent in model.sent_gradients():
            for row, size in enumerate(
                sent_at_once(table, [size * sent for size, sent in zip(sizes, is_sent, strict=True)])
            ):
                underway[row] += size
        return held_at_peak(spec, table, kept, underway, model.backward_rows())

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: Clock) -> StepTime:
        """The first rank has most heads, features, words and tokens."""
        return step_of_tensor(clock, SplitModel(spec, table, 0))


def activations_kept(spec: RunSpec, table: LayerTable, rank: int) -> int:
    """What is kept from the forward pass of a micro-batch when its backward pass begins, without recomputation."""
    return sum(row.kept for row in SplitModel(spec, table, rank).backward_rows())
