"""The computation of pipeline stages equals the oracle's: real ranks on which every operator has its price and
none computes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel
from hpcbench.oracle.machine import nominal_machine
from hpcbench.oracle.strategies.base import resolve_cost
from hpcbench.parallel.layer_table import read_shipped_table
from hpcbench.parallel.roofline import DeviceCompute
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.emulation_mode import EmulationMode
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategies.base import resolve_runtime
from tests.distributed.cases import CPU
from tests.distributed.pool import Pool

pytestmark = pytest.mark.slow

FAST = DeviceCompute(peak_flops_per_s={"fp32": 2e12}, memory_bandwidth_bytes_per_s=2e11, launch_s=0.0)


def computed_s(spec: RunSpec, group: dist.ProcessGroup) -> float:
    """Return the seconds of the second step: pipedream's first one fills the pipeline."""
    strategy, feed = resolve_runtime(spec.strategy)(), make_feed(spec, CPU)
    strategy.setup(build_model(spec), spec, RankContext(dist.get_rank(group), spec.ranks, CPU, group))
    strategy.announce(range(3))
    mode = EmulationMode(FAST, spec.precision, spec.model, CPU)
    spent = []
    for step in range(2):
        with mode:
            strategy.step(feed, step)
        spent.append(mode.computed_s)
    return spent[1] - spent[0]


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("gpipe", {}),
        ("gpipe", {"options": {"recompute": "except_last"}}),
        ("interleaved_1f1b", {}),
        ("zero_bubble", {}),
        ("pipedream", {}),
    ],
    ids=["gpipe", "recompute", "interleaved_1f1b", "zero_bubble", "pipedream"],
)
def test_the_longest_stage_computes_for_the_predicted_time(pool: Pool, strategy: str, more: dict[str, Any]) -> None:
    spec = RunSpec(
        model="resnet18", dataset="cifar10", strategy=strategy, pp_degree=2, tasks_per_node=2, batch_size=64,
        micro_batches=2, **more,
    )  # fmt: skip
    table = read_shipped_table("resnet18", "cifar10")
    assert table is not None
    machine = msgspec.structs.replace(nominal_machine(load_cluster("local")[0]), compute=FAST)
    expected = resolve_cost(strategy).step(spec, table, CostModel(machine, spec)).compute_s
    assert max(pool.call(2, computed_s, spec)) == pytest.approx(expected, rel=0.1)
