"""The stub of CUDA claims eight GPUs, and torch's own calls about devices, streams, events and memory answer."""

from __future__ import annotations

import pytest
import torch

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
