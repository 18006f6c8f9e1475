"""Predictions and recommendations as people read them, from planted figures."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.prediction import (
    MEASURED_FOR_SWEEP,
    BasisKind,
    NotPredicted,
    Prediction,
    PredictionBasis,
    PredictionInterval,
)
from hpcbench.predict.recommend import Candidate, InfeasiblePoints, Recommendation
from hpcbench.report.prediction_view import (
    PredictedConfiguration,
    predict_configurations,
    predictions_view,
)
from hpcbench.report.recommendation_view import ranking_view, recommended_sweep_toml, refused_table, scales_view
from hpcbench.report.table_model import View
from hpcbench.report.table_output import render_view
from tests.predict.test_recommend import told

GIB = 2**30


def spec(strategy: str, nodes: int = 1, **more: Any) -> RunSpec:
    return RunSpec(model="resnet18", dataset="cifar10", strategy=strategy, batch_size=8, nodes=nodes, **more)


def lines(shown: Any) -> list[str]:
    console = Console(width=80, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(render_view(shown, 80) if isinstance(shown, View) else shown)
    return [line.rstrip() for line in captured.get().splitlines() if line.strip()]


def test_the_table_of_predictions_shows_time_memory_and_interval() -> None:
    fits = told(
        0.09,
        0.01,
        8,
        peak_memory_bytes=GIB,
        memory_limit_bytes=2 * GIB,
        interval=PredictionInterval(low=0.06, high=0.17),
    )
    large = told(0.9, 0.0, 16, peak_memory_bytes=3 * GIB, memory_limit_bytes=2 * GIB, fits=False, bound_by="memory")
    found = [
        PredictedConfiguration(spec("single"), ["a"], fits),
        PredictedConfiguration(spec("ddp", 2, dp_degree=2), ["b", "c"], large),
        PredictedConfiguration(
            spec("spatial", 2, sp_degree=2), ["d"], NotPredicted("the oracle has no formulas for spatial")
        ),
    ]
    assert lines(predictions_view(found, "tiny on here")) == [
        "tiny on here",
        "strategy  ranks        step [90 %]  split     memory  bound by    samples/s",
        "────────────────────────────────────────────────────────────────────────────",
        "single        1  100.0 [60 170] ms  90+10    1.0 GiB  compute          80.0",
        "ddp         2x1  900 [450 1800] ms  100+0  3.0 GiB !  memory           17.8",
        "spatial     2x1                  -                    not priced",
        "all runs: model resnet18, dataset cifar10, batch_size 8, precision fp32",
        "[90 %]: prediction interval, from the assumed uncertainty of the hardware",
        "figures above",
        "split: % of the step in computation + exposed communication + pipeline bubble",
        "memory: peak of the rank that uses most; capacity 2.0 GiB",
        "!: does not fit; the time is that of a rank with more memory",
        "not priced: 1 of 3: the oracle has no formulas for spatial",
    ]


@pytest.mark.parametrize(
    ("kinds", "sources"),
    [
        (["profile"], "the assumed uncertainty of the hardware figures above"),
        (["published runs"], "the error of the fit to published runs"),
        (["calibrated"], "the error of the calibration's fits"),
        ([MEASURED_FOR_SWEEP], "the scatter of the calibration's measurements"),
        (
            ["published runs", "measured neighbours", "published runs"],
            "the error of the fit to published runs or the scatter of measured runs",
        ),
        ([], None),
    ],
)
def test_the_legend_states_the_source_of_each_kind_of_interval(kinds: list[BasisKind], sources: str | None) -> None:
    predictions: list[Prediction | NotPredicted]
    predictions = [told(1.0, rests_on=PredictionBasis(kind=kind)) for kind in kinds] or [NotPredicted("no")]
    rows = [PredictedConfiguration(spec("ddp", n + 1), [str(n)], one) for n, one in enumerate(predictions)]
    notes = [note for note in predictions_view(rows, "t").notes if note.startswith("[90 %]")]
    assert notes == ([] if sources is None else [f"[90 %]: prediction interval, from {sources}"])


def test_columns_that_a_prediction_does_not_depend_on_are_left_out() -> None:
    def headings(*specs: RunSpec) -> list[str]:
        shown = predictions_view([PredictedConfiguration(one, [str(n)], told(1.0)) for n, one in enumerate(specs)], "t")
        notes = [note for note in shown.notes if "hidden since" in note]
        return [*(column.heading for column in shown.columns if column.is_key), *notes]

    sizes = [spec("ddp", 2, dp_degree=2, learning_rate=rate, micro_batches=many) for rate, many in ((0.1, 1), (0.2, 2))]
    followed = "`learning_rate` also varies; hidden since the other columns identify every row"
    assert headings(*sizes) == ["strategy", "ranks", "micro-batches", followed]
    rates = [spec("single", learning_rate=rate, momentum=0.9 * (rate > 0.1)) for rate in (0.1, 0.2)]
    assert headings(*rates)[2:3] == ["lr"]
    assert len(headings(*sizes, *rates)) == 5


class Told:
    """Says that a second replica does not fit, and nothing of pipelines."""

    def predict(self, spec: RunSpec) -> Any:
        return NotPredicted("no") if spec.strategy == "gpipe" else told(1.0, fits=spec.nodes == 1)


@pytest.mark.parametrize(
    ("where", "left"),
    [
        (None, ["ddp 1", "ddp 2", "gpipe 2"]),
        ("fits", ["ddp 1"]),
        ("not fits and nodes == 2", ["ddp 2", "gpipe 2"]),
        ("step_time_s < 2 and ranks > 1", ["ddp 2"]),
    ],
)
def test_conditions_may_use_predicted_values(where: str | None, left: list[str]) -> None:
    runs = {str(place): one for place, one in enumerate([
        spec("ddp"), spec("ddp", repeat=1, seed=1), spec("ddp", 2, dp_degree=2), spec("gpipe", 2, pp_degree=2)
    ])}  # fmt: skip
    found = predict_configurations(runs, Told(), where)  # type: ignore[arg-type]
    assert [f"{one.spec.strategy} {one.spec.nodes}" for one in found] == left
    # Launches of one configuration are one row.
    assert found[0].run_ids == (["0", "1"] if left[0] == "ddp 1" else ["2"])


def recommendation() -> Recommendation:
    best = Candidate(spec=spec("ddp", 2, dp_degree=2), predicted=told(0.1, samples=16), largest_batch_size=512)
    near = Candidate(
        spec=spec("fsdp", 2, dp_degree=2, options={"shard_degree": 2}, micro_batches=4, activation_checkpointing=True),
        predicted=told(0.11, samples=16), ratio=1.1, ratio_low=0.9, ratio_high=1.3,
    )  # fmt: skip
    far = Candidate(
        spec=spec("zero1", 2, dp_degree=2), predicted=told(0.5, 0.5, 16), ratio=10.0, ratio_low=8.0, ratio_high=12.0
    )
    refused = [
        InfeasiblePoints("tensor", "limit", "it is no transformer", 3),
        InfeasiblePoints("1f1b", "memory", "needs more", 1),
    ]
    return Recommendation(nodes=2, tasks_per_node=1, candidates=[best, near, far], refused=refused, priced=3)


def test_a_ranking_marks_inconclusive_candidates() -> None:
    shown = "\n".join(lines(ranking_view(recommendation(), "2 devices", 2)))
    assert "1.10 [0.90 1.30] ~" in shown
    assert "fsdp shard_degree=2 in 4" in shown
    assert "recomputing" in shown
    assert "zero1" not in shown
    assert "~: not significantly slower than the first (1 candidate); measure them" in shown
    assert "1 more candidate not shown" in shown
    assert "whether these fit is unknown" in shown


def test_views_list_the_best_per_scale_and_refusals() -> None:
    nothing = Recommendation(nodes=4, tasks_per_node=1, candidates=[], refused=[], priced=0)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines(scales_view([recommendation(), nothing]))}
    # 50,000 samples at 160 a second on two nodes.
    assert rows["2"] == "ddp 160 80.0 0.174 1"
    assert rows["4"] == "none can run"
    shown = lines(refused_table([recommendation(), recommendation()]))
    assert [" ".join(line.split()) for line in shown[2:]] == [
        "tensor 6 excluded: it is no transformer", "1f1b 2 too large: needs more"
    ]  # fmt: skip


def test_the_best_candidates_are_written_as_a_sweep() -> None:
    assert recommended_sweep_toml([recommendation()], "best").split("\n\n")[:3] == [
        'name = "best"\nrepeats = 3',
        '[fixed]\nmodel = "resnet18"\ndataset = "cifar10"\nprecision = "fp32"',
        '[[include]]\nstrategy = "ddp"\nnodes = 2\nbatch_size = 8\ndp_degree = 2',
    ]
    assert recommended_sweep_toml([recommendation()], "best", "/nets").startswith(
        'name = "best"\nrepeats = 3\nmodel_folder = "/nets"\n'
    )
    assert "activation_checkpointing = true\noptions.shard_degree = 2" in recommended_sweep_toml(
        [recommendation()], "best"
    )
