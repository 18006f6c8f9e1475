"""The commands ``cancel`` and ``clean``, and ``status --audit``: jobs in the queue, and files that are left."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import click
import msgspec

from hpcbench.cli.common import (
    cluster_filter_option,
    filter_runs,
    output_options,
    print_json,
    print_message,
    project_relative,
    run_prefix_option,
    runs_with_prefix,
    sweep_argument,
    why_nothing,
)
from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.errors import (
    EXIT_OK,
    EXIT_RUNS_FAILED,
    EXIT_SYSTEM_REFUSED,
    ConfigError,
    StorageError,
    SubmitError,
    did_you_mean,
)
from hpcbench.fileio import printable_text
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.submit.audit import AuditFinding, audit_tree, cancel_findings, clusters_of
from hpcbench.submit.leftovers import Leftover, find_leftovers, remove_leftovers
from hpcbench.submit.lock import announce_silence
from hpcbench.submit.run_state import CancelOutcome, RunState, cancel_runs, run_states
from hpcbench.submit.scheduler import QueueTable
from hpcbench.submit.slurm_queue import read_queue
from hpcbench.submit.submission_record import select_sweeps
from hpcbench.submit.watcher import RunCatalog, SweepWatcher, wait_for_runs
from hpcbench.units import format_bytes, parse_quantity, pluralize


@click.command("cancel")
@sweep_argument
@cluster_filter_option
@run_prefix_option
@click.option("--where", metavar="EXPR", help="Only runs whose parameters satisfy the expression.")
@click.option("--wait", "waits", is_flag=True, help="Stay until they have ended.")
@output_options
def cancel_sweep(
    *, sweep: str, cluster_name: str | None, prefix: str | None, where: str | None, waits: bool, results: ResultsTree,
    as_json: bool,
) -> None:  # fmt: skip
    """Stop the runs of SWEEP that are queued or running. Their measurements are kept; submit runs them again.

    Stopping takes a moment. Until a run has ended, `submit` treats it as running; use --wait. Without --run and
    --where, jobs that the sweep has in the queue by mistake are cancelled, too.
    """
    documents = []
    problems: list[str] = []
    for cluster, record in select_sweeps(results, (sweep,), cluster_name):
        profile, _ = load_cluster(record.profile)
        tree = results.cluster(cluster)
        is_whole = prefix is None and where is None
        with announce_silence(print_message):
            queue = _read_whole_queue(tree, profile) if is_whole else None
            states = run_states(tree, record.run_ids, profile, time.time(), queue=queue)
        surplus = audit_tree(tree, queue, {record.sweep}) if queue is not None else []
        if prefix is not None:
            states = runs_with_prefix(states, prefix, record.sweep)
        if where is not None:
            states = filter_runs(RunCatalog(tree), states, where, record.sweep)
        outcome = cancel_runs(tree, states, profile)
        problems += _print_cancelled(record.sweep, cluster, states, outcome, waits=waits)
        further, refused = cancel_findings(surplus, profile)
        for finding in further:
            print_message(f"  {finding.subject} cancelled, too: a {finding.kind}, {printable_text(finding.reason)}")
        problems += [f"job {job_id} stays in the queue: {reason}" for job_id, reason in refused.items()]
        documents.append(
            {
                "sweep": record.sweep,
                "cluster": cluster,
                "run_ids": outcome.run_ids,
                "not_cancelled": outcome.refused,
                "further_jobs": [finding.job_id for finding in further],
            }
        )
        if waits:
            watcher = SweepWatcher(tree.root, profile, {record.sweep: list(outcome.run_ids)})
            wait_for_runs(watcher, lambda _: None)
    if as_json:
        print_json({"cancelled": documents})
    if problems:
        raise SubmitError("\n".join(problems), hint="hpcbench status --audit lists what stays in the queue")


def _read_whole_queue(tree: ClusterTree, profile: ClusterProfile) -> QueueTable | None:
    """The scheduler's whole queue; ``None`` if it has none, or does not answer."""
    with contextlib.suppress(SubmitError):
        return read_queue(profile, clusters_of(tree)) if profile.scheduler.traits.is_slurm else None
    return None


def _print_cancelled(
    sweep: str, cluster: str, states: Mapping[str, RunState], outcome: CancelOutcome, *, waits: bool
) -> list[str]:
    """Print the cancelled runs; return a sentence for each group of runs that could not be cancelled."""
    done = [run_id for run_id in outcome.run_ids if run_id not in outcome.refused]
    running = sum(states[run_id].state == "running" for run_id in done)
    hint = f", {running} of them running: --wait stays until they have ended" if running and not waits else ""
    print_message(f"{sweep} on {cluster}: asked {pluralize(len(done), 'run')} to stop{hint}")
    problems = []
    for reason in dict.fromkeys(outcome.refused.values()):
        run_ids = [run_id for run_id, why in outcome.refused.items() if why == reason]
        going = sum(states[run_id].state == "running" for run_id in run_ids)
        jobs = sorted({str(states[run_id].job_id).partition("_")[0] for run_id in run_ids})
        owners = sorted({run.submitted_by or "?" for run_id in run_ids if (run := states[run_id].submitted_run)})
        text = f"the scheduler did not cancel job {', '.join(jobs)} of {', '.join(owners)}: {reason}"
        if waiting := len(run_ids) - going:
            text += f"; {pluralize(waiting, 'run')} removed from the submission, so that the job does nothing for them"
        if going:
            text += f"; {pluralize(going, 'run')} still running"
        problems.append(text)
    return problems


def show_audit(sweeps: tuple[str, ...], cluster_name: str | None, results: ResultsTree, *, as_json: bool) -> None:
    """Run ``status --audit``; ends the command with 1 if something was found."""
    by_cluster: dict[str, dict[str, str]] = {}
    for cluster, record in select_sweeps(results, sweeps, cluster_name):
        by_cluster.setdefault(cluster, {})[record.sweep] = record.profile
    documents = []
    if not by_cluster:
        print_message(why_nothing(results, sweeps, 0))
    for cluster, records in by_cluster.items():
        profile, _ = load_cluster(next(iter(records.values())))
        tree = results.cluster(cluster)
        if not profile.scheduler.traits.is_slurm:
            print_message(f"{cluster}: it has no scheduler whose queue could be audited")
            continue
        with announce_silence(print_message):
            queue = read_queue(profile, clusters_of(tree))
        findings = audit_tree(tree, queue, None if not sweeps else set(records))
        documents += [{"cluster": cluster, **msgspec.to_builtins(finding)} for finding in findings]
        if not as_json:
            _print_findings(cluster, findings)
    if as_json:
        print_json({"findings": documents})
    sys.exit(EXIT_RUNS_FAILED if documents else EXIT_OK)


def _print_findings(cluster: str, findings: Sequence[AuditFinding]) -> None:
    if not findings:
        click.echo(f"{cluster}: nothing is in the queue that should not be there")
    for finding in findings:
        click.echo(
            f"{finding.kind}  {finding.sweep}  {printable_text(finding.subject)}: {printable_text(finding.reason)}"
        )
        click.echo(f"    {finding.command}")


@click.command()
@cluster_filter_option
@click.option(
    "--older-than", metavar="TIME", default="30 days", show_default=True,
    help="Only files unchanged for this long, for example '2 h'.",
)  # fmt: skip
@click.option("--yes", "removes", is_flag=True, help="Remove it. Without this option nothing is changed.")
@output_options
def clean(
    *, cluster_name: str | None, older_than: str, removes: bool, results: ResultsTree, as_json: bool
) -> None:  # fmt: skip
    """Show old files of the results tree that no record names, with their size; --yes removes them.

    \b
    unfinished submission   of a submit that was killed before it sent anything
    old submission          none of its runs is in a sweep or measured anything
    orphan                  a run that belongs to no sweep and has neither an ok nor an oom result
    temporary file          of a process that died while it wrote

    Measurements are kept. The scheduler is not asked: TIME must be longer than a job waits and runs.
    """
    try:
        age = {"min_age_s": parse_quantity(older_than, "time"), "now_unix_s": time.time()}
    except ValueError as error:
        raise ConfigError(str(error), where="--older-than") from None
    clusters = results.clusters()
    if cluster_name is not None and cluster_name not in clusters:
        reason = f"no results of cluster {cluster_name!r} in {results.root}"
        raise ConfigError(reason, hint=did_you_mean(cluster_name, clusters))
    leftovers: list[Leftover] = []
    failed: list[StorageError] = []
    for name in [cluster_name] if cluster_name else clusters:
        tree = results.cluster(name)
        with announce_silence(print_message):
            found, refusals = remove_leftovers(tree, **age) if removes else (find_leftovers(tree, **age), [])
        leftovers += found
        failed += refusals
    size_bytes = sum(leftover.size_bytes for leftover in leftovers)
    if as_json:
        entries = [asdict(leftover) | {"path": str(leftover.path)} for leftover in leftovers]
        print_json({"removed": removes, "size_bytes": size_bytes, "leftovers": entries})
    else:
        for leftover in leftovers:
            size, path = format_bytes(leftover.size_bytes), printable_text(project_relative(leftover.path))
            click.echo(f"{leftover.kind:22} {size:>9}  {path}: {leftover.reason}")
        counted = f"{pluralize(len(leftovers), 'leftover')}, {format_bytes(size_bytes)}"
        outcome = " removed" if removes else ": nothing was changed, --yes removes them"
        print_message(counted + outcome if leftovers else "nothing to remove")
    for failure in failed:
        print_message(f"error: {failure}")
    sys.exit(EXIT_SYSTEM_REFUSED if failed else 0)
