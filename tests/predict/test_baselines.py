"""Baselines by hand: what the papers' formulas make of a run, and what follows from smaller runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from benchmarks.oracle.baselines import (
    BASELINES,
    BaselineEstimate,
    BaselineRequest,
    MeasuredRun,
    single_device_step,
)
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.collective_formulas import HockneyLink
from hpcbench.predict.machine import nominal_machine
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.pipeline.rank_cost import PipelineRank
from tests.layer_tables import table_of

ALPHA_S, BETA_S = 1e-4, 1e-9
PLAIN = nominal_machine(load_cluster("slurmbox")[0])
COMM = msgspec.structs.replace(PLAIN.comm, inter_node=HockneyLink(ALPHA_S, BETA_S))
MACHINE = msgspec.structs.replace(PLAIN, comm=COMM)
OWN = dict.fromkeys(STRATEGIES, "dp_degree") | {
    name: entry.own_degree for name, entry in STRATEGIES.items() if entry.own_degree
}


TABLE = table_of("resnet18", "cifar10")


def spec_of(strategy: str, degree: int, **more: Any) -> RunSpec:
    given = {"model": "resnet18", "dataset": "cifar10", "batch_size": 16, "nodes": degree, **more}
    if degree > 1:
        given.setdefault(OWN[strategy], degree)
    return RunSpec(strategy=strategy, **given)


def said(name: str, spec: RunSpec, known: Sequence[MeasuredRun] = (), table: LayerTable = TABLE) -> BaselineEstimate:
    return BASELINES[name](BaselineRequest(spec, table, MACHINE, known))


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gets_a_time_or_a_reason(name: str, strategy: str) -> None:
    transformer = strategy == "tensor"
    table = table_of("vit", "cifar10") if transformer else TABLE
    spec = spec_of(strategy, 1 if strategy == "single" else 2, model="vit" if transformer else "resnet18")
    found = said(name, spec, table=table)
    assert (found.step_time_s is None) == bool(found.reason)
    assert found.step_time_s is None or found.step_time_s > 0


def test_paradl_prices_data_parallel_replicas_by_its_formula() -> None:
    """2 (p - 1)(alpha + W delta beta / p), and a quarter of the computation for four times the batch."""
    found, alone = said("paradl", spec_of("ddp", 4)), said("paradl", spec_of("single", 1))
    weights = sum(row.parameters for row in TABLE.layers)
    assert found.comm_s == pytest.approx(6 * (ALPHA_S + weights * BETA_S))
    assert found.compute_s == pytest.approx(alone.compute_s)


def test_paradl_prices_filter_parallelism_by_its_formula() -> None:
    """3 (p - 1) sum of (alpha + B y delta beta / p) over what is split but the last layer."""
    found = said("paradl", spec_of("filter", 4))
    split = [row for row in TABLE.layers[:-1] if row.kind in ("Conv2d", "Linear")]
    expected = 9 * sum(ALPHA_S + 16 * row.output_bytes / 4 * BETA_S for row in split)
    assert found.comm_s == pytest.approx(expected)
    assert said("paradl", spec_of("channel", 4)) == found


def test_paradl_prices_pipelines_by_its_formula() -> None:
    """2 (p + S - 2) max(alpha + B / S y delta beta), and (p + S - 1) / S of the slowest stage; the update once."""
    spec = spec_of("gpipe", 4, micro_batches=8)
    found, model = said("paradl", spec), said("paradl", spec_of("model", 4, micro_batches=8))
    run = PipelineRank(spec, TABLE, 0)
    largest = max(run.boundary_bytes(chunk) for chunk in range(3))
    assert found.comm_s == pytest.approx(2 * (4 + 8 - 2) * (ALPHA_S + 2 * largest * BETA_S))
    assert model.comm_s == pytest.approx(8 * 2 * 3 * (ALPHA_S + 2 * largest * BETA_S))
    assert found.compute_s is not None
    assert model.compute_s == pytest.approx(found.compute_s * 32 / 11, rel=0.05)
    hybrid = spec_of("gpipe", 8, pp_degree=4, dp_degree=2)
    assert said("paradl", hybrid).reason == "ParaDL has no formula for pipelines with replicas or split layers"


def test_the_compute_only_baseline_divides_computation_evenly() -> None:
    alone_s = single_device_step(BaselineRequest(spec_of("single", 1), TABLE, MACHINE)).compute_s
    assert said("compute_only", spec_of("ddp", 8)).step_time_s == pytest.approx(alone_s)
    assert said("compute_only", spec_of("filter", 8)).step_time_s == pytest.approx(alone_s / 8)
    assert said("compute_only", spec_of("filter", 8, tp_degree=2, dp_degree=4)).comm_s == 0


KNOWN = [
    MeasuredRun(spec_of("ddp", 2), 0.10),
    MeasuredRun(spec_of("ddp", 2, seed=1), 0.12),
    MeasuredRun(spec_of("ddp", 4), 0.14),
    MeasuredRun(spec_of("ddp", 16), 9.0),
    MeasuredRun(spec_of("ddp", 4, batch_size=32), 9.0),
    MeasuredRun(spec_of("horovod", 4), 9.0),
]


def test_baselines_extrapolate_from_smaller_runs_of_the_strategy() -> None:
    """Neither larger runs, nor other batches or strategies, tell anything."""
    spec = spec_of("ddp", 8)
    assert said("flat", spec, KNOWN).step_time_s == 0.14
    assert said("perfect", spec, KNOWN).step_time_s == pytest.approx(0.11)
    # 0.11 at 2 and 0.14 at 4 devices.
    assert said("log_p", spec, KNOWN).step_time_s == pytest.approx(0.17)
