"""The figures of the pages follow from the tree alone; a changed measurement, prediction or figure is noticed."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import msgspec
import polars
import pytest

from benchmarks.oracle import figures, timelines
from benchmarks.oracle.registered import SCORES
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
