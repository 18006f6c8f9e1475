"""The commands ``cluster list``, ``cluster show``, ``cluster init`` and ``cluster calibrate``: profiles, and
calibrations measured, fitted and stored.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import (
    json_option,
    make_console,
    print_json,
    print_message,
    print_text,
    project_relative,
    results_option,
    results_tree,
    runs_exit_code,
)
from hpcbench.fileio import printable_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcbench.config.cluster_profile import ClusterProfile
    from hpcbench.oracle.calibration.calibration_store import Calibration
    from hpcbench.results.results_tree import ClusterTree, ResultsTree
    from hpcbench.submit.plan import SweepPlan
    from hpcbench.submit.run_state import RunState


def measure_and_fit(
    profile: ClusterProfile, results: str | None, partition: str | None, budget_s: float, over_budget: bool
) -> tuple[Calibration, Path, dict[str, RunState]]:
    """Submit what the calibration that is due still lacks, wait, fit and keep it; also how the runs ended."""
    from hpcbench.forecast.oracle_requests import collect_evidence, make_calibration_plan, select_runs
    from hpcbench.submit.submit import check_scheduler

    check_scheduler(profile)
    cluster_tree = results_tree(results).cluster(profile.name)
    plan = make_calibration_plan(cluster_tree, profile, partition, budget_s)
    states = _run_calibration(plan, cluster_tree, results, over_budget)
    calibration, path = fit_and_store(
        profile, partition, collect_evidence([select_runs(cluster_tree, plan.runs)]), results
    )
    return calibration, path, states


def _run_calibration(
    plan: SweepPlan, cluster_tree: ClusterTree, results: str | None, over_budget: bool
) -> dict[str, RunState]:
    from hpcbench.cli.run_commands import check_send_outcome, print_submit_outcome, watch_runs
    from hpcbench.submit.submit import RunSelection, submit

    submitted = submit(plan, cluster_tree, RunSelection(over_budget=over_budget), print_message)
    print_submit_outcome(plan, submitted)
    check_send_outcome(submitted.sent, waits=True)
    try:
        return watch_runs(plan, results, {})
    except KeyboardInterrupt:
        print_message(f"hpcbench cluster calibrate {plan.profile.name} goes on with it")
        raise


def fit_given_runs(
    profile: ClusterProfile, results: str | None, partition: str | None, given: Sequence[str], where: str | None
) -> tuple[Calibration, Path]:
    """From runs that are there: sweeps by name, or whole trees by their folder; of these those with ``where``."""
    from hpcbench.forecast.oracle_requests import collect_evidence, select_runs
    from hpcbench.report.sweep_selection import select_sweeps
    from hpcbench.results.results_tree import ResultsTree

    here = results_tree(results)
    folders = [one for one in given if Path(one).is_dir()]
    sources = [select_runs(ResultsTree(Path(one)).cluster(profile.name)) for one in folders]
    names = [one for one in given if one not in folders]
    for _, record in select_sweeps(here, names, profile.name) if names else []:
        sources.append(select_runs(here.cluster(profile.name), record.run_ids))
    if where is not None:
        chosen = _run_ids_where(here, profile.name, given, where)
        sources = [(one, [run_id for run_id in run_ids if run_id in chosen]) for one, run_ids in sources]
    return fit_and_store(profile, partition, collect_evidence(sources), results)


def _run_ids_where(here: ResultsTree, cluster: str, given: Sequence[str], where: str) -> set[str]:
    """The runs of what was ``given`` for which the expression ``where`` holds; ``ConfigError`` where none is."""
    from hpcbench.errors import ConfigError
    from hpcbench.report.column_names import Condition
    from hpcbench.report.load_results import load_frame

    condition = Condition(where, "--where")
    frame = load_frame(here, given, [cluster], ["run_id", *condition.columns])
    found = set(frame.filter(condition.mask(frame))["run_id"])
    if not found:
        raise ConfigError(f"none of {frame.height} runs of {cluster} has {where}", where="--where")
    return found


def fit_and_store(
    profile: ClusterProfile, partition: str | None, found: tuple[Sequence[Any], Sequence[str]], results: str | None
) -> tuple[Calibration, Path]:
    """Part by part where the runs have probes, else as whole runs; ``ConfigError`` where no run can be used."""
    from hpcbench.errors import ConfigError
    from hpcbench.oracle.calibration.calibration_runs import usable_runs
    from hpcbench.oracle.calibration.calibration_store import machine_for, write_calibration
    from hpcbench.oracle.calibration.fit_machine import fit_calibration, fit_calibration_from_runs

    evidence, problems = found
    for problem in problems:
        print_message(f"  {problem}")
    if not usable_runs(evidence):
        hint = "hpcbench status shows how they ended, hpcbench logs RUN_ID why"
        raise ConfigError(f"no run of {profile.name} that was given or made ended well: nothing to fit", hint=hint)
    here = results_tree(results).cluster(profile.name)
    if any(one.result.probe is not None for one in evidence):
        calibration = fit_calibration(profile, partition, evidence)
    else:
        calibration = fit_calibration_from_runs(profile, partition, machine_for(profile, here, partition), evidence)
    return calibration, write_calibration(calibration, here)


def show_calibration(calibration: Calibration, path: Path, *, as_json: bool) -> None:
    """What was found, and where it lies."""
    if as_json:
        import msgspec

        print_json({"path": str(path), "calibration": msgspec.to_builtins(calibration, str_keys=True)})
        return
    from hpcbench.report.prediction_view import calibration_view

    make_console().print(calibration_view(calibration))
    print_message(f"kept in {project_relative(path)}: predictions for {calibration.cluster} are made from it")


@click.group()
def cluster() -> None:
    """List, show and write cluster profiles."""


@cluster.command("list")
@click.option("--here", "only_here", is_flag=True, help="Only those whose login nodes this machine is one of.")
@json_option
def list_clusters(only_here: bool, as_json: bool) -> None:
    """List every profile that --cluster takes: the project's, yours, the shipped ones.

    Those whose login nodes this machine is one of, as far as its name tells, come first and are marked.
    """
    entries = sorted(_profile_entries(), key=lambda entry: not entry["here"])
    if only_here:
        entries = [entry for entry in entries if entry["here"]]
        if not entries:
            print_message(
                f"no profile knows this machine, {socket.getfqdn()}, as its login node: see docs/add-a-cluster.md"
            )
    if as_json:
        print_json({"clusters": entries})
    if as_json or not entries:
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    headings = ("name", "here", "verified", "description", "file")
    for heading in headings:
        table.add_column(heading)
    for entry in entries:
        shown = {**entry, "here": "here" if entry["here"] else ""}
        table.add_row(*(Text(printable_text(shown[key])) for key in headings))
    make_console().print(table)


def _profile_entries() -> list[dict[str, Any]]:
    from hpcbench.config.cluster_profile import find_cluster_profiles, load_cluster_file
    from hpcbench.errors import HpcbenchError
    from hpcbench.site.profile_check import is_login_node

    entries: list[dict[str, Any]] = []
    for name, path in find_cluster_profiles().items():
        entry: dict[str, Any] = {"name": name, "file": project_relative(path), "verified": "", "here": False}
        try:
            profile, _ = load_cluster_file(path)
        except HpcbenchError as error:
            entries.append({**entry, "description": f"broken: {error}"})
            continue
        here = is_login_node(profile.match)
        entries.append({**entry, "description": profile.description, "verified": profile.verified, "here": here})
    return entries


@cluster.command("show")
@click.argument("name")
@json_option
def show_cluster(name: str, as_json: bool) -> None:
    """Show a profile as it was written; --json fills in every default, and what it extends."""
    from hpcbench.config.cluster_profile import load_cluster

    profile, source = load_cluster(name)
    if as_json:
        print_json(profile.model_dump(mode="json"))
        return
    print_message(f"# {source.path}")
    print_text(source.text)


@cluster.command("init")
@click.argument("name")
@click.option("--probe", "probes", is_flag=True, help="Also run a short job that looks at a node from inside.")
def init_cluster(name: str, probes: bool) -> None:
    """Write clusters/NAME.toml from the live scheduler: partitions, limits, nodes, devices, accounts.

    What the scheduler cannot know is there as a comment. A file that exists is left alone.
    """
    from hpcbench.config.cluster_profile import load_cluster_file
    from hpcbench.errors import HpcbenchError
    from hpcbench.fileio import make_folder, write_atomic
    from hpcbench.paths import project_folder
    from hpcbench.site.profile_writer import profile_toml
    from hpcbench.site.slurm_facts import query_site

    path = project_folder() / "clusters" / f"{name}.toml"
    base = _scheduler_only_profile(name, path)
    facts = query_site(base)
    config_file = base.scheduler.config_file
    text = profile_toml(name, facts, config_file=config_file)
    make_folder(path.parent)
    write_atomic(path, text.encode())
    if probes:
        from hpcbench.site.node_probe import run_probe

        # The job asks as the profile says that was just written.
        try:
            probe = run_probe(load_cluster_file(path)[0], print_message)
        except HpcbenchError:
            print_message(
                f"wrote {project_relative(path)} from the scheduler alone; to look at a node after all, move it "
                f"away first"
            )
            raise
        write_atomic(path, profile_toml(name, facts, probe, config_file).encode())
    load_cluster_file(path)
    print_message(f"wrote {project_relative(path)}")
    print_message(f"next: hpcbench check {project_relative(path)} && hpcbench doctor --cluster {name}")


def _scheduler_only_profile(name: str, path: Path) -> Any:
    """A profile that only says how the scheduler is reached: as this shell does."""
    from hpcbench.config.cluster_profile import ClusterProfile
    from hpcbench.config.toml_tables import TomlSource, validate_table
    from hpcbench.errors import ConfigError

    if path.exists():
        raise ConfigError(f"{path} exists", hint="choose another name, or move it away")
    config_file = os.environ.get("SLURM_CONF")
    data = {"name": name, "scheduler": {"config_file": config_file} if config_file else {}}
    return validate_table(ClusterProfile, data, TomlSource(path, ""))


@cluster.command("calibrate")
@click.argument("name")
@click.option("--partition", metavar="NAME", help="The partition to measure. (default: the profile's)")
@click.option(
    "--from",
    "given",
    multiple=True,
    metavar="SWEEP|TREE",
    help="Measure nothing: fit from these sweeps' runs, or from all of a results tree. May be repeated.",
)
@click.option("--where", metavar="EXPR", help="Of --from, only runs for which it holds: 'devices == 1'.")
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="x.toml: write the sweep that would be run, and stop. x.json: write the calibration there, too.",
)
@click.option(
    "--budget",
    "budget_s",
    default=20.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds that the measurements of one run may take, about.",
)
@click.option(
    "--yes", "over_budget", is_flag=True, help="Measure even if that may cost more than the cluster's budget."
)
@results_option
@json_option
def calibrate_cluster(
    *, name: str, partition: str | None, given: tuple[str, ...], where: str | None, out: Path | None, budget_s: float,
    over_budget: bool, results: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure a cluster: a sweep of ordinary runs, submitted, waited for and fitted.

    What is interrupted goes on when the same command is given again. Predictions then take the newest calibration.
    """
    from hpcbench.config.cluster_profile import load_cluster
    from hpcbench.errors import ConfigError
    from hpcbench.forecast.oracle_requests import calibration_sweep_text, write_copy

    profile, _ = load_cluster(name)
    _check_calibrate_options(profile, partition, out)
    if where is not None and not given:
        raise ConfigError("--where chooses among the runs of --from", hint="name sweeps or a results tree: --from")
    if out is not None and out.suffix == ".toml":
        write_copy(
            out,
            calibration_sweep_text(results_tree(results).cluster(profile.name), profile, partition, budget_s)[
                1
            ].encode(),
        )
        print_message(f"wrote {project_relative(out)}: hpcbench submit {out} --cluster {name} runs it")
        return
    states: dict[str, Any] = {}
    if given:
        found, path = fit_given_runs(profile, results, partition, given, where)
    else:
        found, path, states = measure_and_fit(profile, results, partition, budget_s, over_budget)
    if out is not None:
        write_copy(out, path.read_bytes())
    show_calibration(found, path, as_json=as_json)
    sys.exit(runs_exit_code(states))


def _check_calibrate_options(profile: Any, partition: str | None, out: Path | None) -> None:
    from hpcbench.errors import ConfigError, did_you_mean

    if partition is not None and partition not in profile.partitions:
        raise ConfigError(
            f"cluster {profile.name} has no partition {partition!r}", hint=did_you_mean(partition, profile.partitions)
        )
    if out is not None and out.suffix not in (".toml", ".json"):
        raise ConfigError(
            f"--out {out}: what kind of file is that?", hint="x.toml for the sweep, x.json for the calibration"
        )
