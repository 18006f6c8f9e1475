"""The commands ``predict``, ``recommend`` and ``validate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import (
    cluster_option,
    json_option,
    load_plan,
    make_console,
    print_json,
    print_message,
    print_text,
    results_option,
    results_tree,
)

if TYPE_CHECKING:
    from hpcbench.forecast.forecast import Forecast
    from hpcbench.oracle.recommend import Recommendation
    from hpcbench.oracle.scoring import ValidationCase
    from hpcbench.report.oracle_validation import ValidationResult
    from hpcbench.report.table_model import View
    from hpcbench.submit.plan import SweepPlan


@click.command()
@click.argument("sweep")
@cluster_option()
@click.option("--where", metavar="EXPR", help="Only runs for which it holds: 'strategy == \"ddp\" and fits'.")
@results_option
@json_option
def predict(sweep: str, cluster_name: str, where: str | None, results: str | None, as_json: bool) -> None:
    """Say how long a step of every run of SWEEP would take on a cluster, what binds it, and whether it fits.

    Nothing is submitted and no scheduler is asked. The numbers are those of the cluster's newest calibration, or its
    profile's; which, and what had to be guessed, is said above the table.
    """
    from hpcbench.report.prediction_view import (
        machine_notes,
        predict_configurations,
        predictions_json,
        predictions_view,
    )

    made = load_plan(sweep, cluster_name, results)
    forecast = _make_forecast(made, results)
    found = predict_configurations(made.runs, forecast, where)
    if as_json:
        print_json(predictions_json(found, forecast.machines()))
        return
    title = f"{made.sweep.name} on {made.profile.name}: {len(found)} configurations, predicted"
    _show_view(predictions_view(found, title), machine_notes(forecast.machines()))


@click.command()
@click.option("--model", metavar="M", required=True, help="A shipped model (hpcbench models) or module:function.")
@click.option("--dataset", metavar="D", required=True, help="What it is trained on.")
@click.option("--input-size", metavar="N", type=click.IntRange(min=1), help="Edge length or tokens, not the dataset's.")
@cluster_option()
@click.option("--nodes", metavar="N", type=click.IntRange(min=1), multiple=True, help="May be repeated. (default: 1)")
@click.option("--tasks-per-node", metavar="T", type=click.IntRange(min=1), help="(default: a node's devices, or 1)")
@click.option("--batch-size", metavar="B", type=click.IntRange(min=1), help="Samples of a replica and step.")
@click.option("--global-batch-size", metavar="G", type=click.IntRange(min=1), help="Samples of a step, all replicas'.")
@click.option("--precision", metavar="P", default="fp32", show_default=True, help="fp64, fp32, tf32, bf16 or fp16.")
@click.option("--optimizer", metavar="O", default="sgd", show_default=True, help="sgd, adam or adamw.")
@click.option("--partition", metavar="P", help="Of the profile, not its default.")
@click.option("--objective", metavar="O", default="samples_per_s", show_default=True,
              help="samples_per_s, step_time_s or node_hours (of an epoch).")  # fmt: skip
@click.option("--top", metavar="N", type=click.IntRange(min=1), default=10, show_default=True, help="Rows of a table.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="Write the sweep that measures the best.")
@click.option("--model-folder", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False),
              default=".", help="Where the module of a model of your own is. (default: this folder)")  # fmt: skip
@results_option
@json_option
def recommend(
    *, cluster_name: str, nodes: tuple[int, ...], objective: str, top: int, out: Path | None, results: str | None,
    as_json: bool, model_folder: Path, **asked: Any,
) -> None:  # fmt: skip
    """Rank every strategy and degree for a model on a cluster, by what the oracle predicts.

    What cannot run is listed with the limit that stops it. The ranking ends with a sweep that measures the best.
    """
    from hpcbench.forecast.oracle_requests import RecommendRequest, recommend_for
    from hpcbench.report.recommendation_view import recommendation_json, recommended_sweep_toml

    wish = RecommendRequest(nodes=nodes or (1,), objective=objective, **asked)
    found, forecast = recommend_for(wish, cluster_name, results_tree(results), model_folder)
    module, _, model = asked["model"].rpartition(":")
    folder = str(model_folder.resolve()) if module else None
    text = recommended_sweep_toml(found, f"measure-{model}", folder) if any(one.candidates for one in found) else ""
    if out is not None and text:
        from hpcbench.fileio import write_atomic

        write_atomic(out, text.encode())
        print_message(f"written: {out}; next: hpcbench plan {out} --cluster {cluster_name}")
    if as_json:
        print_json(recommendation_json(found, objective))
        return
    _show_recommendations(found, forecast, top, text if out is None else "")


def _show_recommendations(found: list[Recommendation], forecast: Forecast, top: int, text: str) -> None:
    from hpcbench.report.prediction_view import machine_notes
    from hpcbench.report.recommendation_view import ranking_view, refused_table, scales_view

    above = machine_notes(forecast.machines())
    for one in found:
        world = f"{one.nodes} node{'s' * (one.nodes > 1)} x {one.tasks_per_node} = {one.nodes * one.tasks_per_node}"
        title = (
            f"{world} device{'s' * (one.nodes * one.tasks_per_node > 1)}: {len(one.candidates) or 'nothing'} can run"
        )
        if one.candidates:
            _show_view(ranking_view(one, title, top), above)
        else:
            _print_dimmed([*above, title])
        above = [""]
    if len(found) > 1:
        _show_view(scales_view(found), above)
    if any(one.refused for one in found):
        make_console().print("", refused_table(found), sep="\n")
    if text:
        print_text(f"\n# a sweep that measures the best (--out FILE writes it)\n{text}")


@click.command()
@click.argument("sources", metavar="[SWEEP|TREE|BUNDLE]...", nargs=-1)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@click.option("--where", metavar="EXPR", help="Only runs for which it holds: 'nodes == 4 and strategy != \"single\"'.")
@click.option("--cases", "every", is_flag=True, help="Every configuration, too.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path),
              help=".json: everything; .csv .md .tex .xlsx .parquet: every configuration.")  # fmt: skip
@results_option
@json_option
def validate(
    sources: tuple[str, ...], cluster_name: str | None, where: str | None, every: bool, out: Path | None,
    results: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Compare what was measured with what the oracle and simpler baselines say of it.

    Nothing is fitted to these results. What failed counts as a misprediction unless it was said not to fit.
    """
    from hpcbench.report.column_names import Condition
    from hpcbench.report.load_results import load_frame
    from hpcbench.report.oracle_validation import VALIDATION_COLUMNS, score_predictors
    from hpcbench.report.validation_view import validation_json

    condition = Condition(where, "--where") if where else None
    columns = [*VALIDATION_COLUMNS, *(condition.columns if condition else [])]
    frame = load_frame(results_tree(results), sources, [cluster_name] if cluster_name else None, columns)
    if condition:
        frame = frame.filter(condition.mask(frame))
    found = score_predictors(frame, results_tree(results))
    document = validation_json(found.cases, found.scores, found.notes)
    if out is not None:
        _write_validation(out, found.cases, document)
    if as_json:
        print_json(document)
    elif not found.cases:
        print_message(
            "\n".join([f"no results to validate in {', '.join(sources) or results_tree(results).root}", *found.notes])
        )
    elif out is None or every:
        _show_validation(found, every)


def _write_validation(out: Path, cases: list[ValidationCase], document: dict[str, Any]) -> None:
    from hpcbench.report.table_output import write_view
    from hpcbench.report.validation_view import configuration_cases_view

    if out.suffix == ".json":
        import msgspec

        from hpcbench.fileio import write_atomic

        write_atomic(out, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    else:
        write_view(configuration_cases_view(cases), out)
    print_message(f"{len(cases)} configurations written to {out}")


def _show_validation(found: ValidationResult, every: bool) -> None:
    from hpcbench.report.prediction_view import machine_notes
    from hpcbench.report.validation_view import (
        accuracy_by_part_view,
        accuracy_by_strategy_view,
        chosen_strategies_view,
        configuration_cases_view,
        predictor_comparison_view,
    )

    ours, *_ = found.scores
    _show_view(accuracy_by_strategy_view(ours), [*machine_notes(found.machines), *found.notes, ""])
    _show_view(accuracy_by_part_view(ours), [""])
    _show_view(predictor_comparison_view(found.scores), [""])
    chosen = chosen_strategies_view(found.cases)
    if chosen.raw:
        _show_view(chosen, [""])
    if every:
        _show_view(configuration_cases_view(found.cases), [""])


def _make_forecast(made: SweepPlan, results: str | None) -> Forecast:
    from hpcbench.forecast.forecast import Forecast
    from hpcbench.parallel.check_names import custom_model_folder

    return Forecast(
        made.profile, results_tree(results).cluster(made.profile.name), custom_model_folder(made.sweep, made.profile)
    )


def _show_view(view: View, above: list[str]) -> None:
    from hpcbench.report.table_output import render_view

    _print_dimmed(above)
    screen = make_console()
    screen.print(render_view(view, screen.width))


def _print_dimmed(texts: list[str]) -> None:
    from rich.text import Text

    from hpcbench.fileio import printable_excerpt

    for line in texts:
        make_console().print(Text(printable_excerpt(line), style="dim"))
