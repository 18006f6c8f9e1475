"""The records of dry runs: what the worker's program is asked and answers for a shape, and what a user sees."""

from __future__ import annotations

from typing import Literal

import msgspec

from hpcbench.config.run_spec import RunSpec

DryRunOutcome = Literal["ok", "oom", "unsupported", "not_fakeable"]


class DryRunTask(msgspec.Struct, frozen=True, kw_only=True):
    """A run to build and to step on fake tensors."""

    index: int
    """Returned with the answer."""
    spec: RunSpec
    device: str
    """``cpu`` or ``cuda``: the device that the run would have."""
    model_folder: str | None = None
    """Absolute path of the folder of custom models."""


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A step of one rank; for several ranks the largest value of each figure."""

    peak_memory_bytes: int
    """Live tensor bytes at their peak."""
    peak_layer: str
    """The module whose operator ran at the peak, or the phase of the step if no module did."""
    operators: int
    """Operators that compute or copy: about one kernel each."""
    collectives: int
    """Collectives and sends."""
    host_syncs: int
    """Waits of the host for the device."""
    host_sync_sites: list[str] = []
    """``file:line: reason`` of each wait, without repetitions."""
    modelled: list[str] = []
    """Stand-ins for code that does not run on fake tensors."""


class DryRunAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's answer to a task."""

    index: int
    outcome: Literal["ok", "unsupported", "not_fakeable"]
    seconds: float
    reason: str | None = None
    figures: StepFigures | None = None
    """``None`` unless the outcome is ``ok``."""


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """The dry run of one configuration. Figures are ``None`` if it could not be stepped; see ``StepFigures``."""

    config_id: str
    spec: RunSpec
    outcome: DryRunOutcome
    reason: str | None
    """The message that a run would leave; ``None`` if it would be ok."""
    peak_memory_bytes: int | None
    peak_layer: str | None
    operators: int | None
    collectives: int | None
    host_syncs: int | None
    host_sync_sites: list[str]
    modelled: list[str]
    seconds: float
    """Time of the dry run; 0 if it shares the step of a configuration before it."""
