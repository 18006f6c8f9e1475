"""Whether predictions put configurations in the right order, and what following them costs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import sqrt
from statistics import fmean
from typing import NamedTuple

import msgspec

from hpcbench.oracle.cases import Case
from hpcbench.results.schema import OK


class Ranking(msgspec.Struct, kw_only=True):
    """How well configurations of the same model on as many devices are put in order, by time per sample."""

    groups: int
    tau: float | None
    """Mean of Kendall's tau-b over groups, ties counted as ties."""
    regret: float | None
    """Mean over groups of how much slower the predicted best is than the measured best."""
    worst_regret: float | None
    failed: int
    """Groups whose predicted best did not run."""


class Choice(NamedTuple):
    """Of one group of configurations, the one that a predictor would have had run, and the one that was best."""

    best: Case
    chosen: Case | None
    """``None`` where it says something of fewer than two."""
    regret: float | None
    """How much slower the chosen one is than the best; ``None`` where it did not run."""


def choices(cases: Sequence[Case], predictor: str) -> list[Choice]:
    """For every group of two configurations or more of which any ran: by time per sample."""
    found = []
    for group in _groups(cases):
        ran = [(there, one) for one in group if (there := _per_sample(one)) is not None]
        if len(group) < 2 or not ran:
            continue
        least, best = min(ran, key=lambda pair: pair[0])
        told = _told(group, predictor)
        chosen = min(told, key=lambda pair: pair[1])[0] if len(told) > 1 else None
        there = _per_sample(chosen) if chosen is not None else None
        found.append(Choice(best, chosen, None if there is None else there / least - 1))
    return found


def _told(group: Sequence[Case], predictor: str) -> list[tuple[Case, float]]:
    """What the predictor thinks fits, with its time per sample."""
    return [
        (one, said.step_time_s / one.measured.spec.global_batch_size)
        for one in group
        if (said := one.said.get(predictor)) is not None and said.step_time_s is not None and said.fits is not False
    ]


def ranking(cases: Sequence[Case], predictor: str) -> Ranking:
    """Over groups of two configurations or more of which something was said."""
    taus = []
    for group in _groups(cases):
        ran = [
            (predicted, there) for one, predicted in _told(group, predictor) if (there := _per_sample(one)) is not None
        ]
        tau = kendall_tau([one for one, _ in ran], [there for _, there in ran])
        taus += [] if tau is None else [tau]
    made = [one for one in choices(cases, predictor) if one.chosen is not None]
    regrets = [one.regret for one in made if one.regret is not None]
    return Ranking(
        groups=len(made),
        tau=fmean(taus) if taus else None,
        regret=fmean(regrets) if regrets else None,
        worst_regret=max(regrets, default=None),
        failed=len(made) - len(regrets),
    )


def _groups(cases: Sequence[Case]) -> list[list[Case]]:
    found: dict[Hashable, list[Case]] = {}
    for one in cases:
        spec = one.measured.spec
        options = tuple(sorted(spec.model_options.items()))
        key = (one.measured.cluster, spec.model, options, spec.dataset, spec.input_size, spec.precision, spec.devices)
        found.setdefault(key, []).append(one)
    return list(found.values())


def _per_sample(one: Case) -> float | None:
    there = one.measured.step_time_s
    return there / one.measured.spec.global_batch_size if there and one.measured.status == OK else None


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
