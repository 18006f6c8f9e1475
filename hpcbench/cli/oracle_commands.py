"""The commands ``predict``, ``recommend``, ``validate`` and ``cluster calibrate``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from hpcbench.cli.calibrate_sweep import calibrate_for_sweep
from hpcbench.cli.common import (
    cluster_filter_option,
    json_option,
    make_console,
    model_folder_option,
    out_option,
    print_json,
    print_message,
    print_text,
    project_relative,
    results_option,
    results_tree,
    runs_exit_code,
    sources_argument,
    sweep_argument,
    where_option,
)
from hpcbench.cli.completion import complete_choices, complete_sweeps
from hpcbench.cli.plan_options import check_options, cluster_argument, cluster_option, load_plan, overrides_option
from hpcbench.cli.run_commands import check_send_outcome, print_submit_outcome, watch_runs
from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.fileio import encode_indented_json, make_folder, printable_excerpt, write_atomic
from hpcbench.forecast.forecast import Forecast
from hpcbench.forecast.oracle_requests import (
    LayoutRecommendation,
    RecommendRequest,
    calibration_sweep_text,
    collect_evidence,
    make_calibration_plan,
    recommend_for,
    recommend_layouts,
)
from hpcbench.forecast.sweep_calibration import carry_shapes
from hpcbench.oracle.calibration.calibration_runs import CalibrationRun, usable_runs
from hpcbench.oracle.calibration.calibration_store import (
    Calibration,
    calibration_of_partition,
    machine_for,
    read_calibrations,
    write_calibration,
)
from hpcbench.oracle.recommend import Recommendation
from hpcbench.parallel.catalog import shipped_model_entries
from hpcbench.parallel.check_names import custom_model_folder
from hpcbench.parallel.workloads import DATASETS
from hpcbench.report.column_names import Condition
from hpcbench.report.load_results import load_frame
from hpcbench.report.prediction_view import (
    calibration_view,
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
from hpcbench.report.table_output import render_view, write_view
from hpcbench.results.results_tree import ResultsTree
from hpcbench.submit.scheduler import check_scheduler
from hpcbench.submit.submission_record import select_sweeps
from hpcbench.submit.submit import RunSelection, submit

if TYPE_CHECKING:
    from hpcbench.submit.run_state import RunState


@click.command()
@sweep_argument
@cluster_option()
@overrides_option
@click.option(
    "--where", metavar="EXPR", help="Only runs that satisfy the expression, for example 'strategy == \"ddp\" and fits'."
)
@results_option
@json_option
def predict(
    sweep: str, cluster_name: str, overrides: tuple[str, ...], where: str | None, results: str | None, as_json: bool
) -> None:
    """Predict step time, bottleneck and memory of every run of SWEEP on a cluster.

    Nothing is submitted and no scheduler is queried. The machine parameters come from the cluster's newest calibration,
    or from its profile; the lines above the table name the source and every default value. Measured results of the
    cluster move predictions of what is like them; each row states which.
    """
    plan = load_plan(sweep, cluster_name, results, overrides)
    tree = results_tree(results).cluster(plan.profile.name)
    forecast = Forecast(plan.profile, tree, custom_model_folder(plan.sweep, plan.profile))
    predictions = predict_configurations(plan.runs, forecast, where)
    if as_json:
        print_json(predictions_json(predictions, forecast.machines()))
        return
    title = f"{plan.sweep.name} on {plan.profile.name}: {len(predictions)} configurations, predicted"
    _show_view(predictions_view(predictions, title), machine_notes(forecast.machines()))


@click.command()
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
    help="fp64, fp32, tf32, bf16, fp16, or bf16_params: bf16 parameters with fp32 master weights.",
)
@click.option("--optimizer", metavar="O", default="sgd", show_default=True, help="sgd, adam or adamw.")
@click.option("--partition", metavar="P", help="Partition of the profile. (default: the profile's)")
@click.option("--objective", metavar="O", default="samples_per_s", show_default=True,
              help="samples_per_s, step_time_s or node_hours (of an epoch).")  # fmt: skip
@click.option("--top", metavar="N", type=click.IntRange(min=1), default=10, show_default=True, help="Rows of a table.")
@out_option("Write the sweep that measures the best.")
@model_folder_option
@results_option
@json_option
def recommend(
    *, cluster_name: str, nodes: tuple[int, ...], objective: str, top: int, out: Path | None, results: str | None,
    as_json: bool, model_folder: Path, **options: Any,
) -> None:  # fmt: skip
    """Rank every strategy and degree for a model on a cluster by their predictions.

    Decoders of published training runs on a device that was learned from such runs are ranked by their layouts: data,
    sharded, tensor, pipeline and context parallelism, micro-batches and recomputation, also those that are priced only.

    Infeasible candidates are listed with the limit that excludes them. The output ends with a sweep that measures the
    best.
    """
    known: dict[str, Iterable[str]] = {"model": shipped_model_entries(), "dataset": DATASETS}
    missing = {f"--{name}": choices for name, choices in known.items() if options[name] is None}
    if missing and options["batch_size"] is None and options["global_batch_size"] is None:
        missing["--batch-size"] = ["a number", "--global-batch-size"]
    check_options(missing)
    request = RecommendRequest(nodes=nodes or (1,), objective=objective, **options)
    found = recommend_layouts(request, cluster_name, model_folder)
    if isinstance(found, LayoutRecommendation):
        _show_layouts(found, request, cluster_name, top, out, as_json=as_json)
        return
    for note in found:
        print_message(note)
    recommendations, forecast = recommend_for(request, cluster_name, results_tree(results), model_folder)
    module, _, model = request.model.rpartition(":")
    folder = str(model_folder.resolve()) if module else None
    has_candidates = any(recommendation.candidates for recommendation in recommendations)
    text = recommended_sweep_toml(recommendations, f"measure-{model}", folder) if has_candidates else ""
    if out is not None and text:
        write_atomic(out, text.encode())
        print_message(f"written: {out}; next: hpcbench plan {out} --cluster {cluster_name}")
    if as_json:
        print_json(recommendation_json(recommendations, objective))
        return
    _show_recommendations(recommendations, forecast, top)
    if text and out is None:
        print_text(f"\n# a sweep that measures the best (--out FILE writes it)\n{text}")


def _show_layouts(
    found: LayoutRecommendation,
    request: RecommendRequest,
    cluster_name: str,
    top: int,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print ranked layouts, or write them as JSON, with the sweep that measures those that can be run."""
    text = layouts_sweep_toml(found, f"measure-{request.model}", request.dataset)
    if out is not None and text:
        write_atomic(out, text.encode())
        print_message(f"written: {out}; next: hpcbench plan {out} --cluster {cluster_name}")
    if as_json:
        print_json(layouts_json(found, request.objective))
        return
    notes = found.notes
    for nodes in found.rankings:
        _show_view(layouts_view(found, nodes, top), notes)
        notes = [""]
    if any(ranking.refused for ranking in found.rankings.values()):
        make_console().print("", refused_layouts_table(found), sep="\n")
    if text and out is None:
        print_text(f"\n# a sweep that measures the best that can be run (--out FILE writes it)\n{text}")


def _show_recommendations(recommendations: list[Recommendation], forecast: Forecast, top: int) -> None:
    notes = machine_notes(forecast.machines())
    for recommendation in recommendations:
        nodes, per_node = recommendation.nodes, recommendation.tasks_per_node
        world = (
            f"{nodes} node{'s' * (nodes > 1)} x {per_node} = {nodes * per_node} device{'s' * (nodes * per_node > 1)}"
        )
        title = f"{world}: {len(recommendation.candidates) or 'nothing'} can run"
        if recommendation.candidates:
            _show_view(ranking_view(recommendation, title, top), notes)
        else:
            _print_dimmed([*notes, title])
        notes = [""]
    if len(recommendations) > 1:
        _show_view(scales_view(recommendations), notes)
    if any(recommendation.refused for recommendation in recommendations):
        make_console().print("", refused_table(recommendations), sep="\n")


@click.command()
@sources_argument
@cluster_filter_option
@where_option
@click.option("--cases", "every", is_flag=True, help="Also list every configuration.")
@out_option(".json: everything; .csv .md .tex .xlsx .parquet: every configuration.")
@results_option
@json_option
def validate(
    sources: tuple[str, ...], cluster_name: str | None, where: str | None, every: bool, out: Path | None,
    results: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Compare measurements with the predictions of the oracle and of simpler baselines.

    Each prediction leaves out the results of its own configuration. A failed run counts as a wrong prediction, unless
    the prediction was that it does not fit in memory.
    """
    # Imported here: `predict` and `recommend` need no baselines.
    from hpcbench.report.oracle_validation import VALIDATION_COLUMNS, score_predictors
    from hpcbench.report.validation_view import (
        accuracy_by_part_view,
        accuracy_by_strategy_view,
        chosen_strategies_view,
        configuration_cases_view,
        predictor_comparison_view,
        validation_json,
    )

    tree = results_tree(results)
    condition = Condition(where, "--where") if where else None
    columns = [*VALIDATION_COLUMNS, *(condition.columns if condition else [])]
    frame = load_frame(tree, sources, [cluster_name] if cluster_name else None, columns)
    if condition:
        frame = frame.filter(condition.mask(frame))
    validation = score_predictors(frame, tree)
    document = validation_json(validation.cases, validation.scores, validation.notes)
    if out is not None:
        if out.suffix == ".json":
            write_atomic(out, encode_indented_json(document))
        else:
            write_view(configuration_cases_view(validation.cases), out)
        print_message(f"{len(validation.cases)} configurations written to {out}")
    if as_json:
        print_json(document)
    elif not validation.cases:
        print_message("\n".join([f"no results to validate in {', '.join(sources) or tree.root}", *validation.notes]))
    elif out is None or every:
        oracle_score = validation.scores[0]
        notes = [*machine_notes(validation.machines), *validation.notes, ""]
        _show_view(accuracy_by_strategy_view(oracle_score), notes)
        _show_view(accuracy_by_part_view(oracle_score), [""])
        _show_view(predictor_comparison_view(validation.scores), [""])
        chosen = chosen_strategies_view(validation.cases)
        if chosen.raw:
            _show_view(chosen, [""])
        if every:
            _show_view(configuration_cases_view(validation.cases), [""])


def _show_view(view: View, notes: list[str]) -> None:
    """Print ``notes`` dimmed, then the view."""
    _print_dimmed(notes)
    screen = make_console()
    screen.print(render_view(view, screen.width))


def _print_dimmed(lines: list[str]) -> None:
    for line in lines:
        make_console().print(printable_excerpt(line), style="dim")


@click.command("calibrate")
@cluster_argument
@click.option("--partition", metavar="NAME", help="The partition to measure. (default: the profile's)")
@click.option(
    "--from", "sources", multiple=True, metavar="SWEEP|TREE", shell_complete=complete_sweeps,
    help="Measure nothing: fit to the runs of these sweeps or results trees. May be repeated.",
)  # fmt: skip
@click.option("--where", metavar="EXPR", help="With --from: only runs that satisfy the expression: 'devices == 1'.")
@click.option(
    "--out", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
    help="x.toml: write the calibration's sweep, and stop. x.json: write the calibration there, too.",
)  # fmt: skip
@click.option(
    "--budget", "budget_s", default=20.0, show_default=True, type=click.FloatRange(min=0.1),
    help="Approximate seconds for the measurements of one run.",
)  # fmt: skip
@click.option(
    "--for", "sweep", metavar="SWEEP", shell_complete=complete_sweeps,
    help="Measure the blocks and messages of this sweep, in their own sizes and places.",
)  # fmt: skip
@click.option("--busy", "takes_disturbed", is_flag=True, help="With --for: also where all probes were disturbed.")
@click.option("--yes", "over_budget", is_flag=True, help="Measure even if it may cost more than the cluster's budget.")
@results_option
@json_option
def calibrate_cluster(
    *, name: str, partition: str | None, sources: tuple[str, ...], where: str | None, out: Path | None, budget_s: float,
    sweep: str | None, takes_disturbed: bool, over_budget: bool, results: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure a cluster: submit a sweep of ordinary runs, wait, and fit the oracle's machine parameters.

    An interrupted calibration continues when the same command is given again. Predictions use the newest calibration.
    With --for, the newest calibration is extended by what a sweep consists of.
    """
    profile, _ = load_cluster(name)
    if sweep is not None and sources:
        raise ConfigError("--for measures, --from measures nothing", hint="first --from, then --for")
    if takes_disturbed and sweep is None:
        raise ConfigError("--busy is about the probes of --for", hint="name a sweep: --for SWEEP")
    if partition is not None and partition not in profile.partitions:
        raise ConfigError(
            f"cluster {profile.name} has no partition {partition!r}", hint=did_you_mean(partition, profile.partitions)
        )
    if out is not None and out.suffix not in (".toml", ".json"):
        raise ConfigError(f"--out {out}: unknown ending", hint="x.toml for the sweep, x.json for the calibration")
    if where is not None and not sources:
        raise ConfigError("--where chooses among the runs of --from", hint="name sweeps or a results tree: --from")
    if sweep is not None:
        calibrate_for_sweep(
            sweep, name, partition, results, out, budget_s,
            over_budget=over_budget, takes_disturbed=takes_disturbed, as_json=as_json,
        )  # fmt: skip
        return
    if out is not None and out.suffix == ".toml":
        _, text = calibration_sweep_text(results_tree(results).cluster(profile.name), profile, partition, budget_s)
        make_folder(out.parent)
        write_atomic(out, text.encode())
        print_message(f"wrote {project_relative(out)}: hpcbench submit {out} --cluster {name} runs it")
        return
    states: dict[str, RunState] = {}
    if sources:
        calibration, path = _fit_existing_runs(profile, results, partition, sources, where)
    else:
        calibration, path, states = _measure_and_fit(profile, results, partition, budget_s, over_budget)
    if out is not None:
        make_folder(out.parent)
        write_atomic(out, path.read_bytes())
    if as_json:
        print_json({"path": str(path), "calibration": msgspec.to_builtins(calibration, str_keys=True)})
    else:
        make_console().print(calibration_view(calibration))
        print_message(f"kept in {project_relative(path)}: predictions for {calibration.cluster} are made from it")
    sys.exit(runs_exit_code(states))


def _measure_and_fit(
    profile: ClusterProfile, results: str | None, partition: str | None, budget_s: float, over_budget: bool
) -> tuple[Calibration, Path, dict[str, RunState]]:
    """Submit the missing runs of the next calibration, wait, fit and store it; also return how the runs ended."""
    check_scheduler(profile)
    tree = results_tree(results).cluster(profile.name)
    plan = make_calibration_plan(tree, profile, partition, budget_s)
    outcome = submit(plan, tree, RunSelection(over_budget=over_budget), print_message)
    print_submit_outcome(plan, outcome)
    check_send_outcome(outcome.sent, waits=True)
    try:
        states = watch_runs(plan, results, {})
    except KeyboardInterrupt:
        print_message(f"hpcbench cluster calibrate {profile.name} goes on with it")
        raise
    calibration, path = _fit_and_store(profile, partition, collect_evidence([(tree, plan.runs)]), results)
    return calibration, path, states


def _fit_existing_runs(
    profile: ClusterProfile, results: str | None, partition: str | None, sources: Sequence[str], where: str | None
) -> tuple[Calibration, Path]:
    """Fit to the runs of ``sources`` (names of sweeps, folders of whole trees) that satisfy ``where``."""
    main_tree = results_tree(results)
    selections: list[tuple[Any, Iterable[str]]] = []
    for folder in filter(Path.is_dir, map(Path, sources)):
        tree = ResultsTree(folder).cluster(profile.name)
        selections.append((tree, list(tree.run_ids())))
    names = [source for source in sources if not Path(source).is_dir()]
    for _, record in select_sweeps(main_tree, names, profile.name) if names else []:
        selections.append((main_tree.cluster(profile.name), record.run_ids))
    if where is not None:
        condition = Condition(where, "--where")
        frame = load_frame(main_tree, sources, [profile.name], ["run_id", *condition.columns])
        chosen = set(frame.filter(condition.mask(frame))["run_id"])
        if not chosen:
            raise ConfigError(f"none of {frame.height} runs of {profile.name} has {where}", where="--where")
        selections = [(tree, [run_id for run_id in run_ids if run_id in chosen]) for tree, run_ids in selections]
    return _fit_and_store(profile, partition, collect_evidence(selections), results)


def _fit_and_store(
    profile: ClusterProfile,
    partition: str | None,
    evidence: tuple[Sequence[CalibrationRun], Sequence[str]],
    results: str | None,
) -> tuple[Calibration, Path]:
    """Fit part by part if the runs have probes, else to whole runs; ``ConfigError`` if no run is usable."""
    # Imported here: predictions fit nothing.
    from hpcbench.oracle.calibration.fit_machine import fit_calibration, fit_calibration_from_runs

    runs, problems = evidence
    for problem in problems:
        print_message(f"  {problem}")
    if not usable_runs(runs):
        hint = "hpcbench status shows how they ended, hpcbench logs RUN_ID why"
        raise ConfigError(f"no run of {profile.name} that was given or made ended well: nothing to fit", hint=hint)
    tree = results_tree(results).cluster(profile.name)
    stored, _ = read_calibrations(tree, profile.name)
    newest = calibration_of_partition(stored, profile, partition)
    if any(run.result.probe is not None for run in runs):
        calibration = fit_calibration(profile, partition, runs)
    else:
        calibration = fit_calibration_from_runs(profile, partition, machine_for(profile, tree, partition), runs)
    calibration, note = carry_shapes(calibration, newest.calibration if newest else None)
    if note is not None:
        print_message(f"  {note}")
    return calibration, write_calibration(calibration, tree)
