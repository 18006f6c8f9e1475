"""Scores of predictors against measured configurations: accuracy, signed error, ranking and memory.

The unit is a configuration; its measured value is the median over launches of each launch's median step time.
Nothing is clipped or left out: a failed run counts as a misprediction unless the predictor called it infeasible."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from math import log, sqrt
from statistics import fmean, median, stdev
from typing import NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.prediction import PredictionBasis
from hpcbench.results.schema import STATUS_OK
from hpcbench.results.timing_statistics import quantile

COUNTED_FAILURES = frozenset({"oom", "failed", "timeout"})
"""Ends that count as an error of a prediction that the run succeeds; no predictor covers the others."""
SCORED_PARTS = ("compute_s", "comm_s", "peak_memory_bytes")
"""Figures that are scored in addition to the step time; ``comm_s`` without waits for late ranks."""
_BOOTSTRAP_RESAMPLES = 1000
_BOOTSTRAP_SEED = 8
_NORMAL_95 = 1.96
"""Number of standard deviations within which 95 % of a normal distribution lie."""


class MeasuredConfiguration(msgspec.Struct, kw_only=True):
    """A configuration on one cluster in one environment, as it was run."""

    cluster: str
    config_id: str
    spec: RunSpec
    status: str = STATUS_OK
    """``ok`` where any launch ended well, else how the first one ended."""
    run_ids: list[str] = []
    launches_s: list[float] = []
    """Median step time of every launch."""
    figures: dict[str, float] = {}
    """Figures of ``SCORED_PARTS``: medians over launches, for memory the maximum."""
    figures_noise: dict[str, float] = {}
    """Standard deviation of the launches' logarithms for each of ``figures``, as ``noise``."""

    @property
    def step_time_s(self) -> float | None:
        """The median over launches."""
        return median(self.launches_s) if self.launches_s else None

    @property
    def noise(self) -> float | None:
        """Standard deviation of the launches' logarithms: the limit of any prediction's accuracy."""
        return launch_noise(self.launches_s)

    def interval(self) -> tuple[float, float] | None:
        """95 % bootstrap interval of the median over launches; ``None`` for a single one."""
        samples = [[value] for value in self.launches_s]
        return bootstrap_interval(samples, median) if len(samples) > 1 else None


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


class ValidationCase(msgspec.Struct):
    """A configuration and its prediction by each predictor."""

    measured: MeasuredConfiguration
    said: dict[str, PredictorResult]


def bootstrap_interval(
    clusters: Sequence[Sequence[float]], statistic: Callable[[list[float]], float]
) -> tuple[float, float]:
    """95 % percentile interval of ``statistic``, drawing whole clusters with replacement. The seed is fixed."""
    source = random.Random(_BOOTSTRAP_SEED)  # noqa: S311 - resampling, not secrecy
    drawn = [source.choices(clusters, k=len(clusters)) for _ in range(_BOOTSTRAP_RESAMPLES)]
    values = sorted(statistic([value for cluster in resample for value in cluster]) for resample in drawn)
    return quantile(values, 0.025), quantile(values, 0.975)


class RankingScore(msgspec.Struct, kw_only=True):
    """The quality of a ranking of configurations of one model and number of devices, by time per sample."""

    groups: int
    tau: float | None
    """Mean of Kendall's tau-b over groups, ties counted as ties."""
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

    best: ValidationCase
    chosen: ValidationCase | None
    """``None`` if the predictor has fewer than two predictions of the group (none, for a baseline that chooses)."""
    regret: float | None
    """Relative difference between the step times per sample of the chosen and the best one; ``None`` where the chosen
    one did not run."""
    is_tie: bool = False
    """Whether the difference is not significant, given the spread of launches."""


def predicted_bests(cases: Sequence[ValidationCase], predictor: str) -> list[PredictedBest]:
    """Return the best and the chosen case of each group of two configurations or more of which any ran."""
    bests = []
    spreads = pooled_launch_noise(cases)
    for group in _comparable_groups(cases):
        ran = [(seconds, case) for case in group if (seconds := _measured_s_per_sample(case)) is not None]
        if len(group) < 2 or not ran:
            continue
        least_s, best = min(ran, key=lambda pair: pair[0])
        chosen = _chosen_case(group, predictor)
        chosen_s = _measured_s_per_sample(chosen) if chosen is not None else None
        if chosen is None or chosen_s is None:
            bests.append(PredictedBest(best, chosen, None))
            continue
        regret = chosen_s / least_s - 1
        spread = spreads.get(best.measured.cluster)
        launches = [len(case.measured.launches_s) for case in (best, chosen)]
        is_tie = regret <= 0 or (spread is not None and log(chosen_s / least_s) <= _tie_limit(spread, launches))
        bests.append(PredictedBest(best, chosen, regret, is_tie))
    return bests


def pooled_launch_noise(cases: Sequence[ValidationCase]) -> dict[str, float]:
    """Return by cluster the standard deviation of a launch's logarithm, pooled over configurations with several.

    Two or three launches of one configuration do not determine its own spread.
    """
    squares: dict[str, float] = defaultdict(float)
    freedom: Counter[str] = Counter()
    for case in cases:
        noise, launches = case.measured.noise, len(case.measured.launches_s)
        if noise is not None:
            squares[case.measured.cluster] += noise**2 * (launches - 1)
            freedom[case.measured.cluster] += launches - 1
    return {cluster: sqrt(total / freedom[cluster]) for cluster, total in squares.items()}


def _tie_limit(spread: float, launches: Sequence[int]) -> float:
    """Return the logarithm of the ratio of two times up to which they are equal, at 95 %, with so many launches."""
    return _NORMAL_95 * spread * sqrt(sum(1 / count for count in launches))


def _chosen_case(group: Sequence[ValidationCase], predictor: str) -> ValidationCase | None:
    """Return the case that the predictor chooses: by the least predicted time per sample, or by its preference."""
    results = [(case, case.said.get(predictor, PredictorResult())) for case in group]
    preferred = [
        ((result.preference, -case.measured.spec.global_batch_size, case.measured.config_id), case)
        for case, result in results
        if result.preference is not None
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


def _feasible_predictions(group: Sequence[ValidationCase], predictor: str) -> list[tuple[ValidationCase, float]]:
    """Return the cases that the predictor does not call infeasible, with its time per sample."""
    results = [(case, case.said.get(predictor, PredictorResult())) for case in group]
    return [
        (case, result.step_time_s / case.measured.spec.global_batch_size)
        for case, result in results
        if result.step_time_s is not None and result.fits is not False
    ]


def score_ranking(cases: Sequence[ValidationCase], predictor: str) -> RankingScore:
    """Score the order of the configurations in each group of two or more that were predicted."""
    taus = []
    for group in _comparable_groups(cases):
        feasible = [(said, _measured_s_per_sample(case)) for case, said in _feasible_predictions(group, predictor)]
        pairs = [(said, measured) for said, measured in feasible if measured is not None]
        tau = kendall_tau([said for said, _ in pairs], [measured for _, measured in pairs])
        taus += [] if tau is None else [tau]
    chosen = [best for best in predicted_bests(cases, predictor) if best.chosen is not None]
    medians = [best.regret for best in chosen if best.regret is not None]
    regrets = [0.0 if best.is_tie else best.regret for best in chosen if best.regret is not None]
    return RankingScore(
        groups=len(chosen),
        tau=_mean(taus),
        regret=_mean(regrets),
        worst_regret=max(regrets, default=None),
        median_regret=_mean(medians),
        failed=len(chosen) - len(regrets),
    )


def _comparable_groups(cases: Sequence[ValidationCase]) -> list[list[ValidationCase]]:
    groups: dict[Hashable, list[ValidationCase]] = defaultdict(list)
    for case in cases:
        spec = case.measured.spec
        options = tuple(sorted(spec.model_options.items()))
        key = (case.measured.cluster, spec.model, options, spec.dataset, spec.input_size, spec.precision, spec.devices)
        groups[key].append(case)
    return list(groups.values())


def _measured_s_per_sample(case: ValidationCase) -> float | None:
    seconds = case.measured.step_time_s
    return seconds / case.measured.spec.global_batch_size if seconds and case.measured.status == STATUS_OK else None


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Kendall's tau-b (1945): ties of either side count as ties. ``None`` where one side is all ties.

    >>> kendall_tau([1, 2, 3], [1, 3, 2]), kendall_tau([1, 1, 2], [1, 2, 3])
    (0.3333333333333333, 0.8164965809277261)
    """
    agreement = left_pairs = right_pairs = 0
    for (left_a, right_a), (left_b, right_b) in combinations(zip(left, right, strict=True), 2):
        left_sign = (left_a > left_b) - (left_a < left_b)
        right_sign = (right_a > right_b) - (right_a < right_b)
        agreement += left_sign * right_sign
        left_pairs += left_sign != 0
        right_pairs += right_sign != 0
    return agreement / sqrt(left_pairs * right_pairs) if left_pairs and right_pairs else None


GOOD_ACCURACY = 0.9
MIN_STEP_FRACTION = 0.01
"""Fraction of a step; shorter parts of it are not compared."""


class AccuracySummary(msgspec.Struct, kw_only=True):
    """The errors over configurations, relative to the measurement."""

    count: int
    """Configurations, failed ones among them."""
    failed: int = 0
    """Configurations among them without a prediction, or with a failure that was not predicted: accuracy 0, without a
    signed error."""
    mean: float
    low: float
    high: float
    """95 % bootstrap interval of the mean, drawing whole models where there are several."""
    median: float
    least: float
    good: float
    """Share with an accuracy of at least ``GOOD_ACCURACY``."""
    signed: float | None = None
    """Mean of (predicted - measured) / measured."""
    abs_log: float | None = None
    """Mean of |ln(predicted / measured)|."""
    noise: float | None = None
    """Median over configurations of the spread between launches."""
    covered: float | None = None
    """Share of measured values within the predicted 90 % intervals."""


class MemoryFitScore(msgspec.Struct, kw_only=True):
    """Memory as yes or no, over runs that were ok or out of memory and have a prediction."""

    count: int
    false_fits: int
    """Predicted to fit, out of memory."""
    said_to_fit: int
    false_alarms: int
    """Predicted not to fit, and ran."""


class PredictorScore(msgspec.Struct, kw_only=True):
    """The scores of one predictor."""

    predictor: str
    total: AccuracySummary | None
    strategies: dict[str, AccuracySummary]
    parts: dict[str, AccuracySummary]
    ranking: RankingScore
    fits: MemoryFitScore
    other: float | None = None
    """Mean accuracy, over the same configurations, of the predictor that it is compared with."""


def accuracy(predicted: float, measured: float) -> float:
    """``1 - |predicted - measured| / measured``: below 0 where the prediction is more than twice the measurement."""
    return 1 - abs(predicted - measured) / measured


def score_predictor(cases: Sequence[ValidationCase], predictor: str, beside: str | None = None) -> PredictorScore:
    """Score ``predictor`` over the cases that count.

    ``beside`` another predictor: only over the cases that ``predictor`` has a step time of, for both. A baseline that
    chooses without predicting times has the ranking's score alone.
    """
    counted = [case for case in cases if case.measured.status in {STATUS_OK, *COUNTED_FAILURES}]
    if any(case.said.get(predictor, PredictorResult()).preference is not None for case in counted):
        return PredictorScore(
            predictor=predictor, total=None, strategies={}, parts={}, ranking=score_ranking(counted, predictor),
            fits=score_memory_fits((), predictor),
        )  # fmt: skip
    if beside is not None:
        counted = [case for case in counted if case.said.get(predictor, PredictorResult()).step_time_s is not None]
    by_strategy: dict[str, list[ValidationCase]] = defaultdict(list)
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
        fits=score_memory_fits(counted, predictor),
        other=None if other is None else other.mean,
    )


def summarize_accuracy(
    cases: Sequence[ValidationCase], predictor: str, part: str | None = None
) -> AccuracySummary | None:
    """Summarize the step time, or a part where it was measured and predicted; ``None`` without a case."""
    compared = [(case, pair) for case in cases if (pair := _compared_pair(case, predictor, part)) is not None]
    if not compared:
        return None
    accuracies = [accuracy(*pair) if pair else 0.0 for _, pair in compared]
    pairs = [pair for _, pair in compared if pair]
    by_model: dict[str, list[float]] = defaultdict(list)
    for (case, _), value in zip(compared, accuracies, strict=True):
        by_model[case.measured.spec.model].append(value)
    # Whole models are drawn where there are several, else configurations.
    clusters = list(by_model.values()) if len(by_model) > 1 else [[value] for value in accuracies]
    low, high = bootstrap_interval(clusters, fmean)
    measured = [case.measured for case, _ in compared]
    spreads = [each.noise if part is None else each.figures_noise.get(part) for each in measured]
    noise = [value for value in spreads if value is not None]
    return AccuracySummary(
        count=len(compared),
        failed=len(compared) - len(pairs),
        mean=fmean(accuracies),
        low=low,
        high=high,
        median=median(accuracies),
        least=min(accuracies),
        good=sum(value >= GOOD_ACCURACY for value in accuracies) / len(accuracies),
        signed=_mean([(predicted - actual) / actual for predicted, actual in pairs]),
        abs_log=_mean([abs(log(predicted / actual)) for predicted, actual in pairs if predicted > 0]),
        noise=median(noise) if noise else None,
        covered=_interval_coverage([case for case, _ in compared], predictor) if part is None else None,
    )


def _compared_pair(case: ValidationCase, predictor: str, part: str | None) -> tuple[float, float] | tuple[()] | None:
    """Return the predicted and measured figures of a case, in seconds or bytes; empty if either is missing.

    ``None`` where nothing is compared: of a failure that was predicted, without the part, and of parts of a step below
    ``MIN_STEP_FRACTION`` of it.
    """
    result, measured = case.said.get(predictor, PredictorResult()), case.measured
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


def _interval_coverage(cases: Sequence[ValidationCase], predictor: str) -> float | None:
    inside = []
    for case in cases:
        result, seconds = case.said.get(predictor, PredictorResult()), case.measured.step_time_s
        if result.low_s is not None and result.high_s is not None and seconds:
            inside.append(result.low_s <= seconds <= result.high_s)
    return _mean(inside)


def score_memory_fits(cases: Sequence[ValidationCase], predictor: str) -> MemoryFitScore:
    """Score the memory predictions of the cases that were ok or out of memory."""
    results = [(case.measured.status, case.said.get(predictor, PredictorResult()).fits) for case in cases]
    counts = Counter((status, fits) for status, fits in results if status in (STATUS_OK, "oom") and fits is not None)
    return MemoryFitScore(
        count=sum(counts.values()),
        false_fits=counts["oom", True],
        said_to_fit=counts["oom", True] + counts[STATUS_OK, True],
        false_alarms=counts[STATUS_OK, False],
    )
