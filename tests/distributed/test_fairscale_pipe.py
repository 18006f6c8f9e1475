"""fairscale's Pipe, one process over the cpu twice, computes what one process computes per micro-batch."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import resolve_runtime
from hpcbench.worker.verification.reference import VerificationCheck, compare_training
from hpcbench.worker.verification.verify import train_strategy
from tests.distributed.cases import CPU, EXACT, Case, make_case, run_reference, short_epoch

pytestmark = pytest.mark.strategy("fairscale_pipe")

POINT = {"model": "resnet18", "dataset": "digits", "strategy": "fairscale_pipe", "batch_size": 8, "micro_batches": 4}


@pytest.mark.parametrize(("recompute", "samples"), [("never", 7), ("except_last", 8), ("always", 8)])
def test_fairscale_pipe_with_two_stages_equals_one_process(recompute: str, samples: int) -> None:
    """Seven samples are three micro-batches. Running statistics count each once."""
    case = make_case(
        1, "mobilenetv2", "digits", steps=1, strategy="fairscale_pipe", pp_degree=2, dp_degree=1, micro_batches=4,
        precision="fp64", options={"recompute": recompute},
    )  # fmt: skip
    case = Case(msgspec.structs.replace(case.spec, devices_per_task=2), samples, 1)
    place = RankContext(0, 1, CPU)
    with short_epoch("digits", samples):
        feed, strategy = make_feed(case.spec, CPU), resolve_runtime("fairscale_pipe")()
        strategy.setup(build_model(case.spec), case.spec, place)
        trained = train_strategy(strategy, feed, (0,), place)
        assert strategy.module.eval()(feed.batch(0, 0)[0]).shape == (samples, 10)
    found = compare_training(trained, run_reference(case), VerificationCheck("as run", 1, EXACT))
    assert found.passed, found


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        (
            {"tasks_per_node": 2},
            "fairscale_pipe is one process, nodes 1 x tasks_per_node 2 are 2: set devices_per_task",
        ),
        ({"precision": "bf16"}, "autocast does not reach: bf16"),
        ({"compile": True}, "no compile, and options.recompute"),
        ({"model": "gpt", "dataset": "tokens", "model_options": {"tied": True}}, "cannot share tied weights"),
    ],
)
def test_infeasible_fairscale_pipes_have_a_reason(point: dict[str, Any], reason: str) -> None:
    found = resolve_point(
        {"devices_per_task": 1 if "tasks_per_node" in point else 2, **POINT, **point}, PartitionLimits("test")
    )
    assert isinstance(found, InfeasiblePoint), found
    assert reason in found.reason
