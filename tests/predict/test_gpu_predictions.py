"""The committed predictions for GPU runs without published results here, and what a broken table does."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from benchmarks.oracle import gpu
from benchmarks.oracle.gpu_tables import EXAM, FIT, FITS_EXAM, read_rows


def test_a_tenth_of_the_predictions_is_repeated() -> None:
    assert gpu.check(every=10) == []


@pytest.mark.slow
def test_all_predictions_are_repeated() -> None:
    assert gpu.check() == []


@pytest.mark.parametrize(
    ("path", "table", "rows"), [(gpu.STEP_PREDICTIONS, EXAM, 405), (gpu.FITS_PREDICTIONS, FITS_EXAM, 1466)]
)
def test_every_row_has_a_prediction(path: Path, table: Path, rows: int) -> None:
    predictions = list(csv.DictReader(path.open()))
    with gzip.open(table, "rt", newline="") as file:
        configurations = list(csv.DictReader(file))
    assert [row["id"] for row in predictions] == [row["id"] for row in configurations]
    assert len(predictions) == rows
    for row in predictions:
        assert all(float(value) >= 0 for column, value in row.items() if column != "id")
        if "step_time_s" in row:
            assert float(row["step_time_low_s"]) < float(row["step_time_s"]) < float(row["step_time_high_s"])


def test_rows_without_a_price_are_left_out_with_their_reason() -> None:
    rows, left_out = read_rows(FIT)
    assert (len(rows), len(left_out)) == (810, 60)
    assert {row.reason.split("'")[0] for row in left_out} == {"device ", "model "}


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("step_time_s", "3264.6", "differ by more than 2 (unit?)"),
        ("step_time_s", "0.001", "exceeds twice the peak of every GPU known here (unit?)"),
        ("step_time_s", "-1", "above 0 is required"),
        ("step_time_s", "fast", "a number is required"),
        ("peak_mem_gib", "50180", "more than any GPU here holds (unit?)"),
        ("gpu", "TPU v5e", "has no fitted figures"),
        ("dp", "", ""),
        ("tp", "3", "the degrees multiply to"),
        ("micro_batch", "0", "at least 1 is required"),
        ("hidden", "4096", "the shape playbook_1b has 2048"),
        ("model", "llama-unknown", "has no shape here"),
    ],
)
def test_an_impossible_row_is_named_and_the_others_stand(tmp_path: Path, column: str, value: str, reason: str) -> None:
    with gzip.open(FIT, "rt", newline="") as file:
        rows = list(csv.DictReader(file))[:3]
    rows[1][column] = value
    table = tmp_path / "table.csv.gz"
    with gzip.open(table, "wt", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    usable, left_out = read_rows(table)
    if reason:
        assert [row.id for row in usable] == [rows[0]["id"], rows[2]["id"]]
        assert left_out[0].id == rows[1]["id"]
        assert reason in left_out[0].reason
    else:
        assert len(usable) == 3
