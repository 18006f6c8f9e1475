"""The seams of a strategy: every runtime extends ``Strategy``, every cost extends ``Cost``, for mypy and when loaded.

No module beside entries, runtimes and costs has names of strategies."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from hpcbench.predict.strategy_cost import Cost, find_cost, resolve_cost
from hpcbench.strategies.catalog import PROBES, STRATEGIES, representative, selectable_strategies
from hpcbench.strategies.channel.cost import ChannelCost, FilterCost
from hpcbench.strategies.channel.train import ChannelStrategy, FilterStrategy
from hpcbench.strategies.data.cost import DataParallelCost, DdpCost, SingleCost
from hpcbench.strategies.data.train import DdpStrategy, SingleStrategy
from hpcbench.strategies.fairscale.cost import FairscaleFsdpCost, FairscaleOssCost, FairscaleSddpCost
from hpcbench.strategies.fairscale.train import FairscaleFsdpStrategy, FairscaleOssStrategy, FairscaleSddpStrategy
from hpcbench.strategies.horovod.cost import HorovodCost
from hpcbench.strategies.horovod.train import HorovodStrategy
from hpcbench.strategies.pipeline.cost import FairscalePipeCost, PipedreamCost, PipelineCost
from hpcbench.strategies.pipeline.schedules import SCHEDULES
from hpcbench.strategies.pipeline.train.fairscale_pipe import FairscalePipeStrategy
from hpcbench.strategies.pipeline.train.pipedream import PipedreamStrategy
from hpcbench.strategies.pipeline.train.pipeline_strategy import PipelineStrategy
from hpcbench.strategies.probes.train import ProbeBlocksStrategy, ProbeMessagesStrategy
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.strategies.sharded.cost import FsdpCost, Zero1Cost
from hpcbench.strategies.sharded.train import FsdpStrategy, Zero1Strategy
from hpcbench.strategies.spatial.cost import SpatialCost
from hpcbench.strategies.spatial.train import SpatialStrategy
from hpcbench.strategies.strategy_entry import Parallelism
from hpcbench.strategies.tensor.cost import TensorCost
from hpcbench.strategies.tensor.train import TensorParallelStrategy
from hpcbench.worker.strategy import DataParallelStrategy, Strategy, resolve_runtime
from hpcbench.worker.verification.reference_pipelines import resolve_reference_trainer
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
    ProbeBlocksStrategy,
    ProbeMessagesStrategy,
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


@pytest.mark.parametrize("key", [key for key in ALL if find_cost(key) is not None])
def test_a_registered_cost_overrides_the_base_class_and_is_checked_by_mypy(key: str) -> None:
    cost = resolve_cost(key)
    assert isinstance(cost, CHECKED_COSTS)
    for name in ("traffic", "memory", "step", "ranks_that_differ"):
        expected, actual = (inspect.signature(getattr(owner, name)).parameters for owner in (Cost, type(cost)))
        assert list(actual) == list(expected), name


@pytest.mark.parametrize("key", ALL)
def test_the_references_of_a_strategy_entry_exist(key: str) -> None:
    entry = ALL[key]
    assert callable(resolve_reference_trainer(key))
    assert entry.pipeline.schedule is None or entry.pipeline.schedule in SCHEDULES


@pytest.mark.parametrize("key", ALL)
def test_an_entry_and_its_runtime_agree_on_the_optional_members(key: str) -> None:
    entry, runtime = ALL[key], resolve_runtime(key)
    assert runtime.record_actions is not Strategy.record_actions or not entry.pipeline.records_timeline
    assert (runtime.measure is not Strategy.measure) == runtime.measures_machine


@pytest.mark.parametrize("parallelism", get_args(Parallelism))
def test_one_strategy_represents_each_way_to_divide_a_training(parallelism: Parallelism) -> None:
    keys = [key for key, entry in STRATEGIES.items() if entry.represents == parallelism]
    assert keys == [representative(parallelism)]


PACKAGE = Path(__file__).resolve().parents[1] / "hpcbench"
FILES_OF_STRATEGIES = tuple(f"strategies/{path.parent.name}/" for path in (PACKAGE / "strategies").glob("*/entry.py"))
ALLOWED_NAMES: dict[str, tuple[set[str], str]] = {
    "strategies/pipeline/schedules.py": (
        {"gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "pipedream"},
        "names of schedules: a new one is a part of its strategy's runtime and cost",
    ),
    "worker/verification/reference_pipelines.py": ({"pipedream"}, "name of a reference training"),
    "predict/decoder/layout.py": ({"fsdp", "tensor"}, "a software, and a field of a layout"),
    "predict/decoder/layout_search.py": ({"fsdp", "tensor"}, "a software, and a field of a layout"),
    "predict/decoder/work.py": ({"tensor"}, "field of a layout"),
    "report/recommendation_view.py": ({"fsdp", "zero1"}, "words for the degrees of a layout"),
    "submit/plan.py": ({"horovod"}, "name of a package"),
    "tools/build_horovod.py": ({"horovod"}, "name of a package"),
    "worker/failure.py": ({"horovod"}, "name of a package"),
    "worker/measure/environment_record.py": ({"horovod"}, "name of a package"),
}
"""Files in which a string equals the name of a strategy and stands for something else."""
NAMES_OF_PARAMETERS = {"model"}
"""Names of strategies that parameters have as well: only those that are compared with or assigned to ``strategy``."""


def names_of_strategies(source: str) -> Iterator[str]:
    """Yield the names of strategies in ``source``."""
    names = {*selectable_strategies()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in names - NAMES_OF_PARAMETERS:
            yield str(node.value)
        nearby: list[ast.expr] = []
        if isinstance(node, ast.Compare) and ".strategy" in ast.unparse(node):
            nearby = [node.left, *node.comparators]
        elif isinstance(node, ast.keyword) and node.arg == "strategy":
            nearby = [node.value]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            nearby = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "strategy"]
        for expression in nearby:
            for part in ast.walk(expression):
                if isinstance(part, ast.Constant) and part.value in NAMES_OF_PARAMETERS:
                    yield str(part.value)


def test_no_other_module_has_names_of_strategies() -> None:
    unexpected = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(FILES_OF_STRATEGIES):
            names = {*names_of_strategies(path.read_text(encoding="utf-8"))}
            allowed, _ = ALLOWED_NAMES.get(name, (set(), ""))
            if names != allowed:
                unexpected[name] = names ^ allowed
    assert unexpected == {}, "put it into StrategyEntry, Strategy or Cost, or correct ALLOWED_NAMES"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('is_own = spec.strategy == "ddp"', ["ddp"]),
        ('FACTORS = {"horovod": 1.0}', ["horovod"]),
        ('if run.spec.strategy in ("model", "x"): pass', ["model"]),
        ('point = {"model": "vit", "strategy": "model"}', ["model"]),
        ('spec = RunSpec(model="vit", strategy="model")', ["model"]),
        ('point = {"model": "vit", "strategy": strategy}', []),
        ('"""Replicas as of ddp."""', []),
    ],
)
def test_a_planted_name_of_a_strategy_is_found(source: str, names: list[str]) -> None:
    assert [*names_of_strategies(source)] == names


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
