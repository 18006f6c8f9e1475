"""The command ``cluster calibrate``. It needs no polars, which the nodes of a cluster may lack."""

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
from hpcbench.cli.status_command import runs_exit_code
from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.fileio import write_file
from hpcbench.predict.calibrate import (
    SweepCalibration,
    calibration_sweeps,
    collect_evidence,
    coverage_lines,
    make_probe_plan,
    plan_calibration,
    prepare_sweep_calibration,
)
from hpcbench.predict.calibration.calibration_store import (
    CalibrationRun,
    calibration_of_partition,
    check_disturbed,
    read_calibrations,
    usable_runs,
    write_calibration,
)
from hpcbench.predict.calibration.fit_calibration import fit_calibration
from hpcbench.predict.forecast import Forecast
from hpcbench.report.prediction_view import calibration_view
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.submit.plan import SweepPlan
from hpcbench.submit.run_state import RunState
from hpcbench.submit.scheduler_registry import check_scheduler
from hpcbench.submit.submission_record import select_sweeps
from hpcbench.submit.submit import RunSelection
from hpcbench.units import pluralize


@click.command("calibrate")
@cluster_argument
@click.option("--partition", metavar="NAME", help="The partition to measure. (default: the profile's)")
@click.option(
    "--from", "sources", multiple=True, metavar="SWEEP|TREE", shell_complete=complete_sweeps,
    help="Measure nothing: fit the probes in these sweeps or results trees. May be repeated.",
)  # fmt: skip
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
    *, name: str, partition: str | None, sources: tuple[str, ...], out: Path | None, budget_s: float,
    sweep: str | None, takes_disturbed: bool, over_budget: bool, results: ResultsTree, as_json: bool,
) -> None:  # fmt: skip
    """Measure a cluster: submit a sweep of ordinary runs, wait, and fit the oracle's machine parameters.

    An interrupted calibration continues when the same command is given again. Predictions use the newest calibration,
    which extends the one before it.
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
    tree, prepared, states = results.cluster(profile.name), None, dict[str, RunState]()
    if sweep is not None:
        plan = load_plan(sweep, name, results)
        prepared = prepare_sweep_calibration(plan, plan.tree, partition, budget_s)
        for line in prepared.lines():
            print_message(line)
        profile, tree, partition = plan.profile, plan.tree, prepared.partition
    if out is not None and out.suffix == ".toml":
        _write_sweep(out, name, prepared, next(calibration_sweeps(tree, profile, partition, budget_s))[1])
        return
    selection = RunSelection(remeasure=prepared is not None, over_budget=over_budget)
    if sources:
        evidence = collect_evidence(_selected_runs(profile, results, sources), Forecast(profile))
    elif prepared is not None and not prepared.probes:
        print_message(f"every shape of {prepared.sweep.sweep.name} that a probe can measure has been measured")
        evidence = None
    else:
        probes = _due_probes(profile, tree, prepared, partition, budget_s, takes_disturbed=takes_disturbed)
        go_on = f"hpcbench cluster calibrate {profile.name}{f' --for {sweep}' if sweep else ''} goes on with it"
        if probes.missing or probes.elsewhere:
            _check_quiet(profile, takes_disturbed=takes_disturbed)
        states = submit_and_watch(probes, selection, go_on)
        tables = Forecast(profile, model_folder=None if prepared is None else prepared.sweep.model_folder)
        evidence = collect_evidence([(probes.tree, probes.runs)], tables)
    path = None
    if evidence is not None:
        path = _fit_and_store(profile, partition, evidence, results, prepared, takes_disturbed=takes_disturbed)
    _report(path, profile, results, partition, prepared, out, as_json=as_json)
    sys.exit(runs_exit_code(states))


def _due_probes(
    profile: ClusterProfile, tree: ClusterTree, prepared: SweepCalibration | None, partition: str | None,
    budget_s: float, *, takes_disturbed: bool,
) -> SweepPlan:  # fmt: skip
    """Return the plan of the cluster's calibration that is due, or of the probes for a sweep."""
    if not tree.root.is_dir():
        # Nothing has ended that could be fitted without a scheduler: refused before a file is written.
        check_scheduler(profile)
    if prepared is not None:
        return make_probe_plan(prepared, tree, takes_disturbed=takes_disturbed)
    used = {key for entry in read_calibrations(tree, profile.name)[0] for key in entry.calibration.run_ids}
    sweeps = calibration_sweeps(tree, profile, partition, budget_s)
    return plan_calibration(sweeps, profile, tree, takes_disturbed=takes_disturbed, used=used)


def _write_sweep(out: Path, cluster_name: str, prepared: SweepCalibration | None, plain_text: str) -> None:
    """Write the sweep of the calibration that is due, or of the probes for a sweep."""
    if prepared is None:
        write_file(out, plain_text.encode())
        print_message(f"wrote {project_relative(out)}: hpcbench submit {out} --cluster {cluster_name} runs it")
    elif not prepared.probes:
        print_message(f"{out} was not written: there is no probe to run")
    else:
        write_file(out, prepared.probe_sweep_text().encode())
        print_message(
            f"wrote {project_relative(out)}: once its runs have ended, the same command without --out keeps their "
            "measurements"
        )


def _selected_runs(
    profile: ClusterProfile, results: ResultsTree, sources: Sequence[str]
) -> list[tuple[Any, Iterable[str]]]:
    """Return trees with the runs of ``sources``: names of sweeps, and folders of whole trees."""
    selections: list[tuple[Any, Iterable[str]]] = []
    for folder in filter(Path.is_dir, map(Path, sources)):
        tree = ResultsTree(folder).cluster(profile.name)
        selections.append((tree, list(tree.run_ids())))
    names = [source for source in sources if not Path(source).is_dir()]
    for _, record in select_sweeps(results, names, profile.name) if names else []:
        selections.append((results.cluster(profile.name), record.run_ids))
    return selections


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


def _fit_and_store(
    profile: ClusterProfile, partition: str | None, evidence: tuple[Sequence[CalibrationRun], Sequence[str]],
    results: ResultsTree, prepared: SweepCalibration | None, *, takes_disturbed: bool,
) -> Path | None:  # fmt: skip
    """Fit the probes and keep the calibration; ``None`` if the newest one has them all.

    Raises:
        ConfigError: No run is usable, none is a probe, or all were disturbed and ``takes_disturbed`` is not set.
    """
    runs, problems = evidence
    for problem in problems:
        print_message(f"  {problem}")
    good = usable_runs(runs)
    if not good:
        hint = "hpcbench status shows how they ended, hpcbench logs RUN_ID why"
        raise ConfigError(f"no run of {profile.name} that was given or made ended well: nothing to fit", hint=hint)
    if not any(run.result.probe is not None for run in good):
        raise ConfigError(
            f"none of {pluralize(len(good), 'run')} of {profile.name} is a probe: nothing to fit",
            hint="predictions learn from other results by themselves, as measured neighbours",
        )
    tree = results.cluster(profile.name)
    then = "nothing was kept; predictions are unchanged"
    warnings = [run.result.warnings for run in good]
    disturbed = check_disturbed(warnings, f"runs of {profile.name}", then, takes_disturbed=takes_disturbed)
    newest = calibration_of_partition(read_calibrations(tree, profile.name)[0], profile, partition)
    before = None if newest is None else newest.calibration
    if prepared is None:
        calibration = fit_calibration(profile, partition, runs, before)
    else:
        environment = prepared.environment
        key = prepared.sweep.environment_key(environment)
        name = prepared.sweep.sweep.name
        calibration = fit_calibration(
            profile, partition, runs, before, sweep=name, environment=environment, environment_key=key
        )
        if before is not None and {run.result.run_id for run in good} <= {*before.run_ids}:
            print_message("the probes had been kept before; no probe can measure the missing parts")
            return None
    calibration = msgspec.structs.replace(calibration, notes=[*disturbed, *calibration.notes])
    return write_calibration(calibration, tree)


def _report(
    path: Path | None, profile: ClusterProfile, results: ResultsTree, partition: str | None,
    prepared: SweepCalibration | None, out: Path | None, *, as_json: bool,
) -> None:  # fmt: skip
    """Print the fitted numbers, and write the newest calibration to ``out``."""
    stored = calibration_of_partition(
        read_calibrations(results.cluster(profile.name), profile.name)[0], profile, partition
    )
    if out is not None and stored is not None:
        write_file(out, stored.path.read_bytes())
    elif out is not None:
        print_message(f"{out} was not written: {profile.name} has no calibration")
    if prepared is not None:
        forecast = Forecast(profile, prepared.sweep.tree, prepared.sweep.model_folder)
        for line in coverage_lines(prepared.runs.values(), forecast):
            print_message(line)
    elif stored is not None and not as_json:
        make_console().print(calibration_view(stored.calibration))
    if path is not None:
        print_message(f"kept in {project_relative(path)}: predictions for {profile.name} are made from it")
    if as_json:
        document: dict[str, Any] = {"path": None if path is None else str(path)}
        if prepared is not None:
            document |= {
                "sweep": prepared.sweep.sweep.name, "node_hours": prepared.node_hours, "notes": prepared.notes,
                "probes": [{"point": msgspec.to_builtins(one.point), "runs": one.runs} for one in prepared.probes],
            }  # fmt: skip
        elif stored is not None:
            document["calibration"] = msgspec.to_builtins(stored.calibration, str_keys=True)
        print_json(document)
