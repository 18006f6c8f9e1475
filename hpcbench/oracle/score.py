"""How right predictions were: accuracy, signed error, ranking and memory, over configurations that were measured.

The unit is a configuration; its measured value is the median over launches of each launch's median step time. Nothing
is clipped and nothing is left out: a run that failed counts as a misprediction unless it was said not to fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log
from statistics import fmean, median

import msgspec

from hpcbench.oracle.cases import COUNTED, PARTS, Case, Said, bootstrap
from hpcbench.oracle.ranking import Ranking, ranking
from hpcbench.results.schema import OK

GOOD = 0.9
LEAST_SHARE = 0.01
"""Of a step: what is less of it is not compared."""


class Summary(msgspec.Struct, kw_only=True):
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
    """Share with an accuracy of at least ``GOOD``."""
    signed: float | None = None
    """Mean of (predicted - measured) / measured."""
    abs_log: float | None = None
    """Mean of |ln(predicted / measured)|."""
    noise: float | None = None
    """Median over configurations of the spread between launches."""
    covered: float | None = None
    """Share of measured values within the predicted 90 % intervals."""


class Fits(msgspec.Struct, kw_only=True):
    """Memory as yes or no, over runs that were ok or out of memory and were said to fit or not."""

    count: int
    false_fits: int
    """Said to fit, out of memory."""
    said_to_fit: int
    false_alarms: int
    """Said not to fit, and ran."""


class Score(msgspec.Struct, kw_only=True):
    """One predictor's."""

    predictor: str
    total: Summary | None
    strategies: dict[str, Summary]
    parts: dict[str, Summary]
    ranking: Ranking
    fits: Fits
    other: float | None = None
    """Mean accuracy, over the same configurations, of the predictor that it is compared with."""


def accuracy(predicted: float, measured: float) -> float:
    """``1 - |predicted - measured| / measured``: below 0 where the prediction is more than twice the measurement."""
    return 1 - abs(predicted - measured) / measured


def score(cases: Sequence[Case], predictor: str, beside: str | None = None) -> Score:
    """Of the cases that count.

    ``beside`` another predictor: of those alone that ``predictor`` says something of, for both.
    """
    counted = [one for one in cases if one.measured.status == OK or one.measured.status in COUNTED]
    if beside is not None:
        counted = [one for one in counted if one.said.get(predictor, Said()).step_time_s is not None]
    strategies = dict.fromkeys(one.measured.spec.strategy for one in counted)
    by_strategy = {
        name: summary([one for one in counted if one.measured.spec.strategy == name], predictor) for name in strategies
    }
    parts = {name: summary(counted, predictor, name) for name in PARTS}
    return Score(
        predictor=predictor,
        total=summary(counted, predictor),
        strategies={name: one for name, one in by_strategy.items() if one is not None},
        parts={name: one for name, one in parts.items() if one is not None},
        ranking=ranking(counted, predictor),
        fits=fits(counted, predictor),
        other=there.mean if beside and (there := summary(counted, beside)) else None,
    )


def summary(cases: Sequence[Case], predictor: str, part: str | None = None) -> Summary | None:
    """Of the step time, or of one of ``PARTS`` where it was measured and predicted; ``None`` of no configuration."""
    found: list[tuple[Case, float | None, float | None]] = []
    for one in cases:
        said = one.said.get(predictor, Said(reason="nothing was said"))
        measured = one.measured.step_time_s if part is None else one.measured.figures.get(part)
        predicted = said.step_time_s if part is None else said.figures.get(part)
        is_foretold = one.measured.status != OK and said.fits is False
        if is_foretold or (part is not None and (predicted is None or not _counts(one, part, measured))):
            continue
        found.append((one, predicted, measured))
    if not found:
        return None
    accuracies = [accuracy(told, there) if told is not None and there else 0.0 for _, told, there in found]
    compared = [(told, there) for _, told, there in found if told is not None and there]
    low, high = bootstrap(
        _by_model([(one.measured.spec.model, a) for (one, _, _), a in zip(found, accuracies, strict=True)]), fmean
    )
    spreads = [one.measured.noise if part is None else one.measured.figures_noise.get(part) for one, _, _ in found]
    noise = [value for value in spreads if value is not None]
    return Summary(
        count=len(found),
        failed=len(found) - len(compared),
        mean=fmean(accuracies),
        low=low,
        high=high,
        median=median(accuracies),
        least=min(accuracies),
        good=sum(value >= GOOD for value in accuracies) / len(accuracies),
        signed=_mean([(told - there) / there for told, there in compared]),
        abs_log=_mean([abs(log(told / there)) for told, there in compared if told > 0]),
        noise=median(noise) if noise else None,
        covered=_covered([one for one, _, _ in found], predictor) if part is None else None,
    )


def _counts(one: Case, part: str, measured: float | None) -> bool:
    """Whether a part is large enough to be compared: of a step's times those of ``LEAST_SHARE`` of it."""
    step_time_s = one.measured.step_time_s
    if not measured or not step_time_s:
        return False
    return not part.endswith("_s") or measured >= LEAST_SHARE * step_time_s


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _by_model(values: Iterable[tuple[str, float]]) -> list[list[float]]:
    """One list a model, or one a configuration where all are of the same model."""
    by_model: dict[str, list[float]] = {}
    for model, value in values:
        by_model.setdefault(model, []).append(value)
    if len(by_model) > 1:
        return list(by_model.values())
    return [[value] for own in by_model.values() for value in own]


def _covered(cases: Sequence[Case], predictor: str) -> float | None:
    inside = []
    for one in cases:
        said, there = one.said.get(predictor), one.measured.step_time_s
        if said is not None and said.low_s is not None and said.high_s is not None and there:
            inside.append(said.low_s <= there <= said.high_s)
    return fmean(inside) if inside else None


def fits(cases: Sequence[Case], predictor: str) -> Fits:
    """Of the cases that were ok or out of memory."""
    told = [
        (one.measured.status, said.fits)
        for one in cases
        if one.measured.status in (OK, "oom")
        and (said := one.said.get(predictor)) is not None
        and said.fits is not None
    ]
    return Fits(
        count=len(told),
        false_fits=sum(status == "oom" and fit for status, fit in told),
        said_to_fit=sum(fit for _, fit in told),
        false_alarms=sum(status == OK and not fit for status, fit in told),
    )
