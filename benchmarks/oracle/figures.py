"""Every figure of the pages about the oracle and the reruns that the tree alone determines.

    python -m benchmarks.oracle.figures            write the tables into docs/reruns.md and docs/oracle-figures.md
    python -m benchmarks.oracle.figures --check    recompute and compare; 1 where a figure or a measurement differs

Compared are the marked tables of the two pages, the measurements of the committed files with each other, and the
predictions for the reruns, ABCI and published GPU runs with what the oracle predicts now.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars

from benchmarks.oracle import abci, ablation, cases, gpu
from benchmarks.oracle.neighbours import SMALL, held_out_cases, neighbours_rows, regret_rows
from benchmarks.oracle.printed import printed_document
from benchmarks.oracle.registered import BOX, HERE, Score
from benchmarks.oracle.tables import box_rows
from benchmarks.rerun import figures as rerun_figures
from benchmarks.rerun import pages
from hpcbench.oracle.baselines import CHOICE_BASELINES, choice_results
from hpcbench.oracle.scoring import MeasuredConfiguration, PredictorResult, ValidationCase, score_predictor
from hpcbench.report.oracle_validation import MACHINE_ONLY, ORACLE_NAME
from hpcbench.report.validation_view import validation_json

DOCS = Path(__file__).resolve().parents[2] / "docs"
_TITLES = {"paradl-small": "ParaDL's matrix", "ddlbench-small": "DDLBench's matrix", "box": "the box"}


def document(found: Sequence[ValidationCase]) -> dict[str, Any]:
    """Return what ``validate --json`` prints of these cases."""
    names = {name for case in found for name in case.said} | CHOICE_BASELINES.keys()
    order = [name for name in (*rerun_figures.PREDICTORS, *CHOICE_BASELINES) if name in names]
    scores = [score_predictor(found, name, None if name == ORACLE_NAME else ORACLE_NAME) for name in order]
    return validation_json(found, scores, [])


def stored_cases(path: Path) -> list[ValidationCase]:
    """Return the cases in a committed output of ``validate``, with the constant choices.

    The oracle's predictions are those without other measured configurations.
    """
    fields = MeasuredConfiguration.__struct_fields__
    found = []
    for entry in json.loads(path.read_text())["cases"]:
        said = msgspec.convert(entry["predicted"], dict[str, PredictorResult])
        measured = msgspec.convert({name: entry[name] for name in fields if name in entry}, MeasuredConfiguration)
        said[ORACLE_NAME] = said.pop(MACHINE_ONLY, said[ORACLE_NAME])
        said |= choice_results(measured.spec.strategy, said[ORACLE_NAME].fits)
        found.append(ValidationCase(measured, said))
    return found


def documents(
    sweep: str, reruns: Path, alone: Sequence[ValidationCase], held_out: Sequence[ValidationCase]
) -> dict[str, Any]:
    """Return the columns of a rerun's tables.

    Args:
        sweep: its name.
        reruns: the folder of the rerun's files.
        alone: its cases, predicted by the calibration.
        held_out: the same, each moved by all others.
    """
    pairs = reruns / f"{sweep}-pairs.json"
    return {
        "by the calibration": document(alone),
        "moved by the runs on one device": document(stored_cases(reruns / f"{sweep}-oracle.json")),
        "by those on one and two": document(stored_cases(pairs))
        if pairs.exists()
        else _printed_pairs((reruns / f"{sweep}-pairs.txt").read_text(), alone),
        "calibration, moved by all other configurations": document(held_out),
    }


def _printed_pairs(text: str, alone: Sequence[ValidationCase]) -> dict[str, Any]:
    """The fit to one and two devices as it was printed, where its predictions are in no file.

    The constant choices need none.
    """
    pairs = printed_document(text)
    larger = document([case for case in alone if case.measured.spec.devices > SMALL])
    pairs["scores"] += [score for score in larger["scores"] if score["predictor"] in CHOICE_BASELINES]
    pairs["choices"] += [
        {"best": row["best"], **{name: row[name] for name in CHOICE_BASELINES}} for row in larger["choices"]
    ]
    return pairs


def blocks(docs: Path = DOCS, folder: Path = HERE) -> dict[str, dict[str, str]]:
    """Return by page and name the tables."""
    reruns = docs / "reruns"
    tables: dict[str, str] = {}
    regrets, neighbours = {}, {}
    for sweep in cases.SWEEPS:
        rows = polars.read_parquet(reruns / f"{sweep}.parquet").to_dicts()
        alone = cases.read(cases.path_of(sweep, folder)).validation_cases()
        held_out = held_out_cases(alone)
        tables |= pages.blocks_of(sweep, rows, documents(sweep, reruns, alone, held_out))
        regrets[sweep], neighbours[sweep] = regret_rows(held_out), neighbours_rows(alone, held_out)
    box = tables_of_box(BOX._replace(folder=folder))
    return {
        "reruns.md": tables,
        "oracle-figures.md": box
        | {
            "oracle-regret": _side_by_side(regrets, ("accuracy", "regret", "every difference counted")),
            "oracle-neighbours": _side_by_side(
                neighbours, ("accuracy", "regret", "90 % interval holds, width", "that of a ratio")
            ),
        },
    }


def tables_of_box(score: Score) -> dict[str, str]:
    """Return by name the tables of the score on the SLURM box; none where its cases are not in the tree."""
    if not score.cases.exists():
        return {}
    registered = cases.read(score.cases).validation_cases()
    present = cases.with_present_predictions(score, registered)
    head = ["", "the profile alone", "calibrated", "calibrated for the sweep", "the same by the present version",
            "with one pilot", "noise"]  # fmt: skip
    regrets = {"box": regret_rows(held_out_cases(registered))}
    return {
        "oracle-box": rerun_figures.table(head, [[name, *row] for name, row in box_rows(registered, present).items()]),
        "oracle-box-regret": _side_by_side(regrets, ("accuracy", "regret", "every difference counted")),
    }


def _side_by_side(rows: dict[str, dict[str, list[str]]], columns: Sequence[str]) -> str:
    head = ["", *(f"{_TITLES[sweep]}: {name}" for sweep in rows for name in columns)]
    names = list(next(iter(rows.values())))
    return rerun_figures.table(head, [[name, *(cell for own in rows.values() for cell in own[name])] for name in names])


def ablation_block() -> dict[str, dict[str, str]]:
    """Return by page and name the table of single terms, which takes as long as all others together."""
    return {"oracle-figures.md": {"oracle-ablation": _side_by_side(ablation.rows(), ablation.COLUMNS)}}


def page_differences(found: dict[str, dict[str, str]], docs: Path = DOCS) -> Iterator[str]:
    """Yield the lines of the pages that the recomputed tables ``found`` do not have."""
    for name, own in found.items():
        before = (docs / name).read_text()
        after = pages.filled(before, own)
        lines = zip(before.splitlines(), after.splitlines(), strict=False)
        yield from (f"{name}: the page has {old!r}, recomputed is {new!r}" for old, new in lines if old != new)
        if len(before.splitlines()) != len(after.splitlines()):
            yield f"{name}: a table has other rows than the page"


def differences(docs: Path = DOCS, folder: Path = HERE) -> Iterator[str]:
    """Yield everything that differs."""
    yield from page_differences(blocks(docs, folder), docs)
    for sweep in cases.SWEEPS:
        yield from cases.differences(sweep, cases.read(cases.path_of(sweep, folder)), docs / "reruns")


def other_differences() -> Iterator[str]:
    """Yield where the table of single terms, and predictions for ABCI and published GPU runs are not the oracle's."""
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
            page = DOCS / name
            page.write_text(pages.filled(page.read_text(), own))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
