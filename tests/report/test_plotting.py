"""Every kind of plot over planted results: rows with their numbers, words, what is left out, and valid specifications."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars
import pytest

from benchmarks.planted_results import write_planted
from hpcbench.errors import ConfigError
from hpcbench.report.column_names import Condition
from hpcbench.report.configurations import filter_launches
from hpcbench.report.load_results import full_results, load_frame
from hpcbench.report.plots.charts import SPAN_COLUMNS, BarChart, GanttChart, LineChart
from hpcbench.report.plots.plot_model import Plot, PlotRequest
from hpcbench.report.plots.plotting import PLOTS, draw_plot, plot_columns, plot_specification
from hpcbench.report.plots.theme import PlotAxis
from hpcbench.results.frame import collected_frame
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import RunResult
from tests.report.test_pivot_table import entry, planted

DDP, FSDP = ("ddp", 16), ("fsdp", 16)


@pytest.fixture
def tree(planted_tree: Path) -> ResultsTree:
    return ResultsTree(planted_tree)


def picture(tree: ResultsTree, name: str, where: str = "", by: Sequence[str] = (), **asked: Any) -> Plot:
    """Draw it as the command does, from the columns that the kind names alone."""
    condition = Condition(where, "--where") if where else None
    columns = [*plot_columns(name), *by, *(condition.columns if condition else [])]

    def whole(wanted: Sequence[tuple[str, str]]) -> list[RunResult]:
        return full_results(tree, [], None, wanted)

    return draw_plot(
        name, filter_launches(load_frame(tree, [], None, columns), condition), PlotRequest(tuple(by), whole, **asked)
    )


def values(found: Plot, *names: str, **where: Any) -> list[tuple[Any, ...]]:
    rows = [row for row in found.rows if all(row[key] == value for key, value in where.items())]
    return [tuple(round(row[name], 4) if isinstance(row[name], float) else row[name] for name in names) for row in rows]


def test_the_throughput_plot_has_lines_range_and_ideal(tree: ResultsTree) -> None:
    found = picture(tree, "throughput")
    assert values(found, "x", "y", "low", "high", series="ddp", x=16.0) == [(16, 3200.0, 3137.2549, 3265.3061)]
    assert values(found, "x", "y", role="ideal") == [(1, 320.0), (16, 5120.0)]
    assert found.alt == (
        "Throughput over 1 to 16 devices, 5 lines. "
        "At 16 devices fsdp has 3616 samples/s, the most; ddp 3200 samples/s, the least."
    )
    assert found.subtitle == "resnet50, imagenet, 32 samples per device, on made-up"
    assert found.notes == [
        "whiskers: minimum and maximum of 3 launches", "ideal: as many times one device's rate as there are devices",
        "not drawn: 1 run that did not end well (1 oom)",
    ]  # fmt: skip


def test_the_efficiency_plot_is_relative_to_the_baseline(tree: ResultsTree) -> None:
    found = picture(tree, "efficiency")
    assert values(found, "x", "y", series="ddp") == [(1, 1.0), (2, 0.9615), (4, 0.8929), (8, 0.7812), (16, 0.625)]
    # 32 samples on 16 devices in the slowest launch, over the baseline's fastest.
    assert values(found, "low", "high", series="ddp", x=16.0) == [(round(0.98 / 1.632, 4), round(1.02 / 1.568, 4))]
    assert values(found, "x", "y", role="ideal") == [(1, 1.0), (16, 1.0)]
    assert "without efficiency: 6 configurations" in found.notes


def test_scaling_marks_where_lines_cross(tree: ResultsTree) -> None:
    found = picture(tree, "scaling")
    ((x, y, loser),) = values(found, "x", "y", "label", role="crossing", series="fsdp")
    assert 8 < x < 9
    assert 0.1281 < y < 0.1416
    assert loser == "ddp"
    assert found.alt.endswith(f"Lines cross: fsdp is below ddp from {x:.3g} devices on.")


def test_predicted_lines_cross_instead_of_measured_ones(tree: ResultsTree) -> None:
    rows = [
        {"strategy": name, "devices": n, "step_time_s": s, "step_time_low_s": s * 0.9, "step_time_high_s": s * 1.1}
        for name, line in {"ddp": [(1, 0.1), (32, 0.2)], "fsdp": [(1, 0.14), (32, 0.14)]}.items()
        for n, s in line
    ]
    found = picture(tree, "scaling", predicted=polars.DataFrame(rows))
    assert values(found, "x", "y", "low", "high", role="predicted", series="ddp") == [
        (1, 0.1, 0.09, 0.11), (32, 0.2, 0.18, 0.22),
    ]  # fmt: skip
    # Straight in log-log scales: 0.1 x^(1/5) is 0.14.
    assert values(found, "series", "x", "y", role="crossing") == [("fsdp", round(1.4**5, 4), 0.14)]
    assert len(values(found, "x", role="measured")) == 16
    alone = draw_plot("scaling", collected_frame([]), PlotRequest(predicted=polars.DataFrame(rows)))
    assert len(alone.rows) == 5
    assert "8192" not in alone.alt
    several = draw_plot("scaling", planted(), PlotRequest(predicted=polars.DataFrame(rows)))
    assert not values(several, "x", role="predicted")
    assert any("predictions are not drawn" in note for note in several.notes)


def test_lines_that_take_different_batches_are_no_race(tree: ResultsTree) -> None:
    frame = collected_frame([entry(100, nodes=2), entry(110, nodes=2, strategy="zero1")])
    same = draw_plot("scaling", frame)
    assert not any("throughput compares them" in note for note in same.notes)
    other = entry(110, strategy="gpipe", tasks_per_node=2)
    unequal = draw_plot("scaling", collected_frame([entry(100, nodes=2), other]))
    assert any("throughput compares them" in note for note in unequal.notes)


def test_the_parts_plot_adds_up_to_the_step_time(tree: ResultsTree) -> None:
    found = picture(tree, "parts", "strategy in ['ddp', '1f1b'] and nodes == 1 and tasks_per_node == 4")
    parts = ["computation", "computation over communication", "communication", "bubble", "rest"]
    for row, step_s in (("1f1b, 4 devices", 0.1355), ("ddp, 4 devices", 0.112)):
        drawn = values(found, "part", "begin", "end", row=row)
        assert [part for part, _, _ in drawn] == [part for part in parts if part != "bubble" or row.startswith("1f1b")]
        assert [begin for _, begin, _ in drawn] == [0.0, *(end for _, _, end in drawn[:-1])]
        assert drawn[-1][2] == step_s
    # 3 of 7 units of time is what 1f1b waits for with 4 stages and 4 micro-batches.
    assert values(found, "value", part="bubble") == [(round(0.1355 * 3 / 7, 4),)]
    assert (
        "ddp, 4 devices: 112 ms, 67 % computation, 9 % computation over communication, 17 % communication" in found.alt
    )


def test_the_memory_plot_shows_ranks_and_out_of_memory(tree: ResultsTree) -> None:
    found = picture(tree, "memory", "strategy in ['1f1b', 'filter'] and (tasks_per_node == 2 or nodes == 2)")
    gib = 2.0**30
    assert values(found, "value", row="1f1b, 8 devices", role="dot") == [
        (9.5 * gib,), (13 * gib,), (16.5 * gib,), *[(20 * gib,)] * 5,
    ]  # fmt: skip
    assert values(found, "row", "note", role="lost") == [("filter, 2 devices, batch 32", "out of memory")]
    assert found.alt.endswith("Out of memory: filter, 2 devices, batch 32.")
    frame = load_frame(tree, [], None, plot_columns("memory"))
    assert "the largest rank alone: single ranks were not read" in draw_plot("memory", frame).notes


def test_distribution_is_of_the_steps_that_count(tree: ResultsTree) -> None:
    found = picture(tree, "distribution", "strategy == 'ddp' and nodes == 4")
    asked = Condition("strategy == 'ddp' and nodes == 4", "--where")
    frame = filter_launches(load_frame(tree, [], None, ["cluster", "run_id", *asked.columns]), asked)
    wanted = list(frame["cluster", "run_id"].iter_rows())
    steps = polars.Series([time for one in full_results(tree, [], None, wanted) for time in one.step_times_s])
    expected = tuple(round(steps.quantile(share, "linear") or 0, 4) for share in (0.1, 0.5, 0.9))
    assert values(found, "low", "median", "high", role="box") == [expected]
    assert len(values(found, "value", role="dot")) == 40
    assert "box: the middle half of 72 steps of 3 launches; whiskers: from 10 % to 90 % of them" in found.notes


def test_the_timeline_plot_shows_planned_and_measured_actions(tree: ResultsTree) -> None:
    found = picture(tree, "timeline", "strategy == '1f1b' and pp_degree == 2")
    assert found.subtitle.startswith("1f1b, 2 devices, 4 micro-batches, resnet50")
    planned = [row for row in found.rows if row["source"] == "planned"]
    unit = max(row["end_s"] for row in planned) / 15
    # The first forward pass comes after that of rank 0; a backward pass takes two units.
    assert [
        (row["name"], round(row["begin_s"] / unit, 6), round(row["end_s"] / unit, 6))
        for row in planned
        if row["rank"] == 1
    ][:3] == [("F0", 1, 2), ("B0", 2, 4), ("F1", 4, 5)]
    assert len(found.rows) == 2 * 2 * 8
    assert found.alt.endswith("bubble 20 %.")


def test_colours_mean_the_same_in_timelines_of_other_actions() -> None:
    rows = [
        dict(zip(SPAN_COLUMNS, (run, "measured", 0, kind, kind, 0, 0, float(place), place + 1.0), strict=True))
        for run, kinds in {"1f1b": "FB", "zero_bubble": "FIW"}.items()
        for place, kind in enumerate(kinds)
    ]
    spans = GanttChart({"1f1b": PlotAxis("time"), "zero_bubble": PlotAxis("time")})
    drawn = plot_specification(Plot("timeline", "", drawing=spans, frame=polars.DataFrame(rows)))["vconcat"]
    one, other = (run["spec"]["layer"][0]["encoding"]["color"]["scale"] for run in drawn)
    assert one == other
    assert len(one["domain"]) == len(set(one["range"])) == 4


def test_the_predicted_plot_has_points_band_and_error(tree: ResultsTree) -> None:
    found = picture(tree, "predicted")
    assert values(found, "label", "x", "y", series="1f1b")[0] == ("1f1b, 2 devices", 0.1234, 0.1285)
    assert "3 of 6 configurations predicted within 10 %; the median is off by 8.5 %, the worst by 13.0 %" in found.alt
    band = [row for row in found.rows if row["role"] == "band"]
    assert [(row["low"] / row["x"], row["high"] / row["x"]) for row in band] == [pytest.approx((0.9, 1.1))] * 2
    given = polars.DataFrame({"strategy": ["ddp", "ddp"], "predicted": [1.0, 2.0], "measured": [1.05, 4.0]})
    found = draw_plot("predicted", collected_frame([]), PlotRequest(predicted=given))
    assert "1 of 2 configurations predicted within 10 %" in found.alt
    assert values(found, "x", "y", role="measured") == [(1.0, 1.05), (2.0, 4.0)]


def test_energy_is_per_sample(tree: ResultsTree) -> None:
    found = picture(tree, "energy", "strategy == 'ddp'")
    # 250 W and 5 W more with every device of the run, for 32 samples a device.
    assert values(found, "x", "y") == [
        (n, round((250 + 5 * n) * 0.1 * (1 + 0.04 * (n - 1)) / 32, 4)) for n in (1, 2, 4, 8, 16)
    ]
    assert "read from: nobody" in found.notes


@pytest.mark.parametrize("name", [name for name, kind in PLOTS.items() if kind.workload is None])
def test_a_specification_is_valid_and_fetches_nothing(tree: ResultsTree, name: str) -> None:
    found = picture(tree, name)
    specification = plot_specification(found)
    text = json.dumps(specification)
    assert "http" not in text
    assert '"url"' not in text
    assert specification["description"] == found.alt
    assert len(text) < 400_000


EMPTY: dict[str, Any] = {
    "nothing": ([], "there are no results"),
    "failed": ([entry(None, "oom"), entry(None, "failed", nodes=2)], "none of 2 runs ended well: 1 oom, 1 failed"),
    "one failed": ([entry(None, "failed")], "the one run did not end well: 1 failed"),
}


@pytest.mark.parametrize("entries", EMPTY.values(), ids=EMPTY.keys())
@pytest.mark.parametrize("name", [name for name in PLOTS if name != "predicted"])
def test_an_empty_plot_gives_the_reason(name: str, entries: tuple[Any, str]) -> None:
    found = draw_plot(name, collected_frame(entries[0]).select(plot_columns(name)))
    assert (found.drawing, plot_specification(found), found.rows, found.nothing) == (None, {}, [], entries[1])


NEEDED = {
    "throughput": "", "efficiency": "", "scaling": "", "parts": "",
    "memory": "1 configuration ended well, but none has a measured peak_memory_bytes",
    "distribution": "no result holds its single steps",
    "timeline": "1 configuration ended well, but none is a pipeline whose step was noted",
    "predicted": "no run has a prediction: add --predict (in Python: predict=True)",
    "mfu": "1 configuration ended well, but none has a measured mfu",
    "energy": "1 configuration ended well, but none has a measured energy",
    "bandwidth": "1 configuration ended well, but none has a measured own.bus_bandwidth",
    "pairs": 'no run has operation = "pairs"',
    "history": "none of 1 launch has step time and a date",
}  # fmt: skip


@pytest.mark.parametrize("name", PLOTS)
def test_a_single_run_is_drawn_or_the_missing_data_is_named(name: str) -> None:
    found = draw_plot(name, collected_frame([entry(100)]))
    assert found.nothing == NEEDED[name]
    if not found.nothing:
        assert plot_specification(found)


def test_throughput_counts_tokens_where_all_samples_are_sequences() -> None:
    given: dict[str, Any] = {"model": "gpt", "dataset": "tokens", "input_size": 64}
    entries = [entry(100 / nodes, nodes=nodes, **given) for nodes in (1, 2)]
    metrics = [collected.result.metrics for collected in entries if collected.result is not None]
    for figures in metrics:
        figures.tokens_per_s = 64 * (figures.samples_per_s or 0.0)
    found = draw_plot("throughput", collected_frame(entries))
    measured = [row["y"] for row in found.rows if row["role"] == "measured"]
    assert measured == pytest.approx([figures.tokens_per_s for figures in metrics])
    assert "tokens/s" in found.alt
    assert "samples/s" in draw_plot("throughput", collected_frame([*entries, entry(100, nodes=4)])).alt


def test_recomputation_is_a_line_above_mfu(tree: ResultsTree) -> None:
    found = picture(tree, "mfu")
    lines = {row["series"] for row in found.rows}
    assert {"fsdp", "fsdp HFU", "ddp"} <= lines
    assert "ddp HFU" not in lines
    own, repeated = (
        {row["x"]: row["y"] for row in found.rows if row["series"] == name} for name in ("fsdp", "fsdp HFU")
    )
    assert repeated == pytest.approx({x: y * 4 / 3 for x, y in own.items()})


def test_workloads_are_panels_and_notes_define_the_intervals() -> None:
    found = draw_plot("throughput", planted())
    assert len({row["panel"] for row in found.rows}) == 4
    assert found.notes[0] == "whiskers: 95 % of the median within one launch; minimum and maximum of 3 launches"
    assert values(found, "low", "high", panel="vgg11, batch 8 per replica", series="zero1", x=2.0) == [
        (round(16 / 0.125 / 1.1, 4), round(16 / 0.125 / 0.9, 4)),
    ]


def test_rows_of_two_clusters_are_counted_and_drawn_apart(tmp_path: Path) -> None:
    for cluster in ("a", "b"):
        write_planted(tmp_path / cluster)
    tree = ResultsTree(tmp_path)
    asked = "strategy in ['ddp', 'filter'] and nodes < 4"
    memory, distribution = (picture(tree, name, asked) for name in ("memory", "distribution"))
    assert memory.alt.startswith("Peak memory of 8 configurations, the largest rank: on a, ddp, 1 device 20.0 GiB;")
    assert values(memory, "panel", "row", role="lost") == [
        ("out of memory", "filter, 2 devices, batch 32, resnet50 on a"),
        ("out of memory", "filter, 2 devices, batch 32, resnet50 on b"),
    ]
    assert distribution.alt.startswith("Step times of 8 configurations, medians: on a, ddp, 1 device ")
    assert distribution.subtitle == "resnet50, imagenet, batch 32 per replica"


def test_a_chosen_parameter_separates_the_lines() -> None:
    entries = [entry(ms, nodes=2, options={"bucket_mb": size}) for ms, size in ((100, 1), (90, 25))]
    frame = collected_frame(entries)
    (point,) = [row for row in draw_plot("throughput", frame).rows if row["role"] == "measured"]
    assert point["y"] == pytest.approx(16 / 0.09)
    assert any("1 slower ones are not drawn" in note for note in draw_plot("throughput", frame).notes)
    found = draw_plot("throughput", frame, PlotRequest(("spec.options.bucket_mb",)))
    assert [row["series"] for row in found.rows] == ["bucket_mb 1", "bucket_mb 25"]
    for column in ("metrics.accuracy", "run_id", "warnings", "speedup"):
        with pytest.raises(ConfigError, match="equal for all lines"):
            draw_plot("throughput", frame, PlotRequest((column,)))
    for column in ("devices", "sweep", "spec.options", "environment_digest", "spec.compile"):
        assert draw_plot("throughput", frame, PlotRequest((column,))).rows


def sweep(**changes: Any) -> list[Any]:
    """Two models, two strategies and two batches on two devices; ``vit`` is twenty times slower."""
    return [
        entry(ms * size, model=model, strategy=strategy, batch_size=size, nodes=2, **changes)
        for model, strategy, ms in (
            ("resnet18", "ddp", 1.0), ("resnet18", "fsdp", 1.25), ("vit", "ddp", 20.0), ("vit", "fsdp", 25.0),
        ) for size in (8, 16)
    ]  # fmt: skip


def test_one_device_count_gives_bars_by_strategy() -> None:
    found = draw_plot("throughput", collected_frame(sweep()))
    assert isinstance(found.drawing, BarChart)
    assert (found.title, found.subtitle) == ("Throughput by strategy", "mnist, 2 devices, on c")
    assert values(found, "label", "x", "y", panel="vit, batch 8 per replica") == [
        ("ddp", None, 100),
        ("fsdp", None, 80),
    ]
    assert "vit, batch 8 per replica: ddp has 100 samples/s, the most; fsdp 80 samples/s, the least." in found.alt
    assert draw_plot("scaling", collected_frame(sweep())).title == "Step time by strategy"
    lines = polars.DataFrame({
        "strategy": ["ddp"] * 2, "devices": [2, 4], "step_time_s": [0.1, 0.2], "step_time_low_s": [0.1, 0.2],
        "step_time_high_s": [0.1, 0.2],
    })  # fmt: skip
    resnet = collected_frame([one for one in sweep() if one.result.spec.model == "vit"][:1])
    assert isinstance(draw_plot("scaling", resnet, PlotRequest(predicted=lines)).drawing, LineChart)


def test_any_parameter_can_be_the_x_axis() -> None:
    frame = collected_frame(sweep())
    found = draw_plot("throughput", frame, PlotRequest(x="spec.batch_size"))
    assert found.title == "Throughput over batch size"
    assert values(found, "x", "y", panel="vit", series="fsdp") == [(8, 80), (16, 80)]
    assert "vit: at batch size 16 ddp has 100 samples/s" in found.alt
    bars = draw_plot("scaling", collected_frame([*sweep(), *sweep(precision="bf16")]), PlotRequest(x="spec.precision"))
    assert [label for (label,) in values(bars, "label", panel="vit, batch 8 per replica")] == [
        "ddp, bf16", "ddp, fp32", "fsdp, bf16", "fsdp, fp32",
    ]  # fmt: skip
    # Other numbers of devices are other panels, unless they follow the axis.
    both = collected_frame([entry(100, nodes=nodes, batch_size=size) for nodes in (1, 2) for size in (8, 16)])
    panels = {row["panel"] for row in draw_plot("throughput", both, PlotRequest(x="spec.batch_size")).rows}
    assert panels == {"1 device", "2 devices"}
    panels = {row["panel"] for row in draw_plot("throughput", both, PlotRequest(x="spec.nodes")).rows}
    assert panels == {"batch 8 per replica", "batch 16 per replica"}


def test_lines_over_a_parameter_cross_at_its_value() -> None:
    entries = [entry(ms, strategy=strategy, batch_size=size, nodes=2)
               for strategy, size, ms in (("ddp", 8, 1), ("ddp", 32, 16), ("fsdp", 8, 2), ("fsdp", 32, 8))]  # fmt: skip
    found = draw_plot("scaling", collected_frame(entries), PlotRequest(x="spec.batch_size"))
    assert "lines cross (between medians): fsdp is below ddp from batch size 16 on" in found.notes


def test_panels_have_their_own_scales_where_one_would_flatten_others() -> None:
    own = draw_plot("throughput", collected_frame(sweep()))
    assert own.notes[-1] == "each panel has its own scale"
    assert own.drawing is not None
    assert plot_specification(own)["resolve"]["scale"] == {"x": "independent", "y": "independent"}
    # The unit suits the lowest panel.
    assert isinstance(own.drawing, BarChart)
    assert own.drawing.x.heading == "samples/s"
    vit = collected_frame([one for one in sweep() if one.result.spec.model == "vit"])
    shared = draw_plot("throughput", vit)
    assert shared.notes[-1] == "all panels have the same scale"
    assert plot_specification(shared)["resolve"]["scale"] == {"x": "shared", "y": "independent"}


def test_every_mark_is_in_the_legend(tree: ResultsTree) -> None:
    def marks(name: str) -> list[str]:
        subtitle: list[str] = plot_specification(picture(tree, name))["title"]["subtitle"]
        return " ".join(subtitle[1:]).split("; ")

    whiskers = "whiskers: minimum and maximum of 3 launches"
    assert marks("throughput") == ["dotted line: ideal", whiskers]
    assert marks("scaling") == ["ring: lines cross", whiskers]
    assert marks("memory") == ["bar: the most", "thin marks: single ranks"]
    assert marks("parts") == ["black mark: step time"]
    assert marks("distribution") == [
        "line: 10 % to 90 % of the steps", "box: middle half", "thick mark: median", "thin marks: single steps",
    ]  # fmt: skip
    assert {"dotted line: equal", "grey band: within 10 %"} <= set(marks("predicted"))


def test_a_bar_of_parts_beyond_its_mark_is_explained() -> None:
    one = entry(100)
    assert one.result is not None
    one.result.metrics.compute_s, one.result.metrics.comm_s, one.result.metrics.exposed_comm_s = 0.11, 0.0, 0.0
    found = draw_plot("parts", collected_frame([one]))
    cost = "the profiled steps took longer than the timed ones, by the cost of the profiler"
    assert f"a bar that ends beyond its step time: {cost}" in found.notes
    assert f"bar longer than its mark: {cost}" in " ".join(plot_specification(found)["title"]["subtitle"])


def test_a_hybrid_is_one_line_however_large_it_is() -> None:
    hybrids = [
        entry(100, strategy="filter", nodes=nodes, tasks_per_node=2, tp_degree=2) for nodes in (2, 4)
    ]  # fmt: skip
    found = draw_plot("throughput", collected_frame(hybrids))
    assert [(row["series"], row["label"], row["x"]) for row in found.rows] == [
        ("filter dp tp", "filter dp2 tp2", 4.0), ("filter dp tp", "filter dp4 tp2", 8.0),
    ]  # fmt: skip


def test_panels_and_lines_are_limited_with_a_note() -> None:
    entries = [
        entry(100, model=f"m{number}", nodes=nodes) for number in range(12) for nodes in (1, 2)[: 1 + number % 2]
    ]
    found = draw_plot("throughput", collected_frame(entries))
    assert len({row["panel"] for row in found.rows}) == 9
    assert "the 9 panels with most points of 12; others can be chosen with --where" in found.notes
    lines = [entry(100, strategy=f"s{number}") for number in range(14)]
    found = draw_plot("scaling", collected_frame(lines))
    assert len(found.rows) == 12
    assert "the 12 lines with most points of 14; others can be chosen with --where" in found.notes
