"""fairscale's Pipe, one process over the cpu twice, computes what one process computes per micro-batch."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.bounds import Check
from hpcbench.parallel.catalog import resolve_runtime
from hpcbench.parallel.resolve import Dropped, Limits, resolve
from hpcbench.worker.compare import compare
from hpcbench.worker.data.feed import make_feed
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategies.base import Place
from hpcbench.worker.verify import train
from tests.distributed.cases import CPU, EXACT, Case, make_case, run_reference, short_epoch

POINT = {"model": "resnet18", "dataset": "digits", "strategy": "fairscale_pipe", "batch_size": 8, "micro_batches": 4}


@pytest.mark.parametrize(("recompute", "samples"), [("never", 7), ("except_last", 8), ("always", 8)])
def test_two_stages(recompute: str, samples: int) -> None:
    """Seven samples are three micro-batches. Running statistics count each once."""
    case = make_case(
        1, "mobilenetv2", "digits", steps=1, strategy="fairscale_pipe", pp_degree=2, dp_degree=1, micro_batches=4,
        precision="fp64", options={"recompute": recompute},
    )  # fmt: skip
    case = Case(msgspec.structs.replace(case.spec, devices_per_task=2), samples, 1)
    place = Place(0, 1, CPU)
    with short_epoch("digits", samples):
        feed, strategy = make_feed(case.spec, CPU), resolve_runtime("fairscale_pipe")()
        strategy.setup(build_model(case.spec), case.spec, place)
        trained = train(strategy, feed, (0,), place)
        assert strategy.module.eval()(feed.batch(0, 0)[0]).shape == (samples, 10)
    found = compare(trained, run_reference(case), Check("as run", 1, EXACT))
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
def test_excluded(point: dict[str, Any], reason: str) -> None:
    found = resolve({"devices_per_task": 1 if "tasks_per_node" in point else 2, **POINT, **point}, Limits("test"))
    assert isinstance(found, Dropped), found
    assert reason in found.reason


def test_stages_are_the_devices_of_the_task() -> None:
    found = resolve({**POINT, "devices_per_task": 4}, Limits("test"))
    assert isinstance(found, RunSpec), found
    assert (found.pp_degree, found.ranks) == (4, 1)
