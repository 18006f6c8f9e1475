"""Tables by keys: literal tables of planted results, in the terminal and in files."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars
import pytest
from rich.console import Console

from hpcbench.errors import ConfigError
from hpcbench.report.column_names import Condition, resolve_column
from hpcbench.report.pivot_table import parse_table_request, pivot_view
from hpcbench.report.table_files import write_view
from hpcbench.report.table_model import View, format_spread, format_value
from hpcbench.report.table_output import render_view
from hpcbench.results.frame import collected_frame
from hpcbench.results.results_tree import CollectedResult
from tests.report.planted import launch


def entry(step_ms: float | None, status: str = "ok", warnings: Sequence[str] = (), **changes: Any) -> CollectedResult:
    """A run whose interval is 10 % on both sides, with a quarter of its step in communication."""
    step_s = None if step_ms is None else step_ms / 1e3
    one = launch(step_s, status=status, warnings=warnings, digest=None, spread=0.1, **changes)
    if step_s is not None:
        one.metrics.compute_s, one.metrics.comm_s = step_s * 0.75, step_s / 4
        one.metrics.exposed_comm_s = step_s / 8
    return CollectedResult("c", one.run_id, one)


def planted() -> polars.DataFrame:
    entries = [entry(100, strategy="single"), *(entry(ms, repeat=n) for n, ms in enumerate((102, 98, 100)))]
    for nodes, ddp, zero in ((2, 110, 125), (4, 125, 200)):
        entries += [entry(ddp, nodes=nodes), entry(zero, nodes=nodes, strategy="zero1")]
    entries += [
        entry(None, "oom", nodes=4, strategy="fsdp"), entry(50, batch_size=16, nodes=2), entry(80, model="resnet18"),
        entry(200, batch_size=4, nodes=2),
    ]  # fmt: skip
    return collected_frame(entries)


def ask(**options: Any) -> View:
    return pivot_view(planted(), parse_table_request(**options), "planted")


def text(view: View, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False).print(render_view(view, width))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


SAME = 'model == "vgg11" and batch_size == 8'


def test_a_weak_scaling_table_shows_speedup_and_efficiency() -> None:
    view = ask(scaling="weak", where=SAME, metrics="speedup,efficiency")
    assert (
        text(view)
        == """planted

strategy            devices 1  devices 2  devices 4
────────────────────────────────────────────────────
ddp       speed-up       1.00       1.82       3.20
ddp       eff.          100 %       91 %       80 %
single    speed-up       1.00
single    eff.          100 %
zero1     speed-up                  1.60       2.00
zero1     eff.                      80 %       50 %

speed-up: samples/s over that of one device with the same batch per replica;
eff.: speed-up per device
not counted: 1 run that did not end well; the table without --by lists them"""
    )
    assert view.raw[0][2:] == [1.0, pytest.approx(2 * 100 / 110), pytest.approx(3.2)]


def test_strong_scaling_compares_equal_global_batches() -> None:
    view = ask(scaling="strong", where='model == "vgg11" and strategy in ["ddp", "single"]', metrics="speedup")
    # 2 nodes with 4 each: 8 samples in 200 ms, against single's 8 in 100 ms; 16 and 32 have no such baseline.
    assert view.cells == [["ddp", "1.00", "0.50", ""], ["single", "1.00", "", ""]]
    assert any("no such baseline" in note for note in view.notes)


def test_a_pivot_folds_at_80_columns_and_names_what_failed() -> None:
    view = ask(by="strategy", pivot="nodes", metrics="step_time_s", where=SAME, sort="-strategy")
    assert text(view, 64).splitlines()[2:17] == [
        "strategy            nodes 1            nodes 2",
        "───────────────────────────────────────────────",
        "zero1                         125 [112 138] ms",
        "single    100 [90.0 110] ms",
        "fsdp",
        "ddp       100 [98.0 102] ms  110 [99.0 121] ms",
        "",
        "strategy           nodes 4",
        "───────────────────────────",
        "zero1     200 [180 220] ms",
        "single",
        "fsdp                 - oom",
        "ddp       125 [112 138] ms",
        "",
        "[min max] over repeats; with one launch, 95 % confidence",
    ]
    assert all(len(line) <= 64 for line in text(view, 64).splitlines())


def test_ddlbenchs_speedups_are_those_of_the_best_configuration() -> None:
    view = ask(layout="ddlbench")
    assert [column.heading for column in view.columns] == [
        "model", "dataset", "devices", "ddp", "fsdp", "single", "zero1",
    ]  # fmt: skip
    assert view.cells == [
        ["resnet18", "mnist", "1", "1.00", "", "", ""],
        ["vgg11", "mnist", "1", "1.00", "", "1.00", ""],
        ["vgg11", "mnist", "2", "1.82", "", "", "1.60"],
        ["vgg11", "mnist", "4", "3.20", "- oom", "", "2.00"],
    ]


def test_the_paradl_layout_has_its_parts_of_an_iteration() -> None:
    view = ask(layout="paradl", where=f"{SAME} and nodes == 4")
    assert [column.heading for column in view.columns[3:]] == [
        "compute", "comm", "exposed comm", "step time", "launches",
    ]  # fmt: skip
    assert view.cells == [
        ["vgg11", "ddp", "4", "93.8 ms", "31.2 ms", "15.6 ms", "125 [112 138] ms", "1"],
        ["vgg11", "fsdp", "4", "- oom", "", "", "", ""],
        ["vgg11", "zero1", "4", "150 ms", "50.0 ms", "25.0 ms", "200 [180 220] ms", "1"],
    ]


def test_cells_over_different_configurations_are_marked() -> None:
    (row,) = [row for row in ask(by="strategy", metrics="samples_per_s").cells if row[0] == "zero1"]
    assert row == ["zero1", "144 ~2", "2"]
    (row,) = [row for row in ask(by="strategy", metrics="samples_per_s", best=True).cells if row[0] == "zero1"]
    assert row == ["zero1", "160", "1"]


def test_cells_over_other_workloads_are_said_to_be_no_comparison() -> None:
    note = "the cells hold different runs and cannot be compared; they differ in model: add it to --by, or use --where"
    assert note in ask(by="strategy").notes
    for options in ({"by": "model,strategy"}, {"by": "strategy", "where": SAME}, {"by": "strategy", "best": True}):
        assert not [text for text in ask(**options).notes if "cannot be compared" in text]


def test_a_metric_that_no_run_has_gives_its_reason_and_no_marks() -> None:
    frame = collected_frame([entry(100, warnings=["noise: x"])])
    view = pivot_view(frame, parse_table_request(by="strategy", metrics="mfu"), "planted")
    assert (view.cells[0][1], view.warnings) == ("", [])
    assert view.notes == ["mfu: no run has it; it needs FLOPs of the model, and the device's peak in the profile"]


def test_a_chosen_baseline_replaces_the_default() -> None:
    view = ask(scaling="weak", where=SAME, metrics="speedup,efficiency", baseline='strategy == "zero1" and nodes == 2')
    rows = {tuple(row[:2]): row[2:] for row in view.cells}
    assert rows["ddp", "speed-up"] == ["0.62", "1.14", "2.00"]
    assert rows["ddp", "eff."] == ["125 %", "114 %", "100 %"]
    with pytest.raises(ConfigError, match="no measured row fits the baseline"):
        ask(scaling="weak", baseline="nodes == 64")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "stratgy"}, "no column 'stratgy'"),
        ({"metrics": "speed"}, "no column 'speed'"),
        ({"where": "nodess == 4"}, "no column 'nodess'"),
        ({"where": "__import__(1)", "by": "strategy"}, "no function"),
        ({"by": "strategy", "sort": "model"}, "no column of this table"),
        ({"layout": "dlbench"}, "no layout 'dlbench'"),
        ({"where": "nodes", "by": "strategy"}, "where true or false is needed"),
        ({"metrics": "step_time_s,model"}, "--metric model: not a figure"),
        ({"by": "opts.bucket_mb"}, "no column 'opts.bucket_mb'"),
    ],
)
def test_wrong_questions_name_what_would_be_right(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        ask(**options)
    assert raised.value.hint


def test_conditions_read_options_and_figures() -> None:
    frame = collected_frame([entry(100, options={"bucket_mb": 5}), entry(200)])
    assert Condition("options.bucket_mb == 5", "").mask(frame).to_list() == [True, False]
    assert Condition("step_time_s > 0.15 or devices > 1", "").mask(frame).to_list() == [False, True]
    assert Condition("step_time_s.p10 < 0.1", "").mask(frame).to_list() == [True, False]
    assert Condition("1 < 2", "").mask(frame).to_list() == [True, True]
    both = "spec.options.bucket_mb == 5 and step_time_s.p10 < step_time_s"
    assert Condition(both, "").mask(frame).to_list() == [True, False]
    failed = collected_frame([entry(100), entry(None, "oom", nodes=2)])
    assert Condition("2 * step_time_s < 1", "").mask(failed).to_list() == [True, False]
    assert resolve_column("bubble_fraction") == "metrics.bubble_fraction"


@pytest.mark.parametrize("name", ["speedup", "efficiency", "predicted_step_time_s", "prediction_error"])
def test_conditions_on_computed_columns_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--where: '{name} > 1': {name} is computed from the selected runs"
    ) as raised:
        Condition(f"{name} > 1", "--where")
    assert raised.value.hint


def test_strategy_options_are_keys_of_a_pivot_table() -> None:
    options: tuple[dict[str, Any], ...] = ({"bucket_mb": 5}, {"bucket_mb": 25}, {"stages": [2, 1, 1]}, {})
    frame = collected_frame([entry(100 + number, options=one) for number, one in enumerate(options)])
    view = pivot_view(frame, parse_table_request(by="options.bucket_mb"), "t")
    assert [row[0] for row in view.raw] == [5, 25, None]
    assert view.cells[2] == ["", "102 ms ~2", "78.1 ~2", "2"]
    across = pivot_view(frame, parse_table_request(by="strategy", pivot="options.stages", metrics="step_time_s"), "t")
    assert [column.heading for column in across.columns[1:]] == ["options.stages [2, 1, 1]", "options.stages None"]


def test_warnings_are_marked_where_they_belong() -> None:
    noisy = "noise above 10 %: 12.1 % of the median; more steps narrow it"
    frame = collected_frame([entry(100, warnings=[noisy]), entry(200, strategy="zero1"), entry(300, nodes=2)])
    view = pivot_view(frame, parse_table_request(by="strategy", pivot="nodes", metrics="samples_per_s,compute_s"), "t")
    assert [row[2:] for row in view.cells] == [["80.0 *a", "53.3"], ["75.0 ms", "225 ms"], ["40.0", ""], ["150 ms", ""]]
    assert text(view).splitlines()[-1] == f"*a: {noisy}"[:79]
    plain = pivot_view(frame, parse_table_request(by="strategy"), "t")
    assert [row[1] for row in plain.cells] == ["200 ms ~2 *a", "200 [180 220] ms"]


def test_a_condition_on_figures_keeps_all_launches_of_a_configuration() -> None:
    view = ask(by="strategy", where=f'step_time_s < 0.101 and strategy == "ddp" and nodes == 1 and {SAME}')
    assert view.cells == [["ddp", "100 [98.0 102] ms", "80.0 [78.4 81.6]", "3"]]


def test_a_missing_baseline_is_noted() -> None:
    view = ask(scaling="weak", metrics="speedup", where="nodes == 4")
    assert view.raw == []
    assert "without a speed-up: no such baseline was measured; choose another with --baseline" in view.notes


def test_a_narrow_table_drops_optional_columns() -> None:
    wide, narrow = (text(ask(layout="paradl", where="nodes == 4"), width).splitlines()[2] for width in (80, 70))
    assert wide.split()[-1] == "launches"
    assert narrow.split()[-2:] == ["step", "time"]


def test_files_hold_figures_and_documents_texts(tmp_path: Path) -> None:
    view = ask(by="strategy", pivot="nodes", metrics="step_time_s", where=f'{SAME} and strategy in ["ddp", "fsdp"]')
    for ending in ("csv", "json", "md", "tex", "xlsx", "parquet"):
        write_view(view, tmp_path / f"t.{ending}")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text())))
    assert rows[0] == {"strategy": "ddp", "nodes=1": "0.1", "nodes=2": "0.11", "nodes=4": "0.125"}
    assert json.loads((tmp_path / "t.json").read_text())["rows"][0]["nodes=4"] == 0.125
    assert polars.read_parquet(tmp_path / "t.parquet")["nodes=2"].to_list() == [0.11, None]
    assert (tmp_path / "t.md").read_text().splitlines()[2:6] == [
        "| strategy | nodes 1 | nodes 2 | nodes 4 |",
        "|---|---:|---:|---:|",
        r"| ddp | 100 \[98.0 102\] ms | 110 \[99.0 121\] ms | 125 \[112 138\] ms |",
        "| fsdp |  |  | - oom |",
    ]
    assert (tmp_path / "t.tex").read_text().splitlines()[1:6] == [
        r"\begin{tabular}{lrrr}", r"\toprule", r"strategy & nodes 1 & nodes 2 & nodes 4 \\", r"\midrule",
        r"ddp & 100 [98.0 102] ms & 110 [99.0 121] ms & 125 [112 138] ms \\",
    ]  # fmt: skip
    sheet = zipfile.ZipFile(tmp_path / "t.xlsx").read("xl/worksheets/sheet1.xml").decode()
    assert "<v>0.125</v>" in sheet
    with pytest.raises(ConfigError, match="unknown ending"):
        write_view(view, tmp_path / "t.doc")


def test_a_hostile_name_is_text_everywhere(tmp_path: Path) -> None:
    evil = "=HYPERLINK(1)|<script>\\input{x}\x1b[2J"
    frame = collected_frame([entry(100, model=evil)])
    view = pivot_view(frame, parse_table_request(by="model"), evil)
    for ending in ("md", "tex", "xlsx"):
        write_view(view, tmp_path / f"t.{ending}")
    assert "\x1b" not in text(view)
    assert r"\<script\>" in (tmp_path / "t.md").read_text()
    assert r"\textbackslash{}input\{x\}" in (tmp_path / "t.tex").read_text()
    sheet = zipfile.ZipFile(tmp_path / "t.xlsx").read("xl/worksheets/sheet1.xml").decode()
    assert "<f>" not in sheet


@pytest.mark.parametrize(
    ("column", "value", "shown"),
    [
        ("metrics.step_time_s.median", 0.00123, "1.23 ms"),
        ("metrics.step_time_s.p90", 75.0, "1m15s"),
        ("metrics.peak_memory_bytes", 2**31, "2.0 GiB"),
        ("metrics.flops_per_s", 3.2e13, "32.0 TFLOP/s"),
        ("metrics.energy_j", 1500.0, "1.50 kJ"),
        ("metrics.energy_per_sample_j", 0.0123, "12.3 mJ"),
        ("metrics.energy_per_token_j", 32.1e-6, "32.1 µJ"),
        ("metrics.idle_power_w", 92.5, "92.5 W"),
        ("metrics.power_cap_w", 0.0, "0 W"),
        ("metrics.mfu", 0.421, "42.1 %"),
        ("metrics.accuracy", None, ""),
        ("spec.batch_size", 4096, "4096"),
        ("spec.compile", True, "True"),
    ],
)
def test_units_adapt_to_the_size_of_a_value(column: str, value: Any, shown: str) -> None:
    assert format_value(column, value) == shown


def test_a_unit_stands_once_where_it_is_the_same() -> None:
    assert format_spread("metrics.step_time_s.median", 0.0012, 0.00115, 0.0013) == "1.20 [1.15 1.30] ms"
    assert format_spread("metrics.step_time_s.median", 0.0012, 0.00095, 0.0013) == "1.20 ms [950 µs 1.30 ms]"
