"""Scores of predictors against measured configurations: accuracy, signed error, ranking and memory.

The unit is a configuration; its measured value is the median over launches of each launch's median step time.
Nothing is clipped or left out: a failed run counts as a misprediction unless the predictor called it infeasible."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import log, sqrt
from statistics import fmean, median, stdev
from typing import NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.schema import STATUS_OK
from hpcbench.results.timing_statistics import quantile

COUNTED_FAILURES = frozenset({"oom", "failed", "timeout"})
"""Ends that count against whoever said that the run would go well; the others are nobody's prediction."""
SCORED_PARTS = ("compute_s", "comm_s", "exposed_comm_s", "peak_memory_bytes")
"""What is scored beside the step time."""
_BOOTSTRAP_RESAMPLES = 1000
_BOOTSTRAP_SEED = 8


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
    """Of ``PARTS``: medians over launches, of memory the most."""
    figures_noise: dict[str, float] = {}
    """As ``noise``, of these."""

    @property
    def step_time_s(self) -> float | None:
        """The median over launches."""
        return median(self.launches_s) if self.launches_s else None

    @property
    def noise(self) -> float | None:
        """Standard deviation of the launches' logarithms: what no prediction can be better than."""
        return launch_noise(self.launches_s)

    def interval(self) -> tuple[float, float] | None:
        """95 % bootstrap interval of the median over launches; ``None`` for a single one."""
        if len(self.launches_s) < 2:
            return None
        return bootstrap_interval([[value] for value in self.launches_s], median)


def launch_noise(values: Sequence[float]) -> float | None:
    """Standard deviation of the logarithms; ``None`` of fewer than two, or where one is 0."""
    return stdev(map(log, values)) if len(values) > 1 and min(values) > 0 else None


class PredictorResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one predictor said of a configuration."""

    step_time_s: float | None = None
    figures: dict[str, float] = {}
    fits: bool | None = None
    low_s: float | None = None
    high_s: float | None = None
    """90 % interval of the step time, where it has one."""
    reason: str = ""
    """Why it said nothing."""


class ValidationCase(msgspec.Struct):
    """A configuration, and by predictor what was said of it."""

    measured: MeasuredConfiguration
    said: dict[str, PredictorResult]


def bootstrap_interval(
    clusters: Sequence[Sequence[float]], statistic: Callable[[list[float]], float]
) -> tuple[float, float]:
    """95 % percentile interval of ``statistic``, drawing whole clusters with replacement. The seed is fixed."""
    source = random.Random(_BOOTSTRAP_SEED)  # noqa: S311 - resampling, not secrecy
    drawn = [source.choices(clusters, k=len(clusters)) for _ in range(_BOOTSTRAP_RESAMPLES)]
    values = sorted(statistic([value for cluster in one for value in cluster]) for one in drawn)
    return quantile(values, 0.025), quantile(values, 0.975)


class RankingScore(msgspec.Struct, kw_only=True):
    """How well configurations of the same model on as many devices are put in order, by time per sample."""

    groups: int
    tau: float | None
    """Mean of Kendall's tau-b over groups, ties counted as ties."""
    regret: float | None
    """Mean over groups of how much slower the predicted best is than the measured best."""
    worst_regret: float | None
    failed: int
    """Groups whose predicted best did not run."""


class PredictedBest(NamedTuple):
    """Of one group of configurations, the one that a predictor would have had run, and the one that was best."""

    best: ValidationCase
    chosen: ValidationCase | None
    """``None`` where it says something of fewer than two."""
    regret: float | None
    """How much slower the chosen one is than the best; ``None`` where it did not run."""


def predicted_bests(cases: Sequence[ValidationCase], predictor: str) -> list[PredictedBest]:
    """For every group of two configurations or more of which any ran: by time per sample."""
    found = []
    for group in _comparable_groups(cases):
        ran = [(there, one) for one in group if (there := _measured_s_per_sample(one)) is not None]
        if len(group) < 2 or not ran:
            continue
        least, best = min(ran, key=lambda pair: pair[0])
        told = _feasible_predictions(group, predictor)
        chosen = min(told, key=lambda pair: pair[1])[0] if len(told) > 1 else None
        there = _measured_s_per_sample(chosen) if chosen is not None else None
        found.append(PredictedBest(best, chosen, None if there is None else there / least - 1))
    return found


def _feasible_predictions(group: Sequence[ValidationCase], predictor: str) -> list[tuple[ValidationCase, float]]:
    """What the predictor thinks fits, with its time per sample."""
    return [
        (one, said.step_time_s / one.measured.spec.global_batch_size)
        for one in group
        if (said := one.said.get(predictor)) is not None and said.step_time_s is not None and said.fits is not False
    ]


def score_ranking(cases: Sequence[ValidationCase], predictor: str) -> RankingScore:
    """Over groups of two configurations or more of which something was said."""
    taus = []
    for group in _comparable_groups(cases):
        ran = [
            (predicted, there)
            for one, predicted in _feasible_predictions(group, predictor)
            if (there := _measured_s_per_sample(one)) is not None
        ]
        tau = kendall_tau([one for one, _ in ran], [there for _, there in ran])
        taus += [] if tau is None else [tau]
    made = [one for one in predicted_bests(cases, predictor) if one.chosen is not None]
    regrets = [one.regret for one in made if one.regret is not None]
    return RankingScore(
        groups=len(made),
        tau=fmean(taus) if taus else None,
        regret=fmean(regrets) if regrets else None,
        worst_regret=max(regrets, default=None),
        failed=len(made) - len(regrets),
    )


def _comparable_groups(cases: Sequence[ValidationCase]) -> list[list[ValidationCase]]:
    found: dict[Hashable, list[ValidationCase]] = {}
    for one in cases:
        spec = one.measured.spec
        options = tuple(sorted(spec.model_options.items()))
        key = (one.measured.cluster, spec.model, options, spec.dataset, spec.input_size, spec.precision, spec.devices)
        found.setdefault(key, []).append(one)
    return list(found.values())


def _measured_s_per_sample(one: ValidationCase) -> float | None:
    there = one.measured.step_time_s
    return there / one.measured.spec.global_batch_size if there and one.measured.status == STATUS_OK else None


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Kendall's tau-b (1945): ties of either side count as ties. ``None`` where one side is all ties.

    >>> kendall_tau([1, 2, 3], [1, 3, 2]), kendall_tau([1, 1, 2], [1, 2, 3])
    (0.3333333333333333, 0.8164965809277261)
    """
    agree = pairs_one = pairs_other = 0
    for first in range(len(one)):
        for second in range(first):
            left, right = _sign(one[first] - one[second]), _sign(other[first] - other[second])
            agree += left * right
            pairs_one += left != 0
            pairs_other += right != 0
    return agree / sqrt(pairs_one * pairs_other) if pairs_one and pairs_other else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


GOOD_ACCURACY = 0.9
MIN_STEP_FRACTION = 0.01
"""Of a step: what is less of it is not compared."""


class AccuracySummary(msgspec.Struct, kw_only=True):
    """Over configurations; errors are relative to what was measured."""

    count: int
    """Configurations, failed ones among them."""
    failed: int = 0
    """Of these, those that were not predicted at all or failed unpredicted: accuracy 0, in no signed error."""
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
    """Memory as yes or no, over runs that were ok or out of memory and were said to fit or not."""

    count: int
    false_fits: int
    """Said to fit, out of memory."""
    said_to_fit: int
    false_alarms: int
    """Said not to fit, and ran."""


class PredictorScore(msgspec.Struct, kw_only=True):
    """One predictor's."""

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
    """Of the cases that count.

    ``beside`` another predictor: of those alone that ``predictor`` says something of, for both.
    """
    counted = [one for one in cases if one.measured.status == STATUS_OK or one.measured.status in COUNTED_FAILURES]
    if beside is not None:
        counted = [one for one in counted if one.said.get(predictor, PredictorResult()).step_time_s is not None]
    strategies = dict.fromkeys(one.measured.spec.strategy for one in counted)
    by_strategy = {
        name: summarize_accuracy([one for one in counted if one.measured.spec.strategy == name], predictor)
        for name in strategies
    }
    parts = {name: summarize_accuracy(counted, predictor, name) for name in SCORED_PARTS}
    return PredictorScore(
        predictor=predictor,
        total=summarize_accuracy(counted, predictor),
        strategies={name: one for name, one in by_strategy.items() if one is not None},
        parts={name: one for name, one in parts.items() if one is not None},
        ranking=score_ranking(counted, predictor),
        fits=score_memory_fits(counted, predictor),
        other=there.mean if beside and (there := summarize_accuracy(counted, beside)) else None,
    )


def summarize_accuracy(
    cases: Sequence[ValidationCase], predictor: str, part: str | None = None
) -> AccuracySummary | None:
    """Of the step time, or of one of ``PARTS`` where it was measured and predicted; ``None`` of no configuration."""
    found: list[tuple[ValidationCase, float | None, float | None]] = []
    for one in cases:
        said = one.said.get(predictor, PredictorResult(reason="nothing was said"))
        measured = one.measured.step_time_s if part is None else one.measured.figures.get(part)
        predicted = said.step_time_s if part is None else said.figures.get(part)
        is_foretold = one.measured.status != STATUS_OK and said.fits is False
        if is_foretold or (part is not None and (predicted is None or not _is_compared(one, part, measured))):
            continue
        found.append((one, predicted, measured))
    if not found:
        return None
    accuracies = [accuracy(told, there) if told is not None and there else 0.0 for _, told, there in found]
    compared = [(told, there) for _, told, there in found if told is not None and there]
    low, high = bootstrap_interval(
        _clusters_by_model([(one.measured.spec.model, a) for (one, _, _), a in zip(found, accuracies, strict=True)]),
        fmean,
    )
    spreads = [one.measured.noise if part is None else one.measured.figures_noise.get(part) for one, _, _ in found]
    noise = [value for value in spreads if value is not None]
    return AccuracySummary(
        count=len(found),
        failed=len(found) - len(compared),
        mean=fmean(accuracies),
        low=low,
        high=high,
        median=median(accuracies),
        least=min(accuracies),
        good=sum(value >= GOOD_ACCURACY for value in accuracies) / len(accuracies),
        signed=_mean([(told - there) / there for told, there in compared]),
        abs_log=_mean([abs(log(told / there)) for told, there in compared if told > 0]),
        noise=median(noise) if noise else None,
        covered=_interval_coverage([one for one, _, _ in found], predictor) if part is None else None,
    )


def _is_compared(one: ValidationCase, part: str, measured: float | None) -> bool:
    """Whether a part is large enough to be compared: of a step's times those of ``MIN_STEP_FRACTION`` of it."""
    step_time_s = one.measured.step_time_s
    if not measured or not step_time_s:
        return False
    return not part.endswith("_s") or measured >= MIN_STEP_FRACTION * step_time_s


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _clusters_by_model(values: Iterable[tuple[str, float]]) -> list[list[float]]:
    """One list a model, or one a configuration where all are of the same model."""
    by_model: dict[str, list[float]] = {}
    for model, value in values:
        by_model.setdefault(model, []).append(value)
    if len(by_model) > 1:
        return list(by_model.values())
    return [[value] for own in by_model.values() for value in own]


def _interval_coverage(cases: Sequence[ValidationCase], predictor: str) -> float | None:
    inside = []
    for one in cases:
        said, there = one.said.get(predictor), one.measured.step_time_s
        if said is not None and said.low_s is not None and said.high_s is not None and there:
            inside.append(said.low_s <= there <= said.high_s)
    return fmean(inside) if inside else None


def score_memory_fits(cases: Sequence[ValidationCase], predictor: str) -> MemoryFitScore:
    """Of the cases that were ok or out of memory."""
    told = [
        (one.measured.status, said.fits)
        for one in cases
        if one.measured.status in (STATUS_OK, "oom")
        and (said := one.said.get(predictor)) is not None
        and said.fits is not None
    ]
    return MemoryFitScore(
        count=len(told),
        false_fits=sum(status == "oom" and fit for status, fit in told),
        said_to_fit=sum(fit for _, fit in told),
        false_alarms=sum(status == STATUS_OK and not fit for status, fit in told),
    )
