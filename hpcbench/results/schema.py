"""What a run leaves behind. JSON holds SI base units and bytes only; what was not measured is absent, never zero."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from hpcbench.config.spec import RunSpec

SCHEMA_VERSION = 1

OK = "ok"
STATUSES = ("ok", "oom", "unsupported", "failed", "timeout", "cancelled", "preempted", "skipped")
"""How a run can have ended. Exit code 1 is for those of ``FAILED``."""
FAILED = frozenset({"failed", "timeout", "cancelled", "preempted"})


class _Record(msgspec.Struct, omit_defaults=True):
    """Absent means not measured; a reader ignores fields that a later version added."""


class Spread(_Record, kw_only=True):
    """Seconds of the timed steps that count, without those of ``warmup_found_steps``.

    The interval is the 95 % block bootstrap of the median over the steps of this one launch: it says nothing of what
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


class Loss(_Record, kw_only=True):
    """Mean loss per sample of the first and the last step; absent where it diverged."""

    first: float | None = None
    last: float | None = None


class Metrics(_Record, kw_only=True):
    """Rates are global (all ranks); of every step the slowest rank's time counts."""

    step_time_s: Spread | None = None
    samples_per_s: float | None = None
    epoch_time_s: float | None = None
    compute_s: float | None = None
    """Of a profiled step, as the parts below: those of the rank that computes longest."""
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    comm_s: float | None = None
    exposed_comm_s: float | None = None
    data_s: float | None = None
    bubble_fraction: float | None = None
    flops_per_s: float | None = None
    """Of all devices: the model's own operations (forward and backward, no recomputation) over the step time."""
    mfu: float | None = None
    """``flops_per_s`` over the devices' peak in the run's precision."""
    peak_memory_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    time_to_first_step_s: float | None = None
    loss: Loss | None = None
    accuracy: float | None = None
    time_to_accuracy_s: float | None = None
    """Training time, warm-up included and evaluation excluded, until ``target_accuracy`` was reached."""
    steps_to_accuracy: int | None = None
    energy_j: float | None = None
    """Of the devices over the timed steps."""
    energy_source: str | None = None
    warmup_found_steps: int | None = None
    """Timed steps at the beginning that were still slower; they are in no figure."""
    outlier_steps: int | None = None
    """Of the steps that count, those far above the median; they are in all figures."""
    drift: float | None = None
    """Change of the step time from the first to the last timed step, as a share of the median."""


class Failure(_Record, kw_only=True):
    """Why a run did not end well."""

    type: str
    message: str
    hint: str | None = None
    traceback_tail: str | None = None


class Phases(_Record, kw_only=True):
    """Where a step's time went on one rank, in seconds."""

    step_s: float
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    compute_s: float | None = None
    comm_s: float | None = None
    """While any collective or message was under way."""
    exposed_comm_s: float | None = None
    """As ``comm_s``, where nothing was computed meanwhile."""


class Evaluation(_Record, kw_only=True):
    """The model on the held-out samples after ``step`` steps (warm-up included)."""

    step: int
    train_time_s: float
    accuracy: float


class Verification(_Record, kw_only=True):
    """The run's strategy against the single-device reference: max|a - b| / max(1, max|b|), the worst tensor's."""

    passed: bool
    tolerance: float
    steps: int
    loss_max_rel: float
    gradient_max_rel: float | None = None
    weight_max_rel: float | None = None
    worst: str | None = None
    """The tensor that differs most."""
    notes: list[str] = []


class RankResult(_Record, kw_only=True):
    """What one rank measured; written by that rank alone."""

    rank: int
    local_rank: int
    node_rank: int
    replica: int = 0
    """The data-parallel replica that this rank belongs to."""
    status: str = OK
    error: Failure | None = None
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
    """Of every step, warm-up included: the sum over this rank's samples over the step's global sample count."""
    peak_memory_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    time_to_first_step_s: float | None = None
    accuracy: float | None = None
    evaluations: list[Evaluation] = []
    phases: Phases | None = None
    """Of one profiled step: the median of all."""
    energy_j: float | None = None
    energy_source: str | None = None
    flops_per_sample: float | None = None
    """Forward and backward, of the whole model."""
    verification: Verification | None = None
    warnings: list[str] = []
    provenance: dict[str, Any] = {}


class RunResult(_Record, kw_only=True):
    """``result.json``."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    config_id: str
    attempt: int
    sweep: str
    cluster: str
    status: str
    spec: RunSpec
    metrics: Metrics = msgspec.field(default_factory=Metrics)
    ranks: list[dict[str, Any]] = []
    step_times_s: list[float] = []
    """Of every timed step, the slowest rank's."""
    warnings: list[str] = []
    verification: Verification | None = None
    provenance: dict[str, Any] = {}
    environment_digest: str | None = None
    error: Failure | None = None


BROKEN = "broken"
"""The status of a result whose file cannot be read as one."""


class ResultHead(NamedTuple):
    """What is needed of a result to know whether its run is done."""

    status: str
    """One of ``STATUSES``, or ``broken``."""
    attempt: int = 0
    message: str = ""
    """Why it did not end well."""
    environment_key: str | None = None
    """What the submitter knew of the software that it was measured with."""


def result_json(result: RunResult) -> dict[str, Any]:
    """``result`` as it stands in its file: the schema's version is always named."""
    return {"schema_version": result.schema_version, **msgspec.to_builtins(result)}
