"""The records of ``result.json`` and of the rank files.

JSON holds SI base units and bytes only; values that were not measured are absent, never zero.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.device_records import DevicePower, HostActivity
from hpcbench.results.probe_records import CommandOutcome, ProbeResults
from hpcbench.strategies.traffic import Traffic

SCHEMA_VERSION = 1

STATUS_OK = "ok"
STATUSES = ("ok", "oom", "unsupported", "failed", "timeout", "cancelled", "preempted", "skipped")
"""Statuses of an ended run. Exit code 1 is for those of ``FAILED_STATUSES``."""
FAILED_STATUSES = frozenset({"failed", "timeout", "cancelled", "preempted"})


class _ResultRecord(msgspec.Struct, omit_defaults=True):
    """Absent means not measured; a reader ignores unknown fields."""


class StepTimeStatistics(_ResultRecord, kw_only=True):
    """Seconds of the timed steps that count, without those of ``warmup_found_steps``.

    The interval is the 95 % block bootstrap of the median over the steps of this one launch: it does not contain what
    another launch would measure.
    """

    median: float
    mean: float
    std: float
    p10: float
    p90: float
    min: float
    max: float
    ci95_low: float
    ci95_high: float


class LossSummary(_ResultRecord, kw_only=True):
    """Mean loss per sample of the first and the last step; absent where it diverged."""

    first: float | None = None
    last: float | None = None


class RunMetrics(_ResultRecord, kw_only=True):
    """Rates are global (all ranks), over ``timed_s``; ``step_time_s`` takes every step's time on its slowest rank."""

    step_time_s: StepTimeStatistics | None = None
    samples_per_s: float | None = None
    """Samples of the steps that count over ``timed_s``."""
    timed_s: float | None = None
    """The interval of the steps that count, on the rank on which it is longest; evaluations are left out."""
    tokens_per_s: float | None = None
    """``samples_per_s`` times the length of a sample, of data sets of tokens."""
    tokens_per_s_per_device: float | None = None
    epoch_time_s: float | None = None
    slowest_rank: int | None = None
    """The rank that was the slowest in most of the steps that count; absent of a single rank."""
    slowest_rank_share: float | None = None
    """Share of the steps that count in which it was."""
    rank_max_over_median: float | None = None
    """A step's time on its slowest rank over the median of all ranks; the median over the steps that count."""
    phases_rank: int | None = None
    """The rank that computes longest: all parts of a profiled step below are those of this rank."""
    compute_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    comm_s: float | None = None
    exposed_comm_s: float | None = None
    wire_s: float | None = None
    """The shortest ``comm_s`` of all ranks: the last rank to join a collective waits for none. Absent for pipelines,
    whose stages have different messages."""
    wait_s: float | None = None
    """Mean over ranks of ``comm_s`` beyond ``wire_s``: the time that a rank waits for others while it communicates."""
    data_s: float | None = None
    bubble_fraction: float | None = None
    flops_per_s: float | None = None
    """FLOP/s of all devices: the model's own operations (forward and backward, no recomputation) over ``timed_s``."""
    mfu: float | None = None
    """``flops_per_s`` over the devices' peak in the run's precision."""
    hfu: float | None = None
    """The ``mfu`` that also counts the forward passes of recomputation."""
    peak_memory_bytes: int | None = None
    """Since the process began: set-up and warm-up included."""
    steady_peak_memory_bytes: int | None = None
    """Since the first timed step."""
    peak_reserved_bytes: int | None = None
    time_to_first_step_s: float | None = None
    loss: LossSummary | None = None
    """Mean loss per sample of the `first` and the `last` step; absent where it diverged."""
    accuracy: float | None = None
    time_to_accuracy_s: float | None = None
    """Training time, warm-up included and evaluation excluded, until ``target_accuracy`` was reached."""
    time_to_accuracy_with_evaluation_s: float | None = None
    """The ``time_to_accuracy_s`` with the time of all evaluations, also of the one that reached the target."""
    steps_to_accuracy: int | None = None
    energy_j: float | None = None
    """Energy (J) of the devices over the timed steps."""
    energy_per_sample_j: float | None = None
    energy_per_token_j: float | None = None
    """``energy_per_sample_j`` over the length of a sample, of data sets of tokens."""
    idle_power_w: float | None = None
    """Power (W) of all devices before the ranks built their models, over each counter once."""
    power_cap_w: float | None = None
    """Limit of the power (W) of a device, or of a package of two; the lowest of all."""
    energy_source: str | None = None
    energy_includes: str | None = None
    """The parts of the machine whose energy is counted: figures of different parts are not comparable."""
    warmup_found_steps: int | None = None
    """Timed steps at the beginning that were still slower; every figure excludes them."""
    outlier_steps: int | None = None
    """Number of steps far above the median, among those that count; all figures include them."""
    drift: float | None = None
    """Change of the step time from the first to the last timed step, as a share of the median."""
    wall_time_s: float | None = None
    """From the start of a command's processes to the end of the last one."""
    own: dict[str, StepTimeStatistics | float] = {}
    """Metrics of a command by name; in JSON they stand beside the others."""


class FailureRecord(_ResultRecord, kw_only=True):
    """The error that ended a run or a rank."""

    type: str
    """Class of the exception, or one of ``Stopped``, ``Preempted``, ``VerificationFailed``, ``RankLost``, ``NoResult``,
    ``SchedulerEnded``."""
    message: str
    """The error in one or a few lines."""
    hint: str | None = None
    """A remedy."""
    traceback_tail: str | None = None
    """The last lines of the traceback or of the log."""
    nodes: str | None = None
    """The nodes of the job, in the scheduler's notation, if its ranks left no reason."""

    @property
    def lacks_software(self) -> bool:
        """Whether a package or module was missing: another environment may have it."""
        is_missing = self.type in ("MissingModule", "ModuleNotFoundError", "ImportError")
        return is_missing or re.search("pip install|build_horovod", self.hint or "") is not None

    @classmethod
    def of_module(cls, message: str) -> FailureRecord:
        """The failure of a run whose job script could not load a module; ``message`` names it and its host."""
        hint = "see `module avail`; the modules are those of the environment in the cluster's profile"
        return cls(type="MissingModule", message=message, hint=hint)


class StepPhases(_ResultRecord, kw_only=True):
    """The parts of a step's time on one rank, in seconds."""

    step_s: float
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    compute_s: float | None = None
    comm_s: float | None = None
    """Time in which any collective or message was running."""
    exposed_comm_s: float | None = None
    """Seconds of ``comm_s`` in which nothing was computed."""


class EvaluationPoint(_ResultRecord, kw_only=True):
    """The model on the held-out samples after ``step`` steps (warm-up included)."""

    step: int
    train_time_s: float
    wall_s: float | None = None
    """Since the first step began, evaluations included."""
    accuracy: float


class ReferenceComparison(_ResultRecord, kw_only=True):
    """A strategy's training against its reference: max|a - b| / max(1, max|b|), the worst tensor's.

    A figure is absent where a tensor is missing, is not finite, or was not compared (``notes`` has the reason).
    """

    passed: bool
    precision: str
    """The arithmetic of both."""
    tolerance: float
    """Tolerance of losses and weights; the first step may have a smaller one, and the last gradients have this one
    divided by the learning rate. The largest of any tensor where ``orders`` give each its own."""
    gradient_tolerance: float | None = None
    """The largest of any gradient, where ``orders`` give each its own."""
    orders: list[str] = []
    """Orders of summation in which one device was trained: its own distance from fp64 bounds every tensor.
    None where the bound is a constant.
    """
    steps: int
    loss_max_rel: float | None = None
    gradient_max_rel: float | None = None
    """Largest difference of the gradients of the first step and of the last one."""
    weight_max_rel: float | None = None
    """Parameters and buffers."""
    worst: str | None = None
    """Loss or tensor with the largest difference relative to its tolerance; a gradient of the first step, where any of
    these exceeds its tolerance."""
    worst_rel: float | None = None
    worst_tolerance: float | None = None


class VerificationResult(ReferenceComparison, kw_only=True):
    """The decisive comparison, in fp64; ``passed`` is both's."""

    own_precision: ReferenceComparison | None = None
    """The first step once more, in the run's own arithmetic."""
    notes: list[str] = []
    """Reasons for figures that are absent, and for tolerances that were changed."""


class PipelinePrediction(_ResultRecord, kw_only=True):
    """A pipeline's step as its schedule gives it with measured times of blocks: no communication, no updates."""

    step_time_s: float
    bubble_fraction: float
    cuts: list[int] = []
    """First block of every stage (or chunk) but the first."""
    stage_times_s: list[float] = []
    """Computation time of each stage (or chunk) for one micro-batch."""


class HostSyncs(_ResultRecord, kw_only=True):
    """Waits of a rank's host for its cuda device within the profiled steps, without the one that ends each step, and
    the host's launches."""

    per_step: int
    """The largest number in a step."""
    calls: dict[str, int] = {}
    """Number over all profiled steps by the name of the runtime's call, such as ``cudaStreamSynchronize``."""
    pageable_copies: int | None = 0
    """Copies between the device and host memory that is not pinned, over all profiled steps; absent where the profiler
    recorded no events of the device."""
    launches: int | None = 0
    """Kernels and copies that the host starts on the device in a step: the median; absent as the copies are."""
    sites: list[str] = []
    """``file:line`` of the waits that torch reports, of code outside of torch."""


class TimelineSpan(NamedTuple):
    """One action of a pipeline's schedule: ``F``, ``B``, ``I``, ``W``, and when it was running."""

    kind: str
    chunk: int
    micro_batch: int
    begin_s: float
    end_s: float


class RankTimeline(_ResultRecord, kw_only=True):
    """The actions of one rank of a pipeline in an untimed step."""

    rank: int
    planned: list[TimelineSpan] = []
    measured: list[TimelineSpan] = []


class PipelineTimeline(_ResultRecord, kw_only=True):
    """An untimed step of a pipeline's first replica, action by action, over what its schedule makes of the measured
    durations (each chunk's median) where messages cost nothing."""

    bubble_fraction: float | None = None
    planned_bubble_fraction: float | None = None
    measured_s: float | None = None
    planned_s: float | None = None
    ranks: list[RankTimeline] = []


class RankTraffic(_ResultRecord, kw_only=True):
    """The collectives and messages of one rank in one step."""

    rank: int
    calls: list[Traffic]


class RankResult(_ResultRecord, kw_only=True):
    """The measurements of one rank; written by that rank alone."""

    rank: int
    local_rank: int
    node_rank: int
    replica: int = 0
    """The data-parallel replica that this rank belongs to."""
    status: str = STATUS_OK
    error: FailureRecord | None = None
    host: str
    pid: int
    device: str
    cpu_mask: list[int] = []
    steps_done: int = 0
    """Timed steps."""
    step_times_s: list[float] = []
    step_samples: list[int] = []
    """Samples of this rank's replica in each timed step."""
    losses: list[float | None] = []
    """Loss of every step, warm-up included: the sum over this rank's samples over the step's global sample count."""
    peak_memory_bytes: int | None = None
    steady_peak_memory_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    time_to_first_step_s: float | None = None
    accuracy: float | None = None
    evaluations: list[EvaluationPoint] = []
    phases: StepPhases | None = None
    """Parts of a profiled step: medians over all profiled steps."""
    host_syncs: HostSyncs | None = None
    """Absent on a cpu and without a profile."""
    timeline: list[TimelineSpan] = []
    """Actions of a pipeline's rank in an untimed step, in seconds since the ranks began it together."""
    state: str | None = None
    """State of a pipeline's rank when the run failed."""
    traffic: list[Traffic] = []
    """Operations of one step with a whole batch; equal calls are one entry."""
    energy_j: float | None = None
    energy_source: str | None = None
    device_power: dict[str, DevicePower] = {}
    """The key names the counter: uuid of an NVIDIA device, PCI address of an AMD one, one for both dies of an MI250."""
    flops_per_sample: float | None = None
    """Forward and backward, of the whole model."""
    recomputed_flops_per_sample: float | None = None
    """FLOP of the forward passes that activation checkpointing repeats, 0 without any."""
    predicted: PipelinePrediction | None = None
    probe: ProbeResults | None = None
    verification: VerificationResult | None = None
    watched: HostActivity | None = None
    command: CommandOutcome | None = None
    warnings: list[str] = []
    provenance: dict[str, Any] = {}


class RunResult(_ResultRecord, kw_only=True):
    """The result of one run, ``result.json``: times in seconds, memory in bytes, rates per second.

    ``ClusterTree.write_result`` writes it and ``ClusterTree.read_result`` reads it.
    """

    schema_version: int = SCHEMA_VERSION
    """Version of this format."""
    run_id: str
    """Hash of ``spec``, 16 hexadecimal digits: the name of the run's folder."""
    config_id: str
    """Hash of ``spec`` without repeat, seed and verify: equal for the launches of one configuration."""
    attempt: int
    """Number of the attempt that left the result, from 1; 0 if no rank started."""
    sweep: str
    """Name of the sweep that the run was submitted with."""
    cluster: str
    """Name of the cluster's profile."""
    status: str
    """``ok``, ``oom``, ``unsupported``, ``failed``, ``timeout``, ``cancelled``, ``preempted`` or ``skipped``."""
    ended_at_s: float | None = None
    """Unix time (s) at which the result was recorded, or at which its job ended without one. Readers take the time of
    the file where it is absent."""
    spec: RunSpec
    """All parameters of the run."""
    metrics: RunMetrics = msgspec.field(default_factory=RunMetrics)
    """Figures of the whole run, over all ranks."""
    predicted: PipelinePrediction | None = None
    """Predicted step of a run that has measured its blocks, for comparison with ``metrics``."""
    ranks: list[dict[str, Any]] = []
    """Figures and host of every rank, in the order of ranks."""
    step_times_s: list[float] = []
    """Time of every timed step on its slowest rank."""
    traffic: RankTraffic | None = None
    """Traffic of one step with a whole batch, on the rank that passes most bytes."""
    untimed: str | None = None
    """The reason why the run has no times although it has steps: its ranks shared a device."""
    warnings: list[str] = []
    """Reasons to distrust a figure, as printed below tables."""
    verification: VerificationResult | None = None
    """Comparison with the single-device reference, if ``verify`` is set."""
    probe: ProbeResults | None = None
    """Measurements of a calibration run."""
    timeline: PipelineTimeline | None = None
    """Times of a pipeline's schedule actions in one step."""
    provenance: dict[str, Any] = {}
    """Software, hosts, devices and job that the run was measured with."""
    environment_digest: str | None = None
    """Hash of the part of ``provenance`` that can change figures."""
    units: dict[str, str] = {}
    """Unit of each metric of a command."""
    better: dict[str, str] = {}
    """``lower`` or ``higher``: the better direction of each metric of a command."""
    error: FailureRecord | None = None
    """The reason of a status other than ``ok``."""


STATUS_BROKEN = "broken"
"""The status of a result whose file cannot be read as one."""


class ResultSummary(NamedTuple):
    """The fields of a result that decide whether its run is done."""

    status: str
    """One of ``STATUSES``, or ``broken``."""
    attempt: int = 0
    message: str = ""
    """The reason why the run did not end well; empty if it did."""
    environment_key: str | None = None
    """Hash of the software that it was measured with, as the submitter saw it."""
    lacks_software: bool = False
    """It is ``unsupported`` because a package or a module was missing."""
    failed_on: str | None = None
    """The nodes of the job that failed and left no reason."""
    ended_at_s: float | None = None
    """Unix time (s) of the result, if it states one that can be."""


def result_document(result: RunResult) -> dict[str, Any]:
    """Return ``result`` as plain data, as it is in its file: with ``schema_version``, without fields at defaults.

    Metrics of a command stand beside the others; one of the same name is the command's.
    """
    document = {"schema_version": result.schema_version, **msgspec.to_builtins(result)}
    if result.metrics.own:
        document["metrics"] |= document["metrics"].pop("own")
    return document


def result_of_document(document: dict[str, Any]) -> RunResult:
    """Return a result with metrics of its own from its file's data. Raises ``msgspec.ValidationError``."""
    metrics, names = document.get("metrics"), document.get("better")
    if isinstance(metrics, dict) and isinstance(names, dict):
        own = {name: metrics.pop(name) for name in names if name in metrics}
        document = {**document, "metrics": {**metrics, "own": own}}
    return msgspec.convert(document, RunResult)
