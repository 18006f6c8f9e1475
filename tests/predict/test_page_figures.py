"""The figures of the pages follow from the tree alone; a changed measurement, prediction or figure is noticed."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import polars
import pytest

from benchmarks.oracle import ablation, cases, figures, timelines
from benchmarks.oracle.registered import RERUNS, SCORES
from benchmarks.oracle.scoring import ORACLE_NAME
from benchmarks.rerun import pages

PARADL = SCORES["paradl"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the pages, the reruns' files and the cases."""
    root = tmp_path_factory.mktemp("tree")
    for name in figures.PAGES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(figures.ROOT / name, root / name)
    pages.data_of("", root).parent.mkdir(exist_ok=True)
    for score in SCORES.values():
        for path in (score.cases, score.predictions, timelines.path_of(score)):
            if path.exists():
                shutil.copy(path, root)
        table = pages.data_of(f"{score.name}-small")
        if table.exists():
            shutil.copy(table, pages.data_of(f"{score.name}-small", root))
    shutil.copytree(PARADL.calibrations.parent, root / "calibrations")
    return root


def found(tree: Path) -> list[str]:
    return [*figures.differences(tree, tree)]


def edited(path: Path, change: Any) -> None:
    document = document_of(path.read_bytes())
    change(document)
    path.write_bytes(gzip.compress(msgspec.json.encode(document)))


def document_of(packed: bytes) -> Any:
    """Return the content of a file of cases."""
    return msgspec.json.decode(gzip.decompress(packed))


def test_every_figure_is_recomputed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # The predictions for ABCI and published GPU runs have tests of their own.
    monkeypatch.setattr(figures, "other_differences", lambda: iter(()))
    assert figures.main(["--check"]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.startswith("all figures are the same")


def test_a_changed_measurement_is_noticed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "SCORES", {"paradl": PARADL})
    monkeypatch.setattr(figures, "blocks", lambda *_: {})
    path = PARADL._replace(folder=tree).cases
    before = path.read_bytes()
    assert found(tree) == []

    def one_percent_more(document: Any) -> None:
        document["cases"][3]["measured_step_times_s"][0] *= 1.01

    edited(path, one_percent_more)
    (line,) = found(tree)
    assert line.startswith(f"paradl-small: {document_of(before)['cases'][3]['config_id']}: median ")

    def other_prediction(document: Any) -> None:
        document["cases"][3]["predicted_step_time_s"] *= 1.01
        document["cases"][3]["said"]["hpcbench"]["step_time_s"] *= 1.01

    path.write_bytes(before)
    edited(path, other_prediction)
    (line,) = found(tree)
    assert "s, the oracle predicts" in line
    path.write_bytes(before)
    table = pages.data_of("paradl-small", tree)
    rows = table.read_bytes()
    polars.read_parquet(table).with_columns(polars.col("step_time_s") * 1.001).write_parquet(table)
    assert len(found(tree)) == 66
    table.write_bytes(rows)


def test_a_changed_measurement_changes_the_figures_of_the_pages(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "RERUNS", ("paradl",))

    def differing() -> list[str]:
        scores = figures.blocks(tree, tree)[figures.ORACLE_PAGE]
        # Other tables of the page have columns of both reruns.
        own = {name: text for name, text in scores.items() if name.startswith("paradl-small")}
        return list(figures.page_differences({figures.ORACLE_PAGE: own}, tree))

    def slower(document: Any) -> None:
        case = document["cases"][0]
        case["measured_step_times_s"] = [2 * value for value in case["measured_step_times_s"]]

    path = PARADL._replace(folder=tree).cases
    before = path.read_bytes()
    edited(path, slower)
    lines = differing()
    path.write_bytes(before)
    strategy = cases.read(path).cases[0].spec.strategy
    page = (tree / figures.ORACLE_PAGE).read_text()
    accuracies = page.split("<!-- figures: paradl-small-accuracy -->")[1].split("<!-- end")[0].splitlines()
    (row,) = [line for line in accuracies if line.startswith(f"| `{strategy}` |") and "%, " in line]
    assert any(line.startswith(f"{figures.ORACLE_PAGE}: the page has {row!r}") for line in lines)
    assert differing() == []


def test_cases_have_the_keys_that_readers_of_other_tools_expect() -> None:
    for score in (SCORES[name] for name in RERUNS):
        document = document_of(score.cases.read_bytes())
        keys: Iterable[set[str]] = (case.keys() for case in document["cases"])
        assert set.intersection(*map(set, keys)) >= {
            "config_id", "spec", "predicted_step_time_s", "measured_step_times_s",
        }  # fmt: skip


def test_every_term_of_the_ablation_moves_a_prediction() -> None:
    def predicted(variant: str) -> list[float | None]:
        found = ablation.varied_cases(SCORES["box"], variant)
        return [case.said[name].step_time_s for case in found for name in (ORACLE_NAME, cases.CALIBRATED)]

    whole = predicted("all terms")
    changed = {variant: predicted(variant) != whole for variant in ablation.VARIANTS}
    assert {variant for variant, is_moved in changed.items() if not is_moved} == {"all terms"}
