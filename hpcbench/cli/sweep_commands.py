"""The actions of the commands ``check``, ``plan`` and ``render``; they need no scheduler."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Group

from hpcbench.cli.common import (
    complete_files,
    json_option,
    make_console,
    out_option,
    output_options,
    overrides_option,
    plan_options,
    print_json,
    print_message,
    print_text,
)
from hpcbench.cli.load_plan import find_sweep_file, load_plan, print_if_predicted_only
from hpcbench.config.cluster_profile import find_cluster_profiles, is_profile, load_cluster_file
from hpcbench.config.command import command_warnings
from hpcbench.config.run_spec import spec_document
from hpcbench.config.sweep_loader import count_points, load_sweep
from hpcbench.config.toml_tables import read_toml
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError
from hpcbench.fileio import make_folder, printable_text, write_atomic
from hpcbench.predict.forecast import PlanForecast, forecast_plan
from hpcbench.report.plan_view import plan_renderables
from hpcbench.report.table_output import Stripped
from hpcbench.results.results_tree import ResultsTree
from hpcbench.site.profile_check import check_against_scheduler
from hpcbench.strategies.check_sweep import check_feasible, check_names
from hpcbench.submit.batches import planned_calls
from hpcbench.submit.plan import SweepPlan
from hpcbench.submit.scheduler import account_error
from hpcbench.submit.submission_record import next_submission_folder
from hpcbench.submit.submit import render_submission, write_sweep_record
from hpcbench.units import pluralize

_PREDICTED_FIGURES = ("step_time_s", "peak_memory_bytes", "fits", "bound_by")


@click.command("check")
@click.argument("files", nargs=-1, required=True, shell_complete=complete_files)
@overrides_option
@json_option
def check_files(files: tuple[str, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Validate sweeps and profiles.

    FILES are TOML files, or names of sweeps. Every mistake in all of them is listed, with file and line.
    """
    problems: list[HpcbenchError] = []
    documents = []
    for name in files:
        file_problems: list[HpcbenchError] = []
        try:
            print_message(f"{name}: {_check_file(_find_file(name), overrides)}")
        except ConfigErrors as error:
            file_problems = error.problems
        except HpcbenchError as error:
            file_problems = [error]
        errors = [{"message": error.message, "where": error.where, "hint": error.hint} for error in file_problems]
        documents.append({"file": name, "valid": not file_problems, "errors": errors})
        problems += file_problems
    if as_json:
        print_json({"files": documents})
    if problems:
        raise ConfigErrors(problems)


def _find_file(name: str) -> Path:
    """The file of a sweep or, if no sweep has that name, of a profile."""
    try:
        return find_sweep_file(name)
    except ConfigError:
        profiles = find_cluster_profiles()
        if name not in profiles:
            raise
        return profiles[name]


def _check_file(path: Path, overrides: Sequence[str]) -> str:
    data, _ = read_toml(path)
    if not data:
        raise ConfigError("the file is empty", where=str(path))
    if not is_profile(data, path) or path.resolve().parent.name == "sweeps":
        sweep = load_sweep(path, overrides)
        check_names(sweep)
        check_feasible(sweep)
        for key, text in command_warnings(sweep.command) if sweep.command is not None else ():
            print_message(f"warning: {sweep.source.where(key)}: {text}")
        return f"a sweep of {pluralize(count_points(sweep), 'point')}, valid"
    profile, source = load_cluster_file(path)
    warnings = check_against_scheduler(profile, source)
    for warning in warnings or ():
        print_message(f"warning: {warning}")
    if warnings is None and (missing_account := account_error(profile)):
        print_message(str(missing_account))
    agreed = "; no scheduler here to compare" if warnings is None else ", and the scheduler agrees"
    return f"a cluster profile, valid{agreed}"


@click.command("plan")
@plan_options
@output_options
def show_plan(sweep: str, cluster_name: str, overrides: tuple[str, ...], results: ResultsTree, as_json: bool) -> None:
    """Show what SWEEP would run on a cluster: runs, jobs, finished runs, infeasible points and the reasons.

    The plan includes the predicted duration of the runs, and those that will not fit into memory.
    """
    sweep_plan = load_plan(sweep, cluster_name, results, overrides)
    forecast = forecast_plan(sweep_plan, sweep_plan.tree)
    if as_json:
        print_json(_plan_json(sweep_plan, forecast))
        return

    make_console().print(Stripped(Group(*plan_renderables(sweep_plan, forecast))))
    if missing_account := account_error(sweep_plan.profile):
        print_message(str(missing_account))
    print_if_predicted_only(sweep_plan.profile)


def _plan_json(plan: SweepPlan, forecast: PlanForecast) -> dict[str, Any]:
    missing = plan.missing
    return {
        "sweep": plan.sweep.name,
        "cluster": plan.profile.name,
        "runs": [
            {
                "run_id": run_id,
                "spec": spec_document(spec),
                "time_limit_s": plan.shape(spec).time_limit_s,
                **_prediction_json(run_id, forecast),
            }
            for run_id, spec in plan.runs.items()
        ],
        "done": list(plan.finished),
        "dropped": [{"spec": point.point, "reason": point.reason} for point in plan.dropped],
        "elsewhere": list(plan.elsewhere),
        "order": {"kind": plan.sweep.order, "seed": plan.order_seed},
        "stopped": [{"run_id": run_id, "reason": reason} for run_id, reason in plan.stopped.items()],
        "jobs": [
            {
                "nodes": group.shape.nodes,
                "tasks_per_node": group.shape.tasks_per_node,
                "partition": group.shape.partition.key,
                "time_limit_s": group.shape.time_limit_s,
                "job_limit_s": group.limit_s,
                "pack": group.pack,
                "jobs": group.jobs,
                "node_hours": group.node_hours,
                "run_ids": group.run_ids,
            }
            for group in plan.jobs(missing)
        ],
        "node_hours": plan.node_hours(missing),
        "warnings": plan.node_warnings(),
        "predicted": {
            "node_hours": forecast.node_hours(missing),
            "does_not_fit": forecast.not_fitting(missing),
            "not_priced": dict(forecast.unpriced),
            "machines": [
                {"depth": machine.depth, "source": machine.source} for machine in forecast.forecast.machines()
            ],
        },
    }


def _prediction_json(run_id: str, forecast: PlanForecast) -> dict[str, Any]:
    if run_id not in forecast.predictions:
        return {}
    prediction = forecast.predictions[run_id]
    figures = {name: getattr(prediction, name) for name in _PREDICTED_FIGURES}
    rests_on = msgspec.to_builtins(prediction.rests_on)
    return {"predicted": {**figures, "run_time_s": forecast.run_time_s[run_id], "rests_on": rests_on}}


@click.command("render")
@plan_options
@out_option("Write scripts and task files there.", metavar="DIR")
@output_options
def render_sweep(
    *, sweep: str, cluster_name: str, overrides: tuple[str, ...], out: Path | None, results: ResultsTree, as_json: bool
) -> None:
    """Show the exact bytes that submit would send for SWEEP: job scripts and task files."""
    sweep_plan = load_plan(sweep, cluster_name, results, overrides)
    profile = sweep_plan.profile
    if not sweep_plan.missing:
        if as_json:
            print_json({"files": []})
        print_message(f"nothing to submit: all {len(sweep_plan.runs)} runs of {sweep_plan.sweep.name} have results")
        return
    tree = sweep_plan.tree
    if missing_account := account_error(profile):
        print_message(str(missing_account))
    submit_command = profile.scheduler.traits.submit_command
    runs_from_here = out is not None and submit_command is not None
    folder = out.absolute() if out and runs_from_here else next_submission_folder(tree, sweep_plan.sweep.name)
    rendered = render_submission(sweep_plan, sweep_plan.missing, tree, folder)
    scripts = [name for name in rendered.files if name.endswith(".sh")]
    if as_json:
        print_json({"files": [{"name": name, "text": data.decode()} for name, data in rendered.files.items()]})
    calls = planned_calls(folder, rendered.record, profile) if profile.scheduler.traits.is_slurm else {}
    if out is None:
        for name in () if as_json else scripts:
            array = rendered.record.arrays[int(name[:-3])]
            click.echo(f"# ---- {name}: {pluralize(len(array.run_ids), 'run')} ----")
            for call in calls.get(array.number, ()):
                click.echo(f"# {printable_text(shlex.join(call))}")
            print_text(rendered.files[name].decode())
        return
    make_folder(out)
    for name, data in rendered.files.items():
        write_atomic(out / name, data)
    print_message(f"{pluralize(len(rendered.files), 'file')} written to {out}")
    if runs_from_here:
        write_sweep_record(sweep_plan, tree)
        print_message("\n".join(f"next: {submit_command} {out / name}" for name in scripts))
