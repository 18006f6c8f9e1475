"""The base of strategies that split layers over ranks: process groups, gradient reduction across replicas, shards.

With ``dp`` replicas of ``mp`` ranks each, ranks lie on a mesh. Shards are gathered along one axis, gradients are
reduced along the other::

                 axis (tp, sp or pp)
               +---------+---------+
    replica 0  | rank 0  | rank 1  |   <- gather_shards
               +---------+---------+
    replica 1  | rank 2  | rank 3  |
               +---------+---------+
                    ^ GradientReducer sums each column
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.gradient_buckets import DEFAULT_BUCKET_CAP_MB
from hpcbench.strategies.mesh import RankMesh
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.distributed.process_groups import RankContext, RankGroup, make_axis_groups
from hpcbench.worker.strategy import DataParallelStrategy

_distributed: Any = dist
# torch 2.13 renamed these two and warns of the older names.
all_gather_single = vars(dist).get("all_gather_single") or _distributed.all_gather_into_tensor
reduce_scatter_single = vars(dist).get("reduce_scatter_single") or _distributed.reduce_scatter_tensor


TensorT = TypeVar("TensorT", bound=Tensor)


class TensorSharding(NamedTuple):
    """The division of a tensor among the ranks of a group.

    The shards lie side by side along ``dim`` in the order of the group's ranks::

        dim = 1, extents = (3, 3, 2):   | rank 0 | rank 1 | rank2|
    """

    dim: int
    extents: tuple[int, ...]
    """Length of every rank's shard along ``dim``."""

    def range_of(self, rank: int) -> range:
        """Return the positions along ``dim`` that ``rank`` holds."""
        start = sum(self.extents[:rank])
        return range(start, start + self.extents[rank])

    def narrow(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a view of the shard of ``rank``: [..., sum(extents), ...] -> [..., extents[rank], ...] at ``dim``."""
        return tensor.narrow(self.dim, sum(self.extents[:rank]), self.extents[rank])


def sharding_along(dim: int, ranges: Sequence[range]) -> TensorSharding:
    """Return the sharding of which rank ``r`` holds ``ranges[r]``, which follow one another."""
    return TensorSharding(dim, tuple(map(len, ranges)))


def own_shard(tensor: TensorT, sharding: TensorSharding | None, rank: int) -> TensorT:
    """Return a copy of the shard of ``rank``, so that the whole tensor can be freed; a parameter stays a parameter.

    Args:
        tensor: The whole tensor, [..., sum(extents), ...] at ``sharding.dim``.
        sharding: The division; ``None`` copies the whole tensor.
        rank: Rank within the group, 0 to its size - 1.
    """
    part = tensor.detach() if sharding is None else sharding.narrow(tensor.detach(), rank)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(part.clone(), tensor.requires_grad) if is_parameter else part.clone()  # type: ignore[return-value]


class ModelParallelStrategy(DataParallelStrategy):
    """A replica is divided among the ranks along ``axis``; replicas lie along ``dp``.

    A subclass replaces layers in ``split_model``. A layer whose parameters or buffers are shards has an attribute
    ``shards: dict[str, TensorSharding]`` by the tensors' names within the layer; all others are replicated.
    """

    axis: str
    forward_is_collective = True

    def setup(self, model: nn.Sequential, spec: RunSpec, context: RankContext) -> None:
        self.mesh = RankMesh.of(spec)
        self.groups = make_axis_groups(self.mesh, context)
        self.group = self.groups[self.axis]
        super().setup(model, spec, context)
        self.replica = self.mesh.coordinates(context.rank).dp

    def wrap(self, module: nn.Module, spec: RunSpec, context: RankContext) -> nn.Module:
        self.reducers = self.make_reducers(module)
        return module

    def make_reducers(self, module: nn.Module) -> list[GradientReducer]:
        """Create the reducers that sum gradients; by default one that sums all of them across replicas."""
        return group_reducers((list(module.parameters()), self.groups["dp"]))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for reducer in self.reducers:
                stack.enter_context(reducer.paused())
            yield

    def finish_gradient_reduction(self) -> None:
        for reducer in self.reducers:
            reducer.finish()

    def _take_loss(self) -> Tensor:
        # Every rank of a replica has computed the same loss; only the first one reports it.
        loss = super()._take_loss()
        return loss if self.group.place == 0 else torch.zeros_like(loss)

    def whole_tensor(self, name: str, tensor: Tensor) -> Tensor:
        # Shards lie along tp, also those of a pipeline's stages.
        owner, _, tensor_name = name.rpartition(".")
        shards: dict[str, TensorSharding] = vars(self.module.get_submodule(owner)).get("shards", {})
        sharding = shards.get(tensor_name)
        return tensor.detach() if sharding is None else gather_shards(tensor.detach(), sharding, self.groups["tp"])


def group_reducers(
    *parts: tuple[Sequence[nn.Parameter], RankGroup], bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB
) -> list[GradientReducer]:
    """Create a reducer for each pair of parameters and a group of several ranks that sums their gradients."""
    trained = (([each for each in parameters if each.requires_grad], group) for parameters, group in parts)
    return [
        GradientReducer(parameters, group.members(), bucket_cap_mb)
        for parameters, group in trained
        if parameters and group.size > 1
    ]


def gather_shards(tensor: Tensor, sharding: TensorSharding, group: RankGroup) -> Tensor:
    """Return the whole tensor from all ranks' shards: [..., own extent, ...] -> [..., sum(extents), ...] at ``dim``.

    Collective over ``group``, whose ranks hold the shards in their order; the result is equal on all of them. A group
    of one rank gets ``tensor`` itself. Shards are padded to the largest extent, because collectives move equal parts::

        rank 0 |aaa|          |aaa|
        rank 1 |bbb|  ---->   |bbb|  ---->  |aaabbbcc| on every rank
        rank 2 |cc |  padded  |cc0|
    """
    if group.size == 1:
        return tensor
    padding = max(sharding.extents) - tensor.shape[sharding.dim]
    padded = F.pad(tensor, [0, 0] * (tensor.dim() - sharding.dim - 1) + [0, padding]) if padding else tensor
    parts = all_gather_equal_parts(padded, group)
    return torch.cat(
        [part.narrow(sharding.dim, 0, extent) for part, extent in zip(parts, sharding.extents, strict=True)],
        sharding.dim,
    )


def all_gather_equal_parts(part: Tensor, group: RankGroup) -> Tensor:
    """Return every rank's ``part``: [*shape] -> [ranks, *shape], equal on all ranks.

    Collective over ``group``, which has several ranks; all parts have one shape.
    """
    parts = part.new_empty((group.size, *part.shape))
    all_gather_single(parts.flatten(0, 1), part.contiguous(), group=group.members())
    return parts


def reduce_scatter_shards(partial: Tensor, sharding: TensorSharding, group: RankGroup) -> Tensor:
    """Return this rank's shard of the ranks' sum: [..., sum(extents), ...] -> [..., own extent, ...] at ``dim``.

    Collective over ``group``, which has several ranks; the adjoint of ``gather_shards``, with the same padding.

    Args:
        partial: This rank's addend, with the shape of the whole tensor.
        sharding: The division of the sum.
        group: The ranks whose addends are summed; rank ``r`` gets shard ``r``.
    """
    longest = max(sharding.extents)
    shape = list(partial.shape)
    shape[sharding.dim] = longest
    parts = (partial.new_empty if min(sharding.extents) == longest else partial.new_zeros)((group.size, *shape))
    for padded, part in zip(parts, torch.split(partial, list(sharding.extents), sharding.dim), strict=True):
        padded.narrow(sharding.dim, 0, part.shape[sharding.dim]).copy_(part)
    total = partial.new_empty(shape)
    reduce_scatter_single(total, parts.flatten(0, 1), group=group.members())
    return total.narrow(sharding.dim, 0, sharding.extents[group.place]).contiguous()


class _Collective(torch.autograd.Function):
    """One operation forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operations: tuple[str, str], sharding: TensorSharding, group: RankGroup) -> Tensor:
        ctx.backward_arguments = operations[1], sharding, group
        return _run_operation(x, operations[0], sharding, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _run_operation(gradients[0], *ctx.backward_arguments), None, None, None


def _run_operation(x: Tensor, operation: str, sharding: TensorSharding, group: RankGroup) -> Tensor:
    if operation == "narrow":
        return sharding.narrow(x, group.place)
    if operation == "all_gather":
        return gather_shards(x, sharding, group)
    if operation == "reduce_scatter":
        return reduce_scatter_shards(x, sharding, group)
    if operation in ("all_reduce", "all_reduce_in_place"):
        # Autograd may hand one gradient to several nodes, so it is not summed in place.
        in_place = operation == "all_reduce_in_place"
        total = x.detach().contiguous() if in_place else x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group.members())
        return total
    # A new tensor object: autograd would mistake the input itself for the output.
    return x.view_as(x)


def apply_collective(x: Tensor, operations: tuple[str, str], sharding: TensorSharding, group: RankGroup) -> Tensor:
    """Apply the first of ``operations`` to ``x``, and the second one to its gradient.

    Shapes at ``sharding.dim``, "whole" being sum(extents) and "own" this rank's extent::

        ""              any   -> the same
        narrow          whole -> own
        all_gather      own   -> whole
        reduce_scatter  whole -> own       (of the ranks' sum)
        all_reduce      any   -> the same  (the ranks' sum)

    Args:
        x: A tensor, whole or this rank's shard.
        operations: Names of the table; ``all_reduce_in_place`` overwrites ``x``.
        sharding: The division on the side where the tensor is split.
        group: The ranks that hold the shards; alone, a rank gets ``x`` itself.
    """
    if group.size == 1 or not any(operations):
        return x
    result: Tensor = _Collective.apply(x, operations, sharding, group)  # type: ignore[no-untyped-call]
    return result


def cast_for_autocast(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype in which autocast will multiply it: it and its gradient are then sent in that dtype.

    Autocast leaves fp64 and integers as they are.
    """
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device_type))
    return x


class ConvolutionOperation(NamedTuple):
    """A convolution [n, channels, ...] without its tensors, and its gradients by torch's own kernel."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution [n, in, *extents] -> [n, out, *output extents].

        Args:
            x: Input [n, in, *extents].
            weight: [out, in / groups, *kernel].
            bias: [out], or ``None``.
        """
        zeros = [0] * len(self.stride)
        return torch.convolution(x, weight, bias, self.stride, self.padding, self.dilation, False, zeros, self.groups)

    def backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> list[Tensor | None]:
        """Return the gradients of the input, the weight and the bias, each ``None`` unless ``wanted``.

        Args:
            gradient: Gradient of the output, [n, out, *output extents].
            x: Input of the forward pass, [n, in, *extents].
            weight: [out, in / groups, *kernel].
            wanted: Whether to compute each of the three gradients.
        """
        zeros, bias_sizes = [0] * len(self.stride), [weight.shape[0]] if wanted[2] else None
        geometry = (self.stride, self.padding, self.dilation, False, zeros, self.groups)
        return list(torch.ops.aten.convolution_backward(gradient, x, weight, bias_sizes, *geometry, list(wanted)))


@torch.no_grad()
def update_running_statistics(norm: nn.modules.batchnorm._BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Move a BatchNorm's running statistics towards ``mean`` and the unbiased ``variance``, both [channels]."""
    assert norm.running_mean is not None, "running statistics that are not tracked"
    assert norm.running_var is not None, "running statistics that are not tracked"
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    momentum: Any = norm.momentum
    if momentum is None:
        assert norm.num_batches_tracked is not None, "a cumulative average without a count"
        # A tensor: reading the count would wait for the device.
        momentum = norm.num_batches_tracked.double().reciprocal().to(norm.running_mean.dtype)
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), momentum)
