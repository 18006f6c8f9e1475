"""``cluster calibrate``: measure a cluster, fit, and keep what was found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcbench.cli.common import console, print_json, say, shorten, tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcbench.config.cluster import ClusterProfile
    from hpcbench.oracle.calibration.store import Calibration
    from hpcbench.results.store import ClusterTree, ResultsTree
    from hpcbench.submit.plan import Plan
    from hpcbench.submit.state import RunState


def measure_and_fit(
    profile: ClusterProfile, results: str | None, partition: str | None, budget_s: float, over_budget: bool
) -> tuple[Calibration, Path, dict[str, RunState]]:
    """Submit what the calibration that is due still lacks, wait, fit and keep it; also how the runs ended."""
    from hpcbench.submit.calibrate import calibration_plan, evidence_of, runs_named
    from hpcbench.submit.submit import check_scheduler

    check_scheduler(profile)
    cluster_tree = tree(results).cluster(profile.name)
    plan = calibration_plan(cluster_tree, profile, partition, budget_s)
    states = _run(plan, cluster_tree, results, over_budget)
    calibration, path = fit_and_keep(profile, partition, evidence_of([runs_named(cluster_tree, plan.runs)]), results)
    return calibration, path, states


def _run(plan: Plan, cluster_tree: ClusterTree, results: str | None, over_budget: bool) -> dict[str, RunState]:
    from hpcbench.cli.runs import check_sent, say_submitted, watch
    from hpcbench.submit.submit import Choice, submit

    submitted = submit(plan, cluster_tree, Choice(over_budget=over_budget), say)
    say_submitted(plan, submitted)
    check_sent(submitted.sent, waits=True)
    try:
        return watch(plan, results, {})
    except KeyboardInterrupt:
        say(f"hpcbench cluster calibrate {plan.profile.name} goes on with it")
        raise


def fit_given(
    profile: ClusterProfile, results: str | None, partition: str | None, given: Sequence[str], where: str | None
) -> tuple[Calibration, Path]:
    """From runs that are there: sweeps by name, or whole trees by their folder; of these those with ``where``."""
    from hpcbench.report.select import select_sweeps
    from hpcbench.results.store import ResultsTree
    from hpcbench.submit.calibrate import evidence_of, runs_named

    here = tree(results)
    folders = [one for one in given if Path(one).is_dir()]
    sources = [runs_named(ResultsTree(Path(one)).cluster(profile.name)) for one in folders]
    names = [one for one in given if one not in folders]
    for _, record in select_sweeps(here, names, profile.name) if names else []:
        sources.append(runs_named(here.cluster(profile.name), record.run_ids))
    if where is not None:
        chosen = _chosen(here, profile.name, given, where)
        sources = [(one, [run_id for run_id in run_ids if run_id in chosen]) for one, run_ids in sources]
    return fit_and_keep(profile, partition, evidence_of(sources), results)


def _chosen(here: ResultsTree, cluster: str, given: Sequence[str], where: str) -> set[str]:
    """The runs of what was ``given`` for which the expression ``where`` holds; ``ConfigError`` where none is."""
    from hpcbench.errors import ConfigError
    from hpcbench.report.load import gather
    from hpcbench.report.names import Condition

    condition = Condition(where, "--where")
    frame = gather(here, given, [cluster], ["run_id", *condition.columns])
    found = set(frame.filter(condition.mask(frame))["run_id"])
    if not found:
        raise ConfigError(f"none of {frame.height} runs of {cluster} has {where}", where="--where")
    return found


def fit_and_keep(
    profile: ClusterProfile, partition: str | None, found: tuple[Sequence[Any], Sequence[str]], results: str | None
) -> tuple[Calibration, Path]:
    """Part by part where the runs have probes, else as whole runs; ``ConfigError`` where no run can be used."""
    from hpcbench.errors import ConfigError
    from hpcbench.oracle.calibration.choose import machine_for
    from hpcbench.oracle.calibration.evidence import usable
    from hpcbench.oracle.calibration.fit import calibrate
    from hpcbench.oracle.calibration.from_runs import fit_runs
    from hpcbench.oracle.calibration.store import write_calibration

    evidence, problems = found
    for problem in problems:
        say(f"  {problem}")
    if not usable(evidence):
        hint = "hpcbench status shows how they ended, hpcbench logs RUN_ID why"
        raise ConfigError(f"no run of {profile.name} that was given or made ended well: nothing to fit", hint=hint)
    here = tree(results).cluster(profile.name)
    if any(one.result.probe is not None for one in evidence):
        calibration = calibrate(profile, partition, evidence)
    else:
        calibration = fit_runs(profile, partition, machine_for(profile, here, partition), evidence)
    return calibration, write_calibration(calibration, here)


def show(calibration: Calibration, path: Path, *, as_json: bool) -> None:
    """What was found, and where it lies."""
    if as_json:
        import msgspec

        print_json({"path": str(path), "calibration": msgspec.to_builtins(calibration, str_keys=True)})
        return
    from hpcbench.report.calibration import calibration_view

    console().print(calibration_view(calibration))
    say(f"kept in {shorten(path)}: predictions for {calibration.cluster} are made from it")
