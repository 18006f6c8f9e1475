"""Findings about commands with a declared layout: the part of the best step that the model does not explain."""

from __future__ import annotations

from hpcbench.fileio import printable_excerpt
from hpcbench.predict.cluster_forecasts import ClusterForecasts
from hpcbench.predict.explain import decoder_terms
from hpcbench.predict.fitted_decoders import predict_command
from hpcbench.predict.measured_results import learn_commands
from hpcbench.predict.prediction import NotPredicted
from hpcbench.report.findings.finding import (
    OBSERVED,
    ConfigurationLaunches,
    Finding,
    SubjectNames,
    WorkloadTable,
    evidence_of,
)
from hpcbench.report.recommendation_view import layout_name
from hpcbench.units import format_percent, format_seconds


def unexplained_findings(
    table: WorkloadTable, subjects: SubjectNames, forecasts: ClusterForecasts | None
) -> list[Finding]:
    """State for the fastest run of each command how much of its step the model leaves, and the model's largest term."""
    findings = []
    for workload, by_scale in table.items():
        rows = [row for rows in by_scale.values() for row in rows if row.is_ok and row.spec.workload == "command"]
        if rows and forecasts is not None:
            best = max(rows, key=lambda row: row.rate or 0.0)
            finding = _unexplained_finding(subjects.name(workload, best.scale), best, forecasts)
            findings += [finding] if finding is not None else []
    return findings


def _unexplained_finding(subject: str, best: ConfigurationLaunches, forecasts: ClusterForecasts) -> Finding | None:
    forecast, measured_s = forecasts.forecast(best.cluster), best.step_time_s
    if isinstance(forecast, NotPredicted) or not measured_s:
        return None
    priced = forecast.price_command(best.spec)
    if isinstance(priced, NotPredicted):
        return None
    # The cluster's own runs would explain what published runs do not.
    unmeasured = learn_commands([], forecast.price_command, forecast.profile, best.spec.partition)
    step = predict_command(priced, unmeasured, "")
    terms = sorted(decoder_terms(priced, unmeasured), key=lambda term: -term.seconds)
    left_s = measured_s - step.step_time_s
    bounds = f"[{format_seconds(step.interval.low)} {format_seconds(step.interval.high)}]"
    model = f"the model of {priced.layout.software} explains {format_seconds(step.step_time_s)} {bounds}"
    left = f"{format_percent(left_s / measured_s)} of it is not explained" if left_s > 0 else "all of it is explained"
    is_inside = step.interval.low <= measured_s <= step.interval.high
    named = [f"{one.name} {format_seconds(one.seconds)}" for one in terms if one.seconds >= 0.005 * step.step_time_s]
    return Finding(
        "model", subject,
        f"{printable_excerpt(layout_name(priced.layout))} takes {format_seconds(measured_s)} a step, {left}: {model}, "
        f"of which {terms[0].name} is most, {format_percent(terms[0].seconds / step.step_time_s)}",
        OBSERVED, f"{'inside' if is_inside else 'outside of'} the model's 90 % interval; terms: {', '.join(named)}",
        cluster=best.cluster, nodes=best.scale.nodes, devices=best.scale.devices, strategy=best.label,
        evidence=evidence_of([best]),
    )  # fmt: skip
