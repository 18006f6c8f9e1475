"""Predictions beside measurements: columns of tables, points and lines of plots, and where lines go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.predict.cluster_forecasts import ClusterForecasts
from hpcbench.predict.measured_factors import MeasuredFactors, MeasuredRatio
from hpcbench.report.column_names import PREDICTED_COLUMNS
from hpcbench.report.load_results import load_frame
from hpcbench.report.prediction_frames import (
    PREDICTION_FIELDS,
    enlarge_spec,
    measured_vs_predicted_frame,
    predicted_scaling_frame,
    specs_over_scales,
)
from hpcbench.results.results_tree import ResultsTree
from tests.cli.test_oracle_commands import call, planted, said

PLANTED = {"single": 1.0, "ddp": 1.25, "fsdp": 0.8}
"""Measured over predicted by the machine's numbers alone."""


def held_out_factor(strategy: str) -> float:
    """By what the results of the other two move the prediction of a strategy."""
    ratios = {
        name: MeasuredRatio(name, spec(name, **({} if name == "single" else {"nodes": 2, "dp_degree": 2})),
                            tuple(factor * launch for launch in (0.99, 1.0, 1.01)), factor, 1.0)
        for name, factor in PLANTED.items()
    }  # fmt: skip
    learned = MeasuredFactors([*ratios.values()]).learned(ratios[strategy].spec, strategy, held_out=True)
    assert learned is not None
    return learned.factor


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose results take 1.0, 1.25 and 0.8 of what is predicted."""
    root = tmp_path_factory.mktemp("planted")
    for strategy, factor in PLANTED.items():
        planted(root / "results", strategy, factor)
    return root


def test_a_table_shows_requested_prediction_columns(place: Path) -> None:
    assert {*PREDICTION_FIELDS, "prediction_error"} == set(PREDICTED_COLUMNS)
    rows = said(place, "table", "--by", "strategy", "--metric", "step_time_s,predicted_step_time_s,prediction_error")[
        "rows"
    ]
    found = {row["strategy"]: row for row in rows}
    errors = {name: held_out_factor(name) / factor - 1 for name, factor in PLANTED.items()}
    assert {name: row["prediction_error"] for name, row in found.items()} == pytest.approx(errors, abs=1e-6)
    row = found["ddp"]
    assert row["predicted_step_time_s"] == pytest.approx((1 + errors["ddp"]) * row["step_time_s"])
    text = call(place, "table", "--pivot", "strategy", "--metric", "prediction_error").stdout
    assert f"{errors['ddp'] * 100:.1f} %" in text
    with pytest.raises(ConfigError, match="--by and --pivot name the same: strategy"):
        call(place, "table", "--by", "strategy", "--pivot", "strategy")


def test_points_of_the_plot_are_measured_over_predicted_times(place: Path) -> None:
    tree = ResultsTree(place / "results")
    frame = measured_vs_predicted_frame(load_frame(tree, []), ClusterForecasts(tree))
    ratios = {
        name: measured / predicted
        for name, predicted, measured in frame["strategy", "predicted", "measured"].iter_rows()
    }
    assert ratios == pytest.approx({name: factor / held_out_factor(name) for name, factor in PLANTED.items()})
    assert frame["launches"].to_list() == [3, 3, 3]


def test_lines_go_on_beyond_what_was_measured(place: Path) -> None:
    tree = ResultsTree(place / "results")
    frame = predicted_scaling_frame(load_frame(tree, []), ClusterForecasts(tree))
    devices = {name: part["devices"].to_list() for (name,), part in frame.group_by("strategy")}
    assert devices == {"single": [1], "ddp": [2, 4, 8, 16], "fsdp": [2, 4, 8, 16]}
    assert (frame["step_time_low_s"] < frame["step_time_s"]).all()
    assert (frame["step_time_s"] < frame["step_time_high_s"]).all()


@pytest.mark.parametrize("kind", ["scaling", "predicted"])
def test_plots_with_predict_show_measured_and_predicted_points(place: Path, kind: str) -> None:
    (picture,) = said(place, "plot", kind, "--predict")["plots"]
    roles = {row["role"] for row in picture["rows"]}
    assert ("predicted" in roles) if kind == "scaling" else (len(picture["rows"]) > 3)
    assert "measured" in roles


def test_a_report_with_predict_has_predicted_lines(place: Path, tmp_path: Path) -> None:
    call(place, "report", "--predict", "--out", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Predicted and measured" in text
    assert "lines: predicted, with their interval" in text


def test_only_plots_that_show_predictions_take_them(place: Path) -> None:
    with pytest.raises(ConfigError, match="--predict: the plot memory shows no predictions"):
        call(place, "plot", "memory", "--predict")


def spec(strategy: str, **more: Any) -> RunSpec:
    return RunSpec(**{"model": "resnet18", "dataset": "cifar10", "strategy": strategy, "batch_size": 8, **more})


@pytest.mark.parametrize(
    ("given", "grown"),
    [
        (spec("ddp"), {"nodes": 4, "dp_degree": 4}),
        (spec("filter", nodes=2, tp_degree=2), {"nodes": 8, "tp_degree": 8}),
        (spec("filter", nodes=2, tasks_per_node=2, tp_degree=2, dp_degree=2), {"nodes": 8, "dp_degree": 8}),
        (spec("gpipe", nodes=2, pp_degree=2, micro_batches=4), {"nodes": 8, "pp_degree": 8}),
        (spec("single"), None),
        # Eight rows of an image of eight cannot be shared by sixteen.
        (spec("spatial", dataset="digits", nodes=4, sp_degree=4), None),
    ],
)
def test_a_run_is_enlarged_to_four_times_the_nodes(given: RunSpec, grown: dict[str, int] | None) -> None:
    made = enlarge_spec(given, 4)
    assert (made is None) == (grown is None)
    if made is not None and grown is not None:
        assert {name: getattr(made, name) for name in grown} == grown
        assert made.batch_size == 8


def test_strong_scaling_goes_on_as_such() -> None:
    measured = {1: spec("ddp", batch_size=64), 2: spec("ddp", batch_size=32, nodes=2, dp_degree=2)}
    assert [(one.devices, one.batch_size) for one in specs_over_scales(measured, 8)] == [
        (1, 64),
        (2, 32),
        (4, 16),
        (8, 8),
        (16, 4),
    ]
    weak = {1: spec("ddp"), 2: spec("ddp", nodes=2, dp_degree=2)}
    assert [(one.devices, one.batch_size) for one in specs_over_scales(weak, 2)] == [(1, 8), (2, 8), (4, 8)]


def test_a_cluster_without_a_profile_is_left_out(tmp_path: Path) -> None:
    planted(tmp_path / "results", "ddp", 1.0, launches=1)
    (tmp_path / "results" / "slurmbox").rename(tmp_path / "results" / "elsewhere")
    for path in (tmp_path / "results").rglob("result.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "cluster": "elsewhere"}))
    document = said(tmp_path, "validate")
    assert document["notes"] == ["not predicted: unknown cluster 'elsewhere'"]
    assert [one["predicted_s"] for one in document["cases"]] == [None]
    rows = said(tmp_path, "table", "--metric", "prediction_error")["rows"]
    assert [row["prediction_error"] for row in rows] == [None]
