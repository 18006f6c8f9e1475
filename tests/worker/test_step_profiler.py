"""Profiled steps in one process: what comes of them, and what must not come of a profiler that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcbench.results.schema import StepPhases
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.measure import step_profiler
from hpcbench.worker.measure.clocks import no_marker
from hpcbench.worker.measure.step_profiler import run_profiled_steps
from hpcbench.worker.shutdown import StopController, Stopped
from tests.worker.helpers import make_spec
from tests.worker.only_steps import OnlySteps

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


class Multiplier(OnlySteps):
    """A strategy whose step is a product of matrices, marked as the phases are."""

    def __init__(self, before_step: Callable[[int], None] = lambda _step: None) -> None:
        self.steps: list[int] = []
        self._before_step = before_step

    def step(self, feed: DataFeed, step: int) -> torch.Tensor:
        self._before_step(step)
        self.steps.append(step)
        with self.phases("forward"):
            product = torch.ones(200, 200) @ torch.ones(200, 200)
        with self.phases("optimizer"):
            return product.sum()


def run(
    strategy: Multiplier, stop: StopController | None = None, profile_steps: int = 2
) -> tuple[StepPhases | None, list[str]]:
    spec = make_spec(profile_steps=profile_steps)
    warnings: list[str] = []
    stop = stop or StopController()
    profiled = run_profiled_steps(strategy, make_feed(spec, CPU), spec, CPU, stop, bool, 6, warnings)
    assert profiled.host_syncs is None, "a cpu is not waited for"
    return profiled.phases, warnings


def test_a_lone_device_has_phases_and_no_communication() -> None:
    strategy = Multiplier()
    phases, warnings = run(strategy)
    assert strategy.steps == [6, 7]
    assert strategy.phases is no_marker, "whoever steps from here on pays for no mark"
    assert phases is not None
    assert phases.forward_s is not None
    assert phases.compute_s is not None
    assert 0 < phases.forward_s < phases.step_s
    assert 0 < phases.compute_s <= phases.step_s
    assert (phases.comm_s, phases.exposed_comm_s, phases.data_s, phases.backward_s) == (None, None, None, None)
    assert warnings == []


def test_the_first_profile_of_a_process_prints_nothing() -> None:
    # torch's library reads its log level once per process, so another test's profile would decide here.
    command = [sys.executable, "-c", f"from {__name__} import Multiplier, run; run(Multiplier())"]
    environment = {name: text for name, text in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    first_profile = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    assert first_profile.stdout == ""


def test_a_profiler_that_fails_is_a_warning_and_the_steps_are_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(**_options: Any) -> Any:
        raise RuntimeError("no CUPTI\nnor anything else")

    monkeypatch.setattr(step_profiler, "profile", refuse)
    strategy = Multiplier()
    assert run(strategy) == (None, ["no profile of the steps: RuntimeError: no CUPTI"])
    assert strategy.steps == [6, 7], "the other ranks wait for this one in each of them"


@pytest.mark.parametrize(("told_at", "made"), [(6, 1), (5, 0)])
def test_stopping_ends_profiling_early(told_at: int, made: int) -> None:
    stop = StopController()

    def tell(step: int) -> None:
        if step == told_at:
            stop.reason = Stopped("timeout", "told")

    tell(5)  # before the first of them
    phases, warnings = run(Multiplier(tell), stop)
    assert (phases is not None) == (made > 0)
    assert warnings == [f"{made} of 2 profiled steps were made: no time was left"]


class Raw:
    """An event as torch's profiler gives it on a GPU."""

    def __init__(
        self, name: str, start: int, length: int, device: str = "CPU", number: int = 0, linked: int = 0,
        annotation: bool = False,
    ) -> None:  # fmt: skip
        self._values = {"name": name, "start_ns": start, "duration_ns": length, "correlation_id": number,
                        "linked_correlation_id": linked, "is_user_annotation": annotation, "is_async": False,
                        "device_type": type("DeviceType", (), {"name": device})}  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        return lambda: self._values[name]


def test_a_kernel_is_attributed_to_the_operator_that_launched_it() -> None:
    raw = [
        Raw("hpcbench.forward", 0, 100, number=1, annotation=True),
        Raw("aten::mm", 10, 20, number=2),
        # The runtime numbers its calls by itself: this 2 is not the operator's.
        Raw("cudaLaunchKernel", 15, 2, number=2, linked=2),
        Raw("sgemm", 60, 50, "CUDA", number=2, linked=2),
        Raw("unasked", 60, 5, "CUDA", number=9),
        Raw("hpcbench.forward", 60, 50, "CUDA", annotation=True),
    ]
    found = {event.name: event for event in step_profiler.profiler_events(raw)}
    assert (found["sgemm"].launched, found["sgemm"].interval, found["sgemm"].on_device) == (10, (60, 110), True)
    assert found["unasked"].launched is None
    assert found["hpcbench.forward"].interval == (0, 100), "its copy on the device is left out"
