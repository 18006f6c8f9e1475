"""The first GPU day under the stub of CUDA: small models on tensors of a device, ranks that share it over gloo.

Copies are made and kernels compute nothing, so nothing is verified. All of hpcbench's own code runs as on a GPU: devices,
streams, pinned memory, collectives of CUDA tensors, staged messages, clocks, the profiler, the bundle and the report.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.gpu_day.outputs import DayFiles, read_day
from benchmarks.gpu_day.parts import day_parts
from tests.cuda.stub_answers import NAME

pytestmark = pytest.mark.timeout(1500)

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).with_name("site")
NEEDS_NUMBERS = {
    "fairscale_fsdp": "it sums ones over the ranks to count their devices",
    "fairscale_pipe": "a lone rank has a process group of NCCL",
    "horovod": "it is not installed",
    "probe_blocks": "a lone rank has a process group of NCCL",
}
"""Strategies that cannot set up where kernels compute nothing, or where NCCL finds none."""


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> DayFiles:
    folder = tmp_path_factory.mktemp("day")
    smi = folder / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f'#!/bin/sh\necho "{NAME} H100, 81559, 81000, 580.159.04"\n')
    smi.chmod(0o755)
    variables = {
        **os.environ, "PATH": f"{smi.parent}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{SITE}",
        "TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    words = ["-m", "benchmarks.gpu_day", "run", "--out", str(folder / "2026-01-01-stub"), "--size", "small"]
    done = subprocess.run(
        [sys.executable, *words, "--unverified", "--seconds", "1500"],
        cwd=ROOT, env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    return read_day(folder / "2026-01-01-stub")


def test_the_device_is_found(day: DayFiles) -> None:
    assert day.device == f"{NAME} H100"
    assert day.on_gpu


@pytest.mark.parametrize("part", ["kernels", "shared", "singles", "probes"])
def test_every_run_of_a_part_steps_on_the_device(day: DayFiles, part: str) -> None:
    (points,) = [each.points for each in day_parts("small", large_memory=False) if each.name == part]
    results = day.of_part(part)
    assert len(results) == len(points)
    failed = {result.spec.strategy: result.error for result in results if result.status != "ok"}
    assert {key: error for key, error in failed.items() if key not in NEEDS_NUMBERS} == {}
    for result in results:
        if result.status == "ok":
            assert {str(rank["device"]) for rank in result.ranks} == {"cuda:0"}


def test_ranks_that_share_the_device_have_no_times(day: DayFiles) -> None:
    shared = [result for result in day.of_part("shared") if result.status == "ok"]
    assert Counter(result.spec.ranks for result in shared)[4] == 2
    assert all(result.untimed and result.metrics.step_time_s is None for result in shared)


def test_timed_runs_have_the_devices_clock_and_memory(day: DayFiles) -> None:
    for result in day.of_part("singles"):
        assert result.metrics.step_time_s is not None
        assert result.metrics.peak_memory_bytes
        assert result.untimed is None


def test_shards_have_peaks_on_the_devices_allocator(day: DayFiles) -> None:
    peaks = {shard.spec.strategy: shard.peak_bytes for shard in day.shards if shard.error is None}
    assert set(peaks) >= {"fsdp", "1f1b", "tensor"}
    assert all(peaks.values())


def test_loops_are_timed_on_the_device(day: DayFiles) -> None:
    assert [(figures.error, [loop.loop for loop in figures.loops]) for figures in day.loops] == [
        (None, ["hpcbench", "plain"])
    ]


def test_a_group_of_nccl_fails_with_its_reason(day: DayFiles) -> None:
    """No kernel of NCCL can be found under the stub: the real launcher's runs end, and the day goes on."""
    launched = day.of_part("launcher")
    assert len(launched) == 3
    assert all(result.error is not None and "NCCL" in result.error.message for result in launched)
