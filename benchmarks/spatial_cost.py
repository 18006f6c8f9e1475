"""A spatial step on two ranks against the ideal half of a whole one: halo, imbalance, and the rest.

Of the rank that computes longer: the halo is the time in which it posts messages or waits for them; imbalance is how
much longer it computes than both do on average; the rest is what is left over the ideal: other collectives (statistics,
the switch, gradients; named beside it), strips, and layers that are not cut. The other rank's wait for this one is in
none of them, so that the parts add up. Rank 0 alone runs the whole step. Prints one line of JSON.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.ratios import tell
from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.spatial.train.halo_exchange import HaloExchange
from hpcbench.worker import model_parallel_layers as model_parallel
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import Strategy, resolve_runtime

STEPS = 9
WARM = 2
CPU = torch.device("cpu")
CASES: dict[str, dict[str, Any]] = {
    "cosmoflow, 48^3, batch 1": {"model": "cosmoflow", "dataset": "cosmoflow", "input_size": 48, "batch_size": 1},
    "resnet18, 64^2, batch 4": {"model": "resnet18", "dataset": "imagenet", "input_size": 64, "batch_size": 4},
}


class Spent(NamedTuple):
    """Seconds of one rank in one step."""

    step: float
    halo: float
    collectives: float

    @property
    def computing(self) -> float:
        """Return the remaining time."""
        return self.step - self.halo - self.collectives


class Clock:
    """Adds up the seconds in which a rank is within some functions; one that another calls counts once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            began, self._depth = time.perf_counter(), self._depth + 1
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began

        return timed

    def taken(self) -> float:
        """Since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def strategy_of(spec: RunSpec, place: RankContext) -> Strategy:
    made: Strategy = resolve_runtime(spec.strategy)()
    made.setup(build_model(spec), spec, place)
    return made


@contextmanager
def clocks() -> Iterator[tuple[Clock, Clock]]:
    """Clocks of halos, and of all other communication that a rank waits for."""
    halo, others = Clock(), Clock()
    with ExitStack() as stack:
        for owner, name, clock in (
            (HaloExchange, "__init__", halo),
            (HaloExchange, "wait", halo),
            (model_parallel, "all_gather_single", others),
            (dist, "all_reduce", others),
            (GradientReducer, "finish", others),
        ):
            stack.enter_context(mock.patch.object(owner, name, clock.around(getattr(owner, name))))
        yield halo, others


def timed_steps(strategy: Strategy, spec: RunSpec, together: bool) -> list[Spent]:
    feed, found = make_feed(spec, CPU), []
    with clocks() as (halo, others):
        for step in range(WARM + STEPS):
            if together:
                dist.barrier()
            halo.taken()
            others.taken()
            began = time.perf_counter()
            strategy.step(feed, step)
            found.append(Spent(time.perf_counter() - began, halo.taken(), others.taken()))
    return found[WARM:]


def measure(rank: int, case: dict[str, Any], overlap: bool) -> dict[str, float]:
    """Seconds per step, medians."""
    whole = 0.0
    if rank == 0:
        alone = RunSpec(strategy="single", **case)
        steps = timed_steps(strategy_of(alone, RankContext(0, 1, CPU)), alone, together=False)
        whole = statistics.median(one.step for one in steps)
    dist.barrier()
    spec = RunSpec(strategy="spatial", sp_degree=2, tasks_per_node=2, options={"overlap": overlap}, **case)
    steps = timed_steps(strategy_of(spec, RankContext(rank, 2, CPU)), spec, together=True)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, steps)
    pairs: list[tuple[Spent, ...]] = list(zip(*gathered, strict=True))
    busier = [max(pair, key=lambda one: one.computing) for pair in pairs]
    mean = [sum(one.computing for one in pair) / len(pair) for pair in pairs]
    found = {
        "step": statistics.median(one.step for one in busier),
        "ideal": whole / 2,
        "halo": statistics.median(one.halo for one in busier),
        "imbalance": statistics.median(one.computing - other for one, other in zip(busier, mean, strict=True)),
    }
    rest = found["step"] - found["ideal"] - found["halo"] - found["imbalance"]
    return {**found, "rest": rest, "of it collectives": statistics.median(one.collectives for one in busier)}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, rows = dist.get_rank(), []
    for case_name, case in CASES.items():
        for overlap in (True, False):
            parts = {name: f"{1000 * seconds:.1f}" for name, seconds in measure(rank, case, overlap).items()}
            step = parts.pop("step")
            split = ", ".join(f"{name} {value}" for name, value in parts.items())
            rows.append(
                {
                    "figure": f"spatial step on 2 ranks, {case_name}, overlap {overlap}",
                    "measured": f"{step} ms; {split}",
                    "goal": "half a whole step",
                    "met": None,
                }
            )
    tell(rows)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
