"""Spatial parallelism with halo exchange (Dryden et al. 2019, arXiv:1903.06681).

With one replica it is ParaDL's ``spatial``, with several its ``data+spatial`` (Kahira et al., HPDC 2021)."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, WorkerError
from hpcbench.parallel.layer_table import LayerRow as Row
from hpcbench.parallel.layer_table import LayerTable, read_shipped_table
from hpcbench.parallel.mesh import RankMesh
from hpcbench.parallel.strategies.halo import box_volume, owned_box
from hpcbench.parallel.strategies.spatial import (
    CONVOLUTION_KINDS,
    MAX_POOL_KINDS,
    NORM_KINDS,
    WINDOWED_KINDS,
    SpatialSplit,
    halo_layer,
    shape_changing_options,
    spatial_extents,
    spatial_split_of_run,
)
from hpcbench.parallel.workloads import sample_shape
from hpcbench.worker.data.feed import Batch, DataFeed
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.distributed.process_groups import RankContext, make_group
from hpcbench.worker.strategies.model_parallel import ModelParallelStrategy
from hpcbench.worker.strategies.spatial.halo_exchange import GatherFeatureMaps, SpatialGlobalPool, SpatialGrid, box_view
from hpcbench.worker.strategies.spatial.spatial_batch_norm import SpatialBatchNorm
from hpcbench.worker.strategies.spatial.spatial_layers import SpatialAveragePool, SpatialConvolution, SpatialMaxPool


def layer_table_for(model: nn.Sequential, spec: RunSpec) -> LayerTable:
    """The shipped table of the run's model, else one measured here: a second or two on fake tensors.

    Raises ``WorkerError`` where the model cannot be run with fake tensors.
    """
    shipped = read_shipped_table(spec.model, spec.dataset, spec.input_size, shape_changing_options(spec))
    if shipped is not None:
        return shipped
    # Fake tensors take a second to import, which no other run should wait for before its first step.
    from hpcbench.worker.layers import trace_layer_table

    return trace_layer_table(_meta_copy(model), spec)


def _meta_copy(model: nn.Sequential) -> nn.Sequential:
    """``model`` with its tensors on the meta device, in the type that tables are in; blocks called one by one."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        shape = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape
    copied = copy.deepcopy(model, memo)
    if type(model).__module__.startswith("hpcbench."):
        copied = nn.Sequential(OrderedDict(copied.named_children()))
    return copied.float()


class SpatialStrategy(ModelParallelStrategy):
    """The ranks of a replica hold all weights and a part of every feature map, until the cut part of the model ends.

    Gradients of the cut layers are sums over a replica's ranks too; those of the whole ones are alike on all of them.
    """

    axis = "sp"
    split: SpatialSplit | None = None

    def setup(self, model: nn.Sequential, spec: RunSpec, place: RankContext) -> None:
        """One group more than others have: all that add up the gradients of cut layers."""
        self.sharing = make_group(RankMesh.of(spec), place, "dp", "sp")
        super().setup(model, spec, place)
        if self.own.size > 1 and place.device.type == "cuda":
            # NCCL's first call in a group has to be one that all its ranks make; a halo is not.
            dist.barrier(group=self.own.members(), device_ids=[place.device.index or 0])

    def divide(self, model: nn.Sequential, spec: RunSpec) -> nn.Sequential:
        """Layers replaced one by one; the input is cut, and gathered again, by hooks."""
        if self.own.size == 1:
            return model
        try:
            self.split = split = spatial_split_of_run(spec, layer_table_for(model, spec))
        except ConfigError as error:
            raise WorkerError(
                f"spatial: {error.message}", status="unsupported", hint="a smaller sp_degree, or another grid"
            ) from error
        _refuse_shared_weights(model, split)
        cut = SpatialGrid(self.own, split.grid)
        for row in split.rows[: split.end]:
            if row.kind in WINDOWED_KINDS | NORM_KINDS:
                replaced = self._replaced(model.get_submodule(row.name), row, cut)
                if replaced is not None:
                    _set_submodule(model, row.name, replaced)
        self.cut_input = partial(_slice_input, cut, sample_shape(spec.dataset, spec.input_size)[1:])
        model.register_forward_pre_hook(lambda _module, args: (self.cut_input(args[0]), *args[1:]))
        self._switch(model, split, cut)
        return model

    def _replaced(self, whole: Any, row: Row, cut: SpatialGrid) -> nn.Module | None:
        """What takes the place of a layer; ``None`` where it stays."""
        if row.kind in NORM_KINDS:
            if self.options["batch_norm"] == "local":
                return None
            extents = spatial_extents(row.input_shape)
            shares = tuple(box_volume(owned_box(extents, cut.grid, place)) for place in range(cut.group.size))
            return SpatialBatchNorm(whole, shares, cut.group)
        layer = halo_layer(row)
        if row.kind in CONVOLUTION_KINDS:
            if whole.padding_mode != "zeros":
                raise _unsupported_layer(row, f"padding_mode {whole.padding_mode!r}, only zeros can be cut")
            return SpatialConvolution(whole, cut, layer, self.options["overlap"])
        if row.kind in MAX_POOL_KINDS:
            if whole.return_indices:
                raise _unsupported_layer(row, "return_indices, which would be a part's own")
            return SpatialMaxPool(cut, layer)
        return SpatialAveragePool(whole, cut, layer)

    def _switch(self, model: nn.Sequential, split: SpatialSplit, cut: SpatialGrid) -> None:
        """Make what comes out of the cut part whole on every rank."""
        row = split.rows[split.end]
        if split.by_mean and self.options["global_pool"] == "reduce":
            _set_submodule(model, row.name, SpatialGlobalPool(cut, split.extents))
            return
        gather = GatherFeatureMaps(cut, split.extents)
        if split.block == len(model):
            model.register_forward_hook(lambda _module, _args, output: gather(output))
            return
        first = list(model)[split.block] if split.begins_block else model.get_submodule(row.name)
        first.register_forward_pre_hook(lambda _module, args: (gather(args[0]), *args[1:]))

    def make_reducers(self, module: nn.Module) -> list[GradientReducer]:
        """Cut layers over all ranks that share them, whole ones across replicas."""
        if self.split is None:
            return super().make_reducers(module)
        cap = float(self.options["bucket_cap_mb"])
        named = dict(module.named_parameters())
        groups = (
            ([one for name, one in named.items() if self.split.is_cut(name)], self.sharing),
            ([one for name, one in named.items() if not self.split.is_cut(name)], self.groups["dp"]),
        )
        return [
            GradientReducer(parameters, group.members(), cap)
            for parameters, group in groups
            if parameters and group.size > 1
        ]

    def batch(self, feed: DataFeed, step: int) -> Batch:
        """The own part alone: the whole samples are let go before the forward pass."""
        inputs, labels = super().batch(feed, step)
        return (inputs if self.split is None else self.cut_input(inputs)), labels


def _slice_input(cut: SpatialGrid, extents: tuple[int, ...], inputs: Tensor) -> Tensor:
    """This rank's part of whole samples; a part stays what it is."""
    if tuple(inputs.shape[2:]) != extents:
        return inputs
    image = tuple(range(extent) for extent in extents)
    # A copy: a view would keep the whole.
    return box_view(inputs, owned_box(extents, cut.grid, cut.group.place), image).clone()


def _set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(owner), own_name, module)


def _refuse_shared_weights(model: nn.Module, split: SpatialSplit) -> None:
    """A weight of cut and whole layers would need two sums at once."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if split.is_cut(name) != split.is_cut(other):
            raise WorkerError(
                f"spatial: {other} and {name} are one weight, of a layer that is cut and of one that is whole",
                status="unsupported",
                hint="let options.until end the cut part before both, or after",
            )


def _unsupported_layer(row: Row, what: str) -> WorkerError:
    return WorkerError(
        f"spatial: layer {row.name} ({row.kind}) has {what}",
        status="unsupported",
        hint="let options.until end the cut part before that block",
    )
