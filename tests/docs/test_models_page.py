"""The table of models says what is true: counts, and which data sets they take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.worker.models.build import build_meta_model, count_parameters
from hpcbench.workloads.datasets import DATASETS
from hpcbench.workloads.models import MODELS
from tests.worker.helpers import make_spec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
ROWS = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_model_has_a_row() -> None:
    assert [row[0] for row in ROWS] == list(MODELS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_states_the_models_parameters_and_data_sets(row: tuple[str, str, str, str]) -> None:
    model, counts, _, datasets = row
    stated = re.findall(r"([\d,]+) \((\w+)(, tied)?\)", counts)
    assert stated
    for count, dataset, tied in stated:
        options = {"tied": True} if tied else {}
        built = build_meta_model(make_spec(model=model, dataset=dataset, model_options=options))
        assert f"{count_parameters(built):,}" == count
    points = {key: {"model": model, "dataset": key, "strategy": "single", "batch_size": 1} for key in DATASETS}
    taken = [
        key
        for key, point in points.items()
        if not isinstance(resolve_point(point, PartitionLimits("here")), InfeasiblePoint)
    ]
    assert datasets.split() == taken
