"""``hpcbench dry-run`` shows the figures of a step on cuda, though its fake tensors lie on the cpu."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from hpcbench.results.probe_records import DryRunTask
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.worker.dry_run.fake_rank import built_rank
from hpcbench.worker.dry_run.step_recorder import StepRecorder
from tests.cuda.cases import exclusion, gpu_run
from tests.cuda.gpu_recorder import GpuRecorder

IMITATED = torch.device("cpu", 0)
_ATTENTION = (
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


class AttentionSums(StepRecorder):  # type: ignore[no-untyped-call]
    """Counts at the peak what attention keeps beside its output, in which the kernels of the two devices differ.

    On cuda the logarithms of a head's sums are padded to a multiple of 32, and dropout has a seed and an offset.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.peak_sum_bytes = 0
        self._sums: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _ATTENTION:
            self._sums += [weakref.ref(one.untyped_storage()) for one in out[1:] if isinstance(one, torch.Tensor)]
        return out

    def _follow_storage(self, storage: Any) -> bool:
        is_new = super()._follow_storage(storage)
        if self.live_bytes == self.peak_bytes:
            self.peak_sum_bytes = sum(kept.nbytes() for one in self._sums if (kept := one()) is not None)
        return is_new


class ImitatedRecorder(AttentionSums):  # type: ignore[no-untyped-call]
    """Records fake tensors on the cpu."""


class CudaRecorder(AttentionSums, GpuRecorder):  # type: ignore[no-untyped-call]
    """Records fake tensors on the stub of CUDA."""


class Figures(NamedTuple):
    """The figures of a step that both devices must share."""

    peak_bytes: int
    """Without what attention keeps beside its output."""
    operators: int
    host_syncs: int
    calls: list[Any]


def imitated_figures(key: str, kind: str) -> Figures:
    """Step with fake tensors on the cpu, as a machine without CUDA does."""
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        return figures_of(ImitatedRecorder(IMITATED), key, kind)


def figures_of(recorder: AttentionSums, key: str, kind: str) -> Figures:
    """Return the figures of the second step of rank 0."""
    spec = gpu_run(key, kind, 8)
    with built_rank(DryRunTask(index=0, spec=spec, device="cuda"), 0, recorder) as (strategy, feed):
        strategy.announce(range(2))
        for step in range(2):
            recorder.begin_step()
            strategy.step(feed, step)
    peak_bytes = recorder.peak_bytes - recorder.peak_sum_bytes
    return Figures(peak_bytes, recorder.operators, recorder.host_syncs, list(recorder.calls))


@pytest.mark.parametrize("key", [key for key, entry in STRATEGIES.items() if entry.library_name in (None, "torch")])
def test_dry_run_figures_on_fake_tensors_equal_those_on_cuda(key: str) -> None:
    kind = "cnn" if exclusion(gpu_run(key, "cnn", 8)) is None else "transformer"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    assert imitated_figures(key, kind) == figures_of(CudaRecorder(device), key, kind)
