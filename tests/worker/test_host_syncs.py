"""Waits of the host in profiled steps: counted from the profiler's events, located by torch's warnings."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from hpcbench.results.schema import HostSyncs
from hpcbench.worker.measure.step_profiler import ProfilerEvent, count_host_syncs, record_sync_sites

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SYNC = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:151.)"


def call(name: str, begin: int) -> ProfilerEvent:
    return ProfilerEvent(name, begin, begin + 1)


def copied(name: str, begin: int) -> ProfilerEvent:
    return ProfilerEvent(name, begin, begin + 1, on_device=True)


OWN = [call("cudaDeviceSynchronize", 90), call("cudaDeviceSynchronize", 190)]
STEPS = [(0, 100), (100, 200)]


def test_the_wait_that_ends_a_step_is_no_finding() -> None:
    launches = [call("cudaLaunchKernel", 5), call("cudaMemcpyAsync", 6), copied("Memcpy DtoD (Device -> Device)", 7)]
    assert count_host_syncs(STEPS, [*launches, *OWN], []) == HostSyncs(per_step=0)


def test_waits_and_copies_of_pageable_memory_are_counted() -> None:
    planted = [
        call("cudaStreamSynchronize", 20),
        call("cudaStreamSynchronize", 120),
        call("cudaDeviceSynchronize", 30),
        copied("Memcpy HtoD (Pageable -> Device)", 21),
        copied("Memcpy HtoD (Pinned -> Device)", 22),
        call("cudaStreamSynchronize", 200),
    ]
    assert count_host_syncs(STEPS, [*planted, *OWN], ["a.py:1", "a.py:1", "b.py:2"]) == HostSyncs(
        per_step=2,
        calls={"cudaDeviceSynchronize": 1, "cudaStreamSynchronize": 2},
        pageable_copies=1,
        launches=0,
        sites=["a.py:1", "b.py:2"],
    )


@pytest.fixture
def debug_modes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modes that are set; torch's CPU build refuses to set one."""
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def warn_three_times(sites: list[str]) -> None:
    with record_sync_sites(CUDA, sites):
        for _ in range(2):
            warnings.warn(SYNC, stacklevel=1)
        warnings.warn("another", stacklevel=1)


def test_the_line_of_a_wait_is_kept_and_other_warnings_pass(debug_modes: list[Any]) -> None:
    sites: list[str] = []
    with pytest.warns(UserWarning, match="another") as seen:
        warn_three_times(sites)
    assert [site.rpartition("/")[2].partition(":")[0] for site in sites] == ["test_host_syncs.py"] * 2
    assert len(set(sites)) == 1
    assert [str(one.message) for one in seen] == ["another"]
    assert debug_modes == ["warn", 0]


def test_the_mode_is_restored_after_an_error(debug_modes: list[Any]) -> None:
    show = warnings.showwarning
    with pytest.raises(ZeroDivisionError), record_sync_sites(CUDA, []):
        _ = 1 / 0
    assert debug_modes == ["warn", 0]
    assert warnings.showwarning is show


def test_without_events_of_the_device_launches_and_pageable_copies_are_unknown() -> None:
    """A profiler without CUPTI has the host's events alone: 0 would state that the device was given nothing."""
    wait = ProfilerEvent("cudaStreamSynchronize", 10, 20, on_device=False, is_async=False, launched=None)
    kernel = ProfilerEvent("kernel", 30, 40, on_device=True, is_async=True, launched=25)
    found, seen = count_host_syncs([(0, 50)], [wait], []), count_host_syncs([(0, 50)], [wait, kernel], [])
    assert (found.launches, found.pageable_copies, found.per_step) == (None, None, 1)
    assert (seen.launches, seen.pageable_copies) == (1, 0)
