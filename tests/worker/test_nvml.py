"""Against a stand-in for the module ``pynvml``, with its functions, constants and errors by their real names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcbench.results.device_records import DevicePower
from hpcbench.worker.distributed.rank_environment import RankInfo
from hpcbench.worker.measure import gpu, nvml
from hpcbench.worker.measure.counters import RegionCounters
from tests.worker.helpers import make_rank

UUID = "12345678-1234-1234-1234-12345678900"
CUDA = torch.device("cuda", 0)


class NVMLError(Exception):
    pass


class FakeNvml:
    """``count`` devices, all alike but for uuid and place; what is set to an exception is raised."""

    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_PERF_POLICY_POWER = 0
    NVML_PERF_POLICY_THERMAL = 1
    NVML_NVLINK_MAX_LINKS = 4
    nvmlClocksThrottleReasonSwPowerCap = 0x4  # noqa: N815
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40  # noqa: N815

    def __init__(self, count: int = 1, links: str = "none", **values: Any) -> None:
        self.count, self.links = count, links
        self.values: dict[str, Any] = {"energy": 5000, "reasons": 0, "clock": 1900, "processes": [], "mig": [0, 0],
                                       "power_ns": 0, "init": None, "used": 10**9, **values}  # fmt: skip

    def _get(self, name: str) -> Any:
        value = self.values[name]
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlInit(self) -> None:  # noqa: N802
        self._get("init")

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetTotalEnergyConsumption": lambda handle: self._get("energy"),
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: self._get("reasons"),
            "nvmlDeviceGetClockInfo": lambda handle, kind: {1: self._get("clock")}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda handle, kind: {1: 1980, 2: 2619}[kind],
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=pid) for pid in self._get("processes")],
            "nvmlDeviceGetViolationStatus": lambda handle, policy: SimpleNamespace(violationTime={0: self._get("power_ns"), 1: 0}[policy]),
            "nvmlDeviceGetMigMode": lambda handle: self._get("mig"),
            "nvmlDeviceGetHandleByUUID": self._by_uuid,
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: 0,
            "nvmlDeviceGetCount": lambda: self.count,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{UUID}{handle}",
            "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"00000000:{handle}B:00.0".encode()),
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=150 * 10**9, used=self._get("used")),
            "nvmlDeviceGetPowerManagementLimit": lambda handle: 700_000,
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 650_000,
            "nvmlDeviceGetPowerUsage": lambda handle: 70_500,
            "nvmlDeviceGetEccMode": lambda handle: [1, 1],
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
            "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: 50,
            "nvmlDeviceGetNvLinkState": lambda handle, link: int(self.links != "none" and link < 3),
            "nvmlDeviceGetNvLinkRemoteDeviceType": lambda handle, link: 2 if self.links == "switch" else 0,
            # Device 0 has two links to device 1 and one to device 2.
            "nvmlDeviceGetNvLinkRemotePciInfo": lambda handle, link: SimpleNamespace(
                busId=f"00000000:{[(1, 1, 2), (0, 0, 2), (0, 1, 1)][handle][link]}B:00.0"),
        }  # fmt: skip
        if name not in answers:
            raise AttributeError(name)
        return answers[name]

    def _by_uuid(self, uuid: str) -> int:
        if uuid.startswith("MIG-") == (self.values["mig"] == "instance"):
            return 0
        raise NVMLError("not found")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(fake: FakeNvml) -> FakeNvml:
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr(gpu, "device_uuid", lambda device: f"{UUID}{device.index}")
        monkeypatch.setattr(nvml, "in_root_pid_namespace", lambda: True)
        return fake

    return install


def watch_between(fake: FakeNvml, **after: Any) -> RegionCounters:
    watch = RegionCounters(CUDA, RankInfo(0, 0, 1, 1, 0, "srun", "x"))
    watch.begin()
    fake.values |= after
    watch.end()
    return watch


def test_gpu_counters_are_differences_between_the_timed_edges(use: Any) -> None:
    fake = use(FakeNvml(processes=[4_000_001]))
    watch = watch_between(
        fake, energy=12_500, reasons=0x44, processes=[4_000_001, 4_000_002], power_ns=3 * 10**9, clock=1500
    )
    assert (watch.energy_j, watch.energy_source) == (7.5, "nvml")
    seen = watch.watched
    assert seen is not None
    assert (seen.gpu_others, seen.gpu_reasons) == (2, ["power cap", "heat (hardware)"])
    assert (seen.gpu_held_s, seen.gpu_sm_hz) == ({"power": 3.0, "thermal": 0.0}, [1.9e9, 1.98e9])


def test_power_before_the_work_and_its_limit_are_watts(use: Any) -> None:
    watch, result = watch_between(use(FakeNvml()), energy=12_500), make_rank(0)
    watch.write_into(result)
    assert result.device_power == {f"{UUID}0": DevicePower(energy_j=7.5, idle_power_w=70.5, power_cap_w=650.0)}
    watch_between(use(FakeNvml(mig=[1, 1])), energy=12_500).write_into(result)
    assert result.device_power == {f"{UUID}0": DevicePower()}, "a MIG instance draws a part of it"


def test_a_process_that_drives_several_devices_has_the_energy_of_all(use: Any) -> None:
    fake = use(FakeNvml(count=2))
    watch = RegionCounters(CUDA, RankInfo(0, 0, 1, 1, 0, "srun", "x"), others=[torch.device("cuda", 1)])
    watch.begin()
    fake.values |= {"energy": 12_500, "power_ns": 3 * 10**9, "used": 5 * 10**9}
    watch.end()
    assert (watch.energy_j, watch.watched and watch.watched.gpu_held_s["power"]) == (15.0, 6.0)
    assert watch.used_gpu_bytes() == [5 * 10**9] * 2
    fake.values["used"] = NVMLError("Not Supported")
    assert watch.used_gpu_bytes() == []


def test_a_counter_that_has_not_moved_gives_no_energy(use: Any) -> None:
    """Between two updates of the counter, some 100 ms apart, a run would have used nothing."""
    fake = use(FakeNvml())
    watch = watch_between(fake)
    assert watch.energy_j is None
    assert watch.energy_source is None
    watch.begin()
    fake.values["energy"] = 6000
    watch.end()
    assert watch.energy_j == 1.0, "an update in any part of the steps counts"


@pytest.mark.parametrize("mig", [[1, 1], "instance"])
def test_counters_of_a_whole_gpu_are_not_used_for_a_mig_partition(use: Any, mig: Any) -> None:
    watch = watch_between(use(FakeNvml(mig=mig, processes=[4_000_001])), energy=9000)
    assert watch.watched is not None
    assert (watch.energy_j, watch.watched.gpu_others) == (None, None)
    assert watch.energy_absent == "a MIG instance has no counter of energy of its own"


@pytest.mark.parametrize("name", ["energy", "reasons", "clock", "processes", "power_ns"])
def test_only_unsupported_counters_are_absent(use: Any, name: str) -> None:
    fake = use(FakeNvml())
    fake.values[name] = NVMLError("Not Supported")
    watch = watch_between(fake, **({} if name == "energy" else {"energy": 9000}))
    seen = watch.watched
    assert seen is not None
    given = {"energy": watch.energy_j is not None, "clock": bool(seen.gpu_sm_hz), "processes": seen.gpu_others is not None,
             "power_ns": "power" in seen.gpu_held_s}  # fmt: skip
    assert given == {each: each != name for each in given}


def test_without_library_or_driver_there_are_no_facts(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeNvml(init=NVMLError("Driver Not Loaded")))
    assert (gpu.open_gpu(CUDA), gpu.host_gpu_facts()) == (
        (None, "no answer from nvml: NVMLError: Driver Not Loaded"), {})  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing = "no answer from nvml: ModuleNotFoundError: import of pynvml halted; None in sys.modules"
    assert (gpu.open_gpu(CUDA), gpu.host_gpu_facts()) == ((None, missing), {})
    watch = watch_between(FakeNvml())
    assert watch.watched is not None
    assert (watch.energy_j, watch.watched.gpu_others, watch.energy_absent) == (None, None, missing)


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ("direct", ["X NV2 NV1", "NV2 X NV1", "NV1 NV2 X"]),
        ("switch", ["X NV3 NV3", "NV3 X NV3", "NV3 NV3 X"]),
    ],
)
def test_gpu_links_are_a_matrix_of_nvlinks(use: Any, links: str, expected: list[str]) -> None:
    use(FakeNvml(count=3, links=links))
    assert gpu.host_gpu_facts()["gpu_links"] == expected


def test_the_stand_in_has_the_librarys_names() -> None:
    """A function that NVML's module does not have would be absent for ever, and nobody would notice."""
    import pynvml

    source = Path(nvml.__file__ or "").read_text()
    names = set(re.findall(r"\b(?:nvmlDevice|nvmlSystem|NVML_)\w+", source))
    assert len(names) > 20
    assert sorted(name for name in names if not hasattr(pynvml, name)) == []
    for reason in nvml._THROTTLE_REASONS:
        assert hasattr(pynvml, f"nvmlClocksThrottleReason{reason}")


def test_in_a_container_one_process_is_this_ranks(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(FakeNvml(processes=[11]))
    monkeypatch.setattr(nvml, "in_root_pid_namespace", lambda: False)
    found = nvml.open_nvml_device(f"{UUID}0")
    assert found.other_processes({5}) == 0
    fake.values["processes"] = [11, 12]
    assert found.other_processes({5}) == 1
