"""The stub of CUDA claims eight GPUs, and torch's own calls about devices, streams, events and memory answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from tests.cuda.environment import torch_version
from tests.cuda.stub import WAITS, count_calls
from tests.cuda.stub_answers import DEVICES, MEMORY_BYTES, NAME


def test_torch_is_the_pinned_build_for_cuda() -> None:
    assert torch.__version__.split("+")[0] == torch_version()
    assert torch.version.cuda is not None


def test_the_stub_reports_eight_devices_and_their_memory() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == DEVICES
    properties = torch.cuda.get_device_properties(3)
    assert (properties.name, properties.total_memory) == (NAME, MEMORY_BYTES)
    assert (properties.major, properties.minor, properties.warp_size) == (9, 0, 32)
    assert torch.cuda.get_device_properties(0).uuid != torch.cuda.get_device_properties(1).uuid
    assert torch.cuda.mem_get_info(0) == (MEMORY_BYTES, MEMORY_BYTES)
    # On the first one other tests copy values.
    assert torch.cuda.max_memory_allocated(5) == 0


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuntimeError):
        torch.cuda.set_device(DEVICES)


def test_stub_streams_and_events_use_the_host_clock() -> None:
    torch.cuda.set_device(2)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record(stream)
    last.record(stream)
    assert last.query()  # type: ignore[no-untyped-call]
    assert 0 <= first.elapsed_time(last) < 10_000


def test_waits_of_the_host_are_counted() -> None:
    before = count_calls(WAITS)
    torch.cuda.synchronize()
    torch.cuda.current_stream().synchronize()
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    event.synchronize()
    after = count_calls([*WAITS, "no_such_function"])
    assert {name: after[name] - before[name] for name in WAITS} == {
        "cudaDeviceSynchronize": 1, "cudaStreamSynchronize": 1, "cudaEventSynchronize": 1, "cudaMemcpy": 0,
    }  # fmt: skip
    assert after["no_such_function"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fake_step_of_layers_and_attention_runs_on_cuda(dtype: torch.dtype) -> None:
    with FakeTensorMode(), torch.device("cuda", 1):
        module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten())
        head = torch.nn.Linear(8 * 36, 64)
        optimizer = torch.optim.AdamW([*module.parameters(), *head.parameters()])
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            outputs = head(module(torch.randn(4, 3, 8, 8)))
            heads = outputs.view(4, 2, 4, 8)
            attended = F.scaled_dot_product_attention(heads, heads, heads)
        assert outputs.dtype == attended.dtype == dtype
        assert attended.device == torch.device("cuda", 1)
        attended.float().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("read", [torch.Tensor.item, bool, float, int])
def test_a_value_of_a_fake_tensor_cannot_be_read(read: Callable[[Tensor], object]) -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        read(torch.ones((), device="cuda"))


def test_copies_of_fake_tensors_raise_nothing() -> None:
    """Only a recorder finds them."""
    with FakeTensorMode():
        device = torch.device("cuda", 0)
        assert torch.ones(2, device=device).cpu().device.type == "cpu"
        assert torch.ones(2).to(device).device == device
        assert torch.ones(2, device=device).new_tensor([1.0]).device == device
