"""A rank's training steps on a GPU that is not there, as hpcbench's own loop runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

import msgspec
import torch
from torch.profiler import record_function

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.device_records import HostActivity
from hpcbench.results.probe_records import DryRunTask
from hpcbench.strategies.traffic import Traffic, merge_calls
from hpcbench.worker.distributed.rank_environment import RankInfo
from hpcbench.worker.distributed.world import choose_device
from hpcbench.worker.dry_run.fake_rank import FakeFeed, built_rank, steps_until_steady
from hpcbench.worker.measure.clocks import PhaseMarker
from hpcbench.worker.measure.counters import RegionCounters
from hpcbench.worker.measure.host import read_peak_memory
from hpcbench.worker.measure.step_profiler import MARK_PREFIX
from hpcbench.worker.shutdown import StopController
from hpcbench.worker.strategy import Strategy
from hpcbench.worker.training_loop import LoopProgress, run_training_loop
from tests.cuda.gpu_recorder import GpuRecorder
from tests.cuda.library_stand_ins import library_stand_ins
from tests.cuda.stub import WAITS, count_calls
from tests.cuda.stub_answers import DEVICES

TIMED_STEPS = 1


class GpuSteps(NamedTuple):
    """The record of one rank in the timed step of a run."""

    device: torch.device
    traffic: list[Traffic]
    """Calls that hand something over, in their order."""
    communication: set[str]
    operators: int
    host_sync_sites: list[str]
    runtime_waits: dict[str, int]
    """Calls of CUDA's runtime that wait for the device, in that step; the loop's own one at their end is left out."""
    stray: list[str]
    product_types: set[torch.dtype]
    phases: list[str]
    """Parts of a step that the strategy marks, in the order of their first mark."""
    step_times_s: list[float]
    watched: HostActivity | None
    """The counters around the timed loop."""
    energy_j: float | None
    allocated_bytes: int
    """Peak of the allocator in the timed loop, above what it held before: fake tensors allocate nothing."""
    setup_peak_bytes: int
    peak_bytes: int
    peak_layer: str
    modelled: list[str]
    """Stand-ins, as in ``StepFigures``; ``one_device``: several devices of one process are one here."""

    @property
    def calls(self) -> list[Traffic]:
        """Equal calls merged, in the form of ``Cost.traffic``."""
        return merge_calls(self.traffic)


def rank_info(spec: RunSpec, rank: int) -> RankInfo:
    """Return the place of ``rank`` on nodes of as many ranks as the stub has devices."""
    per_node = min(spec.ranks, DEVICES) if spec.devices_per_task == 1 else 1
    return RankInfo(rank, rank % per_node, spec.ranks, per_node, rank // per_node, "torchrun", "fake")


@contextmanager
def rank_on_gpu(spec: RunSpec, rank: int) -> Iterator[tuple[Strategy, FakeFeed, GpuRecorder]]:
    """Build ``rank`` of ``spec`` on the device that the worker chooses for it."""
    device = choose_device("cuda", rank_info(spec, rank))
    recorder = GpuRecorder(device)
    task = DryRunTask(index=0, spec=spec, device="cuda")
    with library_stand_ins(spec, device), built_rank(task, rank, recorder) as (strategy, feed):
        yield strategy, feed, recorder


def step_on_gpu(spec: RunSpec, rank: int) -> GpuSteps:
    """Run the warm-up and one timed step of ``rank`` in the worker's loop, and return the record of that step.

    Raises:
        Exception: Whatever the run would raise, and torch's errors about values that fake tensors do not have.
    """
    warmup_steps = steps_until_steady(spec) - 1
    spec = msgspec.structs.replace(spec, warmup_steps=warmup_steps, steps=TIMED_STEPS)
    with rank_on_gpu(spec, rank) as (strategy, feed, recorder):
        phases: dict[str, None] = {}
        strategy.phases = _noted_phases(phases, strategy.phases)
        progress = LossesUnread(spec, recorder.device)
        counters = RegionCounters(recorder.device, rank_info(spec, rank))
        allocated: list[int] = []
        waits: list[dict[str, int]] = []
        records: list[GpuSteps] = []

        def begin() -> None:
            counters.begin()
            read_peak_memory(recorder.device, restarts=True)
            allocated.append(torch.cuda.memory_allocated(recorder.device))
            waits.append(count_calls(WAITS))
            recorder.begin_step()
            # As a run does, which resets the allocator's peak here.
            recorder.peak_bytes = recorder.live_bytes

        def end() -> None:
            counts = count_calls(WAITS)
            # The loop itself waits once, after the last step.
            counts["cudaDeviceSynchronize"] -= 1
            counters.end()
            records.append(
                GpuSteps(
                    device=recorder.device,
                    traffic=list(recorder.calls),
                    communication=set(recorder.communication),
                    operators=recorder.operators,
                    host_sync_sites=list(recorder.host_sync_sites),
                    runtime_waits={
                        name: counts[name] - waits[0][name] for name in WAITS if counts[name] != waits[0][name]
                    },
                    stray=list(recorder.stray),
                    product_types=set(recorder.product_types),
                    phases=list(phases),
                    step_times_s=[],
                    watched=counters.watched,
                    energy_j=counters.energy_j,
                    allocated_bytes=read_peak_memory(recorder.device)[0] - allocated[0],
                    setup_peak_bytes=recorder.setup_peak_bytes,
                    peak_bytes=recorder.peak_bytes,
                    peak_layer=recorder.peak_layer,
                    modelled=sorted(recorder.modelled | ({"one_device"} if spec.devices_per_task > 1 else set())),
                )
            )

        recorder.begin_step()
        strategy.announce(range(warmup_steps + TIMED_STEPS))
        run_training_loop(strategy, feed, spec, progress, StopController(), begin, None, end)
        return records[0]._replace(step_times_s=progress.step_times_s())


def _noted_phases(names: dict[str, None], marker: PhaseMarker) -> PhaseMarker:
    """Return the profiler's marker within ``marker``; it adds each name to ``names``."""

    def marked(name: str) -> AbstractContextManager[object]:
        names[name] = None
        contexts = ExitStack()
        contexts.enter_context(marker(name))
        contexts.enter_context(record_function(MARK_PREFIX + name))
        return contexts

    return marked


class LossesUnread(LoopProgress):
    """A loop's progress whose losses are not read: fake ones have no values."""

    def read_losses(self, may_wait: bool) -> list[float | None]:
        del may_wait
        return []
