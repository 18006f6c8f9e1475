"""Copies between device and host within a step, found on fake tensors; shipped strategies have none."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.probe_records import DryRunAnswer, DryRunTask
from hpcbench.worker.dry_run import fake_rank, modelled_ddp, step_recorder
from hpcbench.worker.dry_run.__main__ import answer_task

pytestmark = pytest.mark.slow

MODEL = """
import numpy as np
import torch
from torch import nn

def to_host(x):
    return x * x.detach().cpu().mean()

def values(x):
    return x * torch.tensor([2.0], device=x.device)

def from_host(x):
    return x * torch.ones(1).to(x.device)

def indexed(x):
    return x + x.detach()[torch.tensor([0])]

def unpinned(x):
    return x * torch.ones(1).to(x.device, non_blocking=True)

def read_unpinned(x):
    torch.ones(x.shape).copy_(x.detach(), non_blocking=True)
    return x

def made_pinned(x):
    values = torch.ones(8, pin_memory=True)
    assert values.is_pinned() and not torch.ones(8).is_pinned()
    return x * values[:1].to(x.device, non_blocking=True)

def scalar(x):
    return x * torch.tensor(2.0)

def mixed(x):
    return x * torch.ones(1)

def to_numpy(x):
    return x * float(x.detach().cpu().numpy().mean())

def address(x):
    return x * (x.data_ptr() % 2)

def numpy_of_device(x):
    return x * float(x.detach().numpy().mean())

def numpy_of_constant(x):
    return x * float(torch.tensor(2.0).numpy())

class Block(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return globals()[self.name](x)

def model(in_shape, outputs, function=""):
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 64))
    return nn.Sequential(first, Block(function), nn.Linear(64, outputs))
"""
COPIES = {
    "to_host": "a tensor is copied to the host",
    "values": "tensor copies values from the host",
    "from_host": "a tensor is copied from the host",
    "indexed": "indices are copied from the host",
    "unpinned": "a tensor is copied from the host, whose memory is not pinned",
    "read_unpinned": "a tensor is copied to the host, whose memory is not pinned",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("copies")
    (path / "copying_model.py").write_text(MODEL)
    return path


def answer(folder: Path, function: str, device: str) -> DryRunAnswer:
    spec = RunSpec(
        model="copying_model:model", dataset="digits", strategy="single", batch_size=8,
        model_options={"function": function},
    )  # fmt: skip
    return answer_task(DryRunTask(index=0, spec=spec, device=device, model_folder=str(folder)))


def line_of(function: str) -> int:
    return MODEL.splitlines().index(f"def {function}(x):") + 2


@pytest.mark.parametrize("function", COPIES)
def test_a_copy_is_a_wait_of_the_host_with_its_line(folder: Path, function: str) -> None:
    found = answer(folder, function, "cuda")
    assert (found.outcome, found.reason) == ("ok", None)
    assert found.figures is not None
    assert found.figures.host_syncs == 1
    assert found.figures.host_sync_sites == [f"{folder / 'copying_model.py'}:{line_of(function)}: {COPIES[function]}"]


@pytest.mark.parametrize("function",
    [
        "made_pinned", "scalar", "numpy_of_constant",
    ],
)  # fmt: skip
def test_copies_without_a_wait_of_the_host_are_not_counted(folder: Path, function: str) -> None:
    found = answer(folder, function, "cuda")
    assert (found.outcome, found.reason) == ("ok", None)
    assert found.figures is not None
    assert (found.figures.host_syncs, found.figures.host_sync_sites) == (0, [])


def test_tensors_of_two_devices_end_the_run(folder: Path) -> None:
    found = answer(folder, "mixed", "cuda")
    assert found.outcome == "unsupported"
    assert "cuda:0 and cpu" in str(found.reason)
    assert "RuntimeError" in str(found.reason)


NO_NUMBERS = {
    "to_numpy": "hands the values of a tensor to numpy",
    "address": "asks for the address of a tensor",
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("function", NO_NUMBERS)
def test_what_needs_numbers_is_not_fakeable_at_its_line(folder: Path, function: str, device: str) -> None:
    found = answer(folder, function, device)
    site = f"{folder / 'copying_model.py'}:{line_of(function)}"
    assert found.outcome == "not_fakeable"
    assert f"{site} {NO_NUMBERS[function]}" in str(found.reason)


def test_what_torch_refuses_is_unsupported(folder: Path) -> None:
    found = answer(folder, "numpy_of_device", "cuda")
    assert found.outcome == "unsupported"
    assert str(found.reason).startswith("TypeError: can't convert cuda:0 device type tensor to numpy")


@pytest.mark.parametrize(
    ("module", "name", "site"),
    [
        (step_recorder, "device_of", "step_recorder.py"),
        (fake_rank, "FakeFeed", "fake_rank.py"),
        (modelled_ddp, "fill_buckets", "modelled_ddp.py"),
    ],
)
def test_a_fault_of_the_dry_run_is_not_laid_on_the_run(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, site: str
) -> None:
    """A torch that has renamed what the dry run takes from it gives the same errors."""
    monkeypatch.setattr(module, name, "fake_device_of_another_torch")
    spec = RunSpec(strategy="ddp", model="vgg11", dataset="digits", batch_size=8, dp_degree=2, tasks_per_node=2)
    found = answer_task(DryRunTask(index=0, spec=spec, device="cuda"))
    assert found.outcome == "error"
    assert f"(at hpcbench/worker/dry_run/{site}:" in str(found.reason)
    assert torch.__version__ in str(found.reason)


@pytest.mark.parametrize("function", ["values", "mixed"])
def test_a_run_on_cpus_has_one_device(folder: Path, function: str) -> None:
    found = answer(folder, function, "cpu")
    assert (found.outcome, found.reason) == ("ok", None)
    assert found.figures is not None
    assert found.figures.host_syncs == 0


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("spatial", {"sp_degree": 2}),
        ("gpipe", {"pp_degree": 2, "micro_batches": 2, "options": {"batch_norm": "deferred"}}),
        ("ddp", {"dp_degree": 2, "data": "host"}),
    ],
)
def test_batch_norm_and_the_feed_copy_nothing_that_the_host_waits_for(strategy: str, more: dict[str, Any]) -> None:
    spec = RunSpec(
        model="resnet18", dataset="cifar10", strategy=strategy, batch_size=8, tasks_per_node=2, optimizer="adam", **more
    )
    found = answer_task(DryRunTask(index=0, spec=spec, device="cuda"))
    assert (found.outcome, found.reason) == ("ok", None)
    assert found.figures is not None
    assert (found.figures.host_syncs, found.figures.host_sync_sites) == (0, [])
