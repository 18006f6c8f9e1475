"""Steps of ``filter`` and ``channel``: every operation around a layer is waited for, both ways."""

from __future__ import annotations

from collections.abc import Sequence

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.channel_calls import around_rows
from hpcbench.oracle.channel_rows import RankParts
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.kernels import Share, row_pass
from hpcbench.oracle.placement import group_of
from hpcbench.oracle.step import StepTime
from hpcbench.oracle.steps.model_parallel import (
    RowEvents,
    copied,
    moved,
    replica_reducer,
    step_of_rows,
    whole_rows,
)
from hpcbench.oracle.streams import Compute
from hpcbench.parallel import channel_table
from hpcbench.parallel.layers import LayerTable


def step_of_channels(clock: Clock, spec: RunSpec, table: LayerTable, sizes: Sequence[int]) -> StepTime:
    """Of the rank with the first shares, which are the largest. ``sizes``: bytes of its parameters."""
    rows = _rows(clock, spec, table) if spec.tp_degree > 1 else whole_rows(clock, spec, table)
    return step_of_rows(clock, spec, table, rows, sizes, replica_reducer(spec, sizes))


def _rows(clock: Clock, spec: RunSpec, table: LayerTable) -> list[RowEvents]:
    parts, group = RankParts(spec, 0), group_of(spec, "tp")
    with_bias = {one.name.rpartition(".")[0] for one in table.parameter_tensors if one.name.endswith(".bias")}
    found, channels = [], 0
    for one, around in zip(channel_table.rows(table), around_rows(spec, table), strict=True):
        computed = row_pass(spec, one.row, parts.samples, _share(parts, one, channels))
        channels, split = one.channels, parts.split(one)
        enter, leave = moved(clock, spec, around.enter, group), moved(clock, spec, around.leave, group)
        if split is not None and split.by == "channels" and one.row.name in with_bias:
            # Added to what has been summed over the ranks.
            leave.append(copied(clock, spec, computed.forward.output_bytes * parts.share(channels)))
        forward, backward = (Compute(clock.kernel_s(kernel)) for kernel in computed)
        before, after = (moved(clock, spec, moves, group) for moves in (around.leave_backward, around.enter_backward))
        again = [*enter, forward, *(leave if around.is_left_again else ())]
        found.append(RowEvents([*enter, forward, *leave], [*before, backward], again, after))
    return found


def _share(parts: RankParts, one: channel_table.Row, channels: int) -> Share:
    """Of a row whose input has ``channels`` channels that ranks may share."""
    split = parts.split(one)
    if one.layer is None:
        own = parts.share(one.channels)
        return Share(own, parts.share(channels), own, own)
    if split is None or not split.by:
        return Share()
    ins, outs = parts.of(one.layer.in_channels), parts.of(one.layer.out_channels)
    if split.by == "channels":
        return Share(ins, ins, 1.0, ins)
    return Share(outs, ins if split.by == "groups" else 1.0, outs, outs)
