"""Transformer layers split over a tensor-parallel group, differentiable collectives and rank-local random numbers.

Activations are [n, tokens, width]. The collectives are f and g of Shoeybi et al. 2019 (figure 3) and their
sequence-parallel counterparts of Korthikanti et al. 2022 (figure 5)::

                    enter                            leave
    whole tokens:   f  copy       -> column -> row -> g  all_reduce       -> dropout, norm on all tokens
    by tokens:      g  all_gather -> column -> row -> g  reduce_scatter   -> dropout, norm on own tokens

In the backward pass each collective is replaced by its adjoint (copy <-> all_reduce, all_gather <-> reduce_scatter).
In a group of one rank a collective returns its argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.strategies.channel.channel_split import (
    ALL_GATHER,
    ALL_GATHER_REDUCE_SCATTER,
    ALL_REDUCE_BACKWARD,
    NARROW,
    REDUCE_SCATTER_ALL_GATHER,
)
from hpcbench.strategies.mesh import even_ranges
from hpcbench.strategies.tensor.entry import head_feature_ranges
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.model_parallel_layers import apply_collective, cast_for_autocast, own_shard, sharding_along
from hpcbench.worker.models.transformer import Attention, Mlp, TransformerBlock

_TOKEN_DIM = 1


@dataclass
class TensorParallelComm:
    """The collectives between split layers of one tensor-parallel group.

    Example::

        comm = TensorParallelComm(group, by_tokens=False)
        total = comm.leave(row_linear(gelu(column_linear(comm.enter(x)))))  # [n, tokens, width], equal on all ranks
    """

    group: RankGroup
    by_tokens: bool
    """Sequence parallelism: between split layers each rank holds its own tokens; otherwise all ranks hold all."""
    tokens: int = 0
    """Tokens of the current samples, on all ranks together; set by ``part`` and by a split embedding."""

    @property
    def own_tokens(self) -> range:
        """This rank's tokens."""
        return even_ranges(self.tokens, self.group.size)[self.group.place]

    def enter(self, x: Tensor) -> Tensor:
        """Prepare the input of column layers: [n, tokens or own tokens, width] -> [n, tokens, width].

        Collective over the group along dim 1. Forward: all_gather by tokens, else nothing. Backward: the partial sums
        of the gradient are summed, by reduce_scatter or all_reduce.
        """
        return self._apply(cast_for_autocast(x), ALL_GATHER_REDUCE_SCATTER if self.by_tokens else ALL_REDUCE_BACKWARD)

    def leave(self, partial: Tensor) -> Tensor:
        """Return the ranks' sum of the outputs of row layers: [n, tokens, width] -> [n, tokens or own tokens, width].

        Collective over the group: reduce_scatter along dim 1 by tokens, else all_reduce, which overwrites ``partial``.
        """
        return self._apply(partial, REDUCE_SCATTER_ALL_GATHER if self.by_tokens else ("all_reduce_in_place", ""))

    def part(self, x: Tensor) -> Tensor:
        """Return the own tokens of an activation that all ranks hold: [n, tokens, width] -> [n, own tokens, width].

        Forward without communication; backward an all_gather along dim 1 over the group.
        """
        self.tokens = x.shape[_TOKEN_DIM]
        return self._apply(x, NARROW).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """Return all tokens, for layers that all ranks compute equally: [n, own tokens, width] -> [n, tokens, width].

        Collective over the group: all_gather along dim 1; backward without communication.
        """
        return self._apply(x, ALL_GATHER)

    def _apply(self, x: Tensor, operations: tuple[str, str]) -> Tensor:
        sharding = sharding_along(_TOKEN_DIM, even_ranges(self.tokens, self.group.size))
        return apply_collective(x, operations, sharding, self.group)


@contextmanager
def rank_local_rng(rank: int, device: torch.device) -> Iterator[None]:
    """Let the device's generator draw numbers that differ between the ranks of a group.

    Outside the context the ranks' generators stay in step, which makes masks of replicated activations equal. The seed
    is itself drawn, so a recomputation (which begins with the saved generator states) draws the same numbers again.

    Args:
        rank: This rank within the group.
        device: The device whose generator is used.
    """
    seed = int(torch.randint(2**62, ()).item())
    generator = torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    state = generator.get_state()
    generator.manual_seed(seed + rank)
    try:
        yield
    finally:
        generator.set_state(state)


class RankLocalDropout(nn.Dropout):
    """Dropout of activations of which every rank holds its own tokens."""

    def __init__(self, dropout: nn.Dropout, rank: int) -> None:
        super().__init__(dropout.p)
        self.rank = rank

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """Any shape -> the same shape."""
        if not self.training or self.p == 0:
            return input
        with rank_local_rng(self.rank, input.device):
            return F.dropout(input, self.p)


def mark_partial_gradients(module: nn.Module, *names: str) -> None:
    """Record that the gradients of these parameters are from the rank's own tokens only: ranks must add them up.

    Names that the module has no parameter of are left out: a normalisation may have no bias.
    """
    vars(module)["partial_gradients"] = tuple(name for name in names if getattr(module, name, None) is not None)


def partial_gradient_ids(model: nn.Module) -> set[int]:
    """Return the ids of all parameters that ``mark_partial_gradients`` has marked."""
    return {
        id(module._parameters[name]) for module in model.modules() for name in vars(module).get("partial_gradients", ())
    }


class ColumnLinear(nn.Linear):
    """Some output features of a linear layer: [n, tokens, in] -> [n, tokens, own out].

    The weight [out, in] is split by rows: rank r holds the features ``ranges[r]``. The gradient of the input is a
    partial sum.
    """

    def __init__(self, layer: nn.Linear, ranges: Sequence[range], rank: int) -> None:
        sharding = sharding_along(0, ranges)
        # On the meta device nothing is drawn: the ranks' generators stay in step, whatever the sizes of their shards.
        super().__init__(layer.in_features, len(ranges[rank]), bias=layer.bias is not None, device="meta")
        self.shards = {"weight": sharding, "bias": sharding}
        self.weight = own_shard(layer.weight, sharding, rank)
        if layer.bias is not None:
            self.bias = own_shard(layer.bias, sharding, rank)


class RowLinear(nn.Linear):
    """Some input features of a linear layer: [n, tokens, own in] -> [n, tokens or own tokens, out].

    The weight [out, in] is split by columns: rank r holds the features ``ranges[r]``. The bias is added once, to the
    ranks' sum.
    """

    def __init__(self, layer: nn.Linear, ranges: Sequence[range], comm: TensorParallelComm) -> None:
        sharding, rank = sharding_along(1, ranges), comm.group.place
        super().__init__(len(ranges[rank]), layer.out_features, bias=layer.bias is not None, device="meta")
        self.comm = comm
        self.weight = own_shard(layer.weight, sharding, rank)
        self.bias = layer.bias
        self.shards = {"weight": sharding}
        if comm.by_tokens and layer.bias is not None:
            mark_partial_gradients(self, "bias")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """[n, tokens, own features] -> [n, tokens or own tokens, features]."""
        total = self.comm.leave(F.linear(input, self.weight))
        return total if self.bias is None else total + self.bias.to(total.dtype)


class TensorParallelAttention(Attention):
    """Some heads of an attention layer: [n, tokens or own tokens, width] -> the same shape."""

    def __init__(self, attention: Attention, comm: TensorParallelComm) -> None:
        nn.Module.__init__(self)
        self.comm = comm
        self.head_width, self.causal, self.dropout = attention.head_width, attention.causal, attention.dropout
        self.rotary_base, self.kv_heads = attention.rotary_base, attention.kv_heads
        kv_heads = attention.key.out_features // attention.head_width
        kv_ranges = head_feature_ranges(kv_heads, attention.head_width, comm.group.size)
        # A rank has the keys and values of its queries: heads that share them stay together.
        ranges = head_feature_ranges(kv_heads, attention.query.out_features // kv_heads, comm.group.size)
        self.query = ColumnLinear(attention.query, ranges, comm.group.place)
        self.key = ColumnLinear(attention.key, kv_ranges, comm.group.place)
        self.value = ColumnLinear(attention.value, kv_ranges, comm.group.place)
        self.output = RowLinear(attention.output, ranges, comm)

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens or own tokens, width] -> the same shape; two collectives.

        ``enter`` runs once for queries, keys and values together.
        """
        uses_dropout = self.training and self.dropout.p > 0
        with rank_local_rng(self.comm.group.place, x.device) if uses_dropout else nullcontext():
            return super().forward(self.comm.enter(x))


class TensorParallelMlp(Mlp):
    """Some inner features of an MLP: [n, tokens or own tokens, width] -> the same shape."""

    def __init__(self, mlp: Mlp, comm: TensorParallelComm) -> None:
        nn.Module.__init__(self)
        self.comm = comm
        self.activation = mlp.activation
        ranges = even_ranges(mlp.up.out_features, comm.group.size)
        self.up = ColumnLinear(mlp.up, ranges, comm.group.place)
        if mlp.activation == "swiglu":
            self.gate = ColumnLinear(mlp.gate, ranges, comm.group.place)
        self.down = RowLinear(mlp.down, ranges, comm)

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens or own tokens, width] -> the same shape; two collectives, ``enter`` and ``leave``."""
        return super().forward(self.comm.enter(x))


def refuse_shared_layers(model: nn.Sequential) -> None:
    """Raise ``WorkerError`` (``unsupported``) if a parameter of a transformer block has a second name in ``model``."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for block in model:
        for parameter in block.parameters() if isinstance(block, TransformerBlock) else ():
            if len(shared := names[id(parameter)]) > 1:
                message = f"tensor parallelism splits every layer by itself, but {' and '.join(shared)} are one weight"
                raise unsupported(message, "use ddp, fsdp or a pipeline")


def split_transformer_blocks(
    models: Iterable[nn.Sequential], comm: TensorParallelComm, spec: RunSpec
) -> list[TransformerBlock]:
    """Replace attention and MLP of every transformer block in ``models`` by this rank's part of it.

    Returns:
        The blocks, in order.

    Raises:
        WorkerError: ``unsupported`` if a block has fewer heads than the group has ranks.
    """
    blocks = [block for model in models for block in model if isinstance(block, TransformerBlock)]
    for block in blocks:
        heads = block.attention.key.out_features // block.attention.head_width
        if heads < comm.group.size:
            kind = "heads" if block.attention.kv_heads is None else "key-value heads"
            message = f"a transformer block of {spec.model} has {heads} {kind}, tp_degree is {spec.tp_degree}"
            raise unsupported(message, f"set tp_degree to at most {heads}")
        block.attention = TensorParallelAttention(block.attention, comm)
        block.mlp = TensorParallelMlp(block.mlp, comm)
        if comm.by_tokens:
            mark_partial_gradients(block.norm1, "weight", "bias")
            mark_partial_gradients(block.norm2, "weight", "bias")
            block.dropout1 = RankLocalDropout(block.dropout1, comm.group.place)
            block.dropout2 = RankLocalDropout(block.dropout2, comm.group.place)
    return blocks
