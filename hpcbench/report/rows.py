"""Results to the rows of a table: launches of one configuration together, speed-up against a single rank."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.results.collect import Collected
from hpcbench.results.schema import OK, RunResult


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
    groups: dict[tuple[str, ...], list[RunResult]] = {}
    rows: list[Row] = []
    for entry in collected:
        if entry.result is None:
            rows.append(Row(entry.cluster, "", None, "broken", entry.problem, run_ids=[entry.run_id]))
            continue
        result = entry.result
        status = "" if result.status == OK else f"{result.status} {result.run_id}"
        key = (entry.cluster, result.config_id, result.environment_digest or "", status)
        groups.setdefault(key, []).append(result)
    measured = [_row(key[0], results) for key, results in groups.items()]
    _add_speedups(measured)
    return measured + rows


def _row(cluster: str, results: list[RunResult]) -> Row:
    first = results[0]
    row = Row(
        cluster=cluster,
        config_id=first.config_id,
        spec=first.spec,
        status=first.status,
        reason=first.error.message if first.error else "",
        launches=len(results),
        warnings=list(dict.fromkeys(warning for result in results for warning in result.warnings)),
        run_ids=[result.run_id for result in results],
    )
    _add_times(row, results)
    metrics = [result.metrics for result in results]
    row.samples_per_s = _median(one.samples_per_s for one in metrics)
    row.mfu = _median(one.mfu for one in metrics)
    row.peak_memory_bytes = max((one.peak_memory_bytes for one in metrics if one.peak_memory_bytes), default=None)
    row.loss_first = _median(one.loss.first for one in metrics if one.loss)
    row.loss_last = _median(one.loss.last for one in metrics if one.loss)
    verifications = [result.verification for result in results if result.verification is not None]
    row.verified = all(one.passed for one in verifications) if verifications else None
    row.accuracy = _median(one.accuracy for one in metrics)
    return row


def _add_times(row: Row, results: list[RunResult]) -> None:
    spreads = [result.metrics.step_time_s for result in results if result.metrics.step_time_s]
    if not spreads:
        return
    medians = [spread.median for spread in spreads]
    row.step_time_s = statistics.median(medians)
    if len(spreads) == 1:
        row.low_s, row.high_s = spreads[0].ci95_low, spreads[0].ci95_high
        row.spread = "within one launch"
    else:
        row.low_s, row.high_s = min(medians), max(medians)
        row.spread = f"between {len(medians)} launches"


def _median(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def _add_speedups(rows: list[Row]) -> None:
    """Throughput over that of one rank with the same model, data, batch per replica and arithmetic.

    ``single`` is the baseline where it was run, else the strategy's own run on one device.
    """
    baselines: dict[bytes, Row] = {}
    for row in rows:
        if row.spec is not None and row.spec.devices == 1 and row.status == OK and row.samples_per_s:
            key = _workload(row)
            if key not in baselines or row.spec.strategy == "single":
                baselines[key] = row
    for row in rows:
        base = baselines.get(_workload(row)) if row.spec is not None else None
        if row.spec is not None and base is not None and base.samples_per_s and row.samples_per_s and row.status == OK:
            row.speedup = row.samples_per_s / base.samples_per_s
            row.efficiency = row.speedup / row.spec.devices


def _workload(row: Row) -> bytes:
    spec = row.spec
    assert spec is not None
    same = (spec.model, spec.model_options, spec.dataset, spec.input_size, spec.batch_size, spec.precision, spec.data)
    return msgspec.json.encode((row.cluster, *same, spec.optimizer, spec.channels_last), order="deterministic")
