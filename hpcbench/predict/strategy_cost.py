"""The base class of every strategy's cost, and an estimate of the operators of its step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.predict.cost_model import CostModel, StepBreakdown
from hpcbench.predict.peak_memory import MemoryBreakdown
from hpcbench.strategies.catalog import STRATEGIES, load_member, options_with_defaults
from hpcbench.strategies.layer_table import LayerRow, LayerTable, cached_by_identity
from hpcbench.strategies.mesh import RankMesh
from hpcbench.strategies.traffic import Traffic


class Cost(ABC):
    """The formulas of one strategy. Methods without state; the registry names a subclass per strategy.

    All methods take a resolved run and the layer table of its model, data set and input size. They may assume that
    the strategy's limits hold for the run, and raise nothing on such runs. Bytes are integers, times seconds.

    Example:
        >>> cost = resolve_cost("ddp")
        >>> peak = cost.memory(spec, table, rank=0).total_bytes
        >>> step_s = cost.step(spec, table, CostModel(machine, spec)).step_time_s
    """

    operators_per_call: ClassVar[int] = 1
    """About as many operators as a rank launches for each of its communication calls: casts, copies, split passes."""
    exact_traffic: ClassVar[bool] = True
    """Whether each call is predicted; ``False``: timing decides about the calls, only total bytes are exact."""
    alike_replicas: ClassVar[bool] = False
    """Whether a rank's step does not depend on the number of replicas: nothing is sharded among them."""
    copies_per_gradient: ClassVar[int] = 0
    """Copies of each gradient into and out of the buffers that replicas send, whatever the options are."""

    @abstractmethod
    def traffic(self, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Return the communication calls of ``rank`` in one steady step with whole batches, equal calls merged.

        Exact: a test of the family compares it with the recorded calls of real ranks.
        """

    @abstractmethod
    def memory(self, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Return the live tensor bytes of ``rank`` at its peak."""

    @abstractmethod
    def step(self, spec: RunSpec, table: LayerTable, cost_model: CostModel) -> StepBreakdown:
        """Return the time of one steady step of the slowest rank, in its parts.

        ``cost_model`` is of the same run: it prices the run's kernels and process groups on one machine.
        """

    def ranks_that_differ(self, spec: RunSpec) -> list[int]:
        """Return ranks of one replica among which is the one with the highest peak memory, ascending.

        By default the first, middle and last pipeline stages; of layers, heads and channels the first rank along
        ``tp`` has the largest share.
        """
        mesh = RankMesh.of(spec)
        stages = {0, 1, mesh.pp // 2, mesh.pp - 1} & set(range(mesh.pp))
        return sorted(mesh.rank(RankMesh(pp=stage, dp=0, sp=0, tp=0)) for stage in stages)


def find_cost(key: str) -> Cost | None:
    """Return the cost of a strategy, a probe or an alias of a hybrid; ``None`` if its family predicts no runs of it.

    Raises:
        ConfigError: There is no such strategy, with the nearest key as hint; or its family names something else.

    Example:
        >>> type(find_cost("1f1b")).__name__
        'PipelineCost'
    """
    cost = load_member(key, "cost", "COSTS")
    if cost is None:
        return None
    if not isinstance(cost, type) or not issubclass(cost, Cost):
        raise ConfigError(f"the family of {key}: COSTS has {cost!r} for it, not a subclass of Cost")
    return cost()


def resolve_cost(key: str) -> Cost:
    """Return the cost of a strategy of which runs are predicted; raises as ``find_cost``."""
    cost = find_cost(key)
    assert cost is not None, f"{key} has no cost"
    return cost


class _PassOperators(NamedTuple):
    """Operators of the passes of one micro-batch through the whole model."""

    forward: int
    backward: int
    casts: int
    """Number of casts of weights, of their gradients and around norms, with autocast."""


_INPUT_LAYERS = ("attention.query", "attention.key", "attention.value", "mlp.up", "mlp.gate")
"""Layers of a transformer whose input is a norm's output, which autocast leaves in fp32."""
_ROTARY_OPERATORS = 18
"""Operators by which a layer's queries, or its keys, are turned in a pass (``worker.models.transformer``)."""
_MASTER_OPERATORS = 2
"""Operators for a parameter whose master weight is updated: casts of its gradient and of its new value."""


@cached_by_identity(64)
def _operators_of_table(table: LayerTable) -> _PassOperators:
    rows = [row for row in table.layers if row.forward_flops or row.forward_moved_bytes]
    names = {tensor.name for tensor in table.parameter_tensors}
    is_rotary = "0.tokens.weight" in names and "0.positions.weight" not in names
    counts = [_row_operators(row, is_rotary=is_rotary) for row in rows]
    return _PassOperators(
        forward=sum(forward for forward, _ in counts),
        backward=sum(backward for _, backward in counts),
        # Of weights and their gradients, and of what enters the layers behind norms.
        casts=2 * len([row for row in rows if row.parameters and row.forward_flops])
        + 2 * sum(_has_bias(row) + row.name.endswith(_INPUT_LAYERS) for row in rows),
    )


def _row_operators(row: LayerRow, *, is_rotary: bool) -> tuple[int, int]:
    """Return the operators of a row forward and backward."""
    turned = 2 * _ROTARY_OPERATORS if is_rotary and row.kind == "Attention.other" else 0
    if row.kind == "TransformerBlock.other":
        # Both residual sums; backward also sums of what came through queries, keys and values.
        return 2, 4
    if row.kind == "Linear":
        return 1, 2 + _has_bias(row)
    # BatchNorm counts its batches.
    return 1 + row.kind.startswith("BatchNorm") + turned, 1 + turned


def _has_bias(row: LayerRow) -> bool:
    sizes = row.attributes.get("in_features", 0) * row.attributes.get("out_features", 0)
    return row.kind == "Linear" and row.parameters > sizes


def count_operators(spec: RunSpec, table: LayerTable) -> int:
    """Estimate the operators that the host of a rank launches in one step.

    A row of the table is about one operator forward and one backward, a linear layer one more for its weight and one
    for its bias; a norm is one, as on cuda. Beside the passes there are: sums of the gradients of micro-batches, copies
    of gradients into buckets and back (DDP's unless gradients are views), casts of bf16 and fp16, master weights,
    operators around communication calls by the factor of the strategy's cost, and a fused update.
    ``tests/distributed/test_dry_run.py`` compares it with dry runs.
    """
    forward, backward, casts = _operators_of_table(table)
    operators = forward * (2 if spec.activation_checkpointing else 1) + backward
    operators += casts if spec.precision in ("bf16", "fp16") else 0
    stages = 1 if STRATEGIES[spec.strategy].drives_several_devices else spec.pp_degree
    cost, tensors = resolve_cost(spec.strategy), len(table.parameter_tensors)
    fills_buckets = options_with_defaults(spec).get("gradient_as_bucket_view") is False
    copies = (2 if fills_buckets else cost.copies_per_gradient) * tensors if spec.dp_degree > 1 else 0
    sums = (spec.micro_batches - 1) * tensors
    calls = max(sum(call.count for call in cost.traffic(spec, table, rank)) for rank in cost.ranks_that_differ(spec))
    masters = _MASTER_OPERATORS * tensors if spec.precision == "bf16_params" else 0
    return (spec.micro_batches * operators + sums + copies + masters) // stages + calls * cost.operators_per_call + 1
