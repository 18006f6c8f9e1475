"""Autocast and loss scaling on cuda do what ``precision`` says, in every strategy that computes in its own way."""

from __future__ import annotations

import pytest
import torch

from hpcbench.worker.model_execution import choose_convolution_algorithms
from tests.cuda.cases import exclusion, gpu_run
from tests.cuda.checks import PRODUCT_TYPES, step_problems
from tests.cuda.fake_gpu import rank_on_gpu, step_on_gpu

KINDS = {
    "single": "cnn", "ddp": "cnn", "fsdp": "transformer", "tensor": "transformer", "filter": "cnn", "spatial": "cnn",
    "1f1b": "transformer", "zero_bubble": "transformer", "pipedream": "cnn", "horovod": "cnn",
}  # fmt: skip
WITH_LOSS_SCALING = ("single", "ddp")


@pytest.mark.parametrize("precision", ["fp64", "tf32", "bf16"])
@pytest.mark.parametrize("key", KINDS)
def test_products_have_the_type_of_the_precision(key: str, precision: str) -> None:
    spec = gpu_run(key, KINDS[key], 8, precision=precision)
    assert exclusion(spec) is None
    rank = spec.ranks - 1
    steps = step_on_gpu(spec, rank)
    assert step_problems(spec, rank, steps) == []
    assert steps.product_types == {PRODUCT_TYPES[precision]}
    switches = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    assert switches == (precision == "tf32",) * 2


@pytest.mark.parametrize("key", WITH_LOSS_SCALING)
def test_loss_scaling_waits_once_a_step(key: str) -> None:
    spec = gpu_run(key, KINDS[key], 8, precision="fp16")
    steps = step_on_gpu(spec, spec.ranks - 1)
    assert step_problems(spec, spec.ranks - 1, steps) == []
    assert len(steps.host_sync_sites) == 1
    assert steps.product_types == {torch.float16}


@pytest.mark.parametrize(("precision", "has_lower"), [("fp32", False), ("bf16", True)])
def test_weights_and_gradients_stay_in_fp32(precision: str, has_lower: bool) -> None:
    with rank_on_gpu(gpu_run("single", "transformer", 1, precision=precision), 0) as (strategy, feed, recorder):
        recorder.begin_step()
        loss = strategy.step(feed, 0)
        assert loss.dtype == torch.float32
        for parameter in strategy.module.parameters():
            assert parameter.grad is not None
            assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert (torch.bfloat16 in recorder.product_types) == has_lower


def test_cudnn_benchmark_mode_is_set_as_the_run_requests() -> None:
    before = torch.backends.cudnn.benchmark
    try:
        for by_trial in (True, False):
            choose_convolution_algorithms(by_trial, torch.device("cuda", 0))
            assert torch.backends.cudnn.benchmark is by_trial
    finally:
        torch.backends.cudnn.benchmark = before
