"""Profiles of the day's machine: one device for itself, and the same device shared by several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_day.parts import SHARED_RANKS, Device
from hpcbench.config.cluster_profile import ClusterProfile, load_cluster_file
from hpcbench.config.sweep_file import settings_lines

NODES = {"H100": "h100-80gb-ib", "H200": "h200-141gb-ib"}
"""The shipped profile whose figures a device has, by a part of its name."""
LARGE_MEMORY = ("H200",)


class DayProfiles(NamedTuple):
    """The profile of timed runs, and that of runs whose ranks share the device."""

    alone: ClusterProfile
    shared: ClusterProfile
    files: dict[str, Path]

    def of(self, is_shared: bool) -> ClusterProfile:
        return self.shared if is_shared else self.alone


def device_key(name: str | None) -> str | None:
    """Return the key of ``NODES`` that the device's ``name`` contains; ``None`` if predictions know it not."""
    return next((key for key in NODES if name is not None and key in name), None)


def write_profiles(folder: Path, device: Device, name: str | None, cores: int) -> DayProfiles:
    """Write both profiles into ``folder`` and load them.

    Args:
        folder: Created if it is missing.
        device: Of the day.
        name: The GPU's name; ``None`` on a cpu.
        cores: Of the machine, for a rank that has it alone.
    """
    key = device_key(name)
    kind = "cpu" if device == "cpu" else (key or "gpu").lower()
    common: dict[str, Any] = {
        "extends": NODES[key] if key else "local", "launcher": "torchrun", "device": device, "time_limit_min": 5,
        "scheduler": {"kind": "local", "warning_s": 5.0}, "network": {"wait_s": 60.0},
    }  # fmt: skip
    devices = {} if device == "cpu" else {"devices": 1}
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for suffix, ranks in (("", 1), ("-shared", SHARED_RANKS)):
        data = {
            "name": f"gpu-day-{kind}{suffix}", **common,
            "node": {**devices, "ranks_per_device": ranks},
            # Threads that wait for each other keep the cores of a cpu from other ranks.
            "request": {"cpus_per_task": 1 if device == "cpu" else max(1, cores // ranks)},
        }  # fmt: skip
        files[data["name"]] = folder / f"{data['name']}.toml"
        files[data["name"]].write_text("\n".join([*settings_lines(data), ""]))
    alone, shared = (load_cluster_file(path)[0] for path in files.values())
    return DayProfiles(alone, shared, files)
