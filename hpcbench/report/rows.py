"""Results to the rows of a table: launches of one configuration together, speed-up against a single rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.report.groups import STEP, Scaling, configurations, with_speedups
from hpcbench.results.collect import Collected
from hpcbench.results.columns import JSON, collected_frame, schema
from hpcbench.results.schema import BROKEN

if TYPE_CHECKING:
    import polars

    from hpcbench.report.names import Condition


ORDER = (
    "spec.model", "spec.dataset", "spec.strategy", "spec.nodes", "spec.tasks_per_node", "spec.batch_size", "config_id",
)  # fmt: skip
"""How rows follow each other where nothing else orders them."""


@dataclass
class Row:
    """One configuration on one cluster in one environment."""

    cluster: str
    config_id: str
    spec: RunSpec | None
    status: str
    reason: str = ""
    launches: int = 0
    step_time_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    spread: str = ""
    """What low and high are: within one launch, or between several."""
    samples_per_s: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    accuracy: float | None = None
    verified: bool | None = None
    """Whether what was computed is what the reference computes; ``None`` where no launch was asked to check."""
    warnings: list[str] = field(default_factory=list)
    run_ids: list[str] = field(default_factory=list)


def make_rows(collected: Iterable[Collected]) -> list[Row]:
    """Rows in the order in which their configurations first appear; what failed is a row with its reason."""
    return rows_of(collected_frame(collected))


def rows_of(frame: polars.DataFrame, baseline: Condition | None = None, scaling: Scaling = "weak") -> list[Row]:
    """As ``make_rows``, of a frame with all columns; broken files are at its end."""
    grouped = with_speedups(configurations(frame), baseline, scaling)
    made = [_row(values) for values in grouped.iter_rows(named=True)]
    return sorted(made, key=lambda row: row.status == BROKEN)


def order(row: Row) -> tuple[Any, ...]:
    """As ``ORDER`` has it, clusters first; what has no specification comes last."""
    if row.spec is None:
        return (True, row.cluster, *row.run_ids)
    values = (getattr(row.spec, name.removeprefix("spec.")) for name in ORDER if name.startswith("spec."))
    return (False, row.cluster, *values, row.config_id, *row.run_ids)


def sort_rows(rows: list[Row], by: str) -> list[Row]:
    """``rows`` by one of their fields or parameters; ``-name`` has the largest first, what has none comes last."""
    name = by.removeprefix("-")
    fields = {*Row.__dataclass_fields__, *RunSpec.__struct_fields__, "ranks", "devices"}
    if name not in fields:
        raise ConfigError(f"--sort {name}: no column of this table", hint=did_you_mean(name, fields))
    known = [(value, row) for row in rows if isinstance(value := _value(row, name), (int, float, str))]
    known.sort(key=lambda pair: pair[0], reverse=by.startswith("-"))
    there = {id(row) for _, row in known}
    return [row for _, row in known] + [row for row in rows if id(row) not in there]


def _value(row: Row, name: str) -> Any:
    return getattr(row, name) if name in Row.__dataclass_fields__ else getattr(row.spec, name, None)


def _row(values: dict[str, Any]) -> Row:
    launches = values["launches"]
    row = Row(
        cluster=values["cluster"],
        config_id=values["config_id"] or "",
        spec=None if values["status"] == BROKEN else spec_of(values),
        status=values["status"],
        reason=values["error.message"] or "",
        launches=0 if values["status"] == BROKEN else launches,
        warnings=list(dict.fromkeys(text for texts in values["warnings"] for text in msgspec.json.decode(texts))),
        run_ids=values["run_ids"],
        verified=values["verified"],
    )
    row.step_time_s, row.low_s, row.high_s = values[STEP], values[f"{STEP}:low"], values[f"{STEP}:high"]
    if row.step_time_s is not None:
        row.spread = "within one launch" if launches < 2 else f"between {launches} launches"
    for name, column in _FIGURES.items():
        setattr(row, name, values[column])
    return row


_FIGURES = {
    "samples_per_s": "metrics.samples_per_s", "speedup": "speedup", "efficiency": "efficiency", "mfu": "metrics.mfu",
    "peak_memory_bytes": "metrics.peak_memory_bytes", "loss_first": "metrics.loss.first",
    "loss_last": "metrics.loss.last", "accuracy": "metrics.accuracy",
}  # fmt: skip


def spec_of(values: dict[str, Any]) -> RunSpec:
    """The specification that a row of a results frame holds."""
    given: dict[str, Any] = {}
    for name in RunSpec.__struct_fields__:
        value = values[f"spec.{name}"]
        if value is not None:
            given[name] = msgspec.json.decode(value) if schema()[f"spec.{name}"] == JSON else value
    return RunSpec(**given)
