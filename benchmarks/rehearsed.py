"""Pipelines whose ranks sleep instead of computing (rehearsal), over the steps that the oracle says: 4 ranks.

Communication and schedules are real, and every operator takes what it would take of a slow device. Operators are
priced one by one, the oracle's rows layer by layer: what computation alone takes more stands beside the ratio.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmarks.ratios import median_interval, tell
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.machine import nominal_machine
from hpcbench.oracle.prediction import Prediction, predict
from hpcbench.parallel.layer_table import read_shipped_table
from hpcbench.parallel.roofline import DeviceCompute
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.emulation_mode import EmulationMode
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategies.base import resolve_runtime

CPU = torch.device("cpu")
SLOW = DeviceCompute(peak_flops_per_s={"fp32": 40e9}, memory_bandwidth_bytes_per_s=20e9, launch_s=1e-4)
"""A step of four stages takes between one and five seconds: waking up late is little beside it."""

STEPS = int(os.environ.get("STEPS", "6"))
NEAR = 0.1
CASES: list[tuple[str, dict[str, Any]]] = [
    ("model", {}),
    ("gpipe", {}),
    ("gpipe", {"options": {"recompute": "always"}}),
    ("gpipe", {"options": {"stage_replicas": "2-1-1"}}),
    ("1f1b", {}),
    ("1f1b", {"pp_degree": 2, "dp_degree": 2}),
    ("interleaved_1f1b", {}),
    ("zero_bubble", {}),
    ("pipedream", {}),
    ("pipedream", {"options": {"weight_versions": "2bw"}}),
]


def spec_of(strategy: str, more: dict[str, Any]) -> RunSpec:
    given = {"model": "resnet18", "dataset": "cifar10", "pp_degree": 4, **more}
    return RunSpec(strategy=strategy, batch_size=32, micro_batches=8, tasks_per_node=4, **given)


def predicted(spec: RunSpec) -> Prediction:
    table = read_shipped_table(spec.model, spec.dataset)
    assert table is not None
    machine = nominal_machine(load_cluster("local")[0])
    return predict(spec, table, msgspec.structs.replace(machine, compute=SLOW))


def measured(spec: RunSpec, rank: int) -> tuple[list[float], float]:
    """The slowest rank's steps, and what the longest of them computes in one."""
    strategy, feed = resolve_runtime(spec.strategy)(), make_feed(spec, CPU)
    strategy.setup(build_model(spec), spec, RankContext(rank, spec.ranks, CPU))
    strategy.announce(range(STEPS + 3))
    mode, ends, computed = EmulationMode(SLOW, spec.precision, spec.model, CPU), [], []
    for step in range(STEPS + 2):
        with mode:
            strategy.step(feed, step)
        ends.append(time.perf_counter())
        computed.append(mode.computed_s)
    own = [after - before for before, after in pairwise(ends[1:])]
    every: list[Any] = [None] * spec.ranks
    dist.all_gather_object(every, (own, computed[-1] - computed[-2]))
    return [max(steps) for steps in zip(*(one[0] for one in every), strict=True)], max(one[1] for one in every)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows: list[dict[str, object]] = []
    for strategy, more in CASES:
        spec = spec_of(strategy, more)
        steps_s, computed_s = measured(spec, dist.get_rank())
        said = predicted(spec)
        ratio, low, high = median_interval([step / said.step_time_s for step in steps_s])
        given = ", ".join(f"{name} {value}" for name, value in (more.get("options") or more).items())
        rows.append(
            {
                "figure": f"a step of {strategy}{' ' * bool(given)}{given} over predicted, 4 ranks that sleep",
                "measured": f"{ratio:.3f} [{low:.3f} {high:.3f}], computation alone {computed_s / said.compute_s:.3f}",
                "goal": "within 10%",
                "met": abs(ratio - 1) <= NEAR,
            }
        )
    tell(rows)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
