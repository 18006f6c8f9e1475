"""Configurations as answers look at them: every launch's throughput, what they can be compared with, where they ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hpcbench.config.spec import RunSpec, strategy_label
from hpcbench.fileio import brief
from hpcbench.report.answers.answer import Evidence, counted
from hpcbench.report.groups import IDENTITY, RATE, STEP, WORKLOAD, configurations, with_speedups
from hpcbench.report.rows import spec_of
from hpcbench.results.schema import BROKEN, OK

if TYPE_CHECKING:
    import polars

    from hpcbench.report.names import Condition

_CARRIED = ("_rates", "devices", "environment_digest")


class Scale(NamedTuple):
    """How much of a machine a run had; ordered by it."""

    devices: int
    nodes: int

    def __str__(self) -> str:
        """``4 nodes, 16 devices``."""
        nodes = counted(self.nodes, "node")
        return nodes if self.nodes == self.devices > 1 else f"{nodes}, {counted(self.devices, 'device')}"


@dataclass
class Measured:
    """The launches of one configuration in one environment, or one run that did not end well."""

    cluster: str
    spec: RunSpec
    status: str
    config_id: str
    run_ids: list[str]
    environment_digest: str | None
    workload: tuple[Any, ...]
    """What else than strategy and scale decides the throughput: values of ``WORKLOAD`` but the cluster."""
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
        return self.status == OK and self.rate is not None

    @property
    def scale(self) -> Scale:
        """Nodes and devices."""
        return Scale(self.spec.devices, self.spec.nodes)

    @property
    def label(self) -> str:
        """The strategy, of a hybrid with its degrees."""
        return brief(strategy_label(self.spec))

    def evidence(self) -> Evidence:
        """The row of a table that stands for it."""
        return Evidence(
            self.label, self.spec.nodes, self.spec.devices, self.spec.batch_size, self.spec.global_batch_size,
            self.status, self.config_id, self.run_ids[0], len(self.rates), self.rate, self.low, self.high,
            self.step_time_s, self.efficiency, self.peak_memory_bytes, self.environment_digest,
        )  # fmt: skip


def measured_of(frame: polars.DataFrame, where: Condition | None = None) -> tuple[list[Measured], list[Measured]]:
    """The configurations of a results frame for which ``where`` holds, and runs whose file is broken.

    Their efficiency is against one device in any case: what ``where`` leaves out can still be a baseline.
    """
    import polars as pl

    launches = frame.filter((pl.col("status") == OK) & (pl.col(RATE) > 0))
    rates = launches.group_by(IDENTITY, maintain_order=True).agg(pl.col(RATE).alias("_rates"))
    rows = configurations(frame).join(rates, on=list(IDENTITY), how="left", nulls_equal=True, maintain_order="left")
    rows = with_speedups(rows, carried=_CARRIED)
    whole = rows.filter(pl.col("status") != BROKEN)
    if where is not None:
        whole = whole.filter(where.mask(whole))
    broken = rows.filter(pl.col("status") == BROKEN) if where is None else rows.clear()
    return [_measured(row) for row in whole.iter_rows(named=True)], [
        _broken(row) for row in broken.iter_rows(named=True)
    ]


def _measured(row: dict[str, Any]) -> Measured:
    found = Measured(
        row["cluster"], spec_of(row), row["status"], row["config_id"], row["run_ids"], row["environment_digest"],
        tuple(row[name] for name in WORKLOAD if name != "cluster"), failure=_failure(row),
    )  # fmt: skip
    found.warnings = list(dict.fromkeys(text for texts in row["warnings"] for text in msgspec.json.decode(texts)))
    found.peak_memory_bytes = row["metrics.peak_memory_bytes"]
    if found.status != OK or not row["_rates"]:
        return found
    found.rates, found.rate, found.step_time_s = row["_rates"], row[RATE], row[STEP]
    if len(found.rates) > 1:
        found.low, found.high = row[f"{RATE}:low"], row[f"{RATE}:high"]
    found.efficiency = row["efficiency"]
    found.baseline_rates = row["baseline._rates"] or []
    found.baseline_devices = row["baseline.devices"]
    found.baseline_environment = row["baseline.environment_digest"]
    return found


def _broken(row: dict[str, Any]) -> Measured:
    nothing = RunSpec(model="", dataset="", strategy="?", batch_size=1)
    return Measured(row["cluster"], nothing, BROKEN, "", row["run_ids"], None, (), failure=_failure(row))


def _failure(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["error.type"] or "", row["error.message"] or "", row["error.hint"] or ""


Place = tuple[str, tuple[Any, ...]]
"""A cluster and a workload: within it strategies compete, scale by scale."""


def places(rows: Iterable[Measured]) -> dict[Place, dict[Scale, list[Measured]]]:
    """``rows`` by cluster and workload, and in each by scale."""
    found: dict[Place, dict[Scale, list[Measured]]] = {}
    for row in rows:
        found.setdefault((row.cluster, row.workload), {}).setdefault(row.scale, []).append(row)
    return {place: dict(sorted(by_scale.items())) for place, by_scale in sorted(found.items(), key=_ordered)}


def _ordered(item: tuple[Place, Any]) -> list[str]:
    (cluster, workload), _ = item
    return [cluster, *("" if value is None else str(value) for value in workload)]


def best_of_each(rows: Sequence[Measured]) -> list[Measured]:
    """Of each strategy the configuration with the highest median throughput, the fastest first."""
    best: dict[str, Measured] = {}
    for row in rows:
        if row.is_ok and (row.label not in best or _rate(row) > _rate(best[row.label])):
            best[row.label] = row
    return sorted(best.values(), key=_rate, reverse=True)


def _rate(row: Measured) -> float:
    return row.rate or 0.0


class Subjects:
    """What places are called: model and data set, and of the rest what differs between them."""

    def __init__(self, found: Iterable[Place]) -> None:
        names = [name.removeprefix("spec.") for name in WORKLOAD if name != "cluster"]
        values = list(found)
        self._several_clusters = len({cluster for cluster, _ in values}) > 1
        self._named = [
            (place, name)
            for place, name in enumerate(names)
            if name not in ("model", "dataset") and len({workload[place] for _, workload in values if workload}) > 1
        ]
        self._model, self._dataset = names.index("model"), names.index("dataset")

    def of(self, place: Place, scale: Scale | None = None) -> str:
        """``resnet18 on digits, precision bf16, 4 nodes``."""
        cluster, workload = place
        words = [f"{workload[self._model]} on {workload[self._dataset]}"]
        words += [f"{name} {workload[number]}" for number, name in self._named if workload[number] is not None]
        words += [str(scale)] if scale is not None else []
        words += [f"cluster {cluster}"] if self._several_clusters else []
        return brief(", ".join(words))
