"""Robust least squares in pure Python: the mode and covariance of a posterior with normal priors.

Residuals have Student's t distribution. The mode is found by Levenberg and Marquardt's damped Gauss-Newton steps
on iteratively reweighted residuals (Lange, Little and Taylor 1989); the curvature there gives the covariance
(Laplace)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log1p, sqrt
from typing import NamedTuple

Vector = list[float]
Matrix = list[list[float]]

DEGREES_OF_FREEDOM = 4.0
"""Degrees of freedom of Student's t: a residual of four standard deviations has a fifth of the weight."""
_DIFFERENCE_STEP = 1e-3
_MAX_ITERATIONS = 60
_COST_TOLERANCE = 1e-3
_MAX_DAMPING = 1e8


class PosteriorMode(NamedTuple):
    """The mode of the posterior and its width."""

    at: Vector
    covariance: Matrix
    residuals: Vector


def find_mode(
    residuals: Callable[[Vector], Vector], widths: Sequence[float], start: Sequence[float] = ()
) -> PosteriorMode:
    """Return the mode of the posterior.

    ``residuals`` are in units of their scale; ``widths`` are the standard deviations of the priors.
    """
    at, damping = list(start) or [0.0] * len(widths), 1e-3
    now = residuals(at)
    for _ in range(_MAX_ITERATIONS):
        normal, gradient = _normal_equations(residuals, now, at, widths)
        cost, is_better = _negative_log_posterior(now, at, widths), False
        while damping < _MAX_DAMPING and not is_better:
            damped = [[value * (1 + damping * (i == j)) for j, value in enumerate(row)] for i, row in enumerate(normal)]
            candidate = [old - step for old, step in zip(at, solve_positive_definite(damped, gradient), strict=True)]
            candidate_residuals = residuals(candidate)
            is_better = _negative_log_posterior(candidate_residuals, candidate, widths) <= cost
            damping *= 0.25 if is_better else 8.0
        if not is_better:
            break
        at, now = candidate, candidate_residuals
        if cost - _negative_log_posterior(now, at, widths) < _COST_TOLERANCE:
            break
    normal, _ = _normal_equations(residuals, now, at, widths)
    unit_vectors = [[float(row == column) for row in range(len(at))] for column in range(len(at))]
    columns = [solve_positive_definite(normal, vector) for vector in unit_vectors]
    return PosteriorMode(at, [list(row) for row in zip(*columns, strict=True)], now)


def student_t_weight(residual: float) -> float:
    """Return the weight of a residual in units of its scale: 1 for a residual of 0."""
    return DEGREES_OF_FREEDOM / (DEGREES_OF_FREEDOM + residual * residual)


def cholesky_factor(matrix: Matrix) -> Matrix:
    """Return the lower triangular matrix whose product with its transpose is the positive definite ``matrix``."""
    lower = [[0.0] * len(matrix) for _ in matrix]
    for row in range(len(matrix)):
        for column in range(row + 1):
            left = matrix[row][column] - sum(lower[row][k] * lower[column][k] for k in range(column))
            lower[row][column] = sqrt(left) if row == column else left / lower[column][column]
    return lower


def solve_positive_definite(matrix: Matrix, right: Vector) -> Vector:
    """Return x with ``matrix`` x = ``right``; ``matrix`` is positive definite."""
    lower, count = cholesky_factor(matrix), len(right)
    x = list(right)
    for row in range(count):
        x[row] = (x[row] - sum(lower[row][k] * x[k] for k in range(row))) / lower[row][row]
    for row in reversed(range(count)):
        x[row] = (x[row] - sum(lower[k][row] * x[k] for k in range(row + 1, count))) / lower[row][row]
    return x


def _negative_log_posterior(residuals: Vector, at: Vector, widths: Sequence[float]) -> float:
    """Twice the negative logarithm of the posterior, but for a constant."""
    from_runs = (DEGREES_OF_FREEDOM + 1) * sum(log1p(value * value / DEGREES_OF_FREEDOM) for value in residuals)
    return from_runs + sum((value / width) ** 2 for value, width in zip(at, widths, strict=True))


def _normal_equations(
    residuals: Callable[[Vector], Vector], now: Vector, at: Vector, widths: Sequence[float]
) -> tuple[Matrix, Vector]:
    """Half the cost's curvature (Gauss and Newton's) and half its gradient."""
    slopes = []
    for place in range(len(at)):
        moved = residuals([value + _DIFFERENCE_STEP * (place == other) for other, value in enumerate(at)])
        slopes.append([(after - before) / _DIFFERENCE_STEP for after, before in zip(moved, now, strict=True)])
    counts = [(DEGREES_OF_FREEDOM + 1) / DEGREES_OF_FREEDOM * student_t_weight(value) for value in now]
    normal = [
        [sum(c * a * b for c, a, b in zip(counts, left, right, strict=True)) for right in slopes] for left in slopes
    ]
    gradient = [sum(c * r * s for c, r, s in zip(counts, now, row, strict=True)) for row in slopes]
    for place, width in enumerate(widths):
        normal[place][place] += 1 / width**2
        gradient[place] += at[place] / width**2
    return normal, gradient
