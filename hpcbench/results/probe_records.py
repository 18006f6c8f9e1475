"""Records of a calibration's measurements and of a command's process, in results and rank files; and of dry runs."""

from __future__ import annotations

from typing import Literal

import msgspec

from hpcbench.config.run_spec import RunSpec


class _ProbeRecord(msgspec.Struct, omit_defaults=True):
    """Absent means not measured."""


class BlockProbe(_ProbeRecord, kw_only=True):
    """One block of the model as a whole: medians of seconds, the mean of all ranks that ran it side by side.

    On a cpu with one thread these are its processor seconds, on cuda the device's.
    """

    block: int
    """Place in the model's sequence of blocks; one past the last for the loss."""
    samples: int
    forward_s: float
    backward_s: float | None = None
    """Absent where nothing flows back."""
    spread: float
    """Relative: half of what lies between the 16th and the 84th percentile."""
    repeats: int


class UpdateProbe(_ProbeRecord, kw_only=True):
    """The optimizer on one tensor."""

    optimizer: str
    parameter_bytes: int
    seconds: float
    spread: float
    repeats: int


class CollectiveProbe(_ProbeRecord, kw_only=True):
    """One call of many that followed each other: the slowest rank's seconds, the median of all repeats."""

    operation: str
    """One of ``strategies.traffic.COMM_OPERATIONS``."""
    ranks: int
    """Number of ranks of one group."""
    nodes: int
    payload_bytes: int
    """Bytes, counted as in ``strategies.traffic.Traffic``."""
    groups: int = 1
    """That did the same at the same time."""
    pair: list[int] = []
    """The two ranks of a message between two nodes, of a run with ``operation = "pairs"``."""
    readings_s: list[float] = []
    """All readings after the warm-up, of a run that measures one operation."""
    seconds: float
    spread: float
    repeats: int


class OverlapProbe(_ProbeRecord, kw_only=True):
    """Computation and collectives, each alone and both together, in seconds; medians of the slowest rank."""

    operation: str = "all_reduce"
    calls: int = 1
    """Collectives that were begun one after another, before the computation."""
    ranks: int
    nodes: int
    payload_bytes: int
    """Payload of one call."""
    compute_s: float
    comm_s: float
    compute_under_comm_s: float
    """The same computation while the collectives were running."""
    both_s: float
    """Time until both had ended."""
    issue_s: float
    """Time until the calls that begin the collectives returned."""
    repeats: int


class ProbeResults(_ProbeRecord, kw_only=True):
    """The measurements of a probe's run."""

    base_memory_bytes: int | None = None
    """Peak of the process before it had any tensor of the run, counted as ``peak_memory_bytes``."""
    updates: list[UpdateProbe] = []
    collectives: list[CollectiveProbe] = []
    overlaps: list[OverlapProbe] = []
    blocks: list[BlockProbe] = []
    pass_s: float | None = None
    """Seconds that pass while all blocks run forward and backward once, without a clock between them: with what a CPU
    quota or other processes hold back, and what the host takes to launch kernels."""


DryRunOutcome = Literal["ok", "oom", "unsupported", "not_fakeable", "error"]


class CommandOutcome(_ProbeRecord, kw_only=True):
    """The process of a command that one rank started."""

    argv: list[str]
    exit_code: int | None = None
    wall_s: float | None = None
    values: dict[str, list[float]] = {}
    """Values of each metric, in the order in which they were printed."""
    outputs: list[str] = []
    """Files of the run's folder that are kept beside the result."""


class DryRunTask(msgspec.Struct, frozen=True, kw_only=True):
    """A run to build and to step on fake tensors."""

    index: int
    """Returned with the answer."""
    spec: RunSpec
    device: str
    """``cpu`` or ``cuda``: the device that the run would have."""
    ranks: tuple[int, ...] = ()
    """The ranks to step; all where it is empty."""
    model_folder: str | None = None
    """Absolute path of the folder of custom models."""
    limit_s: float = 120.0
    """Seconds for one rank, after which the worker process ends itself."""


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A step of one rank; for several ranks the largest value of each figure."""

    peak_memory_bytes: int
    """Live tensor bytes at their peak."""
    peak_layer: str
    """The module that holds the most bytes at the peak, or the part of the step if no module holds any."""
    running_layer: str = ""
    """The module whose operator runs at the peak, or the part of the step."""
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
    outcome: DryRunOutcome
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
