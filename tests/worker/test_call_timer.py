"""Readings of kernels on a GPU have no launches of the host in them, however many calls follow each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.measure.clocks import CallTimer
from hpcbench.worker.microbench import block_probes

CUDA = torch.device("cuda")
KERNEL_S = 20e-6


class Gpu:
    """A device that works in the order of its queue, and a host: two clocks, in seconds."""

    def __init__(self) -> None:
        self.host_s = self.device_s = 0.0
        self.slept_s = 0.0

    def launch(self, host_s: float, device_s: float) -> None:
        self.host_s += host_s
        self.device_s = max(self.device_s, self.host_s) + device_s

    def sleep(self, cycles: int) -> None:
        # At its highest clock.
        self.slept_s += cycles / 1.98e9
        self.launch(0.0, cycles / 1.98e9)

    def wait(self, *_: object) -> None:
        self.host_s = max(self.host_s, self.device_s)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    fake = Gpu()

    class Event:
        def __init__(self, **_: object) -> None:
            self.at_s = 0.0

        def record(self) -> None:
            fake.launch(2e-6, 0.0)
            self.at_s = fake.device_s

        def elapsed_time(self, later: Event) -> float:
            return (later.at_s - self.at_s) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", fake.sleep, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.wait)
    monkeypatch.setattr("hpcbench.worker.measure.clocks.time.perf_counter", lambda: fake.host_s)
    return fake


@pytest.mark.parametrize("count", [1, 70, 400])
@pytest.mark.parametrize("launch_s", [50e-6, 150e-6, 900e-6])
def test_launches_are_in_no_reading(gpu: Gpu, count: int, launch_s: float) -> None:
    """The first round is not used; from the second one on the host's time is that of the round before."""
    timer = CallTimer(CUDA)
    readings: list[list[float]] = [[] for _ in range(count)]
    calls = [(lambda: gpu.launch(launch_s, KERNEL_S), into) for into in readings]
    for _ in range(3):
        timer.time_all(calls, count, "pass")
        timer.flush()
    assert [into[1:] for into in readings] == [pytest.approx([KERNEL_S, KERNEL_S])] * count
    # Two rounds of a sleep that is not much longer than needed.
    assert gpu.slept_s < 3.1 * max(0.1, 2 * count * (launch_s + 4e-6), count * 250e-6)


def test_a_device_without_a_sleep_shows_its_hosts_launches(gpu: Gpu) -> None:
    readings: list[float] = []
    timer = CallTimer(CUDA)
    timer.time(lambda: gpu.launch(150e-6, KERNEL_S), readings)
    timer.flush()
    assert readings[0] > 150e-6


def test_updates_are_timed_behind_one_sleep(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each size of weights one reading: that of its kernel, and not of 100 us in which it is launched."""
    module = nn.Sequential(*(nn.Linear(size, size, bias=False) for size in (4, 8, 16)))
    monkeypatch.setattr(block_probes, "_optimizer_step", lambda _: gpu.launch(100e-6, KERNEL_S))
    monkeypatch.setattr(block_probes, "CallTimer", lambda _: CallTimer(CUDA))
    spec = RunSpec(model="resnet18", dataset="cifar10", strategy="single", batch_size=8)
    probes = block_probes.measure_optimizer_updates(spec, module)
    assert [probe.seconds for probe in probes] == [pytest.approx(KERNEL_S)] * 3
