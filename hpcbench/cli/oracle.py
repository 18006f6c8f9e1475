"""``predict``, ``recommend``, ``validate``: what the oracle says before, and how right it was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import (
    cluster_option,
    console,
    json_option,
    load_plan,
    print_json,
    results_option,
    say,
    show_text,
    tree,
)

if TYPE_CHECKING:
    from hpcbench.oracle.cases import Case
    from hpcbench.oracle.recommend import Recommendation
    from hpcbench.report.scored import Scored
    from hpcbench.report.view import View
    from hpcbench.submit.forecast import Forecast
    from hpcbench.submit.plan import Plan


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
    from hpcbench.report.predictions import machine_notes, predictions, predictions_json, predictions_view

    made = load_plan(sweep, cluster_name, results)
    forecast = _forecast(made, results)
    found = predictions(made.runs, forecast, where)
    if as_json:
        print_json(predictions_json(found, forecast.machines()))
        return
    title = f"{made.sweep.name} on {made.profile.name}: {len(found)} configurations, predicted"
    _show(predictions_view(found, title), machine_notes(forecast.machines()))


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
    from hpcbench.report.recommendation import recommendation_json, sweep_toml
    from hpcbench.submit.wishes import Wish, fulfilled

    wish = Wish(nodes=nodes or (1,), objective=objective, **asked)
    found, forecast = fulfilled(wish, cluster_name, tree(results), model_folder)
    module, _, model = asked["model"].rpartition(":")
    folder = str(model_folder.resolve()) if module else None
    text = sweep_toml(found, f"measure-{model}", folder) if any(one.candidates for one in found) else ""
    if out is not None and text:
        from hpcbench.fileio import write_atomic

        write_atomic(out, text.encode())
        say(f"written: {out}; next: hpcbench plan {out} --cluster {cluster_name}")
    if as_json:
        print_json(recommendation_json(found, objective))
        return
    _show_recommendations(found, forecast, top, text if out is None else "")


def _show_recommendations(found: list[Recommendation], forecast: Forecast, top: int, text: str) -> None:
    from hpcbench.report.predictions import machine_notes
    from hpcbench.report.recommendation import ranking_view, refused_table, scales_view

    above = machine_notes(forecast.machines())
    for one in found:
        world = f"{one.nodes} node{'s' * (one.nodes > 1)} x {one.tasks_per_node} = {one.nodes * one.tasks_per_node}"
        title = (
            f"{world} device{'s' * (one.nodes * one.tasks_per_node > 1)}: {len(one.candidates) or 'nothing'} can run"
        )
        if one.candidates:
            _show(ranking_view(one, title, top), above)
        else:
            _lines([*above, title])
        above = [""]
    if len(found) > 1:
        _show(scales_view(found), above)
    if any(one.refused for one in found):
        console().print("", refused_table(found), sep="\n")
    if text:
        show_text(f"\n# a sweep that measures the best (--out FILE writes it)\n{text}")


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
    from hpcbench.report.load import gather
    from hpcbench.report.names import Condition
    from hpcbench.report.scored import scored
    from hpcbench.report.validation import COLUMNS
    from hpcbench.report.validation_view import validation_json

    condition = Condition(where, "--where") if where else None
    columns = [*COLUMNS, *(condition.columns if condition else [])]
    frame = gather(tree(results), sources, [cluster_name] if cluster_name else None, columns)
    if condition:
        frame = frame.filter(condition.mask(frame))
    found = scored(frame, tree(results))
    document = validation_json(found.cases, found.scores, found.notes)
    if out is not None:
        _write_validation(out, found.cases, document)
    if as_json:
        print_json(document)
    elif not found.cases:
        say("\n".join([f"no results to validate in {', '.join(sources) or tree(results).root}", *found.notes]))
    elif out is None or every:
        _show_validation(found, every)


def _write_validation(out: Path, cases: list[Case], document: dict[str, Any]) -> None:
    from hpcbench.report.files import write_view
    from hpcbench.report.validation_view import cases_view

    if out.suffix == ".json":
        import msgspec

        from hpcbench.fileio import write_atomic

        write_atomic(out, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    else:
        write_view(cases_view(cases), out)
    say(f"{len(cases)} configurations written to {out}")


def _show_validation(found: Scored, every: bool) -> None:
    from hpcbench.report.predictions import machine_notes
    from hpcbench.report.validation_view import (
        cases_view,
        choices_view,
        parts_view,
        predictors_view,
        strategies_view,
    )

    ours, *_ = found.scores
    _show(strategies_view(ours), [*machine_notes(found.machines), *found.notes, ""])
    _show(parts_view(ours), [""])
    _show(predictors_view(found.scores), [""])
    chosen = choices_view(found.cases)
    if chosen.raw:
        _show(chosen, [""])
    if every:
        _show(cases_view(found.cases), [""])


def _forecast(made: Plan, results: str | None) -> Forecast:
    from hpcbench.parallel.check import model_folder
    from hpcbench.submit.forecast import Forecast

    return Forecast(made.profile, tree(results).cluster(made.profile.name), model_folder(made.sweep, made.profile))


def _show(view: View, above: list[str]) -> None:
    from hpcbench.report.show import view_renderable

    _lines(above)
    screen = console()
    screen.print(view_renderable(view, screen.width))


def _lines(texts: list[str]) -> None:
    from rich.text import Text

    from hpcbench.fileio import brief

    for line in texts:
        console().print(Text(brief(line), style="dim"))
