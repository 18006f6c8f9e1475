"""Errors at sites of which no run was fitted, by the number of their runs that are known: the old sources, held out.

Each source is predicted by a fit to the others, as a program without runs (``unseen_factors``). Its runs on one device
are a site: some of them, drawn at random, are given to ``hpcbench.predict.decoder.site``, and the rest is predicted.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean

from benchmarks.oracle import exam2
from benchmarks.oracle.gpu_fit import BY_SOFTWARE, Fit, fit_figures, row_work, unseen_factors
from benchmarks.oracle.gpu_tables import FIT, PublishedRow, megatron_rows, read_rows
from hpcbench.predict.decoder import site as site_module
from hpcbench.predict.decoder.pricing import Figures, step_terms
from hpcbench.predict.decoder.site import CONFIGURATION_SPREAD, Site, SiteRun, gradient, learn_site, site_step
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.prediction import NORMAL_90, NotPredicted

SOURCES = {
    "nanotron_playbook": "playbook", "mosaicml": "MosaicML", "dgxc_benchmarking": "NVIDIA's recipes",
    "ibm_fsdp": "IBM, torchtitan", "torchtitan": "IBM, torchtitan", "automodel": "IBM, torchtitan",
    "selene": "Megatron-LM on Selene",
}  # fmt: skip
MIN_RUNS = 12
"""Fewest runs of a site that can be drawn from and predicted."""
MAX_PREDICTED, DRAWS = 60, 12
PILOTS = (0, 2, 5, 10)
MEASURED = (3, 5)


@dataclass(frozen=True)
class Score:
    """Mean relative error, mean signed logarithm, and the part of the 90 % intervals that hold."""

    error: float
    signed: float
    holds: float


def held_out_sites() -> Iterator[tuple[str, list[SiteRun]]]:
    """Yield each site with its runs, priced by a fit to the other sources."""
    rows = [*read_rows(FIT)[0], *megatron_rows()]
    for source in dict.fromkeys(SOURCES.values()):
        own = [row for row in rows if SOURCES[row.source] == source]
        fit = fit_figures([row for row in rows if SOURCES[row.source] != source and row.source != "selene"])
        seen = {row.layout.software for row in rows if SOURCES[row.source] != source}
        factors = _factors_without(fit, {row.layout.software for row in own} - seen)
        for device in sorted({row.device for row in own}):
            runs = [_site_run(row, fit, factors) for row in own if row.device == device]
            if len(runs) >= MIN_RUNS:
                yield f"{source}, {device}", runs


def _factors_without(fit: Fit, unseen: Collection[str]) -> dict[str, float]:
    """Return the factors of a program without runs, from those of all programs but ``unseen``."""
    known = [software for software in ("megatron", "fsdp", "torchtitan") if software not in unseen]
    logs = {name: [0.0, *(log(fit.factors(software)[name]) for software in known)] for name in BY_SOFTWARE}
    return {**unseen_factors(fit), **{name: exp(fmean(values)) for name, values in logs.items() if "host" not in name}}


def _site_run(row: PublishedRow, fit: Fit, factors: dict[str, float]) -> SiteRun:
    base = fit.figures(row.device, "nanotron")
    figures = Figures(**{name: value * factors.get(name, 1.0) for name, value in base.items()})
    return SiteRun(row.id, row_work(row), figures, row.step_time_s)


def score(known: Sequence[SiteRun], rest: Sequence[SiteRun]) -> Score:
    """Return the score of predictions for ``rest`` from the runs ``known``."""
    return _score(learn_site(known), rest)


def _score(site: Site, rest: Sequence[SiteRun]) -> Score:
    logs, inside = [], []
    for run in rest:
        rest_log = log(site_step(run.work, run.figures, site.logs).total_s / (run.measured_s or 1.0))
        spread = sqrt(site.variance(gradient(run.work, run.figures, site.logs)) + CONFIGURATION_SPREAD**2)
        logs.append(rest_log)
        inside.append(abs(rest_log) <= NORMAL_90 * spread)
    return Score(fmean(abs(exp(value) - 1) for value in logs), fmean(logs), fmean(inside))


def drawn_score(runs: Sequence[SiteRun], pilots: int) -> Score:
    """Return the mean score over draws of so many runs of a site."""
    draws = random.Random(pilots)
    scores = []
    for _ in range(DRAWS if pilots else 1):
        order = draws.sample(runs, len(runs))
        rest = order[pilots:] if not pilots else order[pilots : pilots + MAX_PREDICTED]
        scores.append(score(order[:pilots], rest))
    return Score(*(fmean(getattr(one, name) for one in scores) for name in ("error", "signed", "holds")))


def choice_groups(runs: Sequence[SiteRun], rows: Mapping[str, PublishedRow]) -> list[list[SiteRun]]:
    """Return the runs that a user would choose among: of one model, number of GPUs, batch and sequence."""
    groups: dict[tuple[str, int, int, int], list[SiteRun]] = defaultdict(list)
    for run in runs:
        layout = rows[run.key].layout
        groups[rows[run.key].shape.name, layout.gpus, layout.global_batch, layout.sequence].append(run)
    return [group for group in groups.values() if len(group) > 1]


def regret(groups: Sequence[Sequence[SiteRun]], seconds: Callable[[SiteRun], float]) -> float:
    """Return by how much the runs of fewest ``seconds`` were slower than the best of their groups, in the mean."""
    return fmean((min(group, key=seconds).measured_s or 1.0) / _best_s(group) - 1 for group in groups)


def predicted_s(site: Site) -> Callable[[SiteRun], float]:
    """Return the function that predicts the seconds of a run's step at ``site``."""
    return lambda run: site_step(run.work, run.figures, site.logs).total_s


def drawn_regret(runs: Sequence[SiteRun], groups: Sequence[Sequence[SiteRun]], pilots: int) -> float:
    """Return the mean regret of predictions over draws of so many runs of a site."""
    draws = random.Random(pilots)
    sites = [learn_site(draws.sample(runs, pilots)) for _ in range(DRAWS if pilots else 1)]
    return fmean(regret(groups, predicted_s(site)) for site in sites)


def regret_of_measured(group: Sequence[SiteRun], measured: int) -> float:
    """Return the regret of the best of so many measured runs: each is the predicted best after those before it."""
    known: list[SiteRun] = []
    for _ in range(min(measured, len(group))):
        known.append(min((run for run in group if run not in known), key=predicted_s(learn_site(known))))
    return _best_s(known) / _best_s(group) - 1


def print_regrets(sites: Sequence[tuple[str, list[SiteRun]]]) -> None:
    """Print how much slower the chosen layout is than the best measured one: by predictions, and by users' habits."""
    rows = {row.id: row for row in (*read_rows(FIT)[0], *megatron_rows())}
    heads = [
        "site, held out", "groups", "layouts", *(f"{count} runs known" if count else "none known" for count in PILOTS),
        *(f"best of {count} runs in turn" for count in MEASURED), "most data parallelism", "mean of all",
    ]  # fmt: skip
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name, runs in sites:
        if groups := choice_groups(runs, rows):
            losses = [drawn_regret(runs, groups, count) for count in PILOTS]
            losses += [fmean(regret_of_measured(group, count) for group in groups) for count in MEASURED]
            losses += [
                regret(groups, lambda run: -rows[run.key].layout.data_degree - rows[run.key].layout.micro_batch / 1e3),
                fmean(fmean(run.measured_s or 1.0 for run in group) / _best_s(group) - 1 for group in groups),
            ]
            cells = " | ".join(f"{loss:.1%}" for loss in losses)
            print(f"| {name} | {len(groups)} | {sum(map(len, groups))} | {cells} |")


def _best_s(group: Sequence[SiteRun]) -> float:
    return min(run.measured_s or 1.0 for run in group)


def exam_sites() -> Iterator[tuple[str, list[SiteRun]]]:
    """Yield each new source with its pilots in their order, where they have times."""
    known = exam2.read_table(exam2.PILOTS)
    for source, site in exam2.load_sites():
        forecast, runs = Forecast(site.profile, command=site.sweep.command), []
        for row in sorted(known[source], key=lambda row: int(row["pilot"])):
            priced = forecast.price_command(site.runs[row["id"]])
            if row["step_time_s"] and not isinstance(priced, NotPredicted):
                runs.append(SiteRun(row["id"], priced.work, priced.figures, float(row["step_time_s"])))
        if runs:
            yield source, runs


def left_one_out(runs: Sequence[SiteRun]) -> Score:
    """Return the score of each run from all others."""
    scores = [score([other for other in runs if other is not run], [run]) for run in runs]
    return Score(*(fmean(getattr(one, name) for one in scores) for name in ("error", "signed", "holds")))


def largest_term(run: SiteRun) -> str:
    """Return the term of a run's step that is largest beside its computation, if it is a tenth of the step."""
    terms = step_terms(run.work, run.figures)
    others = {
        "messages of tensor groups": terms.tensor_traffic,
        "parameters of shards": terms.shard_traffic,
        "gradients of replicas": terms.gradient_traffic,
        "pipeline: bubble and messages": terms.bubble + terms.stage_traffic,
    }
    name = max(others, key=lambda term: others[term])
    return name if others[name] > 0.1 * terms.total_s else "computation"


def _log_ratio(site: Site, run: SiteRun) -> float:
    return log(site_step(run.work, run.figures, site.logs).total_s / (run.measured_s or 1.0))


def term_errors(runs: Sequence[SiteRun]) -> Iterator[tuple[str, int, float]]:
    """Yield the largest term, the column (0, 5, or all others known) and the signed error of each run of a site."""
    prior, whole, draws = learn_site([]), learn_site(runs), random.Random(5)
    for run in runs:
        yield largest_term(run), 0, _log_ratio(prior, run)
        yield largest_term(run), 2, _log_ratio(whole.without(run.key), run)
    for _ in range(DRAWS):
        order = draws.sample(runs, len(runs))
        site = learn_site(order[:5])
        for run in order[5 : 5 + MAX_PREDICTED]:
            yield largest_term(run), 1, _log_ratio(site, run)


def print_terms(sites: Sequence[tuple[str, list[SiteRun]]]) -> None:
    """Print the errors of held-out sites by the largest term of the step."""
    found: dict[str, list[list[float]]] = defaultdict(lambda: [[], [], []])
    for _, runs in sites:
        for term, column, value in term_errors(runs):
            found[term][column].append(value)
    heads = ("largest term beside computation", "runs", "none known", "5 runs known", "all others known")
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for term, columns in sorted(found.items(), key=lambda entry: -len(entry[1][0])):
        cells = " | ".join(f"{fmean(abs(exp(one) - 1) for one in logs):.1%} ({fmean(logs):+.0%})" for logs in columns)
        print(f"| {term} | {len(columns[0])} | {cells} |")


def print_sites() -> None:
    """Print the tables of errors by pilots and by terms, and the worth of each factor."""
    old, new = list(held_out_sites()), list(exam_sites())
    heads = " | ".join(f"{count} runs known" if count else "none known" for count in PILOTS)
    print(f"\n| site, held out | runs | {heads} | 90 % intervals that hold |\n|{'---|' * (len(PILOTS) + 3)}")
    totals: list[list[float]] = [[] for _ in PILOTS]
    for name, runs in old:
        scores = [drawn_score(runs, count) for count in PILOTS]
        for total, one in zip(totals, scores, strict=True):
            total.append(one.error)
        cells = " | ".join(f"{one.error:.1%} ({one.signed:+.0%})" for one in scores)
        print(f"| {name} | {len(runs)} | {cells} | {', '.join(f'{one.holds:.0%}' for one in scores)} |")
    print(f"| mean of sites | | {' | '.join(f'{fmean(total):.1%}' for total in totals)} | |")
    print_regrets(old)
    print_terms(old)
    print(
        "\n| new site | pilots | none known | each from all others | 90 % intervals that hold |\n|---|---|---|---|---|"
    )
    for name, runs in new:
        blind, others = score([], runs), left_one_out(runs)
        print(
            f"| {name} | {len(runs)} | {blind.error:.1%} ({blind.signed:+.0%}) | {others.error:.1%} "
            f"({others.signed:+.0%}) | {blind.holds:.0%}, {others.holds:.0%} |"
        )
    print("\n| without the factor | sites held out, 5 runs known | new sites, each from all others |\n|---|---|---|")

    def both() -> tuple[float, float]:
        return fmean(drawn_score(runs, 5).error for _, runs in old), fmean(left_one_out(runs).error for _, runs in new)

    for name in ("none", *site_module.SITE_FACTORS):
        first, second = _without_factor(name, both)
        print(f"| {name} | {first:.1%} | {second:.1%} |")


def _without_factor(name: str, measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Return ``measure`` with a factor that cannot move."""
    kept = site_module.PRIOR_COVARIANCE
    place = [*site_module.SITE_FACTORS].index(name) if name in site_module.SITE_FACTORS else None
    frozen = tuple(
        tuple(0.0 if place in (row, column) else value for column, value in enumerate(values))
        for row, values in enumerate(kept)
    )
    site_module.PRIOR_COVARIANCE = frozen
    try:
        return measure()
    finally:
        site_module.PRIOR_COVARIANCE = kept


if __name__ == "__main__":
    print_sites()
