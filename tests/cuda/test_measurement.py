"""Measurements of the worker answer on cuda: clocks, counters, memory, profiler, timelines; NVML is absent."""

from __future__ import annotations

import msgspec
import pytest
import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.worker.distributed.rank_environment import RankInfo
from hpcbench.worker.distributed.world import choose_device
from hpcbench.worker.measure import gpu
from hpcbench.worker.measure.clocks import CallTimer, CudaClock, make_step_clock, synchronize
from hpcbench.worker.measure.counters import RegionCounters
from hpcbench.worker.measure.host import read_peak_memory
from hpcbench.worker.measure.step_profiler import NO_DEVICE_EVENTS, run_profiled_steps
from hpcbench.worker.measure.traffic_recorder import run_recorded_step
from hpcbench.worker.shutdown import StopController
from tests.cuda.cases import exclusion, gpu_run
from tests.cuda.fake_gpu import rank_info, rank_on_gpu
from tests.cuda.stub_answers import DEVICES, MEMORY_BYTES, NAME

DEVICE = torch.device("cuda", 3)


def test_a_rank_has_the_device_of_its_place_on_the_node() -> None:
    for rank in (0, 7, 8, 63):
        device = choose_device("cuda", rank_info(gpu_run("ddp", "cnn", 64), rank))
        assert device == torch.device("cuda", rank % DEVICES)
        assert torch.cuda.current_device() == device.index


def test_more_ranks_than_devices_are_refused() -> None:
    info = RankInfo(0, 0, 2 * DEVICES, 2 * DEVICES, 0, "torchrun", "fake")
    with pytest.raises(WorkerError, match=f"{2 * DEVICES} ranks on .* see {DEVICES} GPUs"):
        choose_device("cuda", info)


def test_facts_of_a_device_are_model_memory_and_uuid() -> None:
    facts = gpu.rank_gpu_facts(DEVICE)
    assert (facts["gpu_model"], facts["gpu_memory_bytes"]) == (NAME, MEMORY_BYTES)
    uuids = {gpu.device_uuid(torch.device("cuda", number)) for number in range(DEVICES)}
    assert len(uuids) == DEVICES
    assert read_peak_memory(DEVICE, restarts=True) == (0, 0)


def test_without_nvml_there_is_no_energy_and_no_failure() -> None:
    assert gpu.host_gpu_facts() == {}
    counters = RegionCounters(DEVICE, rank_info(gpu_run("single", "cnn", 1), 0))
    counters.begin()
    counters.end()
    assert counters.energy_j is None


def test_cuda_clocks_read_times_from_events() -> None:
    clock = make_step_clock(DEVICE)
    assert isinstance(clock, CudaClock)
    clock.begin()
    clock.mark()
    clock.mark()
    synchronize(DEVICE)
    times = clock.times_s()
    assert len(times) == 2
    assert all(0 <= seconds < 60 for seconds in times)
    timer, readings = CallTimer(DEVICE), list[float]()
    timer.time_all([(lambda: None, readings)], 1, "nothing")
    timer.flush()
    assert len(readings) == 1


@pytest.mark.parametrize("key", ["single", "ddp", "fsdp", "tensor", "1f1b"])
def test_a_step_can_be_profiled_and_recorded_on_cuda(key: str) -> None:
    kind = "transformer" if exclusion(gpu_run(key, "transformer", 8)) is None else "cnn"
    spec = msgspec.structs.replace(gpu_run(key, kind, 8), profile_steps=1)
    warnings: list[str] = []
    with rank_on_gpu(spec, 0) as (strategy, feed, recorder):
        recorder.begin_step()
        strategy.step(feed, 0)
        profiled = run_profiled_steps(
            strategy, feed, spec, recorder.device, StopController(), lambda flag: flag, 1, warnings
        )
        traffic = run_recorded_step(
            strategy, feed, spec, recorder.device, StopController(), lambda flag: flag, 2, warnings
        )
    # The stub runs no kernels: launches and copies of pageable memory are unknown.
    assert warnings == [NO_DEVICE_EVENTS]
    assert profiled.host_syncs is not None
    assert profiled.host_syncs.launches is profiled.host_syncs.pageable_copies is None
    phases = profiled.phases
    assert phases is not None
    assert phases.step_s is not None
    assert phases.compute_s is None
    assert phases.forward_s == phases.backward_s == phases.optimizer_s == 0
    assert bool(traffic) == (spec.ranks > 1 and strategy.traffic_is_recorded)


@pytest.mark.parametrize("key", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
def test_a_pipelines_timeline_has_every_kind_of_action(key: str) -> None:
    spec: RunSpec = gpu_run(key, "transformer", 8)
    with rank_on_gpu(spec, 1) as (strategy, feed, recorder):
        recorder.begin_step()
        strategy.step(feed, 0)
        spans = strategy.record_actions(feed, 1, recorder.device)
    assert {span.kind for span in spans} == ({"F", "I", "W"} if key == "zero_bubble" else {"F", "B"})
    assert all(0 <= span.begin_s <= span.end_s for span in spans)
