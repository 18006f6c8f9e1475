"""Cases of the tests of tensor parallelism: whole runs on a small vocabulary, and single layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.strategies.tensor.train import (
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    vocabulary_parallel_losses,
)
from hpcbench.strategies.tensor.train.layers import TensorParallelAttention, TensorParallelComm, TensorParallelMlp
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.model_execution import summed_loss
from hpcbench.worker.model_parallel_layers import gather_shards
from hpcbench.worker.models.decoder import Embedding, TokenHead
from hpcbench.worker.models.transformer import Attention, Mlp
from hpcbench.worker.verification.reference import TrainingRecord
from hpcbench.workloads.datasets import DATASETS
from tests.distributed.cases import Case, OfRank, check_rounding, make_case, run_parallel, run_reference
from tests.distributed.narrow import WORDS
from tests.distributed.pool import Pool

VOCABULARY = WORDS


@contextlib.contextmanager
def small_vocabulary(words: int = VOCABULARY) -> Iterator[None]:
    """Let ``tokens`` have as few words."""
    whole = DATASETS["tokens"]
    DATASETS["tokens"] = whole._replace(outputs=words)
    try:
        yield
    finally:
        DATASETS["tokens"] = whole


def tensor_case(ranks: int, model: str = "gpt", **more: Any) -> Case:
    """Return a case on ``ranks``, of which dp_degree are replicas."""
    replicas = more.get("dp_degree", 1)
    given: dict[str, Any] = {"strategy": "tensor", "tp_degree": ranks // replicas, "dp_degree": replicas}
    if model == "gpt":
        given |= {"input_size": 7, "model_options": {"context": 9}}
    elif model == "llama":
        given |= {"input_size": 7, "model_options": {"vocabulary": VOCABULARY}}
    return make_case(
        ranks, model, "tokens" if model in ("gpt", "llama") else "digits",
        **{**given, "replicated": False, "batch_size": 4, "steps": 3, **more},
    )  # fmt: skip


def _run(case: Case, group: dist.ProcessGroup) -> OfRank:
    with small_vocabulary():
        return run_parallel(case, group)


def both(pool: Pool, case: Case) -> tuple[list[OfRank], TrainingRecord]:
    """Return the training by the ranks, and its reference by one process."""
    with small_vocabulary():
        return pool.call(case.spec.ranks, _run, case), run_reference(case)


def check_small(pool: Pool, case: Case) -> None:
    """``check_rounding`` with the small vocabulary."""
    with small_vocabulary():
        check_rounding(lambda one: pool.call(one.spec.ranks, _run, one), case)


@dataclass(frozen=True)
class LayerCase:
    """A layer of the single-device models: ``attention``, ``causal``, ``mlp`` or ``language`` (first, last and loss)."""

    kind: str
    by_tokens: bool
    heads: int = 5
    tokens: int = 7


def build_layer(case: LayerCase) -> nn.Module:
    """Build it in fp64, with weights of about 1 / sqrt(width), so that every digit counts."""
    torch.manual_seed(1)
    width = case.heads * 4
    built: nn.Module
    if case.kind == "language":
        built = nn.ModuleList([Embedding(VOCABULARY, 9, width, 0.0), TokenHead(width, VOCABULARY)])
    else:
        built = Mlp(width, 13) if case.kind == "mlp" else Attention(width, case.heads, case.kind == "causal", 0.0)
    return built.double()


def layer_gradients(
    case: LayerCase, layer: Any, sharing: TensorParallelComm | None, own: Any = None
) -> dict[str, Tensor]:
    """Output, gradients of the input and of all parameters: of the whole layer, or of one that is shared."""
    torch.manual_seed(2)
    found: dict[str, Tensor] = {}
    shape = (3, case.tokens)
    if case.kind == "language":
        words, targets = torch.randint(VOCABULARY, shape), torch.randint(VOCABULARY, shape)
        output = layer[1](layer[0](words))
        loss = (
            summed_loss(output, targets)
            if sharing is None
            else vocabulary_parallel_losses(output, targets, own, sharing.group)
        )
        found["loss"] = loss.detach()
    else:
        x = torch.randn(*shape, case.heads * 4, dtype=torch.float64, requires_grad=True)
        is_parted = sharing is not None and sharing.by_tokens
        output = layer(sharing.part(x) if is_parted and sharing else x)
        output = sharing.join(output) if is_parted and sharing else output
        loss = (output * torch.randn_like(output)).sum()
        found["output"] = output.detach()
    loss.backward()  # type: ignore[no-untyped-call]
    if case.kind != "language":
        assert x.grad is not None
        found["input"] = x.grad
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def split_layer(case: LayerCase, pool_group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return ``layer_gradients`` of the split layer, with its shards joined."""
    ranks, place = dist.get_world_size(pool_group), dist.get_rank(pool_group)
    group = RankGroup(tuple(range(ranks)), place, pool_group)
    sharing, whole, own = TensorParallelComm(group, case.by_tokens), build_layer(case), None
    layer: Any
    if isinstance(whole, nn.ModuleList):
        first, last = whole
        assert isinstance(first, Embedding)
        assert isinstance(last, TokenHead)
        head = VocabularyParallelHead(last, sharing)
        layer, own = nn.ModuleList([VocabularyParallelEmbedding(first, sharing), head]), head.ranges[place]
    else:
        layer = (
            TensorParallelMlp(whole, sharing)
            if isinstance(whole, Mlp)
            else TensorParallelAttention(cast("Attention", whole), sharing)
        )
    found = layer_gradients(case, layer, sharing, own)
    for name in [name for name, _ in layer.named_parameters()]:
        owner = layer.get_submodule(name.rpartition(".")[0])
        own_name = name.rpartition(".")[2]
        if own_name in getattr(owner, "partial_gradients", ()):
            dist.all_reduce(found[name], group=pool_group)
        shard = getattr(owner, "shards", {}).get(own_name)
        if shard is not None:
            found[name] = gather_shards(found[name], shard, group)
    return found
