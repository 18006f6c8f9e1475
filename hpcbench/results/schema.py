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
    """A sample in seconds. The interval is the 95 % block bootstrap of the median over the steps of one launch."""

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
    comm_s: float | None = None
    exposed_comm_s: float | None = None
    data_s: float | None = None
    bubble_fraction: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    time_to_first_step_s: float | None = None
    loss: Loss | None = None
    accuracy: float | None = None
    energy_j: float | None = None


class Failure(_Record, kw_only=True):
    """Why a run did not end well."""

    type: str
    message: str
    hint: str | None = None
    traceback_tail: str | None = None


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
    verification: dict[str, Any] | None = None
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
