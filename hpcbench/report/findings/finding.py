"""Data types of findings: a statement with certainty and evidence, and the configurations that it compares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import polars as pl

from hpcbench.config.run_spec import RunSpec, strategy_label
from hpcbench.fileio import printable_excerpt
from hpcbench.report.column_names import Condition
from hpcbench.report.configurations import (
    CONFIGURATION_KEYS,
    STEP_TIME,
    THROUGHPUT,
    WORKLOAD_COLUMNS,
    aggregate_launches,
    decode_warnings,
    run_spec_of,
    varying_parameters,
    with_speedups,
)
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK
from hpcbench.units import pluralize

Certainty = Literal["significant", "equivalent", "inconclusive", "observed"]
OBSERVED: Literal["observed"] = "observed"
"""Measured or counted as it stands, without any inference; the other values are those of ``hypothesis_tests``."""

FINDING_KINDS = {
    "fastest": "Fastest",
    "crossover": "Crossovers of the fastest",
    "efficiency": "Efficiency",
    "model": "Steps beside the oracle's model",
    "memory": "Memory",
    "node": "Nodes and links",
    "failure": "Failures",
    "doubt": "Data-quality warnings",
}
"""Kinds of findings in the order of the report, and their headings."""


@dataclass(frozen=True)
class EvidenceRow:
    """A configuration behind a finding; the throughput is of all ranks, the median over launches."""

    strategy: str
    nodes: int
    devices: int
    batch_size: int
    global_batch_size: int
    status: str
    config_id: str
    run_id: str
    launches: int = 0
    samples_per_s: float | None = None
    samples_per_s_low: float | None = None
    samples_per_s_high: float | None = None
    step_time_s: float | None = None
    efficiency: float | None = None
    peak_memory_bytes: int | None = None
    environment_digest: str | None = None


@dataclass(frozen=True)
class Finding:
    """A statement about ``subject`` (workload, cluster and scale); the fields are keys of ``report --json``."""

    kind: str
    subject: str
    text: str
    sure: Certainty
    why: str = ""
    """Reason for the certainty, or for its absence."""
    settle: str = ""
    """Measurements that would resolve an inconclusive finding; else a hint."""
    doubts: tuple[str, ...] = ()
    """Caveats."""
    cluster: str = ""
    nodes: int | None = None
    devices: int | None = None
    strategy: str = ""
    """The strategy that the text names first."""
    rival: str = ""
    ratio: float | None = None
    """Ratio of the compared throughputs, with its 95 % interval."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    evidence: tuple[EvidenceRow, ...] = field(default=())
    slow_nodes: tuple[str, ...] = ()
    """Nodes that are slower than the others."""


def format_ratio_percent(ratio: float) -> str:
    """``1.123 -> '+12.3 %'``; from a factor of two on ``x 3.1``."""
    return f"x {ratio:.1f}" if ratio >= 2 else f"{(ratio - 1) * 100:+.1f} %"


class RunScale(NamedTuple):
    """Devices and nodes of a run; ordered by these."""

    devices: int
    nodes: int

    def __str__(self) -> str:
        """``4 nodes, 16 devices``."""
        nodes = pluralize(self.nodes, "node")
        return nodes if self.nodes == self.devices > 1 else f"{nodes}, {pluralize(self.devices, 'device')}"


@dataclass
class ConfigurationLaunches:
    """The launches of one configuration in one environment, or one run that did not end well."""

    cluster: str
    spec: RunSpec
    status: str
    config_id: str
    run_ids: list[str]
    environment_digest: str | None
    workload: tuple[Any, ...]
    """Values of ``WORKLOAD_COLUMNS`` without the cluster: the conditions beside strategy and scale."""
    rates: list[float] = field(default_factory=list)
    """Samples/s of every launch."""
    rate: float | None = None
    low: float | None = None
    high: float | None = None
    step_time_s: float | None = None
    efficiency: float | None = None
    baseline_rates: list[float] = field(default_factory=list)
    baseline_devices: int | None = None
    baseline_environment: str | None = None
    peak_memory_bytes: int | None = None
    warnings: list[str] = field(default_factory=list)
    failure: tuple[str, str, str] = ("", "", "")
    """Type, message and hint."""
    parameters: tuple[str, ...] = ()
    """Parameters of a command by which runs differ: they stand in the strategy's place."""
    batch_note: str = ""
    """`` with batch 32`` where its label was measured at its scale with other batches, too."""

    @property
    def is_ok(self) -> bool:
        """Whether it has a throughput."""
        return self.status == STATUS_OK and self.rate is not None

    @property
    def scale(self) -> RunScale:
        return RunScale(self.spec.devices, self.spec.nodes)

    @property
    def label(self) -> str:
        """The strategy, of a hybrid with its degrees; or the parameters of a command."""
        return printable_excerpt(self._parameters_text or strategy_label(self.spec))

    @property
    def line(self) -> str:
        """Name of a line over scales: the strategy, whatever its degrees are, or the parameters of a command."""
        return printable_excerpt(self._parameters_text or self.spec.strategy)

    @property
    def _parameters_text(self) -> str:
        return ", ".join(f"{name} {self.spec.parameters.get(name)}" for name in self.parameters)

    def evidence(self) -> EvidenceRow:
        return EvidenceRow(
            self.label, self.spec.nodes, self.spec.devices, self.spec.batch_size, self.spec.global_batch_size,
            self.status, self.config_id, self.run_ids[0], len(self.rates), self.rate, self.low, self.high,
            self.step_time_s, self.efficiency, self.peak_memory_bytes, self.environment_digest,
        )  # fmt: skip


Configurations = list[ConfigurationLaunches]


def evidence_of(rows: Iterable[ConfigurationLaunches], most: int = 50) -> tuple[EvidenceRow, ...]:
    """The evidence of the first ``most`` configurations."""
    return tuple(row.evidence() for row in list(rows)[:most])


def configurations_of(frame: pl.DataFrame, where: Condition | None = None) -> tuple[Configurations, Configurations]:
    """Return the configurations of a results frame that satisfy ``where``, and runs whose file is broken.

    Efficiency is always relative to one device: runs that ``where`` leaves out can still be a baseline.
    """
    launches = frame.filter((pl.col("status") == STATUS_OK) & (pl.col(THROUGHPUT) > 0))
    keys = list(CONFIGURATION_KEYS)
    rates = launches.group_by(keys, maintain_order=True).agg(pl.col(THROUGHPUT).alias("_rates"))
    rows = aggregate_launches(frame).join(rates, on=keys, how="left", nulls_equal=True, maintain_order="left")
    rows = with_speedups(rows, carried=("_rates", "devices", "environment_digest"))
    readable = rows.filter(pl.col("status") != STATUS_BROKEN)
    broken = rows.filter(pl.col("status") == STATUS_BROKEN)
    if where is not None:
        readable, broken = readable.filter(where.mask(readable)), rows.clear()
    parameters = tuple(varying_parameters(readable))
    first, second = (
        [_configuration_launches(row, parameters) for row in rows.iter_rows(named=True)] for rows in (readable, broken)
    )
    return first, second


_UNKNOWN_SPEC = RunSpec(model="", dataset="", strategy="?", batch_size=1)


def _configuration_launches(row: dict[str, Any], parameters: tuple[str, ...]) -> ConfigurationLaunches:
    is_broken = row["status"] == STATUS_BROKEN
    launches = ConfigurationLaunches(
        row["cluster"], _UNKNOWN_SPEC if is_broken else run_spec_of(row), row["status"], row["config_id"] or "",
        row["run_ids"], row["environment_digest"],
        tuple(row[name] for name in WORKLOAD_COLUMNS if name != "cluster"),
        peak_memory_bytes=row["metrics.peak_memory_bytes"],
        warnings=decode_warnings(row["warnings"]),
        failure=(row["error.type"] or "", row["error.message"] or "", row["error.hint"] or ""),
        parameters=parameters,
    )  # fmt: skip
    if launches.status == STATUS_OK and row["_rates"]:
        launches.rates, launches.rate, launches.step_time_s = row["_rates"], row[THROUGHPUT], row[STEP_TIME]
        if len(launches.rates) > 1:
            launches.low, launches.high = row[f"{THROUGHPUT}:low"], row[f"{THROUGHPUT}:high"]
        launches.efficiency = row["efficiency"]
        launches.baseline_rates = row["baseline._rates"] or []
        launches.baseline_devices = row["baseline.devices"]
        launches.baseline_environment = row["baseline.environment_digest"]
    return launches


ClusterWorkload = tuple[str, tuple[Any, ...]]
"""A cluster and a workload: strategies compete within it, scale by scale."""
WorkloadTable = dict[ClusterWorkload, dict[RunScale, Configurations]]


def group_by_workload(rows: Iterable[ConfigurationLaunches]) -> WorkloadTable:
    """``rows`` by cluster and workload, and within these by scale."""
    groups: WorkloadTable = {}
    for row in rows:
        groups.setdefault((row.cluster, row.workload), {}).setdefault(row.scale, []).append(row)
    for same_scale in (rows for by_scale in groups.values() for rows in by_scale.values()):
        batches: dict[str, set[int]] = {}
        for row in same_scale:
            batches.setdefault(row.label, set()).add(row.spec.batch_size)
        for row in same_scale:
            row.batch_note = f" with batch {row.spec.batch_size}" if len(batches[row.label]) > 1 else ""
    ordered = sorted(groups.items(), key=lambda item: [item[0][0], *("" if v is None else str(v) for v in item[0][1])])
    return {workload: dict(sorted(by_scale.items())) for workload, by_scale in ordered}


def best_per_strategy(rows: Sequence[ConfigurationLaunches]) -> list[ConfigurationLaunches]:
    """The configuration with the highest median throughput of each strategy, the fastest first."""
    best: dict[str, ConfigurationLaunches] = {}
    for row in sorted((row for row in rows if row.is_ok), key=lambda row: row.rate or 0.0, reverse=True):
        best.setdefault(row.label, row)
    return list(best.values())


class SubjectNames:
    """Names of workloads: model and data set, and those other parameters that differ between ``workloads``."""

    def __init__(self, workloads: Iterable[ClusterWorkload]) -> None:
        names = [name.removeprefix("spec.") for name in WORKLOAD_COLUMNS if name != "cluster"]
        pairs = list(workloads)
        self._several_clusters = len({cluster for cluster, _ in pairs}) > 1
        self._named = [
            (number, name)
            for number, name in enumerate(names)
            if name not in ("model", "dataset") and len({workload[number] for _, workload in pairs if workload}) > 1
        ]
        self._model, self._dataset = names.index("model"), names.index("dataset")

    def name(self, cluster_workload: ClusterWorkload, scale: RunScale | None = None) -> str:
        """``resnet18 on digits, precision bf16, 4 nodes``."""
        cluster, workload = cluster_workload
        is_command = not workload[self._model]
        words = ["the command" if is_command else f"{workload[self._model]} on {workload[self._dataset]}"]
        words += [f"{name} {workload[number]}" for number, name in self._named if workload[number] is not None]
        words += [str(scale)] if scale is not None else []
        words += [f"cluster {cluster}"] if self._several_clusters else []
        return printable_excerpt(", ".join(words))
