"""Fits of a latency and a time per byte to timed collectives, per operation, in bands of sizes.

Every formula of ``hpcbench.oracle.collective_formulas`` is linear in the two: t = a * latency + b * m * beta,
where a counts messages one after another and b m the bytes of all of them. Both are found by least squares,
weighted with the inverse variance of the readings, and neither may be negative. Where one line does not fit,
sizes are cut into bands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import log, sqrt
from statistics import median
from typing import NamedTuple

from hpcbench.oracle.calibration.calibration_runs import fit_residual, rms_log_error
from hpcbench.oracle.calibration.calibration_store import FitResidual
from hpcbench.oracle.collective_formulas import (
    GroupLinks,
    HockneyLink,
    collective_s,
    ring_all_reduce_s,
    tree_all_reduce_s,
)
from hpcbench.oracle.machine import CollectiveSample, CommParameters
from hpcbench.parallel.traffic import COMM_OPERATIONS
from hpcbench.results.probe_records import CollectiveProbe

TARGET_ERROR = 0.06
"""Error of a fit that needs no further band."""
MAX_BANDS = 3
_MIN_POINTS_PER_BAND = 3
_MEASUREMENT_NOISE = 0.03
"""Standard deviation that the spread within a launch does not contain, as a fraction."""
_SMALL_MESSAGE_BYTES = 128 * 1024
"""Four times the burst of a usual traffic shaper: smaller messages exceed the rate of the link."""
_MAX_ITERATIONS = 8


class CollectivePoint(NamedTuple):
    """The time of an operation at one payload."""

    payload_bytes: float
    seconds: float
    spread: float


class SizeBandFit(NamedTuple):
    """The fitted link for payloads from ``from_bytes`` on."""

    wire: HockneyLink
    from_bytes: float
    points: list[CollectivePoint]


def fit_collectives(
    comm: CommParameters, probes: Sequence[CollectiveProbe], call_s: float, trees: bool
) -> tuple[list[CollectiveSample], list[FitResidual], list[str]]:
    """Return corrections of the links of ``comm``, their residuals and notes.

    ``call_s`` seconds of every measured call are those of the computing thread. ``trees``: see ``GroupLinks``.
    """
    groups: dict[tuple[str, int, int], list[CollectiveProbe]] = defaultdict(list)
    for probe in probes:
        if probe.groups == 1 and probe.operation in COMM_OPERATIONS:
            groups[probe.operation, probe.ranks, probe.nodes].append(probe)
    samples: list[CollectiveSample] = []
    residuals: list[FitResidual] = []
    for (operation, ranks, nodes), group_probes in sorted(groups.items()):
        nominal = comm.inter_node if nodes > 1 else comm.intra_node
        span = GroupLinks(ranks, nodes, comm.intra_node, comm.inter_node, trees)
        points = collective_points(group_probes, call_s)
        for line in fit_bands(operation, span, points, nominal):
            samples.append(
                CollectiveSample(
                    operation=operation,
                    ranks=ranks,
                    nodes=nodes,
                    latency_s=line.wire.latency_s,
                    beta_ratio=max(line.wire.beta_s_per_byte / nominal.beta_s_per_byte, 1e-3),
                    spread=median(point.spread for point in line.points),
                    from_bytes=line.from_bytes,
                )
            )
            sizes = (format_bytes_short(point.payload_bytes) for point in (line.points[0], line.points[-1]))
            what = f"{operation}, {ranks} ranks on {nodes} node{'s' if nodes > 1 else ''}, {' to '.join(sizes)}"
            residuals.append(fit_residual("collectives", what, _fitted_and_measured(operation, span, line)))
    measured = {sample.operation for sample in samples}
    missing = [operation for operation in COMM_OPERATIONS if operation not in measured]
    notes = [f"not measured: {', '.join(missing)}; taken to be as all_reduce"] if missing and measured else []
    return samples, residuals, notes if measured else ["no collective was measured: links are the profile's"]


def collective_points(probes: Sequence[CollectiveProbe], call_s: float) -> list[CollectivePoint]:
    """Return a point per size: the median over launches, with the larger of the spreads within and between launches."""
    by_size: dict[int, list[CollectiveProbe]] = defaultdict(list)
    for probe in probes:
        by_size[probe.payload_bytes].append(probe)
    points = []
    for size, same_size in sorted(by_size.items()):
        times = [max(probe.seconds - call_s, 0.2 * probe.seconds) for probe in same_size]
        middle = median(times)
        between = sqrt(sum((value / middle - 1) ** 2 for value in times) / (len(times) - 1)) if len(times) > 1 else 0
        points.append(CollectivePoint(size, middle, max(between, median(probe.spread for probe in same_size))))
    return points


def fit_bands(
    operation: str, span: GroupLinks, points: Sequence[CollectivePoint], nominal: HockneyLink
) -> list[SizeBandFit]:
    """Return the fewest bands of sizes that fit, at most ``MAX_BANDS``, with the cuts of the smallest error."""

    def fit(bands: Sequence[list[CollectivePoint]]) -> list[SizeBandFit]:
        starts = [points[0].payload_bytes if number else 0.0 for number, points in enumerate(bands)]
        links = [fit_link(operation, span, points, nominal) for points in bands]
        return [SizeBandFit(*band) for band in zip(links, starts, bands, strict=True)]

    def error(lines: Sequence[SizeBandFit]) -> float:
        return rms_log_error(pair for line in lines for pair in _fitted_and_measured(operation, span, line))

    best = fit([list(points)])
    # Small messages are no evidence of a link's rate where large ones are there.
    small = [point for point in points if point.payload_bytes < _SMALL_MESSAGE_BYTES]
    large = [point for point in points if point.payload_bytes >= _SMALL_MESSAGE_BYTES]
    if min(len(small), len(large)) >= _MIN_POINTS_PER_BAND and error(best) > TARGET_ERROR:
        best = fit([small, large])
    while error(best) > TARGET_ERROR and len(best) < MAX_BANDS:
        tried = [fit(bands) for bands in _split_bands([line.points for line in best])]
        if not tried:
            break
        best = min(tried, key=error)
    return best


def _split_bands(bands: Sequence[list[CollectivePoint]]) -> list[list[list[CollectivePoint]]]:
    """Return all ways to cut one of the bands in two."""
    return [
        [*bands[:number], points[:place], points[place:], *bands[number + 1 :]]
        for number, points in enumerate(bands)
        for place in range(_MIN_POINTS_PER_BAND, len(points) - _MIN_POINTS_PER_BAND + 1)
    ]


def fit_link(operation: str, span: GroupLinks, points: Sequence[CollectivePoint], start: HockneyLink) -> HockneyLink:
    """Return the latency and the time per byte, both 0 or more, that fit ``points`` best.

    The faster one of several algorithms depends on the fitted link, so that the fit is repeated a few times.
    """
    wire = start
    for _ in range(_MAX_ITERATIONS):
        rows = []
        for point in points:
            messages, bytes_moved = link_coefficients(operation, span, point.payload_bytes, wire)
            weight = 1.0 / (point.seconds * sqrt(point.spread**2 + _MEASUREMENT_NOISE**2)) ** 2
            rows.append((messages, bytes_moved, point.seconds, weight))
        refitted = HockneyLink(*non_negative_least_squares(rows))
        if refitted == wire:
            break
        wire = refitted
    return wire


def link_coefficients(operation: str, span: GroupLinks, payload_bytes: float, wire: HockneyLink) -> tuple[float, float]:
    """Return the factors of latency and of bytes in the time of one call on links like ``wire``."""

    def at(link: HockneyLink) -> GroupLinks:
        return span._replace(intra_node=link, inter_node=link)

    latency, per_byte = at(HockneyLink(1.0, 0.0)), at(HockneyLink(0.0, 1.0))
    if operation == "all_reduce":
        chosen = at(wire)
        ring, tree = (formula(chosen, payload_bytes) for formula in (ring_all_reduce_s, tree_all_reduce_s))
        formula = tree_all_reduce_s if span.trees and tree < ring else ring_all_reduce_s
        return formula(latency, 0.0), formula(per_byte, payload_bytes)
    return collective_s(operation, latency, 0.0), collective_s(operation, per_byte, payload_bytes)


def non_negative_least_squares(rows: Sequence[tuple[float, float, float, float]]) -> tuple[float, float]:
    """Return x, y >= 0 that minimise the sum of w (a x + b y - t)^2 over rows (a, b, t, w).

    With two unknowns the minimum is inside, or on one of the two edges.
    """
    aa = sum(w * a * a for a, _, _, w in rows)
    ab = sum(w * a * b for a, b, _, w in rows)
    bb = sum(w * b * b for _, b, _, w in rows)
    at = sum(w * a * t for a, _, t, w in rows)
    bt = sum(w * b * t for _, b, t, w in rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        x, y = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
        if x >= 0 and y >= 0:
            return x, y
    edges = [(max(at / aa, 0.0) if aa else 0.0, 0.0), (0.0, max(bt / bb, 0.0) if bb else 0.0)]
    return min(edges, key=lambda edge: sum(w * (a * edge[0] + b * edge[1] - t) ** 2 for a, b, t, w in rows))


def _fitted_and_measured(operation: str, span: GroupLinks, line: SizeBandFit) -> list[tuple[float, float]]:
    links = span._replace(intra_node=line.wire, inter_node=line.wire)
    return [(max(collective_s(operation, links, point.payload_bytes), 1e-9), point.seconds) for point in line.points]


def format_bytes_short(size_bytes: float) -> str:
    """``2097152 -> "2 MiB"``."""
    power = min(int(log(max(size_bytes, 1.0), 1024)), 3)
    return f"{size_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
