from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from hpcbench.config.run_spec import RunSpec
from hpcbench.report.configurations import rows_from_frame
from hpcbench.report.results_table import results_data_view, results_text_view, split_parameters
from hpcbench.report.table_files import write_view
from hpcbench.report.table_output import PrintedView
from hpcbench.results.frame import collected_frame
from hpcbench.results.results_tree import CollectedResult
from hpcbench.results.schema import FailureRecord, LossSummary, VerificationResult
from tests.report.planted import launch


def collected(status: str = "ok", rate: float = 100.0, median: float = 0.16, **changes: Any) -> CollectedResult:
    spec = {"model": "resnet18", "dataset": "digits", "strategy": "single", "batch_size": 16, "dp_degree": 1, **changes}
    error = FailureRecord(type="OutOfMemoryError", message="asked for 9 GiB, 3 GiB were there")
    partial = ["last batch of an epoch holds 28 of 32 samples; counted as 28"]
    one = launch(
        median if status == "ok" else None, status=status, error=None if status == "ok" else error, memory_bytes=2**29,
        warnings=partial if spec["batch_size"] == 32 else [], spread=0.1, **spec,
    )  # fmt: skip
    if status == "ok":
        one.metrics.samples_per_s, one.metrics.loss = rate, LossSummary(first=2.5, last=0.5)
    return CollectedResult("c", one.run_id, one)


DDP2: dict[str, Any] = {"strategy": "ddp", "tasks_per_node": 2, "dp_degree": 2}


def test_speedup_is_against_one_rank_with_the_same_batch() -> None:
    rows = rows_from_frame(
        collected_frame([collected(**DDP2, rate=180.0), collected(), collected(strategy="ddp", rate=90.0)])
    )
    assert [(row.speedup, row.efficiency) for row in rows] == [(1.8, 0.9), (1.0, 1.0), (0.9, 0.9)]


def test_without_single_the_strategys_own_run_on_one_device_counts() -> None:
    rows = rows_from_frame(collected_frame([collected(**DDP2, rate=180.0), collected(strategy="ddp", rate=90.0)]))
    assert [row.speedup for row in rows] == [2.0, 1.0]
    assert rows_from_frame(collected_frame([collected(**DDP2)]))[0].speedup is None


def test_samples_from_elsewhere_are_no_baseline() -> None:
    rows = rows_from_frame(
        collected_frame([collected(), collected(**DDP2, data="files", rate=180.0), collected(data="files", rate=60.0)])
    )
    assert [row.speedup for row in rows] == [1.0, 3.0, 1.0]


def test_another_batch_or_precision_is_no_baseline() -> None:
    rows = rows_from_frame(
        collected_frame([collected(batch_size=8), collected(**DDP2), collected(**DDP2, precision="bf16")])
    )
    assert [row.speedup for row in rows] == [1.0, None, None]


def test_repeats_are_one_row_with_the_spread_between_launches() -> None:
    (row,) = rows_from_frame(
        collected_frame(collected(repeat=repeat, median=median) for repeat, median in enumerate((0.16, 0.18, 0.17)))
    )
    assert (row.launches, row.step_time_s, row.low_s, row.high_s) == (3, 0.17, 0.16, 0.18)
    assert row.spread == "between 3 launches"


def test_a_failed_repeat_is_a_separate_row() -> None:
    rows = rows_from_frame(collected_frame([collected(), collected("failed", repeat=1), collected(repeat=2)]))
    assert [(row.status, row.launches) for row in rows] == [("ok", 2), ("failed", 1)]


def test_launches_that_failed_equally_are_one_printed_row() -> None:
    """Their seeds, the only difference, are no column."""
    entries = [collected("cancelled", seed=seed, repeat=seed) for seed in range(3)]
    text = shown([*entries, collected("failed", repeat=3), collected(repeat=4)])
    lines = [words for line in text.splitlines() if (words := " ".join(line.split())).startswith("single 1 ")]
    assert len(lines) == 3, text
    assert [line.rpartition("single 1 ")[2] for line in lines if not line.endswith(" ok")] == [
        "cancelled (3)",
        "failed",
    ]
    assert " ".join(text.split()).count("cancelled: ") == 3


def test_a_broken_file_is_a_row_with_its_reason() -> None:
    (row,) = rows_from_frame(collected_frame([CollectedResult("c", "0" * 16, None, "result.json is broken: no")]))
    assert (row.status, row.reason) == ("broken", "result.json is broken: no")


def shown(rows: list[CollectedResult], width: int = 80) -> str:
    console = Console(width=width, color_system=None, record=True, markup=False, highlight=False, file=io.StringIO())
    console.print(PrintedView(results_text_view(rows_from_frame(collected_frame(rows)), "title")))
    return console.export_text()


def test_a_table_wider_than_the_terminal_goes_on_below() -> None:
    """Every block has the columns that distinguish rows, and nothing is cut."""
    wide = [
        collected(model=model, options={"mb": cap}, dataset=dataset, precision=precision)
        for model, cap, dataset, precision in (
            ("resnet18", 1.0, "cifar10", "fp32"), ("mobilenetv2", 25.0, "imagenet", "bf16"),
        )
    ]  # fmt: skip
    text = shown(wide)
    assert all(len(line) <= 80 for line in text.splitlines())
    blocks = [block for block in text.split("\n\n") if "strategy" in block.split("\n", 1)[0]]
    assert len(blocks) > 1
    for block in blocks:
        assert all(part in block for part in ("resnet18", "mobilenetv2", "mb=25.0", "imagenet"))
    assert all(heading in text for heading in ("samples/s", "memory", "status"))


def test_the_table_is_complete_within_80_columns() -> None:
    text = shown(
        [collected(), collected(**DDP2, rate=180.0), collected("oom", batch_size=32), collected(**DDP2, batch_size=32)]
    )
    assert all(len(line) <= 80 for line in text.splitlines())
    figures = ["single", "160 [144 176]", "1.80", "90 %", "512 MiB", "2.5→0.5", "oom", "ok*"]
    notes = ["asked for 9 GiB, 3 GiB were there", "[95 %]: of one launch's median", "counted as 28"]
    for part in (*figures, *notes):
        assert part in " ".join(text.split())


def ordinary(*warnings: str) -> list[CollectedResult]:
    """Two strategies, models and batches on two ranks, as most sweeps have them."""
    rows = [
        collected(**{**DDP2, "strategy": strategy}, model=model, batch_size=size, median=median)
        for model, median in (("resnet18", 0.0101), ("vit_tiny", 0.1771))
        for strategy in ("ddp", "fsdp") for size in (8, 16)
    ]  # fmt: skip
    for row in rows:
        assert row.result is not None
        row.result.warnings = [*warnings]
    return rows


def test_an_ordinary_table_is_one_block() -> None:
    disturbed = "other processes used the cores: 57% of the 2 cores of rank 0 on node01"
    assert (
        shown(ordinary(disturbed))
        == """\
title

                                               samples
strategy ranks model    batch   step ms [95 %]   per s  memory    loss status
─────────────────────────────────────────────────────────────────────────────
ddp          2 resnet18     8 10.1 [9.09 11.1]     100 512 MiB 2.5→0.5 ok
ddp          2 resnet18    16 10.1 [9.09 11.1]     100 512 MiB 2.5→0.5 ok
fsdp         2 resnet18     8 10.1 [9.09 11.1]     100 512 MiB 2.5→0.5 ok
fsdp         2 resnet18    16 10.1 [9.09 11.1]     100 512 MiB 2.5→0.5 ok
ddp          2 vit_tiny     8    177 [159 195]     100 512 MiB 2.5→0.5 ok
ddp          2 vit_tiny    16    177 [159 195]     100 512 MiB 2.5→0.5 ok
fsdp         2 vit_tiny     8    177 [159 195]     100 512 MiB 2.5→0.5 ok
fsdp         2 vit_tiny    16    177 [159 195]     100 512 MiB 2.5→0.5 ok

all runs: dataset digits, precision fp32; [95 %]: of one launch's median
all 8 rows: other processes used the cores: 57% of the 2 cores of rank 0 on
node01
"""
    )


PRECISIONS: tuple[dict[str, Any], ...] = ({}, {"precision": "bf16"})


def test_columns_that_do_not_fit_beside_the_others_are_named() -> None:
    """Those that follow from others, or say the least, go first."""
    baselines = [collected(model=model, batch_size=size, **more) for model in ("resnet18", "vit_tiny") for size in (8, 16)
                 for more in PRECISIONS]  # fmt: skip
    text = shown([*ordinary(), *baselines])
    title, _, upper, lower, *_ = text.splitlines()
    assert title == "title  (not shown at this width: eff., loss, status)"
    assert (upper.split(), lower.split()) == (
        ["samples", "speed-"],
        ["strategy", "ranks", "model", "batch", "precision", "step", "ms", "[95", "%]", "per", "s", "up", "memory"],
    )
    assert "speed-up: over one rank with the same batch per replica; eff.: per device\n" in text


def test_a_narrow_terminal_shows_a_record_for_each_row() -> None:
    assert (
        shown(ordinary()[:2], 40)
        == """\
title

strategy: ddp
ranks: 2
batch: 8
step ms [95 %]: 10.1 [9.09 11.1]
samples/s: 100
memory: 512 MiB
loss: 2.5→0.5
status: ok

strategy: ddp
ranks: 2
batch: 16
step ms [95 %]: 10.1 [9.09 11.1]
samples/s: 100
memory: 512 MiB
loss: 2.5→0.5
status: ok

all runs: model resnet18, dataset
digits, precision fp32
[95 %]: of one launch's median
"""
    )
    assert not [line for line in shown(ordinary(), 40).splitlines() if line.endswith(" ")]


def test_a_warning_of_most_rows_marks_the_rows_that_have_it() -> None:
    rows = ordinary("first: 1", "second")
    assert rows[0].result is not None
    rows[0].result.warnings = ["second"]
    text = shown(rows)
    statuses = [line.split()[-1] for line in text.splitlines() if line.startswith(("ddp", "fsdp"))]
    assert sorted(set(statuses)) == ["ok", "ok*a"]
    assert statuses.count("ok") == 1
    assert "*a: first: 1 (7 rows)\n" in text
    assert "all 8 rows: second\n" in text


def warned(number: int, *warnings: str) -> CollectedResult:
    entry = collected(learning_rate=number / 100)
    assert entry.result is not None
    entry.result.warnings = list(warnings)
    return entry


def test_warnings_that_differ_in_figures_are_one_text_and_marked_by_a_letter() -> None:
    others = "other processes used the cores: {} of the 2 cores of rank 0 on node01"
    text = shown([
        warned(1, others.format("57 %"), "the last batch of an epoch holds 28 of 32 samples; counted as 28"), warned(2),
        warned(3, others.format("12 %"), others.format("9 %")),
        warned(4, "the last batch of an epoch holds 28 of 32 samples; counted as 28"),
    ])  # fmt: skip
    assert all(len(line) <= 80 for line in text.splitlines())
    statuses = [line.split()[-1] for line in text.splitlines() if line.strip().startswith("single")]
    assert statuses == ["ok*a,b", "ok", "ok*a", "ok*b"]
    words = " ".join(text.split())
    assert f"*a: {others.format('57 %')} (first of 2 similar warnings)" in words
    assert "*b: the last batch of an epoch holds 28 of 32 samples; counted as 28 (2 rows)" in words
    assert "12 %" not in text


def test_more_kinds_of_warnings_than_letters_end_in_one_line() -> None:
    kinds = [chr(ord("A") + number // 26) + chr(ord("a") + number % 26) for number in range(30)]
    text = shown([warned(1, *kinds), warned(2, "Bd"), warned(3)])
    assert "*+: 4 more kinds of warnings: see `hpcbench collect`" in text
    ends = [line.split()[-1] for line in text.splitlines() if line.strip().startswith("single")]
    assert [end for end in ends if end.startswith("ok")] == ["ok*a,b,c,+", "ok*+", "ok"]


def test_a_table_in_latex_explains_its_letters(tmp_path: Path) -> None:
    rows = rows_from_frame(collected_frame([warned(1, "57 % of 2 cores_used"), warned(2)]))
    write_view(results_text_view(rows, "title"), tmp_path / "t.tex")
    text = (tmp_path / "t.tex").read_text()
    assert "ok*a" in text
    assert r"$\to$" in text
    after = text.partition(r"\end{tabular}")[2]
    assert r"{\footnotesize *a: 57 \% of 2 cores\_used\par}" in after


def test_figures_are_columns_where_any_run_has_them() -> None:
    entries = [collected(), collected(batch_size=8)]
    plain = shown(entries, 160)
    figures = {"tokens_per_s": 12_800.0, "tokens_per_s_per_device": 6400.0, "mfu": 0.3, "hfu": 0.4}
    assert entries[1].result is not None
    for name, value in figures.items():
        setattr(entries[1].result.metrics, name, value)
    found = shown(entries, 160)
    for part in ("tokens/s", "/device", "12.8 k", "MFU", "30.0 %", "HFU", "40.0 %", "MFU: the model's own FLOPs"):
        assert part in found, part
    for part in ("tokens", "MFU", "HFU"):
        assert part not in plain, part


def test_a_verified_launch_is_a_launch_of_the_same_row() -> None:
    plain, verified = collected(), collected(verify=True)
    assert verified.result is not None
    verified.result.verification = VerificationResult(passed=True, precision="fp64", tolerance=1e-7, steps=5)
    frame = collected_frame([verified])
    assert frame["verification.passed", "verification.tolerance"].row(0) == (True, 1e-7)
    (row,) = rows_from_frame(collected_frame([plain, verified]))
    assert (row.launches, row.verified) == (2, True)
    other = collected(**DDP2)
    text = shown([plain, verified, other], 120)
    assert "verified" in text
    assert "True" not in text
    assert [line.split()[-2:] for line in text.splitlines() if line.startswith("single")] == [["yes", "ok"]]
    assert rows_from_frame(collected_frame([plain]))[0].verified is None


def test_files_distinguish_rows_by_degrees_and_devices_per_task() -> None:
    places: tuple[dict[str, Any], ...] = ({"tp_degree": 4}, {"tp_degree": 2, "dp_degree": 2}, {"devices_per_task": 2})
    view = results_data_view(
        rows_from_frame(collected_frame([collected(strategy="filter", nodes=4, **one) for one in places])), "files"
    )
    names = [column.name for column in view.columns]
    told = [dict(zip(names, row, strict=True)) for row in view.raw]
    assert [(row["devices_per_task"], row["dp_degree"], row["tp_degree"]) for row in told] == [
        (1, 1, 4), (1, 2, 2), (2, 1, 1),
    ]  # fmt: skip
    assert not {"sp_degree", "pp_degree"} & {*names}


def test_tables_that_all_runs_share_are_printed_by_entry() -> None:
    shared: dict[str, Any] = {"env": {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO"}, "options": {"bucket_cap_mb": 10}}
    specs = [
        RunSpec(model="resnet18", dataset="digits", strategy="ddp", batch_size=8, steps=steps, **shared)
        for steps in (1, 2)
    ]
    text = split_parameters(specs)[1]
    assert "env.OMP_NUM_THREADS=1 env.NCCL_DEBUG=INFO" in text
    assert "options.bucket_cap_mb=10" in text
    assert "{" not in text
