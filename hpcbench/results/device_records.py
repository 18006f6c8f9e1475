"""Records of a rank's host and devices around its timed steps."""

from __future__ import annotations

import msgspec


class _DeviceRecord(msgspec.Struct, omit_defaults=True):
    """Absent means not measured."""


class DevicePower(_DeviceRecord, kw_only=True):
    """Power and energy that one counter of devices has; what cannot be read is absent."""

    energy_j: float | None = None
    """Energy over the timed steps."""
    idle_power_w: float | None = None
    """Power before the rank built its model."""
    power_cap_w: float | None = None
    steps_power_w: float | None = None
    """Mean power while a command's timed steps ran; its ``energy_j`` is that of the whole program."""


class HostActivity(_DeviceRecord, kw_only=True):
    """The activity of a rank's host during its timed steps; counters that could not be read are absent."""

    wall_s: float
    busy_s: list[float] = []
    """Seconds that processes used on every core of the rank's mask, whether or not they belong to this run."""
    stolen_s: list[float] = []
    """Seconds that a hypervisor gave to other virtual machines, on every core of the rank's mask."""
    own_s: float | None = None
    """Processor time of this rank's process and of what it started."""
    throttled_s: float | None = None
    """Seconds for which a CPU quota held back threads of this rank's control groups."""
    cpu_quota_cores: float | None = None
    hot_events: int | None = None
    """Number of times that a core or its package lowered its clock because of heat."""
    core_hz: list[float] = []
    """Mean clock of the mask's cores: before, after."""
    gpu_others: int | None = None
    """Other processes that computed on the rank's GPU, before or after."""
    gpu_reasons: list[str] = []
    """The reasons for which the GPU's clock was held down, before or after."""
    gpu_held_s: dict[str, float] = {}
    """Seconds for which a limit held the GPU's clock down, by limit: ``power``, ``thermal``."""
    gpu_sm_hz: list[float] = []
    """The higher of the clocks before and after, and the most that it can have."""
