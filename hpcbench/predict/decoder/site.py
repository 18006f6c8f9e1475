"""Factors of a site on figures that runs of other sites determined, learned from the site's own runs.

A factor's logarithm is normal around 0 before any run. The standard deviations were chosen by the errors of sources of
published runs that were predicted from the others (``benchmarks/oracle/gpu.md``). Measured runs move the factors by
least squares on the logarithm of the step time, linear around the last estimate (Gauss-Newton); the same equations give
the interval of a prediction, and how much a further run would narrow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log, sqrt
from typing import NamedTuple

from hpcbench.predict.decoder.pricing import Figures, StepTerms, StepTime, step_terms, step_time
from hpcbench.predict.decoder.work import Work

_DATA_RATES = (
    "reduce_rate", "reduce_wide_rate", "gather_rate", "gather_wide_rate", "shard_rate", "shard_wide_rate",
)  # fmt: skip
_DATA_LATENCIES = ("ring_hop_s", "gather_message_s", "gather_hop_s", "shard_message_s")
SITE_FACTORS: dict[str, tuple[tuple[str, ...], float]] = {
    "products": (("matmul",), 0.10),
    "memory-bound kernels": (("memory",), 0.25),
    "attention": (("attention",), 0.3),
    "tensor parallel messages": (("tensor_rate", "tensor_message_s"), 0.5),
    "tensor parallel messages over nodes": (("tensor_wide_rate", "tensor_wide_message_s"), 0.5),
    "data parallel rates": (_DATA_RATES, 0.5),
    "data parallel latencies": (_DATA_LATENCIES, 1.0),
    "messages between stages": (("send_rate",), 0.5),
    "host": (("host_layer_s", "host_tensor_s", "host_head_s"), 0.4),
    "optimizer": (("optimizer",), 0.4),
    "whole step": ((), 0.12),
}
"""Figures that a factor makes faster, and the standard deviation of its logarithm: efficiencies and rates grow, seconds
shrink. The last one, without a figure, is on the speed of the whole step."""
CONFIGURATION_SPREAD, LAUNCH_SPREAD = 0.07, 0.02
"""Standard deviations of the logarithm: the error of the formulas for a configuration, and the noise of a launch."""
MEMORY_PRIOR_SPREAD, MEMORY_SPREAD = 0.3, 0.07
"""Standard deviations of the logarithm of measured over counted memory: between sites, and within a site."""
MAX_LOG_FACTOR = 3.0
_ITERATIONS, _STEP = 4, 0.01
_CONTRADICTION = 3.0
_RUN_VARIANCE = CONFIGURATION_SPREAD**2 + LAUNCH_SPREAD**2

Logs = tuple[float, ...]
PRIOR_LOGS: Logs = (0.0,) * len(SITE_FACTORS)


class SiteRun(NamedTuple):
    """A measured configuration: its work, the figures learned elsewhere, and the median of its launches.

    ``memory_ratio`` is the measured peak memory over the bytes that tensors hold, where both are known.
    """

    key: str
    work: Work
    figures: Figures
    measured_s: float | None
    launches: int = 1
    memory_ratio: float | None = None
    label: str = ""


def scale_figures(figures: Figures, logs: Logs) -> Figures:
    """Return the figures of a site with these logarithms of factors; that of the whole step is left out."""
    changes = {
        name: getattr(figures, name) * exp(-value if name.endswith("_s") else value)
        for (names, _), value in zip(SITE_FACTORS.values(), logs, strict=True)
        if value
        for name in names
    }
    return replace(figures, **changes)


def site_step(work: Work, figures: Figures, logs: Logs) -> StepTime:
    """Price a step at a site."""
    if not any(logs):
        return step_time(work, figures)
    parts = step_time(work, scale_figures(figures, logs))
    return StepTime(**{name: seconds * exp(-logs[-1]) for name, seconds in asdict(parts).items()})


def site_terms(work: Work, figures: Figures, logs: Logs) -> StepTerms:
    """Split a step at a site by its terms."""
    terms = step_terms(work, scale_figures(figures, logs))
    return StepTerms(**{name: seconds * exp(-logs[-1]) for name, seconds in asdict(terms).items()})


def gradient(work: Work, figures: Figures, logs: Logs) -> list[float]:
    """Return the derivatives of the logarithm of the step by the logarithms of the factors."""
    middle = log(step_time(work, scale_figures(figures, logs)).total_s)
    slopes = []
    for place, (names, _) in enumerate(SITE_FACTORS.values()):
        moved = (*logs[:place], logs[place] + _STEP, *logs[place + 1 :])
        step_s = step_time(work, scale_figures(figures, moved)).total_s if names else 0.0
        slopes.append((log(step_s) - middle) / _STEP if names else -1.0)
    return slopes


Matrix = tuple[tuple[float, ...], ...]


PRIOR_COVARIANCE: Matrix = tuple(
    tuple(spread**2 if row == column else 0.0 for column in range(len(SITE_FACTORS)))
    for row, (_, spread) in enumerate(SITE_FACTORS.values())
)
NEW_DEVICE_SCALE = 1.6
"""Factor on the standard deviations for a device of which no run was published."""


def prior_covariance(scale: float) -> Matrix:
    """Return the covariance of the factors before any run."""
    return tuple(tuple(scale**2 * value for value in row) for row in PRIOR_COVARIANCE)


@dataclass(frozen=True)
class _Linear:
    """A run as a linear observation: its logarithm is ``slopes`` times the factors plus an error of ``variance``."""

    slopes: Sequence[float]
    target: float
    variance: float


@dataclass(frozen=True)
class Site:
    """Factors of a site: their most likely logarithms, their covariance, and the runs that determined them."""

    logs: Logs = PRIOR_LOGS
    covariance: Matrix = PRIOR_COVARIANCE
    runs: tuple[SiteRun, ...] = ()
    observations: tuple[_Linear, ...] = ()
    """The linear equations of the runs in ``timed``, in that order."""

    @property
    def timed(self) -> list[SiteRun]:
        """The runs with a time; the others have a memory alone."""
        return [run for run in self.runs if run.measured_s]

    @property
    def memory_factor(self) -> float:
        """Measured peak memory over the bytes that tensors hold: the share that allocator, context and meter add.

        The mean of the logarithms is shrunk towards 0 as by a normal prior.
        """
        ratios = [log(run.memory_ratio) for run in self.runs if run.memory_ratio]
        return exp(sum(ratios) / (len(ratios) + (MEMORY_SPREAD / MEMORY_PRIOR_SPREAD) ** 2))

    def variance(self, slopes: Sequence[float]) -> float:
        """Return the variance of the logarithm of a step with this gradient."""
        return _dot(slopes, [_dot(row, slopes) for row in self.covariance])

    def with_run(self, slopes: Sequence[float]) -> Site:
        """Return the site as it would be after a run with this gradient: of the same factors, and better known."""
        one = _Linear(slopes, _dot(slopes, self.logs), _RUN_VARIANCE)
        return replace(self, covariance=_update(self.logs, self.covariance, one)[1])

    def without(self, key: str) -> Site:
        """Return the site without the run ``key``: the equations are linear, so that its part can be taken out."""
        logs, covariance, kept = self.logs, self.covariance, list[_Linear]()
        for run, one in zip(self.timed, self.observations, strict=True):
            if run.key == key:
                logs, covariance = _update(logs, covariance, replace(one, variance=-one.variance))
            else:
                kept.append(one)
        return Site(logs, covariance, tuple(run for run in self.runs if run.key != key), tuple(kept))

    def own_log(self, key: str) -> tuple[float, float]:
        """Return the logarithm of the measured over the predicted time of the configuration ``key``, and its variance.

        Without a run of it, 0 and the variance of the formulas' error.
        """
        for run in self.runs:
            if run.key == key and run.measured_s:
                rest = log(run.measured_s / site_step(run.work, run.figures, self.logs).total_s)
                launches = LAUNCH_SPREAD**2 / run.launches
                gain = CONFIGURATION_SPREAD**2 / (CONFIGURATION_SPREAD**2 + launches)
                return gain * rest, (1 - gain) * CONFIGURATION_SPREAD**2
        return 0.0, CONFIGURATION_SPREAD**2

    def contradictions(self) -> list[tuple[SiteRun, float]]:
        """Return the runs that differ from the fit to all runs by more than three times their noise, with the ratio of
        measured to predicted seconds."""
        found = []
        for run, one in zip(self.timed, self.observations, strict=True):
            ratio = (run.measured_s or 0.0) / site_step(run.work, run.figures, self.logs).total_s
            if abs(log(ratio)) > _CONTRADICTION * sqrt(one.variance):
                found.append((run, ratio))
        return found


def learn_site(runs: Sequence[SiteRun], scale: float = 1.0) -> Site:
    """Return the factors of a site from its measured configurations, one entry each.

    ``scale`` multiplies the standard deviations of the factors: ``NEW_DEVICE_SCALE`` for a device without runs.
    """
    prior = prior_covariance(scale)
    logs, covariance, observations = PRIOR_LOGS, prior, list[_Linear]()
    for _ in range(_ITERATIONS):
        observations = [_linear(run, logs) for run in runs if run.measured_s]
        logs, covariance = PRIOR_LOGS, prior
        for one in observations:
            logs, covariance = _update(logs, covariance, one)
        logs = tuple(max(-MAX_LOG_FACTOR, min(MAX_LOG_FACTOR, value)) for value in logs)
    return Site(logs, covariance, tuple(runs), tuple(observations))


def _linear(run: SiteRun, logs: Logs) -> _Linear:
    """Return a run's observation around ``logs``. One that is far off counts less (Huber's weights)."""
    slopes = gradient(run.work, run.figures, logs)
    rest = log((run.measured_s or 0.0) / site_step(run.work, run.figures, logs).total_s)
    variance = CONFIGURATION_SPREAD**2 + LAUNCH_SPREAD**2 / run.launches
    if logs is not PRIOR_LOGS:
        variance *= max(1.0, abs(rest) / (2 * sqrt(variance)))
    return _Linear(slopes, rest + _dot(slopes, logs), variance)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))


def _update(logs: Logs, covariance: Matrix, one: _Linear) -> tuple[Logs, Matrix]:
    """Return mean and covariance after an observation (recursive least squares); a negative variance removes it."""
    shared = [_dot(row, one.slopes) for row in covariance]
    variance = _dot(one.slopes, shared) + one.variance
    rest = one.target - _dot(one.slopes, logs)
    mean = tuple(value + each * rest / variance for value, each in zip(logs, shared, strict=True))
    reduced = tuple(
        tuple(value - each * other / variance for value, other in zip(row, shared, strict=True))
        for row, each in zip(covariance, shared, strict=True)
    )
    return mean, reduced
