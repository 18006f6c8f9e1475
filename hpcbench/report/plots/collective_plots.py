"""Plot of the messages between every two nodes."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

import polars as pl

from hpcbench.report.configurations import ok_results
from hpcbench.report.findings.node_findings import pair_times_s
from hpcbench.report.plots import charts
from hpcbench.report.plots.plot_model import NothingToDraw, Plot, PlotRequest, typed_frame
from hpcbench.report.plots.point_data import no_points_reason, printable_name
from hpcbench.report.plots.theme import make_axis
from hpcbench.units import format_count, pluralize

_MAX_MATRICES = 4


def pairs_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The bandwidth of a message between each two nodes, the median of launches, a matrix for each configuration.

    Raises:
        NothingToDraw: no run measured pairs.
    """
    runs = ok_results(frame).filter(pl.col("spec.operation") == "pairs")
    launches = runs.select("cluster", "run_id").rows()
    found: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in request.whole(launches) if request.whole is not None and launches else ():
        panel = f"{format_count(result.spec.message_bytes or 0)} bytes on {printable_name(result.cluster)}"
        for (first, second), seconds in pair_times_s(result).items():
            ends = printable_name(first), printable_name(second)
            for pair in (ends, ends[::-1]):
                found[panel][pair].append((result.spec.message_bytes or 0) / seconds)
    rows: list[dict[str, Any]] = [
        {"panel": panel, "row": row, "column": column, "value": median(values)}
        for panel in [*found][:_MAX_MATRICES] for (row, column), values in sorted(found[panel].items())
    ]  # fmt: skip
    if not rows:
        ended = len(ok_results(frame)) > 0
        raise NothingToDraw('no run has operation = "pairs"' if ended else no_points_reason(frame))
    drawn = typed_frame(rows, charts.HEAT_COLUMNS, ["value"])
    slowest, fastest = (min(rows, key=lambda row: sign * row["value"]) for sign in (1, -1))
    texts = [
        f"{name} pair: {one['row']} - {one['column']}, {format_count(one['value'])} bytes/s"
        for name, one in (("slowest", slowest), ("fastest", fastest))
    ]
    return Plot(
        alt=f"Bandwidth between every two of {pluralize(drawn['row'].n_unique(), 'node')}. {'. '.join(texts)}.",
        drawing=charts.HeatChart(make_axis("{}bytes/s", "/s", drawn["value"])), frame=drawn,
        notes=[*texts, "one pair after the other; median of launches"],
    )  # fmt: skip
