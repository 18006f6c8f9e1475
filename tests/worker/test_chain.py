"""The profiler of blocks: its bytes against the tables of layers, its times where they are known, its cache."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import msgspec
import pytest
import torch
from torch import nn

from hpcbench.errors import WorkerError
from hpcbench.parallel.layer_table import LayerTableRequest
from hpcbench.parallel.pipeline.stage_balance import BlockProfile, BlockProfileRequest, BlockProfileResponse
from hpcbench.worker import block_times as profiler
from hpcbench.worker.block_times import answer_request, block_profile_request, profile_blocks
from hpcbench.worker.layers import make_layer_table
from hpcbench.worker.models.build import build_meta_model
from tests.worker.helpers import make_spec


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(profiler, "_BLOCK_BUDGET_S", 0.0)
    monkeypatch.setattr(profiler, "_WARM_UP_PASSES", 0)


def measured(model: str, dataset: str = "digits", **more: Any) -> BlockProfile:
    return profile_blocks(BlockProfileRequest(model=model, dataset=dataset, **{"micro_batch_size": 2, **more}))


@pytest.mark.parametrize(
    ("model", "dataset", "options"),
    [("resnet18", "digits", {}), ("vgg11", "digits", {}), ("vit", "digits", {}), ("gpt", "tokens", {"tied": True}),
     ("mobilenetv2", "digits", {})],
)  # fmt: skip
def test_bytes_are_those_of_the_table_of_layers(model: str, dataset: str, options: dict[str, Any]) -> None:
    """The table's blocks hand on what their last layer does, and keep what autograd saves; the loss is the last's."""
    size = 8 if dataset == "tokens" else None
    found = measured(model, dataset, micro_batch_size=3, model_options=options, input_size=size)
    table = make_layer_table(LayerTableRequest(model=model, dataset=dataset, input_size=size, model_options=options))
    rows = [[one for one in table.layers if min(one.block, table.blocks - 1) == b] for b in range(table.blocks)]
    assert [one.parameter_bytes for one in found.blocks] == [4 * sum(one.parameters for one in row) for row in rows]
    kept = [sum(3 * one.activation_bytes + one.activation_fixed_bytes for one in row) for row in rows]
    assert [one.kept_bytes for one in found.blocks] == kept
    handed = [next(one for one in reversed(row) if one.output_bytes).output_bytes * 3 for row in rows[:-1]]
    assert [one.output_bytes for one in found.blocks] == [*handed, 0]


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
    found = profile_blocks(BlockProfileRequest(model="vit", dataset="digits", micro_batch_size=2), shapes=model)
    assert [(one.forward_s, one.backward_s) for one in found.blocks] == [(0, 0), (3, 0), (1, 2), (0, 0), (0, 0)]
    assert [one.name for one in found.blocks] == ["0", "1", "2", "3", "4"]


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


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_the_runs_own_arithmetic_and_micro_batch(precision: str) -> None:
    spec = make_spec(model="vgg11", batch_size=10, micro_batches=3, precision=precision, channels_last=True)
    request = block_profile_request(spec, torch.device("cpu"))
    assert (request.micro_batch_size, request.precision, request.channels_last) == (4, precision, True)
    width = {"fp64": 8, "bf16": 4}[precision]
    blocks = profile_blocks(request).blocks
    assert sum(one.parameter_bytes for one in blocks) == width * sum(
        parameter.numel() for parameter in build_meta_model(spec).parameters()
    )


def test_a_measurement_is_kept_until_something_of_it_changes(tmp_path: Path) -> None:
    first = measured("vit")
    (file,) = (tmp_path / "cache" / "hpcbench" / "chains").iterdir()
    assert measured("vit") == first
    assert measured("vit", micro_batch_size=3) != first
    file.write_text("{")
    again = measured("vit")
    assert again != first
    assert profile_blocks(first.request, refresh=True) != again


def test_a_model_that_is_no_chain_names_the_reason(tmp_path: Path) -> None:
    (tmp_path / "chain_own.py").write_text(
        "from torch import nn\nclass Own(nn.Sequential):\n    def forward(self, x):\n        return super().forward(x)\n"
        "def own(in_shape, outputs):\n    return Own(nn.Flatten(), nn.Linear(64, outputs))\n"
    )
    with pytest.raises(WorkerError, match="has a forward of its own"):
        measured("chain_own:own", model_folder=str(tmp_path))
    assert (
        "takes volumes; digits holds images"
        in answer_request(b'{"model":"cosmoflow","dataset":"digits","micro_batch_size":2}').error
    )
    wrong = answer_request(b'{"model":"vit"}')
    assert wrong.is_input
    assert "missing required field" in wrong.error


def test_the_block_profiler_answers_a_request_on_stdin(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpcbench.worker.block_times", "--threads", "1"]
    request = b'{"model":"vit","dataset":"digits","micro_batch_size":2}'
    done = subprocess.run(command, input=request, capture_output=True, check=True)
    found = msgspec.json.decode(done.stdout, type=BlockProfileResponse)
    assert found.chain is not None
    assert len(found.chain.chain()) == 6
