"""AMD's devices through its library ``amdsmi``, from ROCm 6.2 on.

Sources of names and units: its Python interface in the releases 6.2.4 to 7.0.2, and the fields of its C structures.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcbench.worker.measure.gpu_device import HostGpus, NoSuchDevice, SmClock, numa_node, query_or_none

_TWO_DIE_IDS = frozenset({0x7408, 0x740C})
"""PCI numbers of MI250X and MI250, whose two dies are two devices: one of them has the counters of both."""
_WHOLE_DEVICE = (None, "SPX", "N/A", "")
"""Modes in which a device is not cut into partitions."""
_MIB = 2**20
_LEAST_USED_BYTES = 64 * _MIB
"""ROCm opens every device that a process may see: one with less memory there than this does not compute on it."""
_LIMIT_TICKS = {
    "power": ("ppt_residency_acc",),
    "thermal": ("prochot_residency_acc", "socket_thm_residency_acc", "vr_thm_residency_acc", "hbm_thm_residency_acc"),
}
"""Counts of the firmware's ticks at a limit; ``accumulation_counter`` counts all ticks."""


class Die(NamedTuple):
    """A device as the module ``amdsmi`` lists it."""

    library: Any
    handle: Any

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return the answer of ``amdsmi_<function>``, ``None`` where there is none."""
        return query_or_none(lambda: getattr(self.library, f"amdsmi_{function}")(self.handle, *arguments))

    def figure(self, function: str, field: str, *arguments: Any) -> float | None:
        """Return a number of the dictionary that ``amdsmi_<function>`` returns; ``None`` for "N/A"."""
        return _number((self.ask(function, *arguments) or {}).get(field))

    @property
    def address(self) -> str:
        return str(self.ask("get_gpu_device_bdf"))

    @property
    def has_twin(self) -> bool:
        asic = self.ask("get_gpu_asic_info") or {}
        return query_or_none(lambda: int(asic["device_id"], 16)) in _TWO_DIE_IDS

    @property
    def energy_j(self) -> float | None:
        """Ticks times their size in uJ; the field of the ticks had another name before ROCm 6.3."""
        count = self.ask("get_energy_count") or {}
        ticks, micro_j = count.get("energy_accumulator", count.get("power")), count.get("counter_resolution")
        return None if ticks is None or micro_j is None else float(ticks) * float(micro_j) / 1e6

    def clock_hz(self, kind: str, field: str) -> float | None:
        """Return a clock of the ``AmdSmiClkType`` of this name; amdsmi has MHz."""
        clock = query_or_none(lambda: self.library.AmdSmiClkType[kind])
        mhz = self.figure("get_clock_info", field, clock)
        return None if mhz is None else mhz * 1e6


class AmdDevice:
    """A device. Power and energy are its package's: of an MI250 those of two devices, counted by one of them.

    Args:
        die: the device.
        package: all devices of its package that are visible here.
        is_partition: a part of a device (DPX, QPX, CPX): counters of the whole device do not describe it.
    """

    def __init__(self, die: Die, package: Sequence[Die], is_partition: bool = False) -> None:
        self.die = die
        self.is_partition = is_partition
        self.energy_source = "amdsmi package" if die.has_twin else "amdsmi"
        self.energy_absent: str | None = None
        self._counting: Die | None = die
        if die.has_twin:
            counting = [one for one in package if one.energy_j]
            if len(package) != 2 or len(counting) != 1:
                self.energy_absent = (
                    f"{len(package)} of the 2 dies of the package of {die.address} are visible, "
                    f"and {len(counting)} of them count energy: it should be one of two"
                )
            self._counting = counting[0] if self.energy_absent is None else None
        if is_partition:
            self.energy_absent = "a partition of a device has no counter of energy of its own"
            self._counting = None
        self.counter = (self._counting or die).address
        self._first_ticks: tuple[float, dict[str, Any]] | None = None

    def energy_j(self) -> float | None:
        """Return the energy (J) of the package since the driver was loaded; ``None`` for a partition."""
        return self._counting.energy_j if self._counting else None

    def power_w(self) -> float | None:
        """Return the power (W) of the package: MI300 report the current one, MI200 a mean; ``None`` for a partition."""
        if self._counting is None:
            return None
        now, mean = (self._counting.figure("get_power_info", f"{kind}_socket_power") for kind in ("current", "average"))
        return now or mean

    def power_cap_w(self) -> float | None:
        """Return the limit (W) of the package's power; amdsmi has uW. ``None`` for a partition."""
        micro_w = self._counting.figure("get_power_cap_info", "power_cap") if self._counting else None
        return micro_w / 1e6 if micro_w else None

    def used_bytes(self) -> int | None:
        """Return the memory (bytes) that all processes use on the device; ``None`` for a partition."""
        used_mib = None if self.is_partition else self.die.figure("get_gpu_vram_usage", "vram_used")
        return None if used_mib is None else int(used_mib) * _MIB

    def other_processes(self, own_pids: set[int]) -> int | None:
        """Return the number of processes with memory on the device beside ``own_pids``; ``None`` for a partition.

        Where none is of ``own_pids`` the numbers may be the host's: then all but one, this rank's, are others.
        """
        found = None if self.is_partition else self.die.ask("get_gpu_process_list")
        if found is None:
            return None
        pids: set[int] | None = query_or_none(
            lambda: {one["pid"] for one in found if one["memory_usage"]["vram_mem"] >= _LEAST_USED_BYTES}
        )
        if pids is None:
            return None
        return len(pids - own_pids) if pids & own_pids else max(0, len(pids) - 1)

    def throttle_reasons(self) -> list[str]:
        """Return one reason for all on devices before MI300; later ones count the time at a limit (``violation_s``)."""
        return ["a limit of power or heat"] if self._metrics().get("indep_throttle_status") is True else []

    def violation_s(self) -> dict[str, float]:
        """Seconds for which power and heat have held the clock down since this was first asked; from MI300 on.

        The length of the firmware's tick is that of all ticks since then.
        """
        now = (time.monotonic(), self._metrics())
        self._first_ticks = self._first_ticks or now
        (then_s, then), (now_s, ticks) = self._first_ticks, now
        passed = _difference(then, ticks, "accumulation_counter")
        violations_s = {}
        for name, fields in _LIMIT_TICKS.items():
            counts = [count for field in fields if (count := _difference(then, ticks, field)) is not None]
            if counts and passed is not None:
                violations_s[name] = (now_s - then_s) * max(counts) / passed if passed else 0.0
        return violations_s

    def sm_clock(self) -> SmClock | None:
        """``None`` while the device is idle: its clock then means nothing."""
        now_hz, max_hz = self.die.clock_hz("GFX", "clk"), self.die.clock_hz("GFX", "max_clk")
        is_busy = self.die.figure("get_gpu_activity", "gfx_activity")
        return SmClock(now_hz, max_hz) if is_busy and now_hz and max_hz else None

    def _metrics(self) -> dict[str, Any]:
        return self.die.ask("get_gpu_metrics_info") or {}


def load_amd_smi() -> Any:
    """Return the module ``amdsmi``, ready; raises its exceptions without ROCm's library or a driver."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints where it has looked for the library
        import amdsmi
    amdsmi.amdsmi_init()
    return amdsmi


def open_amd_device(uuid: str) -> AmdDevice:
    """The device that torch for ROCm gives this ``uuid``.

    Raises:
        NoSuchDevice: amdsmi does not list it.
    """
    dies = _list_dies()
    die = _find_die(dies, _serial_number(uuid))
    if die is None:
        raise NoSuchDevice(f"amdsmi lists no device {uuid} among {len(dies)}")
    return AmdDevice(die, _package_of(die, dies), die.ask("get_gpu_compute_partition") not in _WHOLE_DEVICE)


def amd_smi_host(root: Path) -> HostGpus:
    """Facts of all devices of the host. The links between them are not read."""
    dies = _list_dies()
    driver = (dies[0].ask("get_gpu_driver_info") or {}).get("driver_version") if dies else None
    return HostGpus(driver, [_gpu_facts(die, root) for die in dies], [])


def _list_dies() -> list[Die]:
    library = load_amd_smi()
    return [Die(library, handle) for handle in library.amdsmi_get_processor_handles()]


def _gpu_facts(die: Die, root: Path) -> dict[str, Any]:
    asic = die.ask("get_gpu_asic_info") or {}
    total_mib, cap_uw = die.figure("get_gpu_vram_usage", "vram_total"), die.figure("get_power_cap_info", "power_cap")
    facts = {
        "model": asic.get("market_name"),
        "uuid": asic.get("asic_serial"),
        "pci": die.address,
        "numa_node": numa_node(die.address, root),
        "memory_bytes": None if total_mib is None else int(total_mib) * _MIB,
        "power_limit_w": cap_uw / 1e6 if cap_uw else None,
        "partition": die.ask("get_gpu_compute_partition"),
        "max_sm_hz": die.clock_hz("GFX", "max_clk"),
        "max_memory_hz": die.clock_hz("MEM", "max_clk"),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _serial_number(uuid: str) -> str:
    """Return the 16 digits that HIP writes as text into the 16 bytes of a uuid, which torch shows byte by byte."""
    digits = uuid.replace("-", "").lower()
    text = query_or_none(lambda: bytes.fromhex(digits).decode("ascii"))
    return str(text).lower() if text and query_or_none(lambda: int(text, 16)) is not None else digits


def _find_die(dies: Sequence[Die], serial: str) -> Die | None:
    """Return the one device with this number: by HIP's own where amdsmi has it (6.4), else by the serial number."""
    for function, field in (("get_gpu_enumeration_info", "hip_uuid"), ("get_gpu_asic_info", "asic_serial")):
        numbers = [str((die.ask(function) or {}).get(field)).lower() for die in dies]
        found = [
            die
            for die, number in zip(dies, numbers, strict=True)
            if number.removeprefix("gpu-").removeprefix("0x") == serial
        ]
        if len(found) == 1:
            return found[0]
    return None


def _package_of(die: Die, dies: Sequence[Die]) -> list[Die]:
    """Return the devices in the package of ``die``: of those with two dies, two neighbours by their PCI addresses."""
    if not die.has_twin:
        return [die]
    twins = sorted((one for one in dies if one.has_twin), key=lambda one: one.address)
    first = [one.address for one in twins].index(die.address) // 2 * 2
    return twins[first : first + 2]


def _difference(before: dict[str, Any], after: dict[str, Any], field: str) -> float | None:
    first, last = _number(before.get(field)), _number(after.get(field))
    return None if first is None or last is None or last < first else last - first


def _number(value: Any) -> float | None:
    """A number that a device reports; ``None`` for "N/A"."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
