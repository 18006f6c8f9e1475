"""Data types of findings: a statement with certainty and evidence, and the configurations that it compares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec, strategy_label
from hpcbench.fileio import printable_excerpt
from hpcbench.report.configurations import (
    CONFIGURATION_KEYS,
    STEP_TIME,
    THROUGHPUT,
    WORKLOAD_COLUMNS,
    aggregate_launches,
    run_spec_of,
    with_speedups,
)
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK

if TYPE_CHECKING:
    import polars

    from hpcbench.report.column_names import Condition

Certainty = Literal["told", "alike", "cannot tell", "counted"]
SIGNIFICANT: Certainty = "told"
"""More than chance: the tests of all findings of its kind together are wrong in at most 5 % of reports."""
EQUIVALENT: Certainty = "alike"
"""The whole 95 % interval lies within what counts as a difference."""
INCONCLUSIVE: Certainty = "cannot tell"
OBSERVED: Certainty = "counted"
"""Seen as it stands, nothing was inferred."""

FINDING_KINDS = {
    "fastest": "Fastest strategy",
    "crossover": "Where the fastest strategy changes",
    "efficiency": "Where efficiency falls",
    "memory": "Memory",
    "failure": "What failed, and why",
    "doubt": "What makes numbers doubtful",
}
"""Kinds of answers, in the order in which they are shown, and their headings."""


@dataclass(frozen=True)
class EvidenceRow:
    """A configuration that an answer rests on; the throughput is of all ranks, the median over launches."""

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
    """``text`` stands alone beside ``subject``, what it is about (workload, cluster and scale)."""

    kind: str
    subject: str
    text: str
    sure: Certainty
    why: str = ""
    """On what the certainty rests, or why there is none."""
    settle: str = ""
    """What would settle it, where nothing can be told."""
    doubts: tuple[str, ...] = ()
    cluster: str = ""
    nodes: int | None = None
    devices: int | None = None
    strategy: str = ""
    """The strategy that the answer names first."""
    rival: str = ""
    ratio: float | None = None
    """Of the throughputs that are compared, with its 95 % interval."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    evidence: tuple[EvidenceRow, ...] = field(default=())


def format_ratio_percent(ratio: float) -> str:
    """``1.123 -> '+12.3 %'``; from a factor of two on ``x 3.1``."""
    if ratio >= 2:
        return f"x {ratio:.1f}"
    return f"{(ratio - 1) * 100:+.1f} %"


def join_words(words: list[str], most: int = 6) -> str:
    """``a, b and c``; of many the first ones and how many more."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def pluralize(count: int, noun: str, plural: str | None = None) -> str:
    """``3 runs``, ``1 run``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def finding_json(answer: Finding) -> dict[str, Any]:
    """``answer`` as plain data: figures in SI units."""
    import msgspec

    document: dict[str, Any] = msgspec.to_builtins(answer)
    return document


_BASELINE_COLUMNS = ("_rates", "devices", "environment_digest")


class RunScale(NamedTuple):
    """How much of a machine a run had; ordered by it."""

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
    """What else than strategy and scale decides the throughput: values of ``WORKLOAD_COLUMNS`` but the cluster."""
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

    @property
    def is_ok(self) -> bool:
        """Whether it has a throughput."""
        return self.status == STATUS_OK and self.rate is not None

    @property
    def scale(self) -> RunScale:
        """Nodes and devices."""
        return RunScale(self.spec.devices, self.spec.nodes)

    @property
    def label(self) -> str:
        """The strategy, of a hybrid with its degrees."""
        return printable_excerpt(strategy_label(self.spec))

    def evidence(self) -> EvidenceRow:
        """The row of a table that stands for it."""
        return EvidenceRow(
            self.label, self.spec.nodes, self.spec.devices, self.spec.batch_size, self.spec.global_batch_size,
            self.status, self.config_id, self.run_ids[0], len(self.rates), self.rate, self.low, self.high,
            self.step_time_s, self.efficiency, self.peak_memory_bytes, self.environment_digest,
        )  # fmt: skip


def configurations_of(
    frame: polars.DataFrame, where: Condition | None = None
) -> tuple[list[ConfigurationLaunches], list[ConfigurationLaunches]]:
    """The configurations of a results frame for which ``where`` holds, and runs whose file is broken.

    Their efficiency is against one device in any case: what ``where`` leaves out can still be a baseline.
    """
    import polars as pl

    launches = frame.filter((pl.col("status") == STATUS_OK) & (pl.col(THROUGHPUT) > 0))
    rates = launches.group_by(CONFIGURATION_KEYS, maintain_order=True).agg(pl.col(THROUGHPUT).alias("_rates"))
    rows = aggregate_launches(frame).join(
        rates, on=list(CONFIGURATION_KEYS), how="left", nulls_equal=True, maintain_order="left"
    )
    rows = with_speedups(rows, carried=_BASELINE_COLUMNS)
    whole = rows.filter(pl.col("status") != STATUS_BROKEN)
    if where is not None:
        whole = whole.filter(where.mask(whole))
    broken = rows.filter(pl.col("status") == STATUS_BROKEN) if where is None else rows.clear()
    return [_configuration_launches(row) for row in whole.iter_rows(named=True)], [
        _broken_run(row) for row in broken.iter_rows(named=True)
    ]


def _configuration_launches(row: dict[str, Any]) -> ConfigurationLaunches:
    found = ConfigurationLaunches(
        row["cluster"], run_spec_of(row), row["status"], row["config_id"], row["run_ids"], row["environment_digest"],
        tuple(row[name] for name in WORKLOAD_COLUMNS if name != "cluster"), failure=_failure_texts(row),
    )  # fmt: skip
    found.warnings = list(dict.fromkeys(text for texts in row["warnings"] for text in msgspec.json.decode(texts)))
    found.peak_memory_bytes = row["metrics.peak_memory_bytes"]
    if found.status != STATUS_OK or not row["_rates"]:
        return found
    found.rates, found.rate, found.step_time_s = row["_rates"], row[THROUGHPUT], row[STEP_TIME]
    if len(found.rates) > 1:
        found.low, found.high = row[f"{THROUGHPUT}:low"], row[f"{THROUGHPUT}:high"]
    found.efficiency = row["efficiency"]
    found.baseline_rates = row["baseline._rates"] or []
    found.baseline_devices = row["baseline.devices"]
    found.baseline_environment = row["baseline.environment_digest"]
    return found


def _broken_run(row: dict[str, Any]) -> ConfigurationLaunches:
    nothing = RunSpec(model="", dataset="", strategy="?", batch_size=1)
    return ConfigurationLaunches(
        row["cluster"], nothing, STATUS_BROKEN, "", row["run_ids"], None, (), failure=_failure_texts(row)
    )


def _failure_texts(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["error.type"] or "", row["error.message"] or "", row["error.hint"] or ""


ClusterWorkload = tuple[str, tuple[Any, ...]]
"""A cluster and a workload: within it strategies compete, scale by scale."""


def group_by_workload(
    rows: Iterable[ConfigurationLaunches],
) -> dict[ClusterWorkload, dict[RunScale, list[ConfigurationLaunches]]]:
    """``rows`` by cluster and workload, and in each by scale."""
    found: dict[ClusterWorkload, dict[RunScale, list[ConfigurationLaunches]]] = {}
    for row in rows:
        found.setdefault((row.cluster, row.workload), {}).setdefault(row.scale, []).append(row)
    return {place: dict(sorted(by_scale.items())) for place, by_scale in sorted(found.items(), key=_workload_sort_key)}


def _workload_sort_key(item: tuple[ClusterWorkload, Any]) -> list[str]:
    (cluster, workload), _ = item
    return [cluster, *("" if value is None else str(value) for value in workload)]


def best_per_strategy(rows: Sequence[ConfigurationLaunches]) -> list[ConfigurationLaunches]:
    """Of each strategy the configuration with the highest median throughput, the fastest first."""
    best: dict[str, ConfigurationLaunches] = {}
    for row in rows:
        if row.is_ok and (row.label not in best or _throughput(row) > _throughput(best[row.label])):
            best[row.label] = row
    return sorted(best.values(), key=_throughput, reverse=True)


def _throughput(row: ConfigurationLaunches) -> float:
    return row.rate or 0.0


class SubjectNames:
    """What places are called: model and data set, and of the rest what differs between them."""

    def __init__(self, found: Iterable[ClusterWorkload]) -> None:
        names = [name.removeprefix("spec.") for name in WORKLOAD_COLUMNS if name != "cluster"]
        values = list(found)
        self._several_clusters = len({cluster for cluster, _ in values}) > 1
        self._named = [
            (place, name)
            for place, name in enumerate(names)
            if name not in ("model", "dataset") and len({workload[place] for _, workload in values if workload}) > 1
        ]
        self._model, self._dataset = names.index("model"), names.index("dataset")

    def of(self, place: ClusterWorkload, scale: RunScale | None = None) -> str:
        """``resnet18 on digits, precision bf16, 4 nodes``."""
        cluster, workload = place
        words = [f"{workload[self._model]} on {workload[self._dataset]}"]
        words += [f"{name} {workload[number]}" for number, name in self._named if workload[number] is not None]
        words += [str(scale)] if scale is not None else []
        words += [f"cluster {cluster}"] if self._several_clusters else []
        return printable_excerpt(", ".join(words))
