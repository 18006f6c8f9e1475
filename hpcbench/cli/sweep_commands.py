"""The commands ``check``, ``plan`` and ``render``, which need no scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import (
    cluster_option,
    find_sweep_file,
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
    from hpcbench.forecast.forecast import PlanForecast
    from hpcbench.submit.plan import SweepPlan


@click.command()
@click.argument("files", nargs=-1, required=True)
def check(files: tuple[str, ...]) -> None:
    """Validate sweeps and profiles.

    FILES are TOML files, or names of sweeps. Every mistake in all of them is listed, with file and line.
    """
    from hpcbench.errors import ConfigErrors, HpcbenchError

    problems: list[HpcbenchError] = []
    for given in files:
        try:
            print_message(f"{given}: {_check_file(given)}")
        except ConfigErrors as error:
            problems += error.problems
        except HpcbenchError as error:
            problems.append(error)
    if problems:
        raise ConfigErrors(problems)


def _check_file(given: str) -> str:
    from hpcbench.config.cluster_profile import load_cluster_file
    from hpcbench.config.sweep_expansion import count_points
    from hpcbench.config.sweep_loader import load_sweep
    from hpcbench.config.toml_tables import read_toml
    from hpcbench.parallel.check_names import check_names
    from hpcbench.site.profile_check import check_against_scheduler

    path = find_sweep_file(given)
    data, _ = read_toml(path)
    if "fixed" in data or "grid" in data:
        sweep = load_sweep(path)
        check_names(sweep)
        return f"a sweep of {count_points(sweep)} points, in order"
    profile, source = load_cluster_file(path)
    checked = check_against_scheduler(profile, source)
    return "a cluster profile, in order" + (", and the scheduler agrees" if checked else "; no scheduler here to ask")


@click.command()
@click.argument("sweep")
@cluster_option()
@results_option
@json_option
def plan(sweep: str, cluster_name: str, results: str | None, as_json: bool) -> None:
    """Show what SWEEP would run on a cluster: runs, jobs, what is done, what is dropped and why.

    The oracle says beside it how long the runs will probably take, and which of them will not fit.
    """
    from hpcbench.forecast.forecast import forecast_plan

    made = load_plan(sweep, cluster_name, results)
    ahead = forecast_plan(made, results_tree(results).cluster(made.profile.name))
    if as_json:
        print_json(_plan_json(made, ahead))
        return
    from hpcbench.report.plan_view import plan_renderables

    screen = make_console()
    for part in plan_renderables(made, ahead):
        screen.print(part)


def _plan_json(made: SweepPlan, ahead: PlanForecast) -> dict[str, Any]:
    from hpcbench.config.run_spec import spec_document

    missing = made.missing
    return {
        "sweep": made.sweep.name,
        "cluster": made.profile.name,
        "runs": [
            {
                "run_id": key,
                "spec": spec_document(spec),
                "time_limit_s": made.shape(spec).time_limit_s,
                **_prediction_json(key, ahead),
            }
            for key, spec in made.runs.items()
        ],
        "done": list(made.finished),
        "dropped": [{"spec": point.point, "reason": point.reason} for point in made.dropped],
        "elsewhere": list(made.elsewhere),
        "stopped": [{"run_id": key, "reason": reason} for key, reason in made.stopped.items()],
        "jobs": [
            {
                "nodes": group.shape.nodes,
                "tasks_per_node": group.shape.tasks_per_node,
                "partition": group.shape.partition,
                "time_limit_s": group.shape.time_limit_s,
                "job_limit_s": group.limit_s,
                "pack": group.pack,
                "jobs": group.jobs,
                "node_hours": group.node_hours,
                "run_ids": group.run_ids,
            }
            for group in made.jobs(missing)
        ],
        "node_hours": made.node_hours(missing),
        "predicted": {
            "node_hours": ahead.node_hours(missing),
            "does_not_fit": ahead.not_fitting(missing),
            "not_priced": dict(ahead.unpriced),
            "machines": [{"depth": one.depth, "source": one.source} for one in ahead.forecast.machines()],
        },
    }


def _prediction_json(key: str, ahead: PlanForecast) -> dict[str, Any]:
    if key not in ahead.found:
        return {}
    found = ahead.found[key]
    figures = ("step_time_s", "peak_memory_bytes", "fits", "bound_by")
    said = {name: getattr(found, name) for name in figures}
    return {"predicted": {**said, "run_time_s": ahead.run_time_s[key]}}


@click.command()
@click.argument("sweep")
@cluster_option()
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Write scripts and task files there.")
@results_option
def render(sweep: str, cluster_name: str, out: Path | None, results: str | None) -> None:
    """Show the exact bytes that submit would send for SWEEP: job scripts and task files."""
    from hpcbench.fileio import make_folder, write_atomic
    from hpcbench.submit.submission import render_submission
    from hpcbench.submit.submission_record import next_submission_folder, write_sweep_record

    made = load_plan(sweep, cluster_name, results)
    if not made.missing:
        print_message(f"nothing to submit: all {len(made.runs)} runs of {made.sweep.name} have results")
        return
    cluster_tree = results_tree(results).cluster(made.profile.name)
    if made.profile.account_required and made.profile.account is None:
        print_message(f"cluster {made.profile.name} takes no job without an account, and none is set")
    runs_from_here = out is not None and made.profile.scheduler.kind == "pbs"
    folder = out.absolute() if out and runs_from_here else next_submission_folder(cluster_tree, made.sweep.name)
    rendered = render_submission(made, made.missing, cluster_tree, folder)
    if out is not None:
        make_folder(out)
        for name, data in rendered.files.items():
            write_atomic(out / name, data)
        print_message(f"{len(rendered.files)} files written to {out}")
        if runs_from_here:
            write_sweep_record(made, cluster_tree)
            print_message("\n".join(f"next: qsub {out / name}" for name in rendered.files if name.endswith(".sh")))
        return
    for name, data in rendered.files.items():
        if name.endswith(".sh"):
            click.echo(f"# ---- {name}: {len(rendered.record.arrays[int(name[:-3])].run_ids)} runs ----")
            print_text(data.decode())
