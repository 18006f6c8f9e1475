"""Metrics of commands as columns of tables, comparisons, bands and plots over time."""

from __future__ import annotations

import json
import os
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpcbench.cli.main import cli
from hpcbench.config.toml_tables import read_toml
from hpcbench.errors import ConfigError
from hpcbench.results.schema import RunMetrics, RunResult
from tests.report.planted import COMMAND, launch, launches, write

UNITS = {"bandwidth": "GB/s", "pause": "s", "loss": "", "held": "bytes"}
BETTER = {"bandwidth": "higher", "pause": "lower", "loss": "lower", "held": "lower"}


def command_launch(repeat: int, factor: float = 1.0, **parameters: Any) -> RunResult:
    own: dict[str, Any] = {
        "bandwidth": 412.5 * factor + repeat % 5, "pause": 0.0123 * factor, "loss": 2.5, "held": 3 * 2**29,
    }  # fmt: skip
    one = launch(0.1, repeat=repeat, workload="command", parameters=parameters, **COMMAND)
    one.metrics, one.units, one.better = RunMetrics(own=own), UNITS, BETTER
    return one


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    for name, first, factor in (("old", 0, 1.0), ("new", 5, 0.8)):
        repeats = range(first, first + 5)
        write([command_launch(repeat, factor, lr=lr) for repeat in repeats for lr in (0.1, 0.2)], tmp_path / name)
    return tmp_path


def call(*words: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)], catch_exceptions=False, standalone_mode=False)


def rows_of(done: Result) -> list[dict[str, Any]]:
    document = json.loads(done.stdout)
    found: list[dict[str, Any]] = document["rows"]
    return found


@pytest.mark.parametrize(
    ("metric", "figure", "text"),
    [
        ("own.bandwidth", 414.5, "414.5 [412.5 416.5] GB/s"),
        ("own.pause", 0.0123, "12.3 [12.3 12.3] ms"),
        ("own.loss", 2.5, "2.5 [2.5 2.5]"),
        ("own.held", 3 * 2**29, "1.5 [1.5 1.5] GiB"),
    ],
)
def test_a_metric_of_a_command_is_a_column_with_its_unit(trees: Path, metric: str, figure: float, text: str) -> None:
    words = ("table", trees / "old", "--by", "parameters.lr", "--metric", metric)
    assert [row[metric] for row in rows_of(call(*words, "--json"))] == [figure] * 2
    assert text in call(*words).stdout


def test_the_table_without_keys_shows_every_metric_with_its_unit(trees: Path) -> None:
    shown = call("table", trees / "old").stdout
    assert "414.5 GB/s" in shown
    assert "1.5 GiB" in shown


def test_the_page_has_the_parameters_and_metrics_of_a_command(trees: Path) -> None:
    page = trees / "page.html"
    call("report", trees / "old", "--out", page)
    text = page.read_text()
    for cell in ("parameters.lr", "bandwidth", "414.5 GB/s", "1.5 GiB", "0.2"):
        assert cell in text


def test_a_condition_can_name_a_metric_of_a_command(trees: Path) -> None:
    words = ("--by", "parameters.lr", "--metric", "own.loss", "--json")
    found = [rows_of(call("table", trees / one, *words, "--where", "own.bandwidth > 400")) for one in ("old", "new")]
    assert [[row["launches"] for row in rows] for rows in found] == [[5, 5], []]


@pytest.mark.parametrize(("metric", "verdict", "code"), [("own.bandwidth", "worse", 1), ("own.pause", "better", 0)])
def test_a_comparison_follows_the_direction_that_the_sweep_states(
    trees: Path, metric: str, verdict: str, code: int
) -> None:
    done = call("compare", trees / "old", trees / "new", "--metric", metric, "--json")
    assert ([row["verdict"] for row in rows_of(done)], done.return_value or 0) == ([verdict] * 2, code)
    assert "GB/s" in call("compare", trees / "old", trees / "new", "--metric", "own.bandwidth").stdout


def test_an_unknown_metric_names_those_that_the_commands_have(trees: Path) -> None:
    with pytest.raises(ConfigError, match="no command has a metric 'bandwith'") as wrong:
        call("table", trees / "old", "--by", "parameters.lr", "--metric", "own.bandwith")
    assert "bandwidth" in str(wrong.value.hint)


BANDS = [
    # Metric, the side of its bound, and the verdicts for the new launches, which have 0.8 times the figure.
    ("own.bandwidth", "low", "outside"),
    ("own.pause", "high", "within"),
]


@pytest.mark.parametrize(("metric", "side", "verdict"), BANDS)
def test_bands_that_hpcbench_makes_judge_later_launches(trees: Path, metric: str, side: str, verdict: str) -> None:
    file = trees / "bands.toml"
    made = call("compare", trees / "old", "--metric", metric, "--make-bands", file, "--json")
    bands = read_toml(file)[0]["band"]
    assert json.loads(made.stdout) == {"file": str(file), "band": bands}
    assert [set(band) for band in bands] == [{"where", "metric", "value", side}] * 2
    same = call("compare", trees / "old", "--bands", file, "--json")
    later = call("compare", trees / "new", "--bands", file, "--json")
    assert [row["verdict"] for row in rows_of(same)] == ["within"] * 2
    assert [row["verdict"] for row in rows_of(later)] == [verdict] * 2


def test_a_band_is_as_wide_as_launches_differ(tmp_path: Path) -> None:
    noisy = launches(0.1, noise=(0.0, 0.05, -0.05, 0.04, -0.03))
    write([*noisy, *launches(0.2, strategy="fsdp"), launch(0.3, strategy="zero1")], tmp_path / "t")
    file = tmp_path / "bands.toml"
    call("compare", tmp_path / "t", "--make-bands", file)
    text = file.read_text()
    wide, narrow = sorted(read_toml(file)[0]["band"], key=itemgetter("value"))
    assert (round(wide["value"], 3), round(narrow["value"], 3)) == (0.1, 0.2)
    # t(0.999, 8) = 4.50, the pooled spread is 0.030, and sqrt(1 + 1/5) = 1.10.
    assert wide["high"] == pytest.approx(narrow["high"], rel=1e-3) == pytest.approx(0.162, abs=0.005)
    assert "1 configuration with fewer than 3 launches" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("old", "new"), "takes one source"),
        (("single",), "no configuration has 3 launches with step_time_s, the most is 1"),
    ],
)
def test_bands_need_launches_of_one_source(trees: Path, words: tuple[str, ...], message: str) -> None:
    write([launch(0.1)], trees / "single")
    with pytest.raises(ConfigError, match=message):
        call("compare", *(trees / word for word in words), "--make-bands", trees / "bands.toml")


def test_making_bands_writes_no_other_file(trees: Path) -> None:
    with pytest.raises(ConfigError, match="takes one source alone"):
        call("compare", trees / "old", "--make-bands", trees / "bands.toml", "--junit", trees / "x.xml")


def test_the_plot_of_history_marks_where_the_environment_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    for day in range(6):
        one = launch(0.1 + 0.001 * day, repeat=day, digest="e1" if day < 4 else "e2")
        one.provenance = {"torch": "2.12" if day < 4 else "2.13", "hpcbench": "0.1.0"}
        write([one], tmp_path / "t")
        path = tmp_path / "t" / "c" / "runs" / one.run_id[:2] / one.run_id / "result.json"
        os.utime(path, (1_790_000_000 + 86_400 * day,) * 2)
    done = call("plot", "history", tmp_path / "t", "--json")
    (plot,) = json.loads(done.stdout)["plots"]
    measured = [(row["x"], round(row["y"], 3)) for row in plot["rows"] if row["role"] == "measured"]
    assert measured == [(day, round(0.1 + 0.001 * day, 3)) for day in range(6)]
    changes = [(row["x"], row["low"], round(row["high"], 3)) for row in plot["rows"] if row["role"] == "change"]
    assert changes == [(4, 0.1, 0.105)]
    assert "2026-09-25 14:13, c: torch 2.12 to 2.13" in plot["notes"]
    shown = call("plot", "history", tmp_path / "t").stdout
    assert "╎ the environment changed" in shown
    assert "days since 2026-09-21 14:13" in shown


def test_the_plot_of_history_shows_any_metric(trees: Path) -> None:
    shown = call("plot", "history", trees / "old", "--metric", "own.bandwidth").stdout
    assert "bandwidth (GB/s)" in shown
    with pytest.raises(ConfigError, match="--metric: the plot scaling has its own"):
        call("plot", "scaling", trees / "old", "--metric", "own.bandwidth")


def test_a_report_compares_parameters_of_a_command_in_place_of_strategies(tmp_path: Path) -> None:
    runs = [
        launch(step_s * (1 + 0.001 * repeat), nodes=nodes, dp_degree=1, repeat=repeat, workload="command",
               parameters={"lr": lr, "name": "x"}, **COMMAND)
        for lr, steps_s in ((0.1, (0.1, 0.1)), (0.2, (0.1, 0.2)))
        for nodes, step_s in zip((1, 4), steps_s, strict=True)
        for repeat in range(5)
    ]  # fmt: skip
    for one in runs:
        assert one.metrics.step_time_s is not None
        one.metrics.samples_per_s = 32 * one.spec.nodes / one.metrics.step_time_s.median
    write(runs, tmp_path / "t")
    found = json.loads(call("report", tmp_path / "t", "--json").stdout)["findings"]
    assert [(one["kind"], one["subject"], one["text"].partition(":")[0]) for one in found] == [
        ("fastest", "the command, 4 nodes", "lr 0.1 is the fastest"),
        ("efficiency", "the command", "lr 0.1 stays at 80 % or more up to 4 nodes"),
        ("efficiency", "the command", "lr 0.2 falls below 80 % at 4 nodes"),
    ]
    shown = call("plot", "throughput", tmp_path / "t").stdout
    assert "lr 0.1" in shown
    assert "batch" not in shown
    assert "with the same parameters" in call("table", tmp_path / "t").stdout
