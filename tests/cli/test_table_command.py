"""``table`` and ``collect`` over trees, as they are called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import polars
import pytest
from click.testing import CliRunner, Result

from benchmarks.results_tree import write_results
from hpcbench.cli.main import cli
from hpcbench.errors import ConfigError
from hpcbench.report.table_files import VIEW_ENCODERS
from hpcbench.report.table_model import Column, View
from hpcbench.results.results_tree import ResultsTree
from hpcbench.submit.submission_record import SweepRecord

DDP = "strategy == 'ddp' and nodes == 1"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    write_results(root / "made-up", 200)
    return root


def call(tree: Path, *arguments: str) -> Result:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(cli, [*arguments, "--results", str(tree)])
    if done.exception is not None:
        raise done.exception
    return done


def test_every_line_of_every_table_fits_80_columns(tree: Path) -> None:
    for options in (
        [], ["--by", "strategy,batch_size", "--pivot", "nodes", "--metric", "step_time_s,samples_per_s"],
        ["--layout", "paradl"], ["--layout", "ddlbench", "--baseline", DDP],
    ):  # fmt: skip
        lines = call(tree, "table", *options).stdout.splitlines()
        assert len(lines) > 10
        assert max(map(len, lines)) <= 80


def test_rows_are_in_run_order_unless_sort_is_given(tree: Path) -> None:
    rows = json.loads(call(tree, "table", "--json").stdout)["rows"]
    assert [row["spec"]["strategy"] for row in rows] == sorted(row["spec"]["strategy"] for row in rows)
    rows = json.loads(call(tree, "table", "--json", "--sort", "-samples_per_s").stdout)["rows"]
    rates = [row["samples_per_s"] for row in rows if row["samples_per_s"] is not None]
    assert rates == sorted(rates, reverse=True)
    assert rows[-1]["status"] == "oom"


def test_a_sweep_and_a_tree_are_counted_and_ordered_as_one(tree: Path, tmp_path: Path) -> None:
    """The sweep has some of the tree's runs, in the opposite order, and two runs without a result."""
    whole = json.loads(call(tree, "table", "--json").stdout)["rows"]
    reversed_ids = [run_id for row in reversed(whole) for run_id in row["run_ids"]]
    other_tree = tmp_path / "own"
    write_results(other_tree / "made-up", 30)
    measured = {path.name for path in (other_tree / "made-up" / "runs").glob("*/*")}
    in_sweep = [run_id for run_id in reversed_ids if run_id in measured]
    record = SweepRecord(
        sweep="mine", cluster="made-up", description="", dropped=0, written_unix_s=1.0,
        run_ids=[*in_sweep, "0" * 16, "1" * 16],
    )  # fmt: skip
    path = ResultsTree(other_tree).cluster("made-up").sweep_path("mine")
    path.parent.mkdir()
    path.write_bytes(msgspec.json.encode(record))
    order_of_tree = [row["config_id"] for row in whole]
    order_of_sweep = [row["config_id"] for row in reversed(whole) if {*in_sweep} & {*row["run_ids"]}]
    for sources, count, order in (
        (["mine"], f": {len(in_sweep)} of {len(in_sweep) + 2} runs", order_of_sweep),
        (["mine", str(tree)], ": 200 of 202 runs", order_of_tree),
        ([str(tree)], "", order_of_tree),
    ):
        lines = [line.rstrip() for line in call(other_tree, "table", *sources).stdout.splitlines()]
        assert any(line.endswith(f"on made-up{count}") for line in lines), lines
        rows = json.loads(call(other_tree, "table", *sources, "--json").stdout)["rows"]
        assert [row["config_id"] for row in rows] == order


def test_grouped_tables_are_written_as_json_and_files(tree: Path, tmp_path: Path) -> None:
    asked = ["table", "--by", "strategy", "--where", "nodes == 2 and batch_size == 8"]
    rows = json.loads(call(tree, *asked, "--json").stdout)["rows"]
    assert [row["strategy"] for row in rows] == ["ddp", "fsdp"]
    for name in ("t.csv", "rows.md"):
        options = [] if name == "rows.md" else asked[1:]
        done = call(tree, "table", *options, "--out", str(tmp_path / name))
        assert done.stdout == ""
        assert "rows written to" in done.stderr
    assert (tmp_path / "t.csv").read_text().startswith("strategy,step_time_s,samples_per_s,launches\nddp,")
    assert "| strategy | ranks |" in (tmp_path / "rows.md").read_text()


def test_results_trees_are_sources_of_table_and_collect(tree: Path, tmp_path: Path) -> None:
    write_results(tmp_path / "made-up", 3, first=1)
    sources = [str(tree / "made-up"), f"{tmp_path}/"]
    assert len(json.loads(call(tree, "collect", *sources).stdout)["results"]) == 203
    rows = json.loads(call(tree, "table", *sources, "--by", "cluster", "--json").stdout)["rows"]
    oom = 200 - json.loads(call(tree, "table", "--by", "cluster", "--json").stdout)["rows"][0]["launches"]
    assert rows[0]["launches"] == 203 - oom
    assert json.loads(call(tree, "collect", *sources, "--cluster", "other").stdout)["results"] == []


def test_collected_files_hold_every_run(tmp_path: Path) -> None:
    tree = tmp_path / "results"
    write_results(tree / "made-up", 20)
    broken = tree / "made-up" / "runs" / "ff" / ("f" * 16)
    broken.mkdir(parents=True)
    (broken / "result.json").write_text("{")
    for ending in ("csv", "parquet", "json", "xlsx", "md"):
        done = call(tree, "collect", "--out", str(tmp_path / f"x.{ending}"))
        assert done.stdout == ""
        assert f"made-up/{'f' * 16}: result.json is broken" in done.stderr
        assert "20 results written to" in done.stderr
    frame = polars.read_csv(tmp_path / "x.csv")
    assert len(frame) == 20
    assert set(frame["spec.options.bucket_mb"]) == {25}
    assert frame.columns == polars.read_parquet(tmp_path / "x.parquet").columns
    document = json.loads((tmp_path / "x.json").read_text())
    assert document == json.loads(call(tree, "collect").stdout)
    assert {row["run_id"] for row in document["results"]} == set(frame["run_id"])


def test_an_impossible_table_names_the_reason(tree: Path) -> None:
    done = call(tree, "table", "--layout", "ddlbench")
    assert done.stdout == ""
    assert "there is nothing to show" in done.stderr
    assert "choose another with --baseline" in done.stderr
    with pytest.raises(ConfigError, match="no column 'stratgy'"):
        call(tree, "table", "--by", "stratgy")
    with pytest.raises(ConfigError, match="--sort loss: no column of this table"):
        call(tree, "table", "--sort", "loss")


def test_nothing_to_show_has_its_reason(tree: Path, tmp_path: Path) -> None:
    for options in ([], ["--by", "strategy"]):
        done = call(tree, "table", "--where", 'strategy == "pipedream"', *options)
        assert done.stderr.startswith("none of the 200 runs in ")
        assert "satisfies --where 'strategy == \"pipedream\"'" in done.stderr


@pytest.mark.parametrize(
    "command", ["table", "status", "report", "collect", "plot throughput", "validate", "logs s", "results rm s"]
)
def test_a_mistyped_folder_of_results_is_an_error(tmp_path: Path, command: str) -> None:
    (tmp_path / "results").mkdir()
    with pytest.raises(ConfigError, match=f"there is no folder .*did you mean {tmp_path}/results"):
        call(tmp_path / "reslts", *command.split())


def test_collect_prints_no_whole_results_on_a_terminal(tree: Path) -> None:
    command = [sys.executable, "-m", "hpcbench", "collect", "--results", str(tree)]
    ours, theirs = os.openpty()
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    os.close(ours)
    assert (done.returncode, "too long for a terminal" in done.stderr) == (2, True)


def test_a_spreadsheet_takes_no_cell_for_a_formula() -> None:
    cells = ["=1+1", "@SUM(A1)", "-2+3", "-0.5", "+1e3", "\tx", "a\x1b[31m", -0.25, None]
    view = View("", [Column("spec.model", "model")], [[cell] for cell in cells], [])
    expected = ["model", "'=1+1", "'@SUM(A1)", "'-2+3", "-0.5", "+1e3", "'\tx", "a\\u001b[31m", "-0.25", '""']
    assert VIEW_ENCODERS[".csv"](view).decode().splitlines() == expected


def test_the_metrics_that_a_table_takes_are_listed(tree: Path) -> None:
    names = json.loads(call(tree, "table", "--list-metrics", "--json").stdout)["metrics"]
    assert {"samples_per_s", "speedup", "step_time_s", "mfu", "prediction_error"} <= {*names}
    assert "own" not in names
    assert call(tree, "table", "--list-metrics").stdout.split() == names


@pytest.mark.parametrize(
    "command",
    [
        "table --where", "table --baseline", "table --by", "table --metric", "table --pivot", "table --sort",
        # The tree has one cluster, called made-up.
        "report --where", "compare made-up made-up --where", "plot throughput --where", "plot throughput --by",
        "validate --where",
    ],
)  # fmt: skip
def test_an_option_with_an_empty_value_is_not_taken_as_absent(tree: Path, command: str) -> None:
    with pytest.raises(ConfigError):
        call(tree, *command.split(), "")
