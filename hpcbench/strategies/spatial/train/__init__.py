"""Spatial parallelism with halo exchange (Dryden et al. 2019, arXiv:1903.06681).

With one replica it is ParaDL's ``spatial``, with several its ``data+spatial`` (Kahira et al., HPDC 2021)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, WorkerError, unsupported
from hpcbench.strategies.layer_table import LayerRow as Row
from hpcbench.strategies.layer_table import LayerTable, read_shipped_table
from hpcbench.strategies.spatial import spatial_split as spatial
from hpcbench.strategies.spatial.halo import Box, box_volume, owned_box
from hpcbench.strategies.spatial.train import layers as spatial_layers
from hpcbench.strategies.spatial.train.halo_exchange import GatherFeatureMaps, SpatialGlobalPool, SpatialGrid, box_view
from hpcbench.worker.data.feed import Batch, DataFeed
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.distributed.process_groups import RankContext, make_group
from hpcbench.worker.model_parallel_layers import ModelParallelStrategy, group_reducers
from hpcbench.worker.models.build import copy_to_meta
from hpcbench.workloads.datasets import sample_shape


def layer_table_for(model: nn.Sequential, spec: RunSpec) -> LayerTable:
    """Return the shipped layer table of the run's model, or trace one with fake tensors, in a second or two.

    Raises:
        WorkerError: The model cannot run with fake tensors.
    """
    shipped = read_shipped_table(spec.model, spec.dataset, spec.input_size, spatial.shape_changing_options(spec))
    if shipped is not None:
        return shipped
    # Fake tensors take a second to import, which no other run should wait for before its first step.
    from hpcbench.worker.layers import trace_layer_table

    meta = copy_to_meta(model)
    if type(model).__module__.startswith("hpcbench."):
        meta = nn.Sequential(OrderedDict(meta.named_children()))
    return trace_layer_table(meta.float(), spec)


class SpatialStrategy(ModelParallelStrategy):
    """The ranks of a replica hold all weights and a part of every feature map, up to a gather point of the model.

    ::

        image -> slice -> split layers (halo exchange) -> gather -> whole layers, the same on all ranks -> loss

    Gradients of split layers are summed over a replica's ranks too; those of whole layers are equal on all of them.
    """

    axis = "sp"
    split: spatial.SpatialSplit | None = None

    def setup(self, model: nn.Sequential, spec: RunSpec, context: RankContext) -> None:
        super().setup(model, spec, context)
        if self.group.size > 1 and context.device.type == "cuda":
            # NCCL's first call in a group has to be one that all its ranks make; a halo is not.
            dist.barrier(group=self.group.members(), device_ids=[context.device.index or 0])

    def split_model(self, model: nn.Sequential, spec: RunSpec) -> nn.Sequential:
        """Replace the layers before the gather point; hooks slice the input and gather the feature maps.

        Raises:
            WorkerError: ``unsupported`` if a layer cannot be split.
        """
        if self.group.size == 1:
            return model
        try:
            self.split = split = spatial.spatial_split_of_run(spec, layer_table_for(model, spec))
        except ConfigError as error:
            raise unsupported(f"spatial: {error.message}", "a smaller sp_degree, or another grid") from error
        _refuse_shared_weights(model, split)
        grid = SpatialGrid(self.group, split.grid)
        for row in split.rows[: split.end]:
            if row.kind in spatial.WINDOWED_KINDS | spatial.NORM_KINDS:
                part = self._split_layer(model.get_submodule(row.name), row, grid)
                if part is not None:
                    model.set_submodule(row.name, part)
        extents = sample_shape(spec.dataset, spec.input_size)[1:]
        self._image: Box = tuple(map(range, extents))
        self._own = owned_box(extents, grid.grid, grid.group.place)
        model.register_forward_pre_hook(lambda _module, inputs: (self.slice_input(inputs[0]), *inputs[1:]))
        self._insert_gather(model, split, grid)
        return model

    def _split_layer(self, layer: Any, row: Row, grid: SpatialGrid) -> nn.Module | None:
        """Return the module that replaces ``layer``; ``None`` if the layer stays."""
        if row.kind in spatial.NORM_KINDS:
            if self.options["batch_norm"] == "local":
                return None
            extents = spatial.spatial_extents(row.input_shape)
            ranks = range(grid.group.size)
            positions = tuple(box_volume(owned_box(extents, grid.grid, rank)) for rank in ranks)
            return spatial_layers.SpatialBatchNorm(layer, positions, grid.group)
        windows = spatial.halo_layer(row)
        if row.kind in spatial.CONVOLUTION_KINDS:
            if layer.padding_mode != "zeros":
                raise _unsupported_layer(row, f"padding_mode {layer.padding_mode!r}, only zeros can be cut")
            return spatial_layers.SpatialConvolution(layer, grid, windows, bool(self.options["overlap"]))
        if row.kind in spatial.MAX_POOL_KINDS:
            if layer.return_indices:
                raise _unsupported_layer(row, "return_indices, which would be a part's own")
            return spatial_layers.SpatialMaxPool(grid, windows)
        return spatial_layers.SpatialAveragePool(layer, grid, windows)

    def _insert_gather(self, model: nn.Sequential, split: spatial.SpatialSplit, grid: SpatialGrid) -> None:
        """Make the feature maps at the gather point whole on every rank."""
        row = split.rows[split.end]
        if split.by_mean and self.options["global_pool"] == "reduce":
            model.set_submodule(row.name, SpatialGlobalPool(grid, split.extents))
            return
        gather = GatherFeatureMaps(grid, split.extents)
        if split.block == len(model):
            model.register_forward_hook(lambda _module, _args, output: gather(output))
            return
        first = list(model)[split.block] if split.begins_block else model.get_submodule(row.name)
        first.register_forward_pre_hook(lambda _module, args: (gather(args[0]), *args[1:]))

    def make_reducers(self, module: nn.Module) -> list[GradientReducer]:
        """Split layers are reduced over all ranks that share them, whole ones across replicas."""
        if self.split is None:
            return super().make_reducers(module)
        named = dict(module.named_parameters())
        in_split = [parameter for name, parameter in named.items() if self.split.is_cut(name)]
        in_whole = [parameter for name, parameter in named.items() if not self.split.is_cut(name)]
        sharing = make_group(self.mesh, self.context, "dp", "sp")
        cap_mb = float(self.options["bucket_cap_mb"])
        return group_reducers((in_split, sharing), (in_whole, self.groups["dp"]), bucket_cap_mb=cap_mb)

    def slice_input(self, inputs: Tensor) -> Tensor:
        """Return this rank's part of whole samples [n, channels, *extents]; a part is returned unchanged."""
        if inputs.shape[2:] != torch.Size(map(len, self._image)):
            return inputs
        # A copy: a view would keep the whole.
        return box_view(inputs, self._own, self._image).clone()

    def batch(self, feed: DataFeed, step: int) -> Batch:
        # Only the own part is kept: the whole samples are freed before the forward pass.
        inputs, targets = super().batch(feed, step)
        return (inputs if self.split is None else self.slice_input(inputs)), targets


def _refuse_shared_weights(model: nn.Module, split: spatial.SpatialSplit) -> None:
    """Raise ``WorkerError``: the gradient of a weight of split and whole layers would need two sums at once."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if split.is_cut(name) != split.is_cut(other):
            message = f"spatial: {other} and {name} are one weight, of a layer that is cut and of one that is whole"
            raise unsupported(message, "let options.until end the cut part before both, or after")


def _unsupported_layer(row: Row, what: str) -> WorkerError:
    return unsupported(
        f"spatial: layer {row.name} ({row.kind}) has {what}", "let options.until end the cut part before that block"
    )


TRAININGS = {
    "spatial": SpatialStrategy,
}
"""The training of each strategy."""
