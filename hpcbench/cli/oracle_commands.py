"""The actions of the commands ``predict`` and ``recommend``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from hpcbench.cli.common import (
    cluster_option,
    complete_choices,
    make_console,
    model_folder_option,
    out_option,
    output_options,
    plan_options,
    print_json,
    print_message,
    print_text,
)
from hpcbench.cli.load_plan import check_options, load_plan, print_if_predicted_only
from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.config.run_spec import run_label
from hpcbench.errors import EXIT_RUNS_FAILED, ConfigError
from hpcbench.fileio import printable_excerpt, write_atomic
from hpcbench.predict.command_layouts import measured_layouts
from hpcbench.predict.explain import explain
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.measured_results import measured_launches
from hpcbench.predict.oracle_requests import LayoutRecommendation, RecommendRequest, recommend_for, recommend_layouts
from hpcbench.predict.prediction import NotPredicted
from hpcbench.predict.recommend import Recommendation
from hpcbench.predict.trainers import TRAINERS, Trainer, trainer_sweep_toml
from hpcbench.report.prediction_view import (
    PredictedConfiguration,
    explanation_json,
    explanation_view,
    machine_notes,
    predict_configurations,
    predictions_json,
    predictions_view,
)
from hpcbench.report.recommendation_view import (
    layouts_json,
    layouts_sweep_toml,
    layouts_view,
    ranking_view,
    recommendation_json,
    recommended_sweep_toml,
    refused_layouts_table,
    refused_table,
    scales_view,
)
from hpcbench.report.table_model import View
from hpcbench.report.table_output import PrintedView
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.strategies.check_sweep import custom_model_folder
from hpcbench.strategies.decoder_shapes import named_shapes
from hpcbench.units import pluralize
from hpcbench.workloads.datasets import DATASETS
from hpcbench.workloads.models import MODELS

MAX_EXPLAINED = 6
"""Configurations that one screenful explains."""


@click.command("predict")
@plan_options
@click.option(
    "--where", metavar="EXPR", help="Only runs that satisfy the expression, for example 'strategy == \"ddp\" and fits'."
)
@click.option("--explain", "explains", is_flag=True, help="Show the terms of each step, and their sources.")
@output_options
def predict_sweep(
    sweep: str, cluster_name: str, overrides: tuple[str, ...], where: str | None, explains: bool,
    results: ResultsTree, as_json: bool,
) -> None:  # fmt: skip
    """Predict step time, bottleneck and memory of every run of SWEEP on a cluster.

    Nothing is submitted and no scheduler is queried. The machine parameters come from the cluster's newest calibration,
    or from its profile; the lines above the table name the source and every default value. Measured results of the
    cluster adjust predictions of similar runs; each row states which.
    """
    plan = load_plan(sweep, cluster_name, results, overrides)
    models, command = custom_model_folder(plan.sweep, plan.profile), plan.sweep.command
    forecast = Forecast(plan.profile, plan.tree, models, command=command)
    predictions = predict_configurations(plan.runs, forecast, where, command.defaults if command else {})
    if explains:
        _explain(predictions, forecast, plan.tree, as_json=as_json)
        return
    if as_json:
        print_json(predictions_json(predictions, forecast.machines()))
        return
    title = f"{plan.sweep.name} on {plan.profile.name}: {pluralize(len(predictions), 'configuration')}, predicted"
    show_view(predictions_view(predictions, title), [*machine_notes(forecast.machines()), *forecast.site_notes()])


def _explain(
    configurations: list[PredictedConfiguration], forecast: Forecast, tree: ClusterTree, *, as_json: bool
) -> None:
    """Print the terms of every configuration, with its measured step where there is one."""
    if len(configurations) > MAX_EXPLAINED and not as_json:
        message = f"{len(configurations)} configurations, at most {MAX_EXPLAINED} are explained at once"
        raise ConfigError(message, where="--explain", hint="--where EXPR selects some, --json explains all")
    if not configurations:
        print_message("no configuration satisfies --where")
    documents = []
    for number, entry in enumerate(configurations):
        explained = explain(entry.spec, forecast)
        measured_s = measured_launches(tree, entry.run_ids)
        if isinstance(explained, NotPredicted):
            print_message(f"{run_label(entry.spec)}: not predicted: {explained.reason}")
        elif as_json:
            documents.append(explanation_json(entry, explained, measured_s))
        else:
            notes = [] if number else [*machine_notes(forecast.machines()), *forecast.site_notes()]
            show_view(explanation_view(entry, explained, measured_s), [*notes, ""])
    if as_json:
        print_json({"explanations": documents})


@click.command("recommend")
@click.option(
    "--model",
    metavar="M",
    shell_complete=complete_choices,
    help="A shipped model (hpcbench models) or module:function.",
)
@click.option("--dataset", metavar="D", shell_complete=complete_choices, help="Data set to train on.")
@click.option("--input-size", metavar="N", type=click.IntRange(min=1), help="Edge length or tokens, not the dataset's.")
@cluster_option()
@click.option("--nodes", metavar="N", type=click.IntRange(min=1), multiple=True, help="May be repeated. (default: 1)")
@click.option("--tasks-per-node", metavar="T", type=click.IntRange(min=1), help="(default: a node's devices, or 1)")
@click.option("--batch-size", metavar="B", type=click.IntRange(min=1), help="Samples per replica and step.")
@click.option(
    "--global-batch-size", metavar="G", type=click.IntRange(min=1), help="Samples per step over all replicas."
)
@click.option(
    "--precision",
    metavar="P",
    default="fp32",
    show_default=True,
    help="fp64, fp32, tf32, bf16, fp16, or bf16_params: bf16 parameters with fp32 master weights. Layouts are in bf16, "
    "or in fp8_delayed, fp8_current, fp8_block, mxfp8, nvfp4.",
)
@click.option("--optimizer", metavar="O", default="sgd", show_default=True, help="sgd, adam or adamw.")
@click.option("--partition", metavar="P", help="Partition of the profile. (default: the profile's)")
@click.option("--objective", metavar="O", default="samples_per_s", show_default=True,
              help="samples_per_s, step_time_s or node_hours (of an epoch).")  # fmt: skip
@click.option("--top", metavar="N", type=click.IntRange(min=1), default=10, show_default=True, help="Rows of a table.")
@click.option("--as", "trainer_name", type=click.Choice([*TRAINERS]), help="Layouts for this trainer, by its flags.")
@click.option("--measured", metavar="SWEEP", help="Show the step times that this sweep of layouts measured.")
@out_option("Write the sweep that measures the best.")
@model_folder_option
@output_options
def rank_strategies(
    *, cluster_name: str, nodes: tuple[int, ...], objective: str, top: int, out: Path | None, results: ResultsTree,
    as_json: bool, model_folder: Path, trainer_name: str | None, measured: str | None, **options: Any,
) -> None:  # fmt: skip
    """Rank every strategy and degree for a model on a cluster by their predictions.

    Decoders of published training runs on a device that was learned from such runs are ranked by their layouts: data,
    sharded, tensor, pipeline and context parallelism, micro-batches and recomputation, including layouts that hpcbench
    can price but not run. With --as they are those of a trainer, and the sweep starts that trainer.

    Infeasible candidates are listed with the limit that excludes them. The output ends with a sweep that measures the
    best.
    """
    request = RecommendRequest(nodes=nodes or (1,), objective=objective, **options)
    known: dict[str, Iterable[str]] = {"model": MODELS, "dataset": DATASETS}
    missing = {f"--{name}": choices for name, choices in known.items() if options[name] is None}
    check_options(missing, request.batch_problems(of_layouts=request.model in named_shapes()))
    trainer = TRAINERS[trainer_name] if trainer_name else None
    profile, _ = load_cluster(cluster_name)
    recommendation = recommend_layouts(request, profile, model_folder, results, trainer)
    _warn_of_nodes(request, profile)
    if isinstance(recommendation, LayoutRecommendation):
        if measured is not None:
            recommendation = recommendation._replace(measured=measured_layouts(results.cluster(profile.name), measured))
        _show_layouts(recommendation, request, profile, top, out, trainer, as_json=as_json)
        return
    if trainer_name or measured:
        reason = "; ".join(recommendation) or f"{request.model} is not a decoder of published runs"
        raise ConfigError(f"there are no layouts to rank: {reason}", where="--as" if trainer_name else "--measured")
    for note in recommendation:
        print_message(note)
    recommendations, forecast = recommend_for(request, profile, results, model_folder)
    module, _, model = request.model.rpartition(":")
    folder = str(model_folder.resolve()) if module else None
    has_candidates = any(recommendation.candidates for recommendation in recommendations)
    text = recommended_sweep_toml(recommendations, f"measure-{model}", folder) if has_candidates else ""
    _write_sweep(text, out, profile)
    if as_json:
        print_json(recommendation_json(recommendations, objective))
    else:
        _show_recommendations(recommendations, forecast, top)
    _end_with_sweep(text, out, as_json=as_json)


def _warn_of_nodes(request: RecommendRequest, profile: ClusterProfile) -> None:
    """State where more nodes are asked for than the partition has."""
    most = max(request.nodes)
    partition = profile.partitions.get(request.partition or profile.default_partition or "")
    limits = [limit for limit in (partition.nodes, partition.max_nodes) if limit is not None] if partition else []
    if limits and most > min(limits):
        print_message(f"warning: {most} nodes, but a job in this partition of {profile.name} has at most {min(limits)}")


def _write_sweep(text: str, out: Path | None, profile: ClusterProfile) -> None:
    """Write the sweep of the best. It comes before tables, whose reader may leave."""
    if out is not None and text:
        write_atomic(out, text.encode())
        print_message(f"written: {out}; next: hpcbench plan {out} --cluster {profile.name}")
        print_if_predicted_only(profile)


def _end_with_sweep(text: str, out: Path | None, *, as_json: bool) -> None:
    """Print the sweep below tables if it has no file; exit with 1 where a file was asked for and nothing can run."""
    if out is not None and not text:
        print_message(f"{out} was not written: nothing can run")
        raise click.exceptions.Exit(EXIT_RUNS_FAILED)
    if out is None and text and not as_json:
        print_text(f"\n# a sweep that measures the best that can run (--out FILE writes it)\n{text}")


def _show_layouts(
    recommendation: LayoutRecommendation,
    request: RecommendRequest,
    profile: ClusterProfile,
    top: int,
    out: Path | None,
    trainer: Trainer | None,
    *,
    as_json: bool,
) -> None:
    """Print ranked layouts, or write them as JSON, with the sweep that measures those that can be run."""
    if trainer is None:
        text = layouts_sweep_toml(recommendation, f"measure-{request.model}", request.dataset)
    else:
        shape, rankings = recommendation.shape, recommendation.rankings
        text = trainer_sweep_toml(trainer, shape, recommendation.tasks_per_node, rankings)
    _write_sweep(text, out, profile)
    if as_json:
        print_json(layouts_json(recommendation, request.objective))
    else:
        for place, nodes in enumerate(recommendation.rankings):
            show_view(layouts_view(recommendation, nodes, top), [""] if place else recommendation.notes)
        if any(ranking.refused for ranking in recommendation.rankings.values()):
            make_console().print("", refused_layouts_table(recommendation), sep="\n")
    _end_with_sweep(text, out, as_json=as_json)


def _show_recommendations(recommendations: list[Recommendation], forecast: Forecast, top: int) -> None:
    notes = machine_notes(forecast.machines())
    for recommendation in recommendations:
        nodes, per_node = recommendation.nodes, recommendation.tasks_per_node
        world = f"{pluralize(nodes, 'node')} x {per_node} = {pluralize(nodes * per_node, 'device')}"
        title = f"{world}: {len(recommendation.candidates) or 'nothing'} can run"
        if recommendation.candidates:
            show_view(ranking_view(recommendation, title, top), notes)
        else:
            _print_dimmed([*notes, title])
        notes = [""]
    if len(recommendations) > 1:
        show_view(scales_view(recommendations), notes)
    if any(recommendation.refused for recommendation in recommendations):
        make_console().print("", refused_table(recommendations), sep="\n")


def show_view(view: View, notes: list[str]) -> None:
    """Print ``notes`` dimmed, then the view."""
    _print_dimmed(notes)
    make_console().print(PrintedView(view))


def _print_dimmed(lines: list[str]) -> None:
    for line in lines:
        make_console().print(printable_excerpt(line), style="dim")
