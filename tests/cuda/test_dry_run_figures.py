"""``hpcbench dry-run`` shows the figures of a step on cuda, though its fake tensors lie on the cpu."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from hpcbench.parallel.catalog import STRATEGIES
from hpcbench.results.probe_records import DryRunTask
from hpcbench.worker.dry_run.fake_rank import built_rank
from hpcbench.worker.dry_run.step_recorder import StepRecorder
from tests.cuda.cases import exclusion, gpu_run
from tests.cuda.gpu_recorder import GpuRecorder

IMITATED = torch.device("cpu", 0)
PAIRED = ("model", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "pipedream")
"""On cuda their messages have fixed places; a dry run steps the cpu's transport."""


_PEAK_TOLERANCE = dict.fromkeys(PAIRED, 0.05) | {"fairscale_pipe": 0.05}
"""Of fairscale_pipe the peak on cuda is 3 % higher; the cause is not known."""


class Figures(NamedTuple):
    """The figures of a step that both devices must share."""

    peak_bytes: int
    operators: int
    host_syncs: int
    calls: list[Any]


def imitated_figures(key: str, kind: str) -> Figures:
    """Step with fake tensors on the cpu, as a machine without CUDA does."""
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        recorder = second_step(StepRecorder(IMITATED), key, kind, 0)
    return Figures(recorder.peak_bytes, recorder.operators, recorder.host_syncs, recorder.calls)


def second_step(recorder: StepRecorder, key: str, kind: str, rank: int) -> StepRecorder:
    spec = gpu_run(key, kind, 8)
    with built_rank(DryRunTask(index=0, spec=spec, device="cuda"), rank, recorder) as (strategy, feed):
        strategy.announce(range(2))
        for step in range(2):
            recorder.begin_step()
            strategy.step(feed, step)
    return recorder


@pytest.mark.parametrize("key", STRATEGIES)
def test_figures(key: str) -> None:
    kind = "cnn" if exclusion(gpu_run(key, "cnn", 8)) is None else "transformer"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    on_cuda = second_step(GpuRecorder(device), key, kind, 0)
    if key == "fairscale_fsdp":
        # Without CUDA its wrapper's class is changed for the rest of the process.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
            imitated = processes.submit(imitated_figures, key, kind).result()
    else:
        imitated = imitated_figures(key, kind)
    assert imitated.peak_bytes == pytest.approx(on_cuda.peak_bytes, rel=_PEAK_TOLERANCE.get(key, 0.02))
    assert imitated.operators == pytest.approx(on_cuda.operators, rel=0.05)
    assert imitated.host_syncs == on_cuda.host_syncs
    if key in PAIRED:
        assert sorted(imitated.calls) == sorted(on_cuda.calls)
    else:
        assert imitated.calls == on_cuda.calls
