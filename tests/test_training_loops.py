"""Loops beside the tool's: they train the same, and the library's model is timm's where it is installed."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu_day.loops import loop_specs
from benchmarks.gpu_day.parts import Size
from benchmarks.gpu_day.training_loops import (
    MIN_ROUNDS,
    STEPS_PER_BLOCK,
    make_library_model,
    measure_loops,
    plain_step,
    time_loops,
)
from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import DataParallelStrategy
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")


def loop_spec(**values: Any) -> RunSpec:
    return make_spec(**{"strategy": "single", "batch_size": 2, **values})


def make_strategy(spec: RunSpec) -> DataParallelStrategy:
    strategy = DataParallelStrategy()
    strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))
    return strategy


def test_the_hand_written_loop_trains_as_the_tool_does() -> None:
    spec = loop_spec(precision="fp64", weight_decay=0.1)
    feed, strategy = make_feed(spec, CPU), make_strategy(spec)
    model = copy.deepcopy(strategy.module)
    step = plain_step(model, spec, CPU, [feed.batch(number, 0) for number in range(3)])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number in range(3):
        step(number)
        strategy.step(feed, number)
    after = model.state_dict()
    assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())
    for name, tensor in strategy.weights().items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-9, atol=1e-9)


def test_loops_are_timed_in_turns() -> None:
    spec = loop_spec()
    loops = time_loops(spec, CPU, 0.01)
    assert [loop.loop for loop in loops] == ["hpcbench", "plain"], "digits have one channel: no library's ResNet"
    assert all(loop.seconds > 0 and loop.repeats >= MIN_ROUNDS for loop in loops)


class Classifier(nn.Module):
    """A stand-in of timm's model that counts its calls."""

    calls = 0

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Classifier.calls += 1
        return torch.mean(self.layer(x), dim=(2, 3))


def test_timms_model_is_trained_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    timm: Any = ModuleType("timm")
    timm.__version__ = "9.9"
    timm.create_model = lambda _name, num_classes: Classifier(num_classes)
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setattr(Classifier, "calls", 0)
    spec = loop_spec(dataset="imagenet", input_size=64, batch_size=1, channels_last=True)
    loops = measure_loops(make_strategy(spec), make_feed(spec, CPU), 0.01)
    assert [(loop.loop, loop.model) for loop in loops][2] == ("timm", "timm 9.9")
    assert Classifier.calls == STEPS_PER_BLOCK * (1 + loops[2].repeats)


def test_torchvisions_model_replaces_timms_where_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    loaded = make_library_model(loop_spec(dataset="imagenet", input_size=64), CPU)
    assert loaded is not None
    assert loaded[1].startswith("torchvision ")
    assert make_library_model(loop_spec(dataset="cifar10"), CPU) is None
    assert make_library_model(loop_spec(model="vit", dataset="cifar10"), CPU) is None


@pytest.mark.parametrize("size", ["full", "small"])
def test_the_days_loops_have_nothing_that_the_others_would_have_to_imitate(size: Size) -> None:
    for spec in loop_specs(size):
        assert (spec.optimizer, spec.micro_batches, spec.compile, spec.activation_checkpointing) == (
            "sgd", 1, False, False,
        )  # fmt: skip
        assert spec.precision in ("fp32", "bf16")
