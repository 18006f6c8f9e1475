"""The command ``cluster calibrate``. Its measuring part needs no polars, which the nodes of a cluster may lack."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import psutil

from hpcbench.cli.common import (
    cluster_argument,
    complete_sweeps,
    make_console,
    output_options,
    print_json,
    print_message,
    project_relative,
)
from hpcbench.cli.load_plan import load_plan
from hpcbench.cli.run_commands import submit_and_watch
from hpcbench.cli.status_output import runs_exit_code
from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.fileio import write_file
from hpcbench.forecast.forecast import Forecast
from hpcbench.forecast.oracle_requests import calibration_sweeps, collect_evidence, plan_calibration
from hpcbench.forecast.sweep_calibration import (
    SweepCalibration,
    carry_shapes,
    coverage_lines,
    extend_calibration,
    make_probe_plan,
    prepare_sweep_calibration,
    probe_sweep_text,
)
from hpcbench.oracle.calibration.calibration_runs import CalibrationRun, check_disturbed, usable_runs
from hpcbench.oracle.calibration.calibration_store import (
    Calibration,
    calibration_of_partition,
    machine_for,
    read_calibrations,
    write_calibration,
)
from hpcbench.oracle.calibration.fit_machine import fit_calibration, fit_calibration_from_runs, machine_runs
from hpcbench.report.column_names import Condition
from hpcbench.report.prediction_view import calibration_view
from hpcbench.results.results_tree import ResultsTree
from hpcbench.submit.run_state import RunState
from hpcbench.submit.scheduler import check_scheduler
from hpcbench.submit.submission_record import select_sweeps
from hpcbench.submit.submit import RunSelection


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
@click.option("--busy", "takes_disturbed", is_flag=True, help="Measure and fit even if others use the machine.")
@click.option("--yes", "over_budget", is_flag=True, help="Measure even if it may cost more than the cluster's budget.")
@output_options
def calibrate_cluster(
    *, name: str, partition: str | None, sources: tuple[str, ...], where: str | None, out: Path | None, budget_s: float,
    sweep: str | None, takes_disturbed: bool, over_budget: bool, results: ResultsTree, as_json: bool,
) -> None:  # fmt: skip
    """Measure a cluster: submit a sweep of ordinary runs, wait, and fit the oracle's machine parameters.

    An interrupted calibration continues when the same command is given again. Predictions use the newest calibration.
    With --for, the newest calibration is extended by the kernels and collectives of a sweep.
    """
    profile, _ = load_cluster(name)
    if sweep is not None and sources:
        raise ConfigError("--for measures, --from measures nothing", hint="first --from, then --for")
    if partition is not None and partition not in profile.partitions:
        raise ConfigError(
            f"cluster {profile.name} has no partition {partition!r}", hint=did_you_mean(partition, profile.partitions)
        )
    if out is not None and out.suffix not in (".toml", ".json"):
        raise ConfigError(f"--out {out}: unknown ending", hint="x.toml for the sweep, x.json for the calibration")
    if where is not None and not sources:
        raise ConfigError("--where chooses among the runs of --from", hint="name sweeps or a results tree: --from")
    if sweep is not None:
        _calibrate_for_sweep(
            sweep, name, partition, results, out, budget_s,
            over_budget=over_budget, takes_disturbed=takes_disturbed, as_json=as_json,
        )  # fmt: skip
        return
    if out is not None and out.suffix == ".toml":
        _, text = next(calibration_sweeps(results.cluster(profile.name), profile, partition, budget_s))
        write_file(out, text.encode())
        print_message(f"wrote {project_relative(out)}: hpcbench submit {out} --cluster {name} runs it")
        return
    states: dict[str, RunState] = {}
    if sources:
        calibration, path = _fit_existing_runs(profile, results, partition, sources, where, takes_disturbed)
    else:
        calibration, path, states = _measure_and_fit(
            profile, results, partition, budget_s, over_budget, takes_disturbed
        )
    if out is not None:
        write_file(out, path.read_bytes())
    if as_json:
        print_json({"path": str(path), "calibration": msgspec.to_builtins(calibration, str_keys=True)})
    else:
        make_console().print(calibration_view(calibration))
        print_message(f"kept in {project_relative(path)}: predictions for {calibration.cluster} are made from it")
    sys.exit(runs_exit_code(states))


_MAX_FOREIGN_SHARE, _MAX_FOREIGN_CORES = 0.05, 0.5
"""Like the warnings of runs."""


def _check_quiet(profile: ClusterProfile, *, takes_disturbed: bool) -> None:
    """Refuse, or with ``takes_disturbed`` state, that others use the cores that runs on this machine would share."""
    if not profile.scheduler.traits.runs_here:
        return
    percent = dict(enumerate(psutil.cpu_percent(1.0, percpu=True)))
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else percent.keys()
    used = sum(percent.get(core, 0.0) for core in cores) / 100
    limit = min(_MAX_FOREIGN_SHARE * len(cores), _MAX_FOREIGN_CORES)
    text = f"other processes use {used:.2f} of the {len(cores)} cores of this machine, at most {limit:.2f} may be used"
    if used > limit and not takes_disturbed:
        raise ConfigError(f"{text}: nothing was measured", hint="wait (top lists them); --busy measures nevertheless")
    if used > limit:
        print_message(text)


def _measure_and_fit(
    profile: ClusterProfile, results: ResultsTree, partition: str | None, budget_s: float, over_budget: bool,
    takes_disturbed: bool,
) -> tuple[Calibration, Path, dict[str, RunState]]:  # fmt: skip
    """Submit the missing runs of the next calibration, wait, fit and store it; also return how the runs ended."""
    check_scheduler(profile)
    sweeps = calibration_sweeps(results.cluster(profile.name), profile, partition, budget_s)
    plan = plan_calibration(sweeps, profile, results.cluster(profile.name), takes_disturbed=takes_disturbed)
    if plan.missing:
        _check_quiet(profile, takes_disturbed=takes_disturbed)
    go_on = f"hpcbench cluster calibrate {profile.name} goes on with it"
    states = submit_and_watch(plan, RunSelection(over_budget=over_budget), go_on)
    evidence = collect_evidence([(plan.tree, plan.runs)], Forecast(profile))
    calibration, path = _fit_and_store(profile, partition, evidence, results, takes_disturbed=takes_disturbed)
    return calibration, path, states


def _fit_existing_runs(
    profile: ClusterProfile, results: ResultsTree, partition: str | None, sources: Sequence[str], where: str | None,
    takes_disturbed: bool,
) -> tuple[Calibration, Path]:  # fmt: skip
    """Fit to the runs of ``sources`` (names of sweeps, folders of whole trees) that satisfy ``where``."""
    selections: list[tuple[Any, Iterable[str]]] = []
    for folder in filter(Path.is_dir, map(Path, sources)):
        tree = ResultsTree(folder).cluster(profile.name)
        selections.append((tree, list(tree.run_ids())))
    names = [source for source in sources if not Path(source).is_dir()]
    for _, record in select_sweeps(results, names, profile.name) if names else []:
        selections.append((results.cluster(profile.name), record.run_ids))
    if where is not None:
        # Imported here: it imports polars.
        from hpcbench.report.load_results import load_frame

        condition = Condition(where, "--where")
        frame = load_frame(results, sources, [profile.name], ["run_id", *condition.columns])
        chosen = set(frame.filter(condition.mask(frame))["run_id"])
        if not chosen:
            raise ConfigError(f"none of {frame.height} runs of {profile.name} has {where}", where="--where")
        selections = [(tree, [run_id for run_id in run_ids if run_id in chosen]) for tree, run_ids in selections]
    # Without a folder of models: code that other people's results name is not run.
    evidence = collect_evidence(selections, Forecast(profile))
    return _fit_and_store(profile, partition, evidence, results, takes_disturbed=takes_disturbed)


def _fit_and_store(
    profile: ClusterProfile, partition: str | None, evidence: tuple[Sequence[CalibrationRun], Sequence[str]],
    results: ResultsTree, *, takes_disturbed: bool,
) -> tuple[Calibration, Path]:  # fmt: skip
    """Fit part by part if the runs have probes, else to whole runs.

    Raises:
        ConfigError: No run is usable, or all were disturbed and ``takes_disturbed`` is not set.
    """
    runs, problems = evidence
    for problem in problems:
        print_message(f"  {problem}")
    if not usable_runs(runs):
        hint = "hpcbench status shows how they ended, hpcbench logs RUN_ID why"
        raise ConfigError(f"no run of {profile.name} that was given or made ended well: nothing to fit", hint=hint)
    if not machine_runs(runs):
        raise ConfigError(
            f"all runs of {profile.name} are probes of one sweep's own shapes, which no other run has: nothing to fit",
            hint=f"hpcbench cluster calibrate {profile.name} --for SWEEP keeps their measurements",
        )
    warnings = [run.result.warnings for run in machine_runs(runs)]
    then = "nothing was kept; predictions are unchanged"
    disturbed = check_disturbed(warnings, f"runs of {profile.name}", then, takes_disturbed=takes_disturbed)
    tree = results.cluster(profile.name)
    stored, _ = read_calibrations(tree, profile.name)
    newest = calibration_of_partition(stored, profile, partition)
    if any(run.result.probe is not None for run in runs):
        calibration = fit_calibration(profile, partition, runs)
    else:
        calibration = fit_calibration_from_runs(profile, partition, machine_for(profile, tree, partition), runs)
    calibration = msgspec.structs.replace(calibration, notes=[*disturbed, *calibration.notes])
    calibration, note = carry_shapes(calibration, newest.calibration if newest else None)
    if note is not None:
        print_message(f"  {note}")
    return calibration, write_calibration(calibration, tree)


def _calibrate_for_sweep(
    sweep: str, cluster_name: str, partition: str | None, results: ResultsTree, out: Path | None, budget_s: float,
    *, over_budget: bool, takes_disturbed: bool, as_json: bool,
) -> None:  # fmt: skip
    """State the cost, measure the shapes of ``sweep`` that have no time yet, and keep them; ends the command."""
    plan = load_plan(sweep, cluster_name, results)
    prepared = prepare_sweep_calibration(plan, plan.tree, partition, budget_s)
    for line in prepared.lines():
        print_message(line)
    if not prepared.probes and not prepared.left_out:
        print_message(f"every shape of {plan.sweep.name} that a probe can measure has been measured")
    if out is not None and out.suffix == ".toml":
        if not prepared.probes:
            print_message(f"{out} was not written: there is no probe to run")
            return
        write_file(out, probe_sweep_text(prepared).encode())
        print_message(
            f"wrote {project_relative(out)}: once its runs have ended, the same command without --out keeps their "
            "measurements"
        )
        return
    path, states = None, dict[str, RunState]()
    if prepared.probes:
        path, states = _measure_and_keep(prepared, over_budget=over_budget, takes_disturbed=takes_disturbed)
    newest = path or (prepared.base.path if prepared.base else None)
    if out is not None and newest is not None:
        write_file(out, newest.read_bytes())
    elif out is not None:
        print_message(f"{out} was not written: {plan.profile_name} has no calibration")
    forecast = Forecast(plan.profile, plan.tree, plan.model_folder)
    for line in coverage_lines(prepared.runs.values(), forecast):
        print_message(line)
    if path is not None:
        print_message(f"kept in {project_relative(path)}: predictions for {plan.profile.name} are made from it")
    if as_json:
        print_json({
            "path": None if path is None else str(path), "sweep": prepared.sweep.sweep.name,
            "node_hours": prepared.node_hours, "sweep_node_hours": prepared.sweep_node_hours,
            "limit_node_hours": prepared.limit_node_hours,
            "probes": [{"point": msgspec.to_builtins(probe.point), "runs": probe.runs} for probe in prepared.probes],
            "left_out": prepared.left_out, "notes": prepared.notes,
        })  # fmt: skip
    sys.exit(runs_exit_code(states))


def _measure_and_keep(
    prepared: SweepCalibration, *, over_budget: bool, takes_disturbed: bool
) -> tuple[Path | None, dict[str, RunState]]:
    """Run the probes and write the calibration; return its file, ``None`` without anything new, and the runs' ends."""
    plan, states = prepared.sweep, dict[str, RunState]()
    probe_plan = make_probe_plan(prepared, plan.tree, takes_disturbed=takes_disturbed)
    if probe_plan.missing or probe_plan.elsewhere:
        _check_quiet(plan.profile, takes_disturbed=takes_disturbed)
        go_on = f"hpcbench cluster calibrate {plan.profile_name} --for {plan.sweep.name} goes on with it"
        states = submit_and_watch(probe_plan, RunSelection(remeasure=True, over_budget=over_budget), go_on)
    tables = Forecast(plan.profile, model_folder=plan.model_folder)
    runs, problems = collect_evidence([(plan.tree, probe_plan.runs)], tables)
    for problem in problems:
        print_message(f"  {problem}")
    calibration = extend_calibration(prepared, runs, takes_disturbed=takes_disturbed)
    before = [] if prepared.base is None else prepared.base.calibration.notes
    for note in calibration.notes:
        if note not in (*prepared.notes, *prepared.left_out, *before):
            print_message(f"  {note}")
    known = set() if prepared.base is None else set(prepared.base.calibration.run_ids)
    if prepared.shapes is not None and {run.result.run_id for run in runs} <= known:
        print_message("the probes had been kept before; no probe can measure the missing parts")
        return None, states
    return write_calibration(calibration, plan.tree), states
