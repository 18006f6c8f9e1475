"""The gain and loss of ``filter`` and ``channel``: steps of two ranks that share layers, and of two that share none.

Both train the same model on the same samples; unsplit, each rank runs the whole step by itself at the same time as the
other, so that both have the same processor to themselves. Half is the ideal. Beside the ratio stands the share of
a split step in which a rank is inside a collective, waiting for the other included: the rest over one half is what
smaller layers, copies and what is computed twice cost. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.ratios import Block, paired, tell
from hpcbench.config.run_spec import RunSpec
from hpcbench.worker import model_parallel_layers as model_parallel
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import resolve_runtime

PAIRS = 20
STEPS = 2
CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "vgg11": {"model": "vgg11", "dataset": "cifar10", "batch_size": 8},
    "mobilenetv2": {"model": "mobilenetv2", "dataset": "cifar10", "input_size": 16, "batch_size": 8},
}


class Clock:
    """Seconds inside collectives."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            found = function(*given, **named)
            self.seconds += time.perf_counter() - began
            return found

        return timed


def block_of(spec: RunSpec, place: RankContext) -> Block:
    strategy = resolve_runtime(spec.strategy)()
    strategy.setup(build_model(spec), spec, place)
    feed = make_feed(spec, CPU)

    def block() -> None:
        for step in range(STEPS):
            strategy.step(feed, step)

    return block


def share_sent(block: Block) -> float:
    """Return the seconds of a block on this rank inside collectives."""
    clock = Clock()
    with (
        mock.patch.object(model_parallel, "all_gather_single", clock.around(model_parallel.all_gather_single)),
        mock.patch.object(model_parallel, "reduce_scatter_single", clock.around(model_parallel.reduce_scatter_single)),
        mock.patch.object(dist, "all_reduce", clock.around(dist.all_reduce)),
    ):
        began = time.perf_counter()
        for _ in range(3):
            block()
        return clock.seconds / (time.perf_counter() - began)


def compare(name: str, strategy: str, form: str, rank: int, world: int) -> dict[str, object]:
    case = MODELS[name]
    spec = RunSpec(strategy=strategy, tasks_per_node=world, tp_degree=world, options={"form": form}, **case)
    split = block_of(spec, RankContext(rank, world, CPU))
    whole = block_of(RunSpec(strategy="single", **case), RankContext(0, 1, CPU))
    for block in (split, whole):
        block()
    ratios, share = paired(split, whole, PAIRS), torch.tensor(share_sent(split))
    dist.all_reduce(share)
    return {
        "figure": f"{strategy} ({form}) on {world} ranks over the unsplit step, {name}",
        "measured": f"{ratios}; {100 * share.item() / world:.0f} % in collectives",
        "goal": "",
        "met": None,
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [
        compare(name, strategy, form, rank, world)
        for name in MODELS
        for strategy in ("filter", "channel")
        for form in ("sharded", "gathered")
    ]
    tell(rows)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
