"""Against a stand-in for the module ``amdsmi``, whose names and fields are compared with those of its releases."""

from __future__ import annotations

import ast
import enum
import importlib.util
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcbench.results.device_records import DevicePower
from hpcbench.worker.distributed.rank_environment import RankInfo
from hpcbench.worker.measure import amd_smi, environment_record, gpu, gpu_device
from hpcbench.worker.measure.counters import RegionCounters
from hpcbench.worker.measure.gpu_device import GpuDevice
from hpcbench.worker.measure.nvml import NvmlDevice
from tests.worker.helpers import make_rank

MI300X, MI250X, MI210 = "0x74a1", "0x7408", "0x740f"
RESOLUTION_UJ = 15.3
"""The size of a tick of the energy counter on MI200 and MI300."""
FIELDS: dict[str, tuple[str, dict[str, set[str]]]] = {
    "amdsmi_get_energy_count": ("6.2", {"6.2": {"power", "counter_resolution"}, "6.3": {"energy_accumulator", "counter_resolution"}}),
    "amdsmi_get_power_info": ("6.2", {"6.2": {"current_socket_power", "average_socket_power"}}),
    "amdsmi_get_power_cap_info": ("6.2", {"6.2": {"power_cap"}}),
    "amdsmi_get_gpu_vram_usage": ("6.2", {"6.2": {"vram_total", "vram_used"}}),
    "amdsmi_get_gpu_process_list": ("6.2", {"6.2": {"pid", "memory_usage", "vram_mem"}}),
    "amdsmi_get_gpu_activity": ("6.2", {"6.2": {"gfx_activity"}}),
    "amdsmi_get_clock_info": ("6.2", {"6.2": {"clk", "max_clk"}}),
    "amdsmi_get_gpu_metrics_info": ("6.2", {
        "6.2": {"indep_throttle_status"},
        "6.3": {"accumulation_counter", "ppt_residency_acc", "prochot_residency_acc", "socket_thm_residency_acc",
                "vr_thm_residency_acc", "hbm_thm_residency_acc"}}),
    "amdsmi_get_gpu_asic_info": ("6.2", {"6.2": {"market_name", "device_id", "asic_serial"}}),
    "amdsmi_get_gpu_enumeration_info": ("6.4", {"6.4": {"hip_uuid"}}),
    "amdsmi_get_gpu_driver_info": ("6.2", {"6.2": {"driver_version"}}),
    "amdsmi_get_gpu_device_bdf": ("6.2", {}),
    "amdsmi_get_gpu_compute_partition": ("6.2", {}),
    "amdsmi_get_processor_handles": ("6.2", {}),
    "amdsmi_init": ("6.2", {}),
}  # fmt: skip
"""The release that has a function first, of 6.2.4, 6.3.3, 6.4.4 and 7.0.2, and the fields that were read in its source.

Units, by the fields of the C structures: ticks times ``counter_resolution`` is uJ, sockets' powers are W, the power cap
uW, memory of a device MiB and of a process bytes, clocks MHz.
"""


class AmdSmiLibraryException(Exception):
    """By the name of amdsmi's."""


class ClockKind(enum.IntEnum):
    SYS = 0
    GFX = 0
    MEM = 4


class FakeAmdSmi:
    """Devices by serial number; a value that is an exception is raised.

    ``release`` decides which fields there are.
    """

    AmdSmiClkType = ClockKind

    def __init__(self, *device_ids: str, release: str = "7.0", **values: Any) -> None:
        self.release = release
        self.devices: list[dict[str, Any]] = [
            {
                "device_id": device_id, "serial": f"{0xAB12_3456_789A_BC00 + number:016X}",
                "bdf": f"0000:{0xC1 + 5 * number:02x}:00.0", "ticks": 1_000_000, "watts": 120, "cap_uw": 750_000_000,
                "used_mib": 1024, "processes": [], "activity": 90, "clk": 2100, "partition": "SPX", "throttled": "N/A",
                "counts": dict.fromkeys(amd_smi_ticks(), 0), "init": None, **values,
            }
            for number, device_id in enumerate(device_ids)
        ]  # fmt: skip

    def amdsmi_init(self) -> None:
        for device in self.devices:
            self._value(device, "init")

    def amdsmi_get_processor_handles(self) -> list[int]:
        # The order of the library need not be that of the addresses.
        return list(reversed(range(len(self.devices))))

    @staticmethod
    def _value(device: dict[str, Any], name: str) -> Any:
        if isinstance(device[name], Exception):
            raise device[name]
        return device[name]

    def __getattr__(self, name: str) -> Any:
        if name not in FIELDS or FIELDS[name][0] > self.release:
            raise AttributeError(name)

        def answer(handle: int, *arguments: Any) -> Any:
            device = self.devices[handle]
            return getattr(self, name.removeprefix("amdsmi_"))(lambda key: self._value(device, key), *arguments)

        return answer

    def get_energy_count(self, value: Any) -> dict[str, Any]:
        ticks = "power" if self.release < "6.3" else "energy_accumulator"
        return {ticks: value("ticks"), "counter_resolution": RESOLUTION_UJ, "timestamp": 1}

    def get_power_info(self, value: Any) -> dict[str, Any]:
        is_mi300 = value("device_id") == MI300X
        return {
            "current_socket_power": value("watts") if is_mi300 else "N/A",
            "average_socket_power": "N/A" if is_mi300 else value("watts"),
        }

    def get_power_cap_info(self, value: Any) -> dict[str, Any]:
        return {"power_cap": value("cap_uw")}

    def get_gpu_vram_usage(self, value: Any) -> dict[str, Any]:
        return {"vram_total": 196_592, "vram_used": value("used_mib")}

    def get_gpu_process_list(self, value: Any) -> list[dict[str, Any]]:
        return [{"pid": pid, "memory_usage": {"vram_mem": used}} for pid, used in value("processes")]

    def get_gpu_activity(self, value: Any) -> dict[str, Any]:
        return {"gfx_activity": value("activity")}

    def get_clock_info(self, value: Any, kind: ClockKind) -> dict[str, Any]:
        return {ClockKind.GFX: {"clk": value("clk"), "max_clk": 2100}, ClockKind.MEM: {"clk": 900, "max_clk": 1300}}[
            kind
        ]

    def get_gpu_metrics_info(self, value: Any) -> dict[str, Any]:
        counts = value("counts") if self.release >= "6.3" else {}
        return {"indep_throttle_status": value("throttled"), **counts}

    def get_gpu_asic_info(self, value: Any) -> dict[str, Any]:
        return {"market_name": "AMD Instinct", "device_id": value("device_id"), "asic_serial": f"0x{value('serial')}"}

    def get_gpu_enumeration_info(self, value: Any) -> dict[str, Any]:
        return {"hip_uuid": f"GPU-{value('serial').lower()}"}

    def get_gpu_driver_info(self, value: Any) -> dict[str, Any]:
        return {"driver_version": "6.12.12"}

    def get_gpu_device_bdf(self, value: Any) -> str:
        return str(value("bdf"))

    def get_gpu_compute_partition(self, value: Any) -> str:
        return str(value("partition"))


def amd_smi_ticks() -> list[str]:
    return ["accumulation_counter", *(field for fields in amd_smi._LIMIT_TICKS.values() for field in fields)]


def torch_uuid(serial: str) -> str:
    """As torch shows the 16 letters that HIP writes: byte by byte, with the lines of a uuid."""
    digits = serial.lower().encode().hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(fake: FakeAmdSmi) -> FakeAmdSmi:
        monkeypatch.setitem(sys.modules, "amdsmi", fake)
        monkeypatch.setattr(torch.version, "hip", "7.0.2")
        monkeypatch.setattr(gpu, "device_uuid", lambda device: torch_uuid(fake.devices[device.index]["serial"]))
        return fake

    return install


def counters(*numbers: int) -> RegionCounters:
    first, *others = (torch.device("cuda", number) for number in numbers)
    return RegionCounters(first, RankInfo(0, 0, 1, 1, 0, "srun", "x"), others=others)


def opened(number: int = 0) -> GpuDevice:
    device, reason = gpu.open_gpu(torch.device("cuda", number))
    assert device is not None, reason
    return device


@pytest.mark.parametrize("release", ["6.2", "6.3", "7.0"])
def test_energy_is_ticks_times_their_size(use: Any, release: str) -> None:
    fake, watch = use(FakeAmdSmi(MI300X, release=release)), counters(0)
    watch.begin()
    fake.devices[0]["ticks"] += 10_000_000
    watch.end()
    # 10 M ticks of 15.3 uJ.
    assert watch.energy_j == pytest.approx(153.0)
    assert watch.energy_source == "amdsmi"


@pytest.mark.parametrize("ticks", [999, AmdSmiLibraryException("AMDSMI_STATUS_NOT_SUPPORTED")])
def test_a_counter_that_began_anew_or_is_missing_gives_no_energy(use: Any, ticks: Any) -> None:
    fake, watch = use(FakeAmdSmi(MI300X)), counters(0)
    watch.begin()
    fake.devices[0]["ticks"] = ticks
    watch.end()
    assert (watch.energy_j, watch.energy_source) == (None, None)
    assert watch.watched is not None, "the others are read"
    assert watch.watched.gpu_sm_hz == [2.1e9, 2.1e9]


@pytest.mark.parametrize(
    ("query", "values", "expected"),
    [
        ("power_w", {"watts": 131}, 131.0),
        ("power_w", {"watts": "N/A"}, None),
        ("power_cap_w", {"cap_uw": 750_000_000}, 750.0),
        ("power_cap_w", {"cap_uw": 0}, None),
        ("used_bytes", {"used_mib": 3}, 3 * 2**20),
        ("used_bytes", {"used_mib": AmdSmiLibraryException()}, None),
        ("sm_clock", {"clk": 1700}, (1.7e9, 2.1e9)),
        ("sm_clock", {"clk": 132, "activity": 0}, None),
        ("sm_clock", {"clk": "N/A"}, None),
        ("throttle_reasons", {"throttled": True}, ["a limit of power or heat"]),
        ("throttle_reasons", {"throttled": False}, []),
        ("throttle_reasons", {"throttled": "N/A"}, []),
    ],
)
@pytest.mark.parametrize("device_id", [MI300X, MI210])
def test_units_are_those_of_hpcbench(use: Any, device_id: str, query: str, values: Any, expected: Any) -> None:
    use(FakeAmdSmi(device_id, **values))
    assert getattr(opened(), query)() == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("processes", "others"),
    [
        ([], 0),
        ([(os.getpid(), 2**30)], 0),
        ([(os.getpid(), 2**30), (4_000_001, 2**30)], 1),
        # A rank of another device has opened this one, too.
        ([(os.getpid(), 2**30), (4_000_001, 2**20)], 0),
        # Numbers of the host: one is this rank.
        ([(4_000_001, 2**30)], 0),
        ([(4_000_001, 2**30), (4_000_002, 2**30)], 1),
        (AmdSmiLibraryException(), None),
    ],
)
def test_others_are_processes_with_memory_on_the_device(use: Any, processes: Any, others: int | None) -> None:
    use(FakeAmdSmi(MI300X, processes=processes))
    assert opened().other_processes({os.getpid()}) == others


def test_time_at_a_limit_is_a_share_of_the_firmwares_ticks(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(FakeAmdSmi(MI300X))
    device, now_s = opened(), 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    assert device.violation_s() == {"power": 0.0, "thermal": 0.0}
    now_s += 8.0
    fake.devices[0]["counts"] = {
        **dict.fromkeys(amd_smi_ticks(), 0), "accumulation_counter": 4000, "ppt_residency_acc": 1000,
        "vr_thm_residency_acc": 500, "hbm_thm_residency_acc": 400,
    }  # fmt: skip
    assert device.violation_s() == {"power": 2.0, "thermal": 1.0}
    fake.devices[0]["counts"] = dict.fromkeys(amd_smi_ticks(), "N/A")
    assert device.violation_s() == {}
    assert opened().violation_s() == {}, "an MI200 counts none"


def test_both_dies_of_an_mi250x_read_the_counter_of_their_package(use: Any) -> None:
    fake = use(FakeAmdSmi(*6 * [MI250X], cap_uw=560_000_000))
    for second in (1, 3, 5):
        fake.devices[second] |= {"ticks": 0, "watts": "N/A", "cap_uw": 0}
    ranks = [make_rank(number, local_rank=number) for number in range(6)]
    watches = [counters(number) for number in range(6)]
    for watch in watches:
        watch.begin()
    fake.devices[0]["ticks"] += 10_000_000
    fake.devices[4]["ticks"] += 20_000_000
    for watch, rank in zip(watches, ranks, strict=True):
        watch.end()
        watch.write_into(rank)
    addresses = [list(rank.device_power) for rank in ranks]
    assert addresses == [[address] for address in ("0000:c1:00.0", "0000:cb:00.0", "0000:d5:00.0") for _ in range(2)]
    assert [rank.energy_j or 0.0 for rank in ranks] == pytest.approx([153.0, 153.0, 0.0, 0.0, 306.0, 306.0])
    assert ranks[5].device_power["0000:d5:00.0"].idle_power_w == 120.0
    assert ranks[5].device_power["0000:d5:00.0"].power_cap_w == 560.0
    assert {rank.energy_source for rank in ranks} == {"amdsmi package", None}, "a counter that stands still has none"
    # A process that drives both dies has their energy once.
    watch = counters(0, 1)
    watch.begin()
    fake.devices[0]["ticks"] += 10_000_000
    watch.end()
    assert watch.energy_j == pytest.approx(153.0)


@pytest.mark.parametrize(
    ("visible", "ticks", "reason"),
    [
        (1, [5], "1 of the 2 dies of the package of 0000:c1:00.0 are visible, and 1 of them count energy"),
        (2, [5, 7], "2 of the 2 dies of the package of 0000:c1:00.0 are visible, and 2 of them count energy"),
        (2, [0, 0], "2 of the 2 dies of the package of 0000:c1:00.0 are visible, and 0 of them count energy"),
    ],
)
def test_a_package_that_is_not_as_expected_has_no_energy_but_a_reason(
    use: Any, visible: int, ticks: list[int], reason: str
) -> None:
    fake = use(FakeAmdSmi(*visible * [MI250X]))
    for device, count in zip(fake.devices, ticks, strict=True):
        device["ticks"] = count
    watch, result = counters(0), make_rank(0, provenance={"host": "x"})
    watch.begin()
    watch.end()
    watch.write_into(result)
    assert result.energy_j is None
    assert result.provenance["energy_absent"] == f"{reason}: it should be one of two"
    assert result.device_power == {"0000:c1:00.0": DevicePower()}


def test_counters_of_a_whole_device_are_not_used_for_a_partition(use: Any) -> None:
    use(FakeAmdSmi(MI300X, partition="CPX", processes=[(4_000_001, 2**30)]))
    device = opened()
    assert [device.energy_j(), device.power_w(), device.power_cap_w(), device.used_bytes(),
            device.other_processes(set())] == 5 * [None]  # fmt: skip
    assert counters(0).energy_absent == "a partition of a device has no counter of energy of its own"


@pytest.mark.parametrize("release", ["6.2", "7.0"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_device_is_found_by_the_number_that_torch_gives_it(use: Any, release: str, number: int) -> None:
    fake = use(FakeAmdSmi(*3 * [MI300X], release=release))
    fake.devices[number]["used_mib"] = 77
    assert opened(number).used_bytes() == 77 * 2**20
    for device in fake.devices:
        device["serial"] = fake.devices[0]["serial"]
    lost = torch_uuid(fake.devices[0]["serial"])
    assert gpu.open_gpu(torch.device("cuda", 0)) == (
        (None, f"no answer from amdsmi: NoSuchDevice: amdsmi lists no device {lost} among 3")
    ), "two of one number are none"


def test_without_library_or_driver_the_reason_is_in_the_result(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeAmdSmi(MI300X, init=AmdSmiLibraryException("Error code:\n\t34 | AMDSMI_STATUS_DRIVER_NOT_LOADED")))
    watch = counters(0)
    watch.begin()
    watch.end()
    assert watch.energy_j is None
    reason = "no answer from amdsmi: AmdSmiLibraryException: Error code: 34 | AMDSMI_STATUS_DRIVER_NOT_LOADED"
    assert (watch.energy_absent, gpu.host_gpu_facts()) == (reason, {})
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    reason = "no answer from amdsmi: ModuleNotFoundError: import of amdsmi halted; None in sys.modules"
    assert (counters(0).energy_absent, gpu.host_gpu_facts()) == (reason, {})


def test_host_facts_are_in_bytes_watts_and_hertz(use: Any, tmp_path: Path) -> None:
    use(FakeAmdSmi(*2 * [MI300X]))
    folder = tmp_path / "sys/bus/pci/devices/0000:c1:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("3")
    facts = gpu.host_gpu_facts(tmp_path)
    assert facts["driver"] == "6.12.12"
    assert facts["gpu"] == {
        "model": "AMD Instinct", "memory_bytes": 196_592 * 2**20, "power_limit_w": 750.0, "partition": "SPX",
        "max_sm_hz": 2.1e9, "max_memory_hz": 1.3e9,
    }  # fmt: skip
    assert facts["gpus"][1] == {"uuid": "0xAB123456789ABC00", "pci": "0000:c1:00.0", "numa_node": 3}


def test_libraries_of_rocm_have_their_own_names(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3_005_000)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 22, 3))
    assert environment_record.gpu_library_versions() == {"cudnn": 3_005_000, "nccl": "2.22.3"}
    use(FakeAmdSmi(MI300X))
    assert environment_record.gpu_library_versions() == {"miopen": 3_005_000, "rccl": "2.22.3"}


def test_both_vendors_answer_the_same_questions() -> None:
    questions = {name for name, value in vars(GpuDevice).items() if callable(value) and not name.startswith("_")}
    assert len(questions) == 8
    for vendor in (amd_smi.AmdDevice, NvmlDevice):
        assert questions <= vars(vendor).keys()
    assert issubclass(gpu_device.NoSuchDevice, Exception)


def interface_functions() -> dict[str, ast.FunctionDef]:
    """The functions of the installed release of amdsmi, which cannot be imported without ROCm's library."""
    spec = importlib.util.find_spec("amdsmi")
    assert spec is not None, "it is in the extra `test`"
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "amdsmi_interface.py").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_stand_in_has_the_librarys_functions_and_fields() -> None:
    """A name that amdsmi does not have would be absent for ever, and nobody would notice."""
    functions = interface_functions()
    for name, (_, fields) in FIELDS.items():
        texts = {node.value for node in ast.walk(functions[name]) if isinstance(node, ast.Constant)}
        newest = {field for release, names in fields.items() for field in names if (release, field) != ("6.2", "power")}
        assert newest - texts == set(), name
        assert len(functions[name].args.posonlyargs) == 0
    source = Path(amd_smi.__file__ or "").read_text(encoding="utf-8")
    used = {f"amdsmi_{name}" for name in re.findall(r'"(get_\w+)"', source)} | set(re.findall(r"\bamdsmi_\w+", source))
    assert used == FIELDS.keys(), "the table lists what is used"
    read = {field for _, fields in FIELDS.values() for names in fields.values() for field in names}
    assert {name for name in read if name not in source and not name.endswith("_socket_power")} == set()


def test_the_library_without_rocm_is_a_reason_and_no_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The release of the package index: it is imported as a run would, on a machine that has no such device."""
    monkeypatch.setattr(torch.version, "hip", "7.0.2")
    monkeypatch.setattr(gpu, "device_uuid", lambda device: torch_uuid("AB123456789ABC00"))
    device, reason = gpu.open_gpu(torch.device("cuda", 0))
    assert device is None
    assert str(reason).startswith("no answer from amdsmi: ")
    assert capfd.readouterr() == ("", "")
