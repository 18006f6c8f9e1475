"""``cluster calibrate --for SWEEP``: probes of the shapes that a sweep consists of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hpcbench.cli.common import print_json, print_message, project_relative, results_tree, runs_exit_code
from hpcbench.cli.plan_options import load_plan
from hpcbench.cli.run_commands import check_send_outcome, print_submit_outcome, watch_runs
from hpcbench.fileio import make_folder, write_atomic
from hpcbench.forecast.forecast import Forecast
from hpcbench.forecast.oracle_requests import collect_evidence
from hpcbench.forecast.sweep_calibration import (
    SweepCalibration,
    coverage_lines,
    extend_calibration,
    make_probe_plan,
    prepare_sweep_calibration,
    probe_sweep_text,
)
from hpcbench.oracle.calibration.calibration_store import write_calibration
from hpcbench.parallel.check_names import custom_model_folder
from hpcbench.submit.plan import SweepPlan
from hpcbench.submit.scheduler import check_scheduler
from hpcbench.submit.submit import RunSelection, submit

if TYPE_CHECKING:
    from hpcbench.submit.run_state import RunState


def calibrate_for_sweep(
    sweep: str, cluster_name: str, partition: str | None, results: str | None, out: Path | None, budget_s: float,
    *, over_budget: bool, takes_disturbed: bool, as_json: bool,
) -> None:  # fmt: skip
    """State the cost, measure the shapes of ``sweep`` that have no time yet, and keep them; ends the command."""
    plan = load_plan(sweep, cluster_name, results)
    tree = results_tree(results).cluster(plan.profile.name)
    prepared = prepare_sweep_calibration(plan, tree, partition, budget_s)
    for line in prepared.lines():
        print_message(line)
    if out is not None and out.suffix == ".toml":
        make_folder(out.parent)
        write_atomic(out, probe_sweep_text(prepared).encode())
        print_message(
            f"wrote {project_relative(out)}: once its runs have ended, the same command without --out keeps what they "
            "measured"
        )
        return
    path, states = None, dict[str, "RunState"]()
    if prepared.probes:
        path, states = _measure_and_keep(prepared, results, over_budget=over_budget, takes_disturbed=takes_disturbed)
    elif not prepared.left_out:
        print_message(f"every shape of {plan.sweep.name} that a probe can measure has been measured")
    if path is not None and out is not None:
        make_folder(out.parent)
        write_atomic(out, path.read_bytes())
    forecast = Forecast(plan.profile, tree, custom_model_folder(plan.sweep, plan.profile))
    for line in coverage_lines(plan, forecast):
        print_message(line)
    if path is not None:
        print_message(f"kept in {project_relative(path)}: predictions for {plan.profile.name} are made from it")
    if as_json:
        print_json(_document(prepared, path))
    sys.exit(runs_exit_code(states))


def _measure_and_keep(
    prepared: SweepCalibration, results: str | None, *, over_budget: bool, takes_disturbed: bool
) -> tuple[Path | None, dict[str, RunState]]:
    """Run the probes and write the calibration; return its file, ``None`` without anything new, and the runs' ends."""
    tree = results_tree(results).cluster(prepared.sweep.profile.name)
    probe_plan = make_probe_plan(prepared, tree, takes_disturbed=takes_disturbed)
    states = _run_probes(probe_plan, results, prepared.sweep, over_budget=over_budget)
    runs, problems = collect_evidence([(tree, probe_plan.runs)])
    for problem in problems:
        print_message(f"  {problem}")
    calibration = extend_calibration(prepared, runs, takes_disturbed=takes_disturbed)
    before = [] if prepared.base is None else prepared.base.calibration.notes
    for note in calibration.notes:
        if note not in (*prepared.notes, *prepared.left_out, *before):
            print_message(f"  {note}")
    known = set() if prepared.base is None else set(prepared.base.calibration.run_ids)
    if prepared.shapes is not None and {run.result.run_id for run in runs} <= known:
        print_message("the probes had been kept before: what is still missing no probe can measure")
        return None, states
    return write_calibration(calibration, tree), states


def _run_probes(
    probe_plan: SweepPlan, results: str | None, plan: SweepPlan, *, over_budget: bool
) -> dict[str, RunState]:
    """Submit the probes without a result of today's software, and wait; return how all of them ended."""
    tree = results_tree(results).cluster(plan.profile.name)
    if not probe_plan.missing and not probe_plan.elsewhere:
        return {}
    check_scheduler(plan.profile)
    outcome = submit(probe_plan, tree, RunSelection(remeasure=True, over_budget=over_budget), print_message)
    print_submit_outcome(probe_plan, outcome)
    check_send_outcome(outcome.sent, waits=True)
    try:
        return watch_runs(probe_plan, results, probe_plan.elsewhere)
    except KeyboardInterrupt:
        print_message(f"hpcbench cluster calibrate {plan.profile_name} --for {plan.sweep.name} goes on with it")
        raise


def _document(prepared: SweepCalibration, path: Path | None) -> dict[str, object]:
    return {
        "path": None if path is None else str(path),
        "sweep": prepared.sweep.sweep.name,
        "node_hours": prepared.node_hours,
        "sweep_node_hours": prepared.sweep_node_hours,
        "limit_node_hours": prepared.limit_node_hours,
        "probes": [{"point": msgspec.to_builtins(probe.point), "runs": probe.runs} for probe in prepared.probes],
        "left_out": prepared.left_out,
        "notes": prepared.notes,
    }
