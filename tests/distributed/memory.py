"""Weights, gradients and optimizer state on a rank of a data-parallel run, as one table.

``python -m tests.distributed.memory`` prints it, for docs/strategies.md.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.measure.host import peak_resident_bytes
from hpcbench.worker.strategy import DataParallelStrategy, resolve_runtime
from tests.distributed.cases import CPU
from tests.distributed.pool import Pool

BLOCKS, WIDTH = 32, 128
ELEMENTS = BLOCKS * WIDTH * WIDTH
P = 4 * ELEMENTS
"""Bytes of parameters and of gradients; Adam keeps twice as many."""

STRATEGIES = {"ddp": 0, "zero1": 1, "fairscale_oss": 1, "fairscale_sddp": 2, "fsdp": 3, "fairscale_fsdp": 3}
"""The stage of ZeRO that each is."""


class Held(NamedTuple):
    """Bytes of one rank right before an update, after it, and beside them."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Whole blocks at the beginning of any block's forward pass, at most; all of them where none is sharded."""
    all_before: int
    """Every tensor but the samples, so also buckets."""
    all_after: int
    resident_peak: int


def build_blocks(_spec: RunSpec) -> nn.Sequential:
    """Equal blocks, each of one tensor, so that whole tensors can be shared out evenly."""
    torch.manual_seed(0)
    blocks = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)]
    return nn.Sequential(nn.Flatten(), nn.ZeroPad1d((0, WIDTH - 64)), *blocks)


def promised(stage: int, ranks: int) -> int:
    """Parameters, gradients and Adam's state after Rajbhandari et al. 2020; gathered blocks are counted apart."""
    shards = [ranks if stage >= least else 1 for least in (3, 2, 1)]
    return P // shards[0] + P // shards[1] + 2 * P // shards[2]


def storages(tensors: Iterable[Any]) -> int:
    """Bytes of the distinct storages of ``tensors``, of a DTensor its shard's."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def every_tensor() -> int:
    """Bytes of all large tensors that Python knows, buckets included; small ones are not of the model."""
    gc.collect()
    with torch.no_grad():
        alive = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and type(one) is not DTensor]
    return storages(one for one in alive if one.device.type == "cpu" and one.numel() >= WIDTH)


def state_of(optimizer: Any) -> list[Any]:
    """Tensors of the instance that updates this rank's share."""
    inner = getattr(optimizer, "optim", optimizer)
    return [value for state in inner.state.values() for value in state.values()]


def measure(spec: RunSpec, group: dist.ProcessGroup) -> Held:
    """Two steps; what is held is looked at around the second update."""
    feed, found, gathered = make_feed(spec, CPU), list[int](), [0]
    started = every_tensor()
    strategy = resolve_runtime(spec.strategy)()
    assert isinstance(strategy, DataParallelStrategy)
    strategy.setup(build_blocks(spec), spec, RankContext(dist.get_rank(group), spec.ranks, CPU, group))
    strategy.step(feed, 0)
    update = strategy.update

    def look() -> None:
        parameters = list(strategy.module.parameters())
        gradients = [one.grad for one in parameters]
        found.extend([storages(parameters), storages(gradients), storages(state_of(strategy.optimizer))])
        del parameters, gradients
        found.append(every_tensor() - started)
        update()

    def whole(module: nn.Module, *_: Any) -> None:
        gathered.append(storages(one.weight for one in blocks if not isinstance(one.weight, DTensor)))

    blocks: list[Any] = [one for one in strategy.module.modules() if isinstance(one, nn.Linear)]
    for block in blocks:
        block.register_forward_pre_hook(whole)
    with mock.patch.object(strategy, "update", look):
        strategy.step(feed, 1)
    parameters, gradients, optimizer, before = found
    after = every_tensor() - started
    return Held(parameters, gradients, optimizer, max(gathered), before, after, peak_resident_bytes())


def spec_of(key: str, ranks: int) -> RunSpec:
    """Adam; without buckets beside the gradients, where that can be had."""
    views = {"gradient_as_bucket_view": True} if key in ("ddp", "zero1", "fairscale_oss") else {}
    options: dict[str, Any] = {"reduce_buffer_mb": 0.0} if key == "fairscale_sddp" else views
    return RunSpec(
        model="resnet18", dataset="digits", strategy=key, tasks_per_node=ranks, dp_degree=ranks, batch_size=4,
        optimizer="adam", options=options,
    )  # fmt: skip


HEAD = [
    "strategy",
    "ranks",
    "promised",
    "held",
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "all tensors",
    "RSS",
]


def row(key: str, ranks: int, one: Held) -> str:
    """Return the table row of one rank, in MiB."""
    held = one.parameters + one.gradients + one.optimizer
    numbers = [promised(STRATEGIES[key], ranks), held, *one[:4], one.all_before, one.resident_peak]
    return f"| `{key}` | {ranks} | " + " | ".join(f"{number / 2**20:.2f}" for number in numbers) + " |"


def main() -> None:
    torch.set_num_threads(1)
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for key in STRATEGIES:
        for ranks in (2, 4):
            # A process's resident set never shrinks in this figure, so each strategy has processes of its own.
            pool = Pool(ranks)
            lines.append(row(key, ranks, pool.call(ranks, measure, spec_of(key, ranks))[0]))
            pool.close()
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
