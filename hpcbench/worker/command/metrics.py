"""Metrics of a command's run from the values that its processes printed. This module does not import torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from hpcbench.config.command import STEP_TIME, Command, command_values
from hpcbench.config.expression import Expression
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.results import timing_statistics
from hpcbench.results.schema import RankResult, RunMetrics, StepTimeStatistics
from hpcbench.units import time_unit_s


def command_metrics(
    spec: RunSpec, command: Command, peak_flops_per_s: Mapping[str, float], ranks: Mapping[int, RankResult],
    warnings: list[str],
) -> tuple[RunMetrics, list[float]]:  # fmt: skip
    """Return the metrics of a run, and the seconds of its steps that are not of the warm-up.

    A metric's values are those of the first rank that printed any. Reasons to doubt a figure are appended to
    ``warnings``.
    """
    started = [outcome for rank in sorted(ranks) if (outcome := ranks[rank].command) is not None]
    own: dict[str, StepTimeStatistics | float] = {}
    steps_s: list[float] = []
    parameters = command_values(spec, command)
    for metric in command.metrics:
        numbers = next((outcome.values[metric.name] for outcome in started if outcome.values.get(metric.name)), [])
        values = numbers
        if metric.value:
            points = ({**parameters, "value": number} for number in numbers)
            values = _evaluate(metric.name, metric.value, points, warnings)
        if metric.per == "run":
            own |= {metric.name: values[-1]} if values else {}
        elif figures := timing_statistics.step_time_statistics(values[spec.warmup_steps :]):
            own[metric.name] = figures
            if metric.name == STEP_TIME and (unit_s := time_unit_s(metric.unit)):
                steps_s = [value * unit_s for value in values[spec.warmup_steps :]]
    firsts = [result.time_to_first_step_s for result in ranks.values() if result.time_to_first_step_s is not None]
    peaks = [result.peak_memory_bytes for result in ranks.values() if result.command and result.peak_memory_bytes]
    metrics = RunMetrics(
        own=own, timed_s=math.fsum(steps_s) or None, **timing_statistics.step_time_metrics(steps_s, warnings),
        wall_time_s=max((one.wall_s for one in started if one.wall_s is not None), default=None),
        time_to_first_step_s=max(firsts, default=None), peak_memory_bytes=max(peaks, default=None),
    )  # fmt: skip
    if not math.fsum(steps_s):
        return metrics, steps_s
    rates = {
        name: count / statistics.fmean(steps_s)
        for name, text in command.per_step.items()
        for count in _evaluate(name, text, [parameters], warnings)
    }
    metrics.samples_per_s = rates.get("samples_per_step")
    metrics.tokens_per_s = rates.get("tokens_per_step")
    if metrics.tokens_per_s is not None:
        metrics.tokens_per_s_per_device = metrics.tokens_per_s / spec.devices
    metrics.flops_per_s = rates.get("flops_per_step")
    peak = peak_flops_per_s.get(spec.compute_precision)
    if metrics.flops_per_s is not None and peak:
        metrics.mfu = metrics.flops_per_s / (spec.devices * peak)
    return metrics, steps_s


def _evaluate(name: str, text: str, points: Iterable[Mapping[str, Any]], warnings: list[str]) -> list[float]:
    """Return the values of an expression at ``points``; none where one cannot be computed, which is a warning."""
    expression = Expression(text)
    try:
        return [float(expression(point)) for point in points]
    except (ConfigError, TypeError, ValueError) as error:
        warnings.append(f"{name}: {error}")
        return []
