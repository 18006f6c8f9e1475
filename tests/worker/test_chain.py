"""The profiler of blocks: its times where they are known, its precision, its cache."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import nn

from hpcbench.errors import WorkerError
from hpcbench.strategies.pipeline.stage_balance import BlockProfile
from hpcbench.worker import block_times as profiler
from hpcbench.worker.block_times import profile_blocks
from hpcbench.worker.models.build import build_meta_model
from tests.worker.helpers import make_spec


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(profiler, "_BLOCK_BUDGET_S", 0.0)
    monkeypatch.setattr(profiler, "_WARM_UP_PASSES", 0)


CPU = torch.device("cpu")


def measured(model: str, **more: Any) -> BlockProfile:
    spec = make_spec(model=model, **{"batch_size": 2, **more})
    return profile_blocks(spec, CPU, build_meta_model(spec))


class _Lasting(torch.autograd.Function):
    """Moves a clock on, by other numbers of seconds forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: list[float], forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        clock[0] += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.clock[0] += ctx.backward_s
        return gradients[0], None, None, None


class Lasting(nn.Module):
    """A block without weights."""

    clock: ClassVar[list[float]] = [0.0]

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Lasting.apply(x, self.clock, *self.seconds)  # type: ignore[no-untyped-call]
        return y


def test_every_block_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcbench.worker.block_times.time.perf_counter", lambda: Lasting.clock[0])
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Flatten(), Lasting(3.0, 0.0), Lasting(1.0, 2.0), nn.ReLU(inplace=True), nn.Linear(64, 10)
        )
    found = profile_blocks(make_spec(model="vit", batch_size=2), CPU, model)
    assert found.blocks == [(0, 0), (3, 0), (1, 2), (0, 0), (0, 0)]


def test_one_block_is_in_memory_at_a_time() -> None:
    """A model may be larger than the device."""
    alive: list[weakref.ref[nn.Module]] = []
    whole = profiler.materialize_block

    def watched(block: nn.Module, device: torch.device) -> nn.Module:
        gc.collect()
        assert [one for one in alive if one() is not None] == []
        made = whole(block, device)
        alive.append(weakref.ref(made))
        return made

    with mock.patch.object(profiler, "materialize_block", watched):
        measured("vit")
    assert len(alive) == 6


@pytest.mark.parametrize("precision", ["fp64", "bf16", "bf16_params"])
def test_the_runs_own_arithmetic_and_micro_batch(precision: str) -> None:
    inputs: list[torch.Tensor] = []
    whole = profiler.materialize_block

    def watched(block: nn.Module, device: torch.device) -> nn.Module:
        made = whole(block, device)
        made.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        return made

    with mock.patch.object(profiler, "materialize_block", watched):
        request = measured("vgg11", batch_size=10, micro_batches=3, precision=precision, channels_last=True).request
    assert (request.micro_batch_size, request.precision, request.channels_last) == (4, precision, True)
    assert {len(tensor) for tensor in inputs} == {4}
    width = {"fp64": torch.float64, "bf16": torch.float32, "bf16_params": torch.bfloat16}[precision]
    assert inputs[0].dtype == width


def test_a_measurement_is_kept_until_something_of_it_changes(tmp_path: Path) -> None:
    first = measured("vit")
    (file,) = (tmp_path / "cache" / "hpcbench" / "chains").iterdir()
    assert measured("vit") == first
    assert measured("vit", batch_size=3) != first
    file.write_text("{")
    again = measured("vit")
    assert again != first
    spec = make_spec(model="vit", batch_size=2)
    assert profile_blocks(spec, CPU, build_meta_model(spec), refresh=True) != again


class Own(nn.Sequential):
    """A model that could call more than its blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return y


def test_a_model_that_is_no_chain_names_the_reason() -> None:
    with pytest.raises(WorkerError, match="has a forward of its own"):
        profile_blocks(make_spec(batch_size=2), CPU, Own(nn.Flatten(), nn.Linear(64, 10)))
