"""Scores of predictors against measured configurations: accuracy, signed error, ranking and memory.

The unit is a configuration; its measured value is the median over launches of each launch's median step time.
Nothing is clipped or left out: a failed run counts as a misprediction unless the predictor called it infeasible."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from math import isnan, log
from statistics import fmean, median, stdev
from typing import NamedTuple

import msgspec
import polars as pl

from hpcbench.predict.cluster_forecasts import ClusterForecasts
from hpcbench.predict.prediction import NotPredicted, PredictionBasis
from hpcbench.report.hypothesis_tests import pooled_spread
from hpcbench.report.validation import (
    COUNTED_FAILURES,
    VALIDATION_COLUMNS,
    MeasuredConfiguration,
    excess_time,
    measured_configurations,
    regret_of,
)
from hpcbench.results.schema import STATUS_OK

ORACLE_NAME, MACHINE_ONLY = "hpcbench", "machine_only"
"""The oracle's name among the predictors, and that of the oracle as if nothing else had been measured."""
MEMORY = "peak_memory_bytes"
SCORED_PARTS = ("compute_s", "comm_s", MEMORY)
"""Figures that are scored in addition to the step time."""
_MEASURED_PARTS = {"compute_s": "metrics.compute_s", "comm_s": "metrics.wire_s", MEMORY: f"metrics.{MEMORY}"}
"""The oracle predicts no wait for late ranks, which measured communication contains except ``wire_s``."""
SCORED_COLUMNS = (*VALIDATION_COLUMNS, *_MEASURED_PARTS.values())
MIN_STEP_FRACTION = 0.01
"""Fraction of a step; shorter parts of it are not compared."""
_IMPLAUSIBLE = 1e18
"""Larger values are errors."""


class ScoredConfiguration(MeasuredConfiguration, kw_only=True):
    """A measured configuration with the parts of its step."""

    figures: dict[str, float] = msgspec.field(default_factory=dict)
    """Figures of ``SCORED_PARTS``: medians over launches, for memory the maximum."""
    figures_noise: dict[str, float] = msgspec.field(default_factory=dict)
    """Standard deviation of the launches' logarithms for each of ``figures``, as ``noise``."""

    @property
    def noise(self) -> float | None:
        """Standard deviation of the launches' logarithms: the limit of any prediction's accuracy."""
        return launch_noise(self.launches_s)


def launch_noise(values: Sequence[float]) -> float | None:
    """Standard deviation of the logarithms; ``None`` of fewer than two, or where one is 0."""
    return stdev(map(log, values)) if len(values) > 1 and min(values) > 0 else None


class PredictorResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The prediction of one predictor for a configuration."""

    step_time_s: float | None = None
    figures: dict[str, float] = {}
    fits: bool | None = None
    low_s: float | None = None
    high_s: float | None = None
    """90 % interval of the step time, where it has one."""
    preference: int | None = None
    """Place of the strategy in the order of a baseline that chooses without predicting times: the lowest is chosen."""
    rests_on: PredictionBasis | None = None
    """Evidence of the oracle's prediction, apart from the configuration itself."""
    reason: str = ""
    """The reason why there is no prediction."""


NO_RESULT = PredictorResult()


class ScoredCase(msgspec.Struct):
    """A configuration and its prediction by each predictor."""

    measured: ScoredConfiguration
    said: dict[str, PredictorResult]

    def result(self, predictor: str) -> PredictorResult:
        """Return the prediction of ``predictor``, an empty one if it has none."""
        return self.said.get(predictor, NO_RESULT)


CasePredictor = Callable[[ScoredConfiguration], PredictorResult]


def scored_configurations(frame: pl.DataFrame) -> list[ScoredConfiguration]:
    """Return ``measured_configurations`` of a frame with ``SCORED_COLUMNS``, with the parts of their steps."""
    launches = {row["run_id"]: row for row in frame.select("run_id", *_MEASURED_PARTS.values()).iter_rows(named=True)}
    found = []
    for one in measured_configurations(frame):
        scored = ScoredConfiguration(**msgspec.structs.asdict(one))
        for part, column in _MEASURED_PARTS.items():
            seen = [value for run_id in one.run_ids if (value := launches[run_id][column]) is not None]
            values = [value for value in seen if 0 <= value < _IMPLAUSIBLE]
            # A stage's communication is mostly the wait for its neighbour.
            if values and not (part == "comm_s" and one.spec.pp_degree > 1):
                scored.figures[part] = max(values) if part == MEMORY else median(values)
                if (spread := launch_noise(values)) is not None:
                    scored.figures_noise[part] = spread
        found.append(scored)
    return found


def oracle_predictor(forecasts: ClusterForecasts) -> CasePredictor:
    """Return the oracle as a predictor, from the machine's numbers alone."""

    def predict(measured: ScoredConfiguration) -> PredictorResult:
        forecast = forecasts.forecast(measured.cluster)
        prediction = forecast if isinstance(forecast, NotPredicted) else forecast.predict_alone(measured.spec)
        if isinstance(prediction, NotPredicted):
            return PredictorResult(reason=prediction.reason)
        return PredictorResult(
            step_time_s=prediction.step_time_s,
            figures={part: float(getattr(prediction, part)) for part in SCORED_PARTS},
            fits=prediction.fits, low_s=prediction.interval.low, high_s=prediction.interval.high,
            rests_on=prediction.rests_on,
        )  # fmt: skip

    return predict


class RankingScore(msgspec.Struct, kw_only=True):
    """The cost of the choices among configurations of one model and number of devices, by time per sample."""

    groups: int
    regret: float | None
    """Mean over groups of how much slower the choice is than the measured best; 0 where the difference is not
    significant."""
    worst_regret: float | None
    median_regret: float | None = None
    """Mean over groups of the regret, where every difference between medians counts."""
    failed: int
    """Groups whose predicted best did not run."""


class PredictedBest(NamedTuple):
    """The configuration that a predictor chose in a group, and the best one."""

    best: ScoredCase
    chosen: ScoredCase | None
    """``None`` if the predictor has fewer than two predictions of the group (none, for a baseline that chooses)."""
    excess: float | None
    """``excess_time`` of the chosen one; ``None`` where it did not run."""
    regret: float | None


def predicted_bests(cases: Sequence[ScoredCase], predictor: str) -> list[PredictedBest]:
    """Return the best and the chosen case of each group of two configurations or more of which any ran."""
    bests, noise = [], pooled_spread((case.measured.cluster, case.measured.launches_s) for case in cases)
    for group in _comparable_groups(cases):
        best, chosen = min(group, key=lambda case: case.measured.s_per_sample), _chosen_case(group, predictor)
        if len(group) < 2 or not best.measured.launches_s:
            continue
        pair = (chosen.measured, best.measured) if chosen is not None else None
        bests.append(
            PredictedBest(best, chosen, *((excess_time(*pair), regret_of(*pair, noise)) if pair else (None, None)))
        )
    return bests


def _comparable_groups(cases: Sequence[ScoredCase]) -> list[list[ScoredCase]]:
    groups: dict[Hashable, list[ScoredCase]] = defaultdict(list)
    for case in cases:
        groups[case.measured.group].append(case)
    return list(groups.values())


def _chosen_case(group: Sequence[ScoredCase], predictor: str) -> ScoredCase | None:
    """Return the case that the predictor chooses: by the least predicted time per sample, or by its preference."""
    preferred = [
        ((preference, -case.measured.spec.global_batch_size, case.measured.config_id), case)
        for case in group
        if (preference := case.result(predictor).preference) is not None
    ]
    if preferred:
        return min(preferred, key=lambda pair: pair[0])[1]
    feasible = _feasible_predictions(group, predictor)
    # Some formulas predict the same time for two strategies: which one is chosen must not depend on the cases' order.
    return (
        min(feasible, key=lambda pair: (float(f"{pair[1]:.9g}"), pair[0].measured.config_id))[0]
        if len(feasible) > 1
        else None
    )


def _feasible_predictions(group: Sequence[ScoredCase], predictor: str) -> list[tuple[ScoredCase, float]]:
    """Return the cases that the predictor does not call infeasible, with its time per sample."""
    results = [(case, case.result(predictor)) for case in group]
    return [
        (case, result.step_time_s / case.measured.spec.global_batch_size)
        for case, result in results
        if result.step_time_s is not None and result.fits is not False
    ]


def score_ranking(cases: Sequence[ScoredCase], predictor: str) -> RankingScore:
    """Score the choices in each group of two configurations or more that were predicted."""
    chosen = [best for best in predicted_bests(cases, predictor) if best.chosen is not None]
    regrets = [best.regret for best in chosen if best.regret is not None]
    return RankingScore(
        groups=len(chosen),
        regret=_mean(regrets),
        worst_regret=max(regrets, default=None),
        median_regret=_mean([best.excess for best in chosen if best.excess is not None]),
        failed=len(chosen) - len(regrets),
    )


def mean_tau(cases: Sequence[ScoredCase], predictor: str) -> float | None:
    """Mean over groups of Kendall's tau-b between predicted and measured times per sample; ties count as ties."""
    # Imported here: only one table shows it.
    from scipy.stats import kendalltau

    taus = []
    for group in _comparable_groups(cases):
        feasible = _feasible_predictions(group, predictor)
        pairs = [(said, case.measured.s_per_sample) for case, said in feasible if case.measured.launches_s]
        taus += [float(kendalltau(*zip(*pairs, strict=True)).statistic)] if len(pairs) > 1 else []
    # Without an order on either side there is none to compare.
    return _mean([tau for tau in taus if not isnan(tau)])


class AccuracySummary(msgspec.Struct, kw_only=True):
    """The errors over configurations, relative to the measurement."""

    count: int
    """Configurations, failed ones among them."""
    failed: int = 0
    """Configurations among them without a prediction, or with a failure that was not predicted: accuracy 0, without a
    signed error."""
    mean: float
    """Of the ``accuracy``."""
    signed: float | None = None
    """Mean of (predicted - measured) / measured."""
    noise: float | None = None
    """Median over configurations of the spread between launches."""
    covered: float | None = None
    """Share of measured values within the predicted 90 % intervals."""


class PredictorScore(msgspec.Struct, kw_only=True):
    """The scores of one predictor."""

    predictor: str
    total: AccuracySummary | None
    strategies: dict[str, AccuracySummary]
    parts: dict[str, AccuracySummary]
    ranking: RankingScore
    false_fits: int
    """Configurations that were predicted to fit and ran out of memory."""
    other: float | None = None
    """Mean accuracy, over the same configurations, of the predictor that it is compared with."""


def accuracy(predicted: float, measured: float) -> float:
    """``1 - |predicted - measured| / measured``: below 0 where the prediction is more than twice the measurement."""
    return 1 - abs(predicted - measured) / measured


def score_predictor(cases: Sequence[ScoredCase], predictor: str, beside: str | None = None) -> PredictorScore:
    """Score ``predictor`` over the cases that count.

    ``beside`` another predictor: only over the cases that ``predictor`` has a step time of, for both. A baseline that
    chooses without predicting times has the ranking's score alone.
    """
    counted = [case for case in cases if case.measured.status in {STATUS_OK, *COUNTED_FAILURES}]
    if any(case.result(predictor).preference is not None for case in counted):
        ranking = score_ranking(counted, predictor)
        return PredictorScore(predictor=predictor, total=None, strategies={}, parts={}, ranking=ranking, false_fits=0)
    if beside is not None:
        counted = [case for case in counted if case.result(predictor).step_time_s is not None]
    by_strategy: dict[str, list[ScoredCase]] = defaultdict(list)
    for case in counted:
        by_strategy[case.measured.spec.strategy].append(case)
    by_name = {name: summarize_accuracy(group, predictor) for name, group in by_strategy.items()}
    by_part = {name: summarize_accuracy(counted, predictor, name) for name in SCORED_PARTS}
    other = summarize_accuracy(counted, beside) if beside else None
    return PredictorScore(
        predictor=predictor,
        total=summarize_accuracy(counted, predictor),
        strategies={name: summary for name, summary in by_name.items() if summary is not None},
        parts={name: summary for name, summary in by_part.items() if summary is not None},
        ranking=score_ranking(counted, predictor),
        false_fits=sum(case.measured.status == "oom" and case.result(predictor).fits is True for case in counted),
        other=None if other is None else other.mean,
    )


def summarize_accuracy(cases: Sequence[ScoredCase], predictor: str, part: str | None = None) -> AccuracySummary | None:
    """Summarize the step time, or a part where it was measured and predicted; ``None`` without a case."""
    compared = [(case, pair) for case in cases if (pair := _compared_pair(case, predictor, part)) is not None]
    if not compared:
        return None
    pairs = [pair for _, pair in compared if pair]
    measured = [case.measured for case, _ in compared]
    spreads = [each.noise if part is None else each.figures_noise.get(part) for each in measured]
    noise = [value for value in spreads if value is not None]
    return AccuracySummary(
        count=len(compared),
        failed=len(compared) - len(pairs),
        mean=fmean(accuracy(*pair) if pair else 0.0 for _, pair in compared),
        signed=_mean([(predicted - actual) / actual for predicted, actual in pairs]),
        noise=median(noise) if noise else None,
        covered=_interval_coverage([case for case, _ in compared], predictor) if part is None else None,
    )


def _compared_pair(case: ScoredCase, predictor: str, part: str | None) -> tuple[float, float] | tuple[()] | None:
    """Return the predicted and measured figures of a case, in seconds or bytes; empty if either is missing.

    ``None`` where nothing is compared: of a failure that was predicted, without the part, and of parts of a step below
    ``MIN_STEP_FRACTION`` of it.
    """
    result, measured = case.result(predictor), case.measured
    if measured.status != STATUS_OK and result.fits is False:
        return None
    step_time_s = measured.step_time_s
    if part is None:
        return (result.step_time_s, step_time_s) if result.step_time_s is not None and step_time_s else ()
    predicted, figure = result.figures.get(part), measured.figures.get(part)
    if predicted is None or not figure or not step_time_s:
        return None
    if part == "comm_s" and measured.spec.pp_degree > 1:
        # A stage's is mostly the wait for its neighbour, which is predicted as the bubble.
        return None
    return None if part.endswith("_s") and figure < MIN_STEP_FRACTION * step_time_s else (predicted, figure)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _interval_coverage(cases: Sequence[ScoredCase], predictor: str) -> float | None:
    inside = []
    for case in cases:
        result, seconds = case.result(predictor), case.measured.step_time_s
        if result.low_s is not None and result.high_s is not None and seconds:
            inside.append(result.low_s <= seconds <= result.high_s)
    return _mean(inside)
