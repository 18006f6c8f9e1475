"""From timed collectives to a latency and a time per byte, operation by operation, in bands of sizes.

Every formula of ``oracle.collectives`` is linear in the two: t = a * latency + b * m * beta, where a counts messages
one after another and b m the bytes of all of them. Both are found by least squares, weighted with the inverse variance
of the readings, and neither may be negative. Where one line does not do, sizes are cut into bands with a line each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import log, sqrt
from typing import NamedTuple

from hpcbench.oracle.calibration.evidence import explained, log_error, median
from hpcbench.oracle.calibration.store import Residual
from hpcbench.oracle.collectives import Span, Wire, ring_all_reduce_s, time_s, tree_all_reduce_s
from hpcbench.oracle.machine import CollectiveSample, Comm
from hpcbench.parallel.traffic import OPERATIONS
from hpcbench.results.schema import CollectiveProbe

GOOD_ENOUGH = 0.06
"""Error of a fit that needs no further band."""
MOST_BANDS = 3
_LEAST_POINTS = 3
_NOISE = 0.03
"""What the spread within a launch does not show."""
_SMALL_BYTES = 128 * 1024
"""Four times the burst of a usual shaper: what is smaller runs ahead of the link's rate."""
_ROUNDS = 8


class Point(NamedTuple):
    """One size of one operation."""

    payload_bytes: float
    seconds: float
    spread: float


class Line(NamedTuple):
    """Of the sizes from ``from_bytes`` on."""

    wire: Wire
    from_bytes: float
    points: list[Point]


def fit_collectives(
    comm: Comm, probes: Sequence[CollectiveProbe], call_s: float, trees: bool
) -> tuple[list[CollectiveSample], list[Residual], list[str]]:
    """Corrections of the links of ``comm``; ``call_s`` of every reading is the computing thread's.

    ``trees``: see ``Span``.
    """
    groups: dict[tuple[str, int, int], list[CollectiveProbe]] = defaultdict(list)
    for one in probes:
        if one.groups == 1 and one.operation in OPERATIONS:
            groups[one.operation, one.ranks, one.nodes].append(one)
    samples: list[CollectiveSample] = []
    residuals: list[Residual] = []
    for (operation, ranks, nodes), found in sorted(groups.items()):
        nominal = comm.inter_node if nodes > 1 else comm.intra_node
        span = Span(ranks, nodes, comm.intra_node, comm.inter_node, trees)
        points = points_of(found, call_s)
        lines = fit_bands(operation, span, points, nominal)
        for line in lines:
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
            residuals.append(_residual(operation, span, line))
    there = {one.operation for one in samples}
    missing = [operation for operation in OPERATIONS if operation not in there]
    notes = [f"not measured: {', '.join(missing)}; taken to be as all_reduce"] if missing and there else []
    return samples, residuals, notes if there else ["no collective was measured: links are the profile's"]


def points_of(found: Sequence[CollectiveProbe], call_s: float) -> list[Point]:
    """One a size: the median over launches; their spread is the larger of that within and that between them."""
    by_size: dict[int, list[CollectiveProbe]] = defaultdict(list)
    for one in found:
        by_size[one.payload_bytes].append(one)
    points = []
    for size, same in sorted(by_size.items()):
        seconds = [max(one.seconds - call_s, 0.2 * one.seconds) for one in same]
        middle = median(seconds)
        between = sqrt(sum((one / middle - 1) ** 2 for one in seconds) / (len(seconds) - 1)) if len(seconds) > 1 else 0
        points.append(Point(size, middle, max(between, median(one.spread for one in same))))
    return points


def fit_bands(operation: str, span: Span, points: Sequence[Point], nominal: Wire) -> list[Line]:
    """As few bands as it takes, at most ``MOST_BANDS``, cut where the error is least."""
    best = _cut(operation, span, [list(points)], nominal)
    # Small messages are no evidence of a link's rate where large ones are there.
    small = [one for one in points if one.payload_bytes < _SMALL_BYTES]
    large = [one for one in points if one.payload_bytes >= _SMALL_BYTES]
    if len(small) >= _LEAST_POINTS and len(large) >= _LEAST_POINTS and _error(operation, span, best) > GOOD_ENOUGH:
        best = _cut(operation, span, [small, large], nominal)
    while _error(operation, span, best) > GOOD_ENOUGH and len(best) < MOST_BANDS:
        tried = list(_further(operation, span, best, nominal))
        if not tried:
            break
        best = min(tried, key=lambda lines: _error(operation, span, lines))
    return best


def _further(operation: str, span: Span, lines: Sequence[Line], nominal: Wire) -> list[list[Line]]:
    """All ways to cut one of the bands in two."""
    found = []
    for number, line in enumerate(lines):
        for place in range(_LEAST_POINTS, len(line.points) - _LEAST_POINTS + 1):
            parts = [line.points[:place], line.points[place:]]
            bands = [*(one.points for one in lines[:number]), *parts, *(one.points for one in lines[number + 1 :])]
            found.append(_cut(operation, span, bands, nominal))
    return found


def _cut(operation: str, span: Span, bands: Sequence[list[Point]], nominal: Wire) -> list[Line]:
    return [
        Line(fit_line(operation, span, points, nominal), points[0].payload_bytes if number else 0.0, points)
        for number, points in enumerate(bands)
    ]


def fit_line(operation: str, span: Span, points: Sequence[Point], start: Wire) -> Wire:
    """Latency and time per byte, both 0 or more, that lie nearest to ``points``.

    Which of several algorithms is the faster depends on what is looked for, so that it is looked for anew a few times.
    """
    wire = start
    for _ in range(_ROUNDS):
        rows = []
        for one in points:
            messages, bytes_moved = coefficients(operation, span, one.payload_bytes, wire)
            weight = 1.0 / (one.seconds * sqrt(one.spread**2 + _NOISE**2)) ** 2
            rows.append((messages, bytes_moved, one.seconds, weight))
        found = Wire(*non_negative(rows))
        if found == wire:
            break
        wire = found
    return wire


def coefficients(operation: str, span: Span, payload_bytes: float, wire: Wire) -> tuple[float, float]:
    """How often the latency counts in one call, and how many bytes, on links like ``wire``."""

    def at(given: Wire) -> Span:
        return span._replace(intra_node=given, inter_node=given)

    latency, per_byte = at(Wire(1.0, 0.0)), at(Wire(0.0, 1.0))
    if operation == "all_reduce":
        chosen = at(wire)
        ring, tree = (formula(chosen, payload_bytes) for formula in (ring_all_reduce_s, tree_all_reduce_s))
        formula = tree_all_reduce_s if span.trees and tree < ring else ring_all_reduce_s
        return formula(latency, 0.0), formula(per_byte, payload_bytes)
    return time_s(operation, latency, 0.0), time_s(operation, per_byte, payload_bytes)


def non_negative(rows: Sequence[tuple[float, float, float, float]]) -> tuple[float, float]:
    """x, y >= 0 that make the sum of w (a x + b y - t)^2 least, of rows (a, b, t, w).

    With two unknowns the least is inside, or on one of the two edges.
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
    return min(edges, key=lambda one: sum(w * (a * one[0] + b * one[1] - t) ** 2 for a, b, t, w in rows))


def _pairs(operation: str, span: Span, line: Line) -> list[tuple[float, float]]:
    there = span._replace(intra_node=line.wire, inter_node=line.wire)
    return [(max(time_s(operation, there, one.payload_bytes), 1e-9), one.seconds) for one in line.points]


def _error(operation: str, span: Span, lines: Sequence[Line]) -> float:
    return log_error(pair for line in lines for pair in _pairs(operation, span, line))


def _residual(operation: str, span: Span, line: Line) -> Residual:
    where = f"{span.ranks} ranks on {span.nodes} node{'s' if span.nodes > 1 else ''}"
    sizes = f"{words(line.points[0].payload_bytes)} to {words(line.points[-1].payload_bytes)}"
    pairs = _pairs(operation, span, line)
    return Residual(part="collectives", what=f"{operation}, {where}, {sizes}", points=len(pairs),
                    error=log_error(pairs), r2=explained(pairs))  # fmt: skip


def words(size_bytes: float) -> str:
    """``2097152 -> "2 MiB"``."""
    power = min(int(log(max(size_bytes, 1.0), 1024)), 3)
    return f"{size_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
