"""Autocast and loss scaling on cuda do what ``precision`` says, in every strategy that computes in its own way."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.traffic import Traffic
from hpcbench.worker.model_execution import MasterWeights, choose_convolution_algorithms
from tests.cuda.cases import STEPPED, exclusion, gpu_run
from tests.cuda.checks import PRODUCT_TYPES, step_problems
from tests.cuda.fake_gpu import rank_on_gpu, step_on_gpu
from tests.distributed.parity import takes_bf16_params

TRANSFORMERS = ("fsdp", "tensor", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "fairscale_pipe")
"""Strategies that step a transformer here; the others step a CNN."""
ALL_PRECISIONS = ("single", "ddp", "fsdp", "tensor", "filter", "spatial", "1f1b", "zero_bubble", "pipedream")
"""Strategies that compute in their own way: also in the precisions without autocast."""
WITH_LOSS_SCALING = ("single", "ddp", "zero1", "fairscale_oss")
WITH_AUTOCAST = tuple(key for key in STEPPED if key != "fairscale_pipe")
"""Strategies that autocast reaches; fairscale_pipe computes in threads of its own."""
WITH_BF16_PARAMS = tuple(key for key in STRATEGIES if takes_bf16_params(key))
RUNS = [
    *((key, precision) for key in ALL_PRECISIONS for precision in ("fp64", "tf32")),
    *((key, "bf16") for key in WITH_AUTOCAST),
    *((key, "bf16_params") for key in WITH_BF16_PARAMS),
]


def kind_of(key: str) -> str:
    return "transformer" if key in TRANSFORMERS else "cnn"


def check_products(key: str, kind: str, precision: str) -> None:
    """Step the last rank, whose products must have the type of ``precision``."""
    spec = gpu_run(key, kind, 8, precision=precision)
    assert exclusion(spec) is None
    rank = spec.ranks - 1
    steps = step_on_gpu(spec, rank)
    assert step_problems(spec, rank, steps) == []
    assert steps.product_types == {PRODUCT_TYPES[precision]}
    switches = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    assert switches == (precision == "tf32",) * 2


@pytest.mark.parametrize(("key", "precision"), RUNS)
def test_products_have_the_type_of_the_precision(key: str, precision: str) -> None:
    check_products(key, kind_of(key), precision)


@pytest.mark.parametrize(("key", "precision"), [("spatial", "bf16"), ("ddp", "bf16_params")])
def test_products_of_volumes(key: str, precision: str) -> None:
    check_products(key, "volumes", precision)


@pytest.mark.parametrize("key", WITH_LOSS_SCALING)
def test_loss_scaling_waits_once_a_step(key: str) -> None:
    spec = gpu_run(key, kind_of(key), 8, precision="fp16")
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


@pytest.mark.parametrize("key", [key for key in WITH_BF16_PARAMS if key != "fsdp"])
def test_weights_in_bf16_have_masters_in_fp32(key: str) -> None:
    with rank_on_gpu(gpu_run(key, kind_of(key), 8, precision="bf16_params"), 0) as (strategy, feed, recorder):
        recorder.begin_step()
        strategy.step(feed, 0)
        parameters = list(strategy.module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        assert {tensor.dtype for tensor in [*parameters, *gradients]} == {torch.bfloat16}
        optimizer = vars(strategy)["optimizer"]
        assert isinstance(optimizer, MasterWeights)
        masters = [master for _, part, _ in optimizer._parts for master in part]
        assert [master.shape for master in masters if master.dtype == torch.float32] == [
            parameter.shape for part, _, _ in optimizer._parts for parameter in part
        ]
        assert len(masters) == len(parameters)


def test_fsdp_gathers_shards_in_fp32_as_bf16() -> None:
    spec = gpu_run("fsdp", "transformer", 8, precision="bf16_params")
    with rank_on_gpu(spec, 0) as (strategy, feed, recorder):
        recorder.begin_step()
        strategy.step(feed, 0)
        for parameter in strategy.module.parameters():
            assert isinstance(parameter, DTensor)
            assert isinstance(parameter.grad, DTensor)
            assert parameter.dtype == parameter.grad.dtype == torch.float32
        gathered = payloads(recorder.calls, "all_gather")
    whole = step_on_gpu(gpu_run("fsdp", "transformer", 8), 0)
    assert 2 * gathered == payloads(whole.traffic, "all_gather")


def payloads(calls: list[Traffic], operation: str) -> int:
    """Return the bytes of all calls of ``operation``."""
    return sum(call.payload_bytes for call in calls if call.operation == operation)


def test_cudnn_benchmark_mode_is_set_as_the_run_requests() -> None:
    before = torch.backends.cudnn.benchmark
    try:
        for by_trial in (True, False):
            choose_convolution_algorithms(by_trial, torch.device("cuda", 0))
            assert torch.backends.cudnn.benchmark is by_trial
    finally:
        torch.backends.cudnn.benchmark = before
