"""Conditions of `make rerun-...`: shares, losses, the models that DDLBench could not run."""

from __future__ import annotations

from benchmarks.rerun.check import Cell, faults
from hpcbench.config.run_spec import RunSpec
from hpcbench.results.schema import LossSummary, RunMetrics, RunResult


def cell(
    strategy: str = "ddp", model: str = "vgg11", status: str | None = "ok", first: float | None = 2.0, last: float = 1.0
) -> Cell:
    spec = RunSpec(model=model, dataset="cifar10", strategy=strategy, batch_size=8)
    if status is None:
        return Cell(spec, None)
    metrics = RunMetrics(loss=LossSummary(first=first, last=last))
    result = RunResult(
        run_id="0" * 16, config_id="0" * 16, attempt=1, sweep="s", cluster="c", status=status, spec=spec,
        metrics=metrics,
    )  # fmt: skip
    return Cell(spec, result)


def test_a_complete_matrix_has_no_fault() -> None:
    assert list(faults([cell(), cell("gpipe"), cell("gpipe", "resnet152"), cell(model="mobilenetv2")])) == []


def test_an_empty_matrix_is_none() -> None:
    assert list(faults([])) == ["no run is planned"]


def test_cells_that_are_missing_or_failed_count() -> None:
    cells = [cell()] * 18 + [cell(status="failed"), cell(status=None)]
    assert list(faults(cells)) == ["90.0% of 20 cells are ok, at least 95% are asked for"]
    assert list(faults([cell()] * 19 + [cell(status=None)])) == []


def test_every_strategy_runs_and_learns() -> None:
    assert list(faults([cell()] * 40 + [cell("gpipe", status="oom")])) == ["gpipe: no cell is ok"]
    grown = [cell("gpipe", first=1.0, last=2.0), cell("gpipe", first=1.0, last=2.0), cell("gpipe")]
    assert list(faults([*grown, cell()])) == ["gpipe: the loss falls in 1 of 3 cells"]
    assert list(faults([cell("gpipe", first=None)])) == ["gpipe: the loss falls in 0 of 0 cells"]


def test_models_that_ddlbench_could_not_run_must_run() -> None:
    cells = [cell()] * 40 + [cell("gpipe"), cell("gpipe", "resnet152", "oom")]
    assert list(faults(cells)) == ["resnet152: 1 cells are not ok, the first: gpipe, resnet152 on cifar10, 1 devices"]
