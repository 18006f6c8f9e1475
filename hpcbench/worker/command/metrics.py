"""Metrics of a command's run from the values that its processes printed. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpcbench.config.command import STEP_TIME, Command, CommandMetric, command_values
from hpcbench.config.expression import Expression
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.results import timing_statistics
from hpcbench.results.schema import RankResult, RunMetrics
from hpcbench.units import time_unit_s


def command_metrics(
    spec: RunSpec, command: Command, peak_flops_per_s: Mapping[str, float], ranks: Mapping[int, RankResult],
    warnings: list[str],
) -> tuple[RunMetrics, list[float]]:  # fmt: skip
    """Return the metrics of a run, and the seconds of its steps that are not of the warm-up.

    A metric's values are those of the first rank that printed any. Reasons to doubt a figure are appended to
    ``warnings``.
    """
    outcomes = [ranks[rank].command for rank in sorted(ranks)]
    started = [outcome for outcome in outcomes if outcome is not None]
    metrics = RunMetrics()
    steps_s: list[float] = []
    for metric in command.metrics:
        values = next((outcome.values[metric.name] for outcome in started if outcome.values.get(metric.name)), [])
        values = _own_values(metric, values, command_values(spec, command), warnings)
        if metric.per == "run":
            if values:
                metrics.own[metric.name] = values[-1]
            continue
        counted = values[spec.warmup_steps :]
        figures = timing_statistics.step_time_statistics(counted)
        if figures is None:
            continue
        metrics.own[metric.name] = figures
        if metric.name == STEP_TIME and (unit_s := time_unit_s(metric.unit)):
            steps_s = [value * unit_s for value in counted]
            _add_step_times(metrics, steps_s, warnings)
    _add_rates(metrics, spec, command, peak_flops_per_s, warnings)
    metrics.wall_time_s = max((one.wall_s for one in started if one.wall_s is not None), default=None)
    firsts = [result.time_to_first_step_s for result in ranks.values() if result.time_to_first_step_s is not None]
    metrics.time_to_first_step_s = max(firsts, default=None)
    peaks = [result.peak_memory_bytes for result in ranks.values() if result.command and result.peak_memory_bytes]
    metrics.peak_memory_bytes = max(peaks, default=None)
    return metrics, steps_s


def _own_values(
    metric: CommandMetric, numbers: list[float], parameters: Mapping[str, Any], warnings: list[str]
) -> list[float]:
    """Return the values of a metric from the numbers that were read."""
    if not metric.value:
        return numbers
    expression = Expression(metric.value)
    try:
        return [float(expression({**parameters, "value": number})) for number in numbers]
    except (ConfigError, TypeError, ValueError) as error:
        warnings.append(f"{metric.name}: {error}")
        return []


def _add_step_times(metrics: RunMetrics, steps_s: list[float], warnings: list[str]) -> None:
    figures = timing_statistics.step_time_statistics(steps_s)
    metrics.step_time_s, metrics.timed_s = figures, math.fsum(steps_s)
    metrics.outlier_steps = timing_statistics.count_outliers(steps_s)
    metrics.drift = timing_statistics.relative_drift(steps_s)
    if figures is not None:
        warnings += timing_statistics.make_steadiness_warnings(steps_s, figures)


def _add_rates(
    metrics: RunMetrics, spec: RunSpec, command: Command, peak_flops_per_s: Mapping[str, float], warnings: list[str]
) -> None:
    """Set the rates that follow from counts per step and the mean step time."""
    if metrics.step_time_s is None:
        return
    values, counts = command_values(spec, command), dict[str, float]()
    for name, text in command.per_step.items():
        try:
            counts[name] = float(Expression(text)(values))
        except (ConfigError, TypeError, ValueError) as error:
            warnings.append(f"{name}: {error}")
    rates = {name: count / metrics.step_time_s.mean for name, count in counts.items()}
    metrics.samples_per_s = rates.get("samples_per_step")
    metrics.tokens_per_s = rates.get("tokens_per_step")
    if metrics.tokens_per_s is not None:
        metrics.tokens_per_s_per_device = metrics.tokens_per_s / spec.devices
    metrics.flops_per_s = rates.get("flops_per_step")
    peak = peak_flops_per_s.get(spec.compute_precision)
    if metrics.flops_per_s is not None and peak:
        metrics.mfu = metrics.flops_per_s / (spec.devices * peak)
