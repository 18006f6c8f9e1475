from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars
import pytest

import hpcbench
from benchmarks.results_tree import write_results
from hpcbench.errors import ConfigError
from hpcbench.report.load_results import load
from hpcbench.results.results_tree import ResultsTree
from tests.report.planted import launch, write


def put(tree: Path, cluster: str, **options: bool | float | str) -> None:
    write([launch(0.1, cluster=cluster, options=options, warnings=["first; of two", "second"])], tree)


def test_several_trees_and_clusters_load_as_one_frame(tmp_path: Path) -> None:
    write_results(tmp_path / "one" / "made-up", 10)
    put(tmp_path / "one", "c", a=1)
    put(tmp_path / "two", "d", a=1)
    one, two = str(tmp_path / "one"), tmp_path / "two"
    assert len(load(one, two)) == 12
    assert sorted(set(load(one, two)["cluster"])) == ["c", "d", "made-up"]
    assert load(f"{one}/c")["spec.strategy"].to_list() == ["ddp"]
    assert len(load(results=one)) == 11
    assert len(load(results=one, clusters=["c"])) == 1
    assert len(load(one, f"{one}/c")) == 11, "the same result twice is one"


def test_strategy_options_are_columns_of_the_frame(tmp_path: Path) -> None:
    for options in ({"a": 1}, {"a": 2.5, "b": True}, {"b": "x"}, {}):
        put(tmp_path, "c", **options)
    frame = load(tmp_path).sort("spec.options.a", "spec.options.b", nulls_last=True)
    assert frame["spec.options.a"].to_list() == [1.0, 2.5, None, None]
    assert frame["spec.options.b"].to_list() == [None, "True", "x", None]
    assert frame["warnings"].to_list() == [["first; of two", "second"]] * 4


def test_a_tree_loads_as_a_polars_frame(tmp_path: Path) -> None:
    write_results(tmp_path / "made-up", 30)
    frame = hpcbench.load(tmp_path).filter(polars.col("status") == "ok")
    best = frame.group_by("spec.strategy").agg(polars.col("metrics.samples_per_s").max())
    assert len(best) == 1
    assert best["metrics.samples_per_s"][0] > 0


def test_importing_the_package_does_not_import_polars() -> None:
    code = "import hpcbench, sys; hpcbench.__version__; sys.exit('polars' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        hpcbench.lod  # noqa: B018


def test_a_missing_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        load(tmp_path / "nowhere")
    assert load(results=tmp_path / "nowhere").is_empty()
    assert ResultsTree(tmp_path / "nowhere").clusters() == []


def test_short_column_names_tables_and_plots_work_in_python(tmp_path: Path) -> None:
    write_results(tmp_path / "made-up", 60)
    frame = hpcbench.load(tmp_path, short=True)
    assert {"strategy", "step_time_s", "batch_size", "status"} <= set(frame.columns)
    assert set(hpcbench.load(tmp_path)["spec.strategy"]) == set(frame["strategy"])
    rows = hpcbench.table(tmp_path, by="strategy,nodes", metrics="samples_per_s")
    assert rows.columns[:3] == ["strategy", "nodes", "samples_per_s"]
    assert "step_time_s" in hpcbench.table(tmp_path, where="nodes == 1").columns
    assert hpcbench.plot("throughput", tmp_path).to_dict()["$schema"]
    assert {"load", "table", "plot"} <= set(dir(hpcbench))
    with pytest.raises(ConfigError, match="did you mean 'metrics'"):
        hpcbench.table(tmp_path, metric="mfu")
