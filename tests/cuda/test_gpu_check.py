"""The runs of ``hpcbench doctor --gpu`` step on eight fake GPUs, and so do the loops that it compares with."""

from __future__ import annotations

import copy
from pathlib import Path

import msgspec
import pytest
import torch

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.forecast.gpu_check import make_check_sweep
from hpcbench.parallel.catalog import STRATEGIES
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.plan import make_plan
from hpcbench.worker.microbench.plain_loops import TrainingStep, make_library_model, plain_step, timm_step
from hpcbench.worker.strategies.base import DataParallelStrategy
from tests.cuda.checks import order_problems, step_problems
from tests.cuda.fake_gpu import rank_on_gpu, step_on_gpu
from tests.cuda.gpu_recorder import GpuRecorder
from tests.cuda.stub import WAITS, count_calls
from tests.cuda.stub_answers import DEVICES


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunSpec]:
    """The runs of the check on a node of eight GPUs, by strategy."""
    local, _ = load_cluster("local")
    node = local.node.model_copy(update={"devices": DEVICES})
    profile = local.model_copy(update={"name": "gpus", "device": "cuda", "node": node})
    folder: Path = tmp_path_factory.mktemp("check")
    plan = make_plan(make_check_sweep(profile), profile, ClusterTree(folder))
    assert plan.dropped == []
    return {spec.strategy: spec for spec in plan.runs.values()}


@pytest.mark.parametrize("key", STRATEGIES)
def test_every_run_steps(specs: dict[str, RunSpec], key: str) -> None:
    # What ``verify`` adds are two trainings on the host.
    spec = msgspec.structs.replace(specs[key], verify=False)
    by_rank = {rank: step_on_gpu(spec, rank) for rank in sorted({0, spec.ranks - 1})}
    for rank, steps in by_rank.items():
        assert step_problems(spec, rank, steps) == []
    if key != "spatial":
        # Of spatial the oracle prices an inner rank.
        assert order_problems(spec, by_rank) == []


def check_steps(step: TrainingStep, recorder: GpuRecorder) -> None:
    """Train three steps, of which the last one must not wait for the device."""
    for number in range(3):
        recorder.begin_step()
        before = count_calls(WAITS)
        step(number)
        assert count_calls(WAITS) == before
    assert (list(recorder.host_sync_sites), list(recorder.stray)) == ([], [])
    assert recorder.product_types == {torch.bfloat16}
    assert recorder.operators > 0


def test_loops_train_without_a_wait_of_the_host(specs: dict[str, RunSpec]) -> None:
    spec = specs["probe_loops"]
    assert (spec.model, spec.precision) == ("resnet50", "bf16")
    with rank_on_gpu(spec, 0) as (strategy, feed, recorder):
        assert isinstance(strategy, DataParallelStrategy)
        device = recorder.device
        batches = [feed.batch(step, 0) for step in range(2)]
        check_steps(lambda number: strategy.step(feed, number), recorder)
        check_steps(plain_step(copy.deepcopy(strategy.module), spec, device, batches), recorder)
        # torch cannot move fake parameters: they are made on the device. There ``Module.to`` is the dry run's.
        with device:
            library_model = make_library_model(spec, device)
        assert library_model is not None
        model, library = library_model
        assert library.startswith(("torchvision", "timm"))
        assert {parameter.device for parameter in model.parameters()} == {device}
        check_steps(timm_step(model, spec, device, batches), recorder)
