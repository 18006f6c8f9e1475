"""Nothing is computed, results have the right shapes, and time is what the oracle says."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.machine import nominal_machine
from hpcbench.oracle.prediction import predict
from hpcbench.parallel.layer_table import read_shipped_table
from hpcbench.parallel.roofline import DeviceCompute, Kernel, KernelSample
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.emulation_mode import EmulationMode
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategies.base import resolve_runtime

CPU = torch.device("cpu")
QUICK = DeviceCompute(peak_flops_per_s={"fp32": 1e18}, memory_bandwidth_bytes_per_s=1e18, launch_s=0.0)


def rehearsal(compute: DeviceCompute = QUICK) -> EmulationMode:
    return EmulationMode(compute, "fp32", "m", CPU)


def test_no_operator_computes_or_writes() -> None:
    weight = torch.full((4, 3), 7.0)
    with rehearsal():
        out = torch.ones(2, 3) @ weight.t()
        weight.add_(1.0)
        out2 = torch.cat([out, out]).relu()
    assert weight.eq(7.0).all()
    assert out.shape == (2, 4)
    assert out2.shape == (4, 4)
    assert out2.eq(0).all()
    assert out2.untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)), (2, 3, 16, 16)),
        (nn.Sequential(nn.Conv3d(1, 4, 3, groups=1), nn.GELU(), nn.AdaptiveAvgPool3d(1), nn.Flatten()), (2, 1, 6, 6, 6)),
        (nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Dropout(0.5)), (2, 7, 5)),
        (nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.ReLU6(inplace=True)), (2, 4, 8, 8)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    ],
)  # fmt: skip
def test_gradients_have_the_shapes_that_they_would_have(model: nn.Module, shape: tuple[int, ...]) -> None:
    def step() -> list[tuple[int, ...]]:
        model.zero_grad()
        x = torch.zeros(shape, requires_grad=True)
        out: Tensor = model(x)
        out.sum().backward()  # type: ignore[no-untyped-call]
        gradients = [one.grad for one in (x, *model.parameters())]
        assert all(one is not None for one in gradients)
        return [tuple(out.shape), *(tuple(one.shape) for one in gradients if one is not None)]

    expected = step()
    with rehearsal():
        assert step() == expected


def spec_of(model: str, dataset: str, batch_size: int, **more: Any) -> RunSpec:
    return RunSpec(model=model, dataset=dataset, strategy="single", batch_size=batch_size, **more)


@pytest.mark.parametrize(
    ("model", "dataset", "batch_size"),
    [("resnet50", "imagenet", 32), ("vgg16", "imagenet", 8), ("mobilenetv2", "imagenet", 32), ("cosmoflow", "cosmoflow", 2)],
)  # fmt: skip
def test_an_emulated_step_takes_the_predicted_time(model: str, dataset: str, batch_size: int) -> None:
    """Operator by operator, while the oracle goes layer by layer."""
    profile, _ = load_cluster("abci-v100")
    machine, spec, table = (
        nominal_machine(profile),
        spec_of(model, dataset, batch_size),
        read_shipped_table(model, dataset),
    )
    assert table is not None
    strategy, feed = resolve_runtime("single")(), make_feed(spec, CPU)
    strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))
    mode = EmulationMode(machine.compute, spec.precision, model, CPU)
    with mode:
        strategy.step(feed, 0)
    assert mode.computed_s == pytest.approx(predict(spec, table, machine).compute_s, rel=0.12)


def test_halves_of_a_backward_pass_are_one() -> None:
    """A pipeline that splits it passes the same time."""
    sample = DeviceCompute(peak_flops_per_s={"fp32": 1e9}, memory_bandwidth_bytes_per_s=1e18, launch_s=0.0)
    grad, x, weight = torch.zeros(2, 8, 6, 6), torch.zeros(2, 4, 8, 8), torch.zeros(8, 4, 3, 3)
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    def computed_s(*masks: list[bool]) -> float:
        mode = rehearsal(sample)
        with mode:
            for mask in masks:
                torch.ops.aten.convolution_backward(grad, x, weight, None, *rest, mask)
        return mode.computed_s

    whole = computed_s([True, True, False])
    assert whole > 0
    assert computed_s([True, False, False], [False, True, False]) == pytest.approx(whole)


def test_time_passes_while_nothing_is_computed() -> None:
    kernel = Kernel(
        kind="Linear", direction="forward", precision="fp32", flops=2 * 64**3, moved_bytes=2 * 4 * 64**2,
        weight_bytes=4 * 64**2, input_bytes=4 * 64**2, output_bytes=4 * 64**2,
    )  # fmt: skip
    sample = KernelSample(kernel=kernel, seconds=0.05)
    mode = rehearsal(
        DeviceCompute(
            peak_flops_per_s={"fp32": 1e12}, memory_bandwidth_bytes_per_s=1e12, launch_s=0.0, samples=[sample]
        )
    )
    began = time.perf_counter()
    with mode:
        torch.zeros(64, 64) @ torch.zeros(64, 64)
    assert mode.computed_s == pytest.approx(0.05, rel=1e-6)
    # A sleep is never shorter than asked for.
    assert time.perf_counter() - began >= 0.045
