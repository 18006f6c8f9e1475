"""A spatial step on two ranks against the ideal half of a whole one: halo, imbalance, and the rest.

The halo is the time in which a rank posts messages or waits for them; imbalance is how much longer the slower rank
computes than both do on average; the rest is what is left over the ideal: gradients, statistics, the switch, strips and
layers that are not cut. Rank 0 alone runs the whole step. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.catalog import resolve_runtime
from hpcbench.worker.data.feed import make_feed
from hpcbench.worker.models.build import build_model
from hpcbench.worker.spatial.exchange import Exchange
from hpcbench.worker.strategies.base import Place, Strategy

STEPS = 9
WARM = 2
CPU = torch.device("cpu")
CASES: dict[str, dict[str, Any]] = {
    "cosmoflow, 48^3, batch 1": {"model": "cosmoflow", "dataset": "cosmoflow", "input_size": 48, "batch_size": 1},
    "resnet18, 64^2, batch 4": {"model": "resnet18", "dataset": "imagenet", "input_size": 64, "batch_size": 4},
}


class HaloClock:
    """Seconds in which this rank posts halos or waits for them, summed over a step."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Any) -> Any:
        """``function``, timed."""

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            found = function(*arguments)
            self.seconds += time.perf_counter() - began
            return found

        return timed


def strategy_of(spec: RunSpec, place: Place) -> Strategy:
    made: Strategy = resolve_runtime(spec.strategy)()
    made.setup(build_model(spec), spec, place)
    return made


def timed_steps(strategy: Strategy, spec: RunSpec, clock: HaloClock, together: bool) -> list[tuple[float, float]]:
    """Per step: seconds in all, and of the halo."""
    feed, found = make_feed(spec, CPU), []
    for step in range(WARM + STEPS):
        if together:
            dist.barrier()
        clock.seconds, began = 0.0, time.perf_counter()
        strategy.step(feed, step)
        found.append((time.perf_counter() - began, clock.seconds))
    return found[WARM:]


def measure(rank: int, case: dict[str, Any], overlap: bool) -> list[float]:
    """Seconds per step, medians: whole, spatial, halo, imbalance, rest."""
    clock, whole = HaloClock(), 0.0
    if rank == 0:
        alone = RunSpec(strategy="single", **case)
        steps = timed_steps(strategy_of(alone, Place(0, 1, CPU)), alone, clock, together=False)
        whole = statistics.median(seconds for seconds, _ in steps)
    dist.barrier()
    spec = RunSpec(strategy="spatial", sp_degree=2, tasks_per_node=2, options={"overlap": overlap}, **case)
    with (
        mock.patch.object(Exchange, "__init__", clock.around(Exchange.__init__)),
        mock.patch.object(Exchange, "wait", clock.around(Exchange.wait)),
    ):
        steps = timed_steps(strategy_of(spec, Place(rank, 2, CPU)), spec, clock, together=True)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, steps)
    both = list(zip(*gathered, strict=True))
    step = statistics.median(max(a[0], b[0]) for a, b in both)
    halo = statistics.median((a[1] + b[1]) / 2 for a, b in both)
    busy = [(a[0] - a[1], b[0] - b[1]) for a, b in both]
    imbalance = statistics.median(max(pair) - sum(pair) / 2 for pair in busy)
    return [whole, step, halo, imbalance, step - whole / 2 - halo - imbalance]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, rows = dist.get_rank(), []
    for name, case in CASES.items():
        for overlap in (True, False):
            whole, step, *parts = measure(rank, case, overlap)
            split = ", ".join(
                f"{what} {1000 * seconds:.1f}"
                for what, seconds in zip(("halo", "imbalance", "rest"), parts, strict=True)
            )
            rows.append(
                {
                    "figure": f"spatial step on 2 ranks, {name}, overlap {overlap}",
                    "measured": f"{1000 * step:.1f} ms; ideal {500 * whole:.1f}, {split}",
                    "goal": "half a whole step and the parts",
                    "met": None,
                }
            )
    if rank == 0:
        print(json.dumps(rows), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
