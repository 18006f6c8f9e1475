"""Steps of ``tensor``: Megatron's collectives around attention and MLP, each waited for (Shoeybi et al. 2019)."""

from __future__ import annotations

from hpcbench.oracle.clock import Clock
from hpcbench.oracle.kernels import Share, row_pass
from hpcbench.oracle.placement import group_of
from hpcbench.oracle.split_model import COLUMNS, ROWS, SplitModel
from hpcbench.oracle.step import StepTime
from hpcbench.oracle.steps.model_parallel import Reducer, RowEvents, copied, moved, step_of_rows, whole_rows
from hpcbench.oracle.streams import Compute
from hpcbench.parallel.layers import Layer

_EMBEDDING = "0.tokens"
_EMBEDDED = ("0.dropout", "0")
"""Rows behind the sum over the words."""


def step_of_tensor(clock: Clock, model: SplitModel) -> StepTime:
    """A step of the rank that ``model`` belongs to."""
    spec, table = model.spec, model.table
    rows = rows_of(clock, model) if model.ranks > 1 else whole_rows(clock, spec, table)
    sizes = [model.parameter_bytes(name, shape) for name, shape, _ in table.parameter_tensors]
    groups = (("dp", group_of(spec, "dp")), ("dp tp", group_of(spec, "dp", "tp")))
    reducers = [
        Reducer(group, lane, places)
        for (lane, group), places in zip(groups, model.gradient_buckets(sizes), strict=True)
        if places
    ]
    return step_of_rows(clock, spec, table, rows, sizes, reducers)


def rows_of(clock: Clock, model: SplitModel) -> list[RowEvents]:
    """What one of several ranks does in a micro-batch, row by row."""
    made: dict[tuple[object, ...], RowEvents] = {}
    found = []
    for layer in model.table.layers:
        key = _kind_of(model, layer)
        if key not in made:
            made[key] = _row_events(clock, model, layer)
        found.append(made[key])
    return found


def _kind_of(model: SplitModel, layer: Layer) -> tuple[object, ...]:
    """Equal for rows that take equal time: most blocks are alike."""
    block, _, inner = layer.name.partition(".")
    if block not in model.blocks or block in (model.first, model.last):
        return (layer.name,)
    flops, moved_bytes = layer.forward_flops, layer.forward_moved_bytes
    return inner, model.head_width(block), flops, moved_bytes, layer.parameters, layer.output_bytes


def _row_events(clock: Clock, model: SplitModel, layer: Layer) -> RowEvents:
    spec, group, around = model.spec, group_of(model.spec, "tp"), model.around(layer)
    passes = row_pass(spec, layer, model.samples, share_of(model, layer))
    enter, leave, before, after = (
        moved(clock, spec, moves, group)
        for moves in (around.enter, around.leave, around.leave_backward, around.enter_backward)
    )
    if layer.name.endswith(ROWS):
        # The bias is added to what has been summed over the ranks.
        leave.append(copied(clock, spec, passes.forward.output_bytes * model.tokens_share))
    forward, backward = [Compute(clock.kernel_s(passes.forward))], [Compute(clock.kernel_s(passes.backward))]
    if layer.name == _EMBEDDING and model.head is not None:
        # Vectors and gradients of other ranks' words are set to zero.
        masked = copied(clock, spec, passes.forward.output_bytes)
        forward.append(masked)
        backward.append(masked)
    again = [*enter, *forward, *(leave if around.is_left_again else ())]
    return RowEvents([*enter, *forward, *leave], [*before, *backward], again, after)


def share_of(model: SplitModel, layer: Layer) -> Share:
    """The rank's part of a row."""
    given, made = (part.own / part.whole for part in model.flow_shares(layer))
    if layer.name.endswith(COLUMNS) or layer.name == f"{model.head}.output":
        return Share(made, given, made, made)
    if layer.name.endswith(ROWS):
        return Share(given, given, made, given)
    if model.head is not None and layer.name in (*_EMBEDDED, f"{model.head}.norm"):
        given = made = model.tokens_share
    weights = model.words_share if layer.name == _EMBEDDING and model.head is not None else 1.0
    return Share(given, given, made, weights)
