"""One layer whole and cut, on the same numbers: what ``test_spatial_layers`` runs on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.strategies.layer_table import LayerRow as Row
from hpcbench.strategies.spatial.halo import Box, owned_box
from hpcbench.strategies.spatial.spatial_split import halo_layer
from hpcbench.strategies.spatial.train.halo_exchange import GatherFeatureMaps, SpatialGlobalPool, SpatialGrid, box_view
from hpcbench.strategies.spatial.train.layers import (
    SpatialAveragePool,
    SpatialBatchNorm,
    SpatialConvolution,
    SpatialMaxPool,
)
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.layers import _module_attributes


class LayerCase(NamedTuple):
    """``layer`` by its class and arguments, on [2, channels, *extents]."""

    kind: str
    arguments: dict[str, Any]
    extents: tuple[int, ...]
    grid: tuple[int, ...]
    channels: int = 4
    overlap: bool = True
    channels_last: bool = False


def row_of(layer: nn.Module, case: LayerCase, outputs: tuple[int, ...]) -> Row:
    shape = [case.channels, *case.extents]
    numbers = dict.fromkeys((
        "block", "parameters", "forward_flops", "backward_flops", "activation_bytes", "activation_fixed_bytes",
        "output_bytes", "forward_moved_bytes", "backward_moved_bytes",
    ), 0)  # fmt: skip
    return Row(
        name="layer", kind=case.kind, input_shape=shape, output_shape=[1, *outputs], attributes=_module_attributes(layer),
        **numbers,
    )  # fmt: skip


def cut_layer(layer: Any, case: LayerCase, cut: SpatialGrid, outputs: tuple[int, ...]) -> nn.Module:
    if "Norm" in case.kind:
        shares = [owned_box(case.extents, cut.grid, place) for place in range(cut.group.size)]
        counts = tuple(int(torch.tensor([len(one) for one in box]).prod()) for box in shares)
        return SpatialBatchNorm(layer, counts, cut.group)
    if "Adaptive" in case.kind:
        return SpatialGlobalPool(cut, case.extents)
    if case.kind == "Identity":
        return GatherFeatureMaps(cut, case.extents)
    geometry = halo_layer(row_of(layer, case, outputs))
    if "Conv" in case.kind:
        return SpatialConvolution(layer, cut, geometry, case.overlap)
    return SpatialMaxPool(cut, geometry) if "Max" in case.kind else SpatialAveragePool(layer, cut, geometry)


def image(extents: tuple[int, ...]) -> Box:
    return tuple(range(extent) for extent in extents)


def difference(ours: Tensor, whole: Tensor) -> float:
    """Return the largest difference relative to the largest number, also where all are small."""
    assert ours.shape == whole.shape, f"{ours.shape} is not {whole.shape}"
    return ((ours - whole).abs().max() / whole.abs().max().clamp(min=1e-3)).item()


class Whole(NamedTuple):
    """A layer that has run forward and backward on whole feature maps, and its twin that has not."""

    layer: Any
    twin: Any
    x: Tensor
    output: Tensor
    gradient: Tensor


def run_whole(case: LayerCase) -> Whole:
    torch.manual_seed(3)
    wide = torch.float64
    # Values far from 0 show a variance made of squares; negative ones, padding that is taken for a largest value.
    offset = 3.0 if "Norm" in case.kind else -2.0
    x = (offset + torch.randn(2, case.channels, *case.extents, dtype=wide)).requires_grad_()
    layer = getattr(nn, case.kind)(**case.arguments).to(wide)
    twin = copy.deepcopy(layer)
    output = layer(x)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    return Whole(layer, twin, x, output.detach(), gradient)


def differences(
    case: LayerCase, whole: Whole, cut: SpatialGrid, add_up: Callable[[Tensor], object]
) -> dict[str, float]:
    """Return the differences of outputs, of gradients of inputs and parameters, and of buffers after the step.

    ``add_up`` makes of a tensor the sum of all ranks'.
    """
    place, same, outputs = cut.group.place, copy.deepcopy(whole.twin), tuple(whole.output.shape[2:])
    split = cut_layer(same, case, cut, outputs)
    is_switch = case.kind == "Identity" or "Adaptive" in case.kind
    own_in = owned_box(case.extents, case.grid, place)
    own_out = image(outputs) if is_switch else owned_box(outputs, case.grid, place)
    mine = box_view(whole.x.detach(), own_in, image(case.extents)).clone()
    if case.channels_last:
        mine = mine.contiguous(memory_format=torch.channels_last)
    mine.requires_grad_()
    found = split(mine)
    kept = found.detach().clone()
    found.backward(box_view(whole.gradient, own_out, image(outputs)))
    assert mine.grad is not None
    assert whole.x.grad is not None
    result = {
        "output": difference(kept, box_view(whole.output, own_out, image(outputs))),
        "input": difference(mine.grad, box_view(whole.x.grad, own_in, image(case.extents))),
    }
    for (name, one), other in zip(split.named_parameters(), whole.layer.parameters(), strict=True):
        assert one.grad is not None
        add_up(one.grad)
        result[name] = difference(one.grad, other.grad)
    for (name, buffer), expected_buffer in zip(same.named_buffers(), whole.layer.buffers(), strict=True):
        result[name] = difference(buffer.double(), expected_buffer.double())
    return result


def all_differences(cases: list[LayerCase], group: dist.ProcessGroup) -> list[dict[str, float]]:
    """Many at once: a call of the pool takes longer than a layer."""
    ranks, place = tuple(range(dist.get_world_size(group))), dist.get_rank(group)
    return [
        differences(
            case,
            run_whole(case),
            SpatialGrid(RankGroup(ranks, place, group), case.grid),
            partial(dist.all_reduce, group=group),
        )
        for case in cases
    ]
