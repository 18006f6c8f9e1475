"""Every figure of the pages about the oracle and the reruns that the tree alone determines.

    python -m benchmarks.oracle.figures            write the tables into three pages (PAGES)
    python -m benchmarks.oracle.figures --check    recompute and compare; 1 where a figure or a measurement differs

Compared are the marked tables of the pages, the measurements of the committed files with each other, and the
predictions for the reruns, ABCI and published GPU runs with what the oracle predicts now.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars

from benchmarks.oracle import abci, ablation, cases, gpu, timelines
from benchmarks.oracle.baselines import CHOICE_BASELINES
from benchmarks.oracle.neighbours import cases_after_pilots, held_out_cases, neighbours_rows, regret_rows
from benchmarks.oracle.registered import BOX, HERE, RERUNS, SCORES, Score
from benchmarks.oracle.scoring import ORACLE_NAME, ScoredCase, predicted_bests, score_predictor
from benchmarks.oracle.tables import box_rows, interval_rows
from benchmarks.rerun import figures as rerun_figures
from benchmarks.rerun import pages
from hpcbench.config.run_spec import strategy_label

ROOT = Path(__file__).resolve().parents[2]
RERUNS_PAGE, USERS_PAGE, ORACLE_PAGE = "benchmarks/rerun/README.md", "docs/oracle.md", "benchmarks/oracle/README.md"
PAGES = (RERUNS_PAGE, USERS_PAGE, ORACLE_PAGE)
_TITLES = {
    "paradl": "ParaDL's matrix", "ddlbench": "DDLBench's matrix", "box": "the test cluster",
    "local": "one machine", "local_busy": "one machine beside other work",
}  # fmt: skip
_SUMMARY_ROWS = 5
"""The oracle's four kinds of predictions and always ``ddp``."""
_BOX_HEAD = (
    "", "the profile alone", "calibrated", "calibrated for the sweep", "the same by the present version",
    "with one pilot", "noise",
)  # fmt: skip


def document(found: Sequence[ScoredCase]) -> dict[str, Any]:
    """Return the scores of all predictors, and of each group the measured best and the predictors' choices."""
    names = {name for case in found for name in case.said} | CHOICE_BASELINES.keys()
    order = [name for name in (*rerun_figures.PREDICTORS, *CHOICE_BASELINES) if name in names]
    scores = [score_predictor(found, name, None if name == ORACLE_NAME else ORACLE_NAME) for name in order]
    choices: list[dict[str, str]] = []
    for group in zip(*(predicted_bests(found, name) for name in rerun_figures.RECOMMENDERS), strict=True):
        chosen = [one.chosen.measured.spec if one.chosen else None for one in group]
        labels = ["" if spec is None else strategy_label(spec) for spec in chosen]
        best = strategy_label(group[0].best.measured.spec)
        choices.append({"best": best, **dict(zip(rerun_figures.RECOMMENDERS, labels, strict=True))})
    return {"scores": [msgspec.to_builtins(score) for score in scores], "choices": choices}


def documents(found: Sequence[ScoredCase], held_out: Sequence[ScoredCase]) -> dict[str, Any]:
    """Return the columns of a rerun's tables, by kind of prediction.

    Args:
        found: the cases of the rerun.
        held_out: the same, each moved by all others.
    """
    columns = {
        words: document([ScoredCase(case.measured, case.said | {ORACLE_NAME: case.said[name]}) for case in found])
        for words, name in cases.KINDS.items()
    }
    columns["with one pilot"] = document(cases_after_pilots(found))
    return columns | {"moved by all other configurations": document(held_out)}


def blocks(root: Path = ROOT, folder: Path = HERE) -> dict[str, dict[str, str]]:
    """Return by page and name the tables."""
    measured: dict[str, str] = {}
    scores: dict[str, str] = {}
    regrets, neighbours = {}, {}
    for name in RERUNS:
        stored = cases.read(SCORES[name]._replace(folder=folder).cases)
        rows = polars.read_parquet(pages.data_of(stored.sweep, root)).to_dicts()
        alone = stored.scored_cases()
        held_out = held_out_cases(alone)
        measured |= pages.measured_blocks(stored.sweep, rows)
        scores |= pages.score_blocks(stored.sweep, documents(alone, held_out))
        regrets[name], neighbours[name] = regret_rows(held_out), neighbours_rows(alone, held_out)
    box = BOX._replace(folder=folder)
    return {
        RERUNS_PAGE: measured,
        USERS_PAGE: summary_table(regrets | regrets_of_box(box)),
        ORACLE_PAGE: scores
        | tables_of_box(box)
        | tables_of_local(folder)
        | timeline_tables(folder)
        | {
            "oracle-intervals": intervals_table(folder),
            "oracle-regret": _side_by_side(regrets, ("accuracy", "regret", "every difference counted")),
            "oracle-neighbours": _side_by_side(
                neighbours, ("accuracy", "regret", "90 % interval holds, width", "that of a ratio")
            ),
        },
    }


def summary_table(regrets: Mapping[str, dict[str, list[str]]]) -> dict[str, str]:
    """Return the table for users: accuracy and regret of each kind of prediction, and of always ``ddp``."""
    shortened = {
        score: {name: cells[:2] for name, cells in list(rows.items())[:_SUMMARY_ROWS]}
        for score, rows in regrets.items()
    }
    return {"oracle-summary": _side_by_side(shortened, ("accuracy", "regret"))}


def regrets_of_box(score: Score) -> dict[str, dict[str, list[str]]]:
    """Return the rows of regrets of the score on the SLURM box; none where its cases are not in the tree."""
    if not score.cases.exists():
        return {}
    return {"box": regret_rows(held_out_cases(cases.read(score.cases).scored_cases()))}


def tables_of_box(score: Score) -> dict[str, str]:
    """Return by name the tables of the score on the SLURM box; none where its cases are not in the tree."""
    if not (regrets := regrets_of_box(score)):
        return {}
    return {
        "oracle-box": table_of_strategies(score),
        "oracle-box-regret": _side_by_side(regrets, ("accuracy", "regret", "every difference counted")),
    }


def table_of_strategies(score: Score) -> str:
    """Return the table of a score by strategy, one column for each kind of prediction."""
    registered = cases.read(score.cases).scored_cases()
    rows = box_rows(registered, cases.with_present_predictions(score, registered))
    return rerun_figures.table(_BOX_HEAD, [[name, *row] for name, row in rows.items()])


def timeline_tables(folder: Path) -> dict[str, str]:
    """Return by name the tables of ranks one by one, of each score whose measured ranks are in the tree."""
    found = [score._replace(folder=folder) for score in SCORES.values()]
    return {
        f"oracle-{score.name.replace('_', '-')}-timelines": rerun_figures.table(
            ["", *timelines.COLUMNS], [[name, *row] for name, row in timelines.rows(score).items()]
        )
        for score in found
        if timelines.path_of(score).exists()
    }


def tables_of_local(folder: Path) -> dict[str, str]:
    """Return the tables of the scores on one machine, quiet and busy; none where their cases are not in the tree."""
    scores = [SCORES[name]._replace(folder=folder) for name in ("local", "local_busy")]
    return {
        f"oracle-{score.name.replace('_', '-')}": table_of_strategies(score) for score in scores if score.cases.exists()
    }


def intervals_table(folder: Path) -> str:
    """Return the table of the 90 % intervals of all registered predictions, and of the present version's."""
    scores = [score._replace(folder=folder) for score in SCORES.values()]
    found = {score: cases.read(score.cases).scored_cases() for score in scores if score.cases.exists()}
    present = {score: cases.with_present_predictions(score, own, [ORACLE_NAME]) for score, own in found.items()}
    rows = [interval_rows({score.name: own for score, own in kind.items()}) for kind in (found, present)]
    return rerun_figures.table(
        ["score", "configurations", "90 % interval holds", "median width", "present version: holds", "its width"],
        [[_TITLES.get(name, name), *row, *rows[1][name][1:]] for name, row in rows[0].items()],
    )


def _side_by_side(rows: Mapping[str, dict[str, list[str]]], columns: Sequence[str]) -> str:
    head = ["", *(f"{_TITLES[sweep]}: {name}" for sweep in rows for name in columns)]
    names, blank = dict.fromkeys(name for own in rows.values() for name in own), [""] * len(columns)
    body = [[name, *(cell for own in rows.values() for cell in own.get(name, blank))] for name in names]
    return rerun_figures.table(head, body)


def ablation_block() -> dict[str, dict[str, str]]:
    """Return by page and name the tables of single terms, which take as long as all others together."""
    tables = {}
    for score in SCORES.values():
        # On one machine there are too few cases for shares of an error.
        if score.shape is not None and score.cases.exists() and score.predictions.exists():
            rows = [[variant, *cells] for variant, cells in ablation.rows(score).items()]
            tables[f"oracle-{score.name}-ablation"] = rerun_figures.table(["", *ablation.COLUMNS], rows)
    return {ORACLE_PAGE: tables}


def page_differences(found: dict[str, dict[str, str]], root: Path = ROOT) -> Iterator[str]:
    """Yield the lines of the pages that the recomputed tables ``found`` do not have."""
    for name, own in found.items():
        before = (root / name).read_text()
        after = pages.filled(before, own)
        lines = zip(before.splitlines(), after.splitlines(), strict=False)
        yield from (f"{name}: the page has {old!r}, recomputed is {new!r}" for old, new in lines if old != new)
        if len(before.splitlines()) != len(after.splitlines()):
            yield f"{name}: a table has other rows than the page"


def differences(root: Path = ROOT, folder: Path = HERE) -> Iterator[str]:
    """Yield everything that differs."""
    yield from page_differences(blocks(root, folder), root)
    for score in SCORES.values():
        own = score._replace(folder=folder)
        if own.cases.exists():
            yield from cases.differences(own, root)


def other_differences() -> Iterator[str]:
    """Yield where the tables of single terms, and predictions for ABCI and published GPU runs are not the oracle's."""
    yield from page_differences(ablation_block())
    if not abci.is_same(abci.predictions_csv(abci.fitted_machine()), abci.PREDICTIONS.read_text(encoding="utf-8")):
        yield f"{abci.PREDICTIONS.name}: the oracle predicts other times"
    yield from gpu.check()


def main(arguments: Sequence[str]) -> int:
    """Write the tables, or compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oracle.figures", description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args(arguments).check:
        begin = time.monotonic()
        wrong = [*differences(), *other_differences()]
        print("\n".join(wrong) or f"all figures are the same, {time.monotonic() - begin:.0f} s")
        return 1 if wrong else 0
    for found in (blocks(), ablation_block()):
        for name, own in found.items():
            page = ROOT / name
            page.write_text(pages.filled(page.read_text(), own))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
