"""The seams of a strategy: every runtime extends ``Strategy``, every cost extends ``Cost``, for mypy and when loaded."""

from __future__ import annotations

import inspect

import pytest

from hpcbench.oracle.strategies.base import Cost, resolve_cost
from hpcbench.oracle.strategies.channel import ChannelCost, FilterCost
from hpcbench.oracle.strategies.data import (
    DataParallelCost,
    DdpCost,
    FairscaleOssCost,
    FairscaleSddpCost,
    HorovodCost,
    SingleCost,
    Zero1Cost,
)
from hpcbench.oracle.strategies.pipeline import FairscalePipeCost, PipedreamCost, PipelineCost
from hpcbench.oracle.strategies.sharded import FairscaleFsdpCost, FsdpCost
from hpcbench.oracle.strategies.spatial import SpatialCost
from hpcbench.oracle.strategies.tensor import TensorCost
from hpcbench.parallel.catalog import PROBES, REFERENCE_TRAINERS, STRATEGIES, load_object
from hpcbench.parallel.pipeline.schedules import SCHEDULES
from hpcbench.parallel.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.worker.strategies.base import DataParallelStrategy, SingleStrategy, Strategy, resolve_runtime
from hpcbench.worker.strategies.channel import ChannelStrategy, FilterStrategy
from hpcbench.worker.strategies.data import (
    DdpStrategy,
    FairscaleFsdpStrategy,
    FairscaleOssStrategy,
    FairscaleSddpStrategy,
    Zero1Strategy,
)
from hpcbench.worker.strategies.fsdp import FsdpStrategy
from hpcbench.worker.strategies.horovod import HorovodStrategy
from hpcbench.worker.strategies.pipeline.fairscale_pipe import FairscalePipeStrategy
from hpcbench.worker.strategies.pipeline.pipedream import PipedreamStrategy
from hpcbench.worker.strategies.pipeline.strategy import PipelineStrategy
from hpcbench.worker.strategies.probes import ProbeCollectivesStrategy, ProbeLayersStrategy, ProbeLoopsStrategy
from hpcbench.worker.strategies.spatial import SpatialStrategy
from hpcbench.worker.strategies.tensor import TensorParallelStrategy
from hpcbench.worker.verification.reference import resolve_reference_trainer
from tests.parity_cases import parity_cases

ALL = {**STRATEGIES, **PROBES}

# mypy checks each class of these tables against its base class.
CHECKED_RUNTIMES: tuple[type[Strategy], ...] = (
    DataParallelStrategy,
    SingleStrategy,
    DdpStrategy,
    Zero1Strategy,
    FsdpStrategy,
    FairscaleOssStrategy,
    FairscaleSddpStrategy,
    FairscaleFsdpStrategy,
    HorovodStrategy,
    FilterStrategy,
    ChannelStrategy,
    SpatialStrategy,
    TensorParallelStrategy,
    PipelineStrategy,
    PipedreamStrategy,
    FairscalePipeStrategy,
    ProbeLayersStrategy,
    ProbeCollectivesStrategy,
    ProbeLoopsStrategy,
)
CHECKED_COSTS: tuple[type[Cost], ...] = (
    DataParallelCost,
    SingleCost,
    DdpCost,
    Zero1Cost,
    FsdpCost,
    FairscaleOssCost,
    FairscaleSddpCost,
    FairscaleFsdpCost,
    HorovodCost,
    FilterCost,
    ChannelCost,
    SpatialCost,
    TensorCost,
    PipelineCost,
    PipedreamCost,
    FairscalePipeCost,
)


@pytest.mark.parametrize("key", ALL)
def test_a_registered_runtime_overrides_the_base_class(key: str) -> None:
    runtime = resolve_runtime(key)
    assert issubclass(runtime, Strategy)
    assert not inspect.isabstract(runtime)
    members = [name for name, member in vars(Strategy).items() if inspect.isfunction(member) and name[0] != "_"]
    for name in (*members, "close"):
        if name == "phases":
            continue
        expected, actual = (inspect.signature(getattr(owner, name)).parameters for owner in (Strategy, runtime))
        assert list(actual) == list(expected), name


@pytest.mark.parametrize("key", ALL)
def test_a_registered_runtime_is_checked_by_mypy(key: str) -> None:
    """A subclass of a class in the table is checked as well: mypy compares overrides with what they override."""
    assert issubclass(resolve_runtime(key), CHECKED_RUNTIMES)


@pytest.mark.parametrize("key", [key for key, entry in ALL.items() if entry.cost is not None])
def test_a_registered_cost_overrides_the_base_class_and_is_checked_by_mypy(key: str) -> None:
    cost = resolve_cost(key)
    assert isinstance(cost, CHECKED_COSTS)
    for name in ("traffic", "memory", "step", "ranks_that_differ"):
        expected, actual = (inspect.signature(getattr(owner, name)).parameters for owner in (Cost, type(cost)))
        assert list(actual) == list(expected), name


@pytest.mark.parametrize("key", ALL)
def test_the_references_of_a_strategy_entry_exist(key: str) -> None:
    entry = ALL[key]
    assert entry.reference in REFERENCE_TRAINERS
    assert callable(resolve_reference_trainer(key))
    assert entry.library_facts is None or callable(load_object(entry.library_facts))
    assert entry.schedule is None or entry.schedule in SCHEDULES


@pytest.mark.parametrize("key", STRATEGIES)
def test_a_strategy_does_not_exclude_its_own_parity_cases(key: str) -> None:
    for case in parity_cases(key):
        point = {
            "strategy": key,
            "model": case.model,
            "dataset": case.dataset,
            "model_options": dict(case.model_options),
            "options": dict(case.options),
            "batch_size": 8,
            "micro_batches": case.micro_batches,
            "tasks_per_node": case.ranks,
            "devices_per_task": case.devices_per_task,
            **case.degrees,
        }
        resolved = resolve_point(point, PartitionLimits("any"))
        assert not isinstance(resolved, InfeasiblePoint), resolved.reason
