"""The command ``status``."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from typing import Any, TextIO

import click

from hpcbench.cli.cancel_command import show_audit
from hpcbench.cli.common import (
    cluster_filter_option,
    complete_choices,
    complete_sweeps,
    output_options,
    print_json,
    print_message,
    where_option,
    why_nothing,
)
from hpcbench.cli.status_output import (
    LiveScreen,
    RunCatalog,
    States,
    make_watchers,
    query_sweeps,
    runs_exit_code,
    states_by_sweep,
)
from hpcbench.config.run_spec import spec_document
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.report.status_text import status_text, suspect_nodes_text
from hpcbench.results.results_tree import ResultsTree
from hpcbench.submit.run_state import RUN_STATES, RunState, count_states
from hpcbench.submit.silence import announce_silence
from hpcbench.submit.submission_record import select_sweeps
from hpcbench.submit.watcher import SweepWatcher, Watched, has_active_runs, refresh_until_query


@click.command()
@click.argument("sweeps", nargs=-1, shell_complete=complete_sweeps)
@cluster_filter_option
@click.option("--watch", is_flag=True, help="Stay and show every change until no run is queued or running.")
@where_option
@click.option(
    "--state", "wanted", metavar="STATE", multiple=True, shell_complete=complete_choices,
    help="Only runs in this state; may be repeated.",
)  # fmt: skip
@click.option("--all", "lists_all", is_flag=True, help="List every run.")
@click.option(
    "--audit", "audits", is_flag=True,
    help="Compare the scheduler's whole queue with the tree: jobs sent twice, held or empty, and what frees them.",
)  # fmt: skip
@output_options
def status(
    *, sweeps: tuple[str, ...], cluster_name: str | None, watch: bool, where: str | None, wanted: tuple[str, ...],
    lists_all: bool, audits: bool, results: ResultsTree, as_json: bool,
) -> None:  # fmt: skip
    """Show the state of every run of SWEEPS, or of all sweeps in the tree.

    Runs that are neither ok nor planned have a row each: model, strategy, nodes x ranks, batch size, elapsed time.
    """
    if audits:
        if any((watch, where, wanted, lists_all)):
            raise ConfigError("--audit looks at the whole queue", hint="leave out --watch, --where, --state and --all")
        show_audit(sweeps, cluster_name, results, as_json=as_json)
    if unknown := [name for name in wanted if name not in RUN_STATES]:
        raise ConfigError(f"--state {unknown[0]}: no state", hint=did_you_mean(unknown[0], RUN_STATES))
    if watch:
        states = _watch_states(sweeps, cluster_name, results, as_json)
    else:
        with announce_silence(print_message):
            states = query_sweeps(results, sweeps, cluster_name)
    catalogs = {cluster: RunCatalog(results.cluster(cluster)) for _, cluster, _ in states}
    if where is not None:
        states = [(sweep, cluster, catalogs[cluster].satisfying(runs, where)) for sweep, cluster, runs in states]
    if wanted:
        states = [
            (sweep, cluster, {run_id: state for run_id, state in runs.items() if state.state in wanted})
            for sweep, cluster, runs in states
        ]
    if as_json:
        print_json({"sweeps": [_states_json(*entry, catalogs[entry[1]]) for entry in states]})
    elif not states:
        print_message(why_nothing(results, sweeps, 0))
    elif not watch:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        texts = [status_text(*entry, width, catalogs[entry[1]].details, lists_all=lists_all) for entry in states]
        _print_states("\n\n".join(texts), sys.stdout)
    for _, cluster, runs in states:
        if text := suspect_nodes_text((state.nodes for state in runs.values()), cluster):
            print_message(text)
    sys.exit(max((runs_exit_code(states_of_runs) for _, _, states_of_runs in states), default=0))


def _print_states(text: str, stream: TextIO) -> None:
    click.echo(text, file=stream, color=False if os.environ.get("NO_COLOR") else None)


def _watch_states(sweeps: tuple[str, ...], cluster_name: str | None, results: ResultsTree, as_json: bool) -> States:
    """Query again and again until no run is queued or running; show the states after each query.

    A terminal's screen is drawn in place; elsewhere the states are printed whenever something has changed.
    """
    # With --json, standard output is for the one document alone.
    stream = sys.stderr if as_json else sys.stdout
    screen = LiveScreen(stream) if stream.isatty() else None
    last_text: str | None = None

    def show(watched: Watched) -> None:
        nonlocal last_text
        if screen is not None:
            screen.show(watched)
            return
        text = "\n\n".join(status_text(*entry, None) for entry in states_by_sweep(watched))
        if text != last_text:
            _print_states(f"{text}\n", stream)
            last_text = text

    watchers: list[SweepWatcher] = []
    watched: Watched = []
    last_mtimes_ns = None
    with screen or contextlib.nullcontext():
        while True:
            began_s = time.monotonic()
            # A cluster's folder of sweeps changes with every submission.
            folders = [(name, results.cluster(name).root / "sweeps") for name in results.clusters()]
            mtimes_ns = [(name, folder.stat().st_mtime_ns) for name, folder in folders if folder.is_dir()]
            if mtimes_ns != last_mtimes_ns:
                watchers = make_watchers(select_sweeps(results, sweeps, cluster_name), results, watchers)
                last_mtimes_ns = mtimes_ns
            seen = dict(watched)
            watched = [(one, one.query_again(seen[one]) if one in seen else one.query()) for one in watchers]
            show(watched)
            watched = refresh_until_query(watched, time.monotonic() - began_s, show)
            if not has_active_runs(watched):
                return states_by_sweep(watched)


def _states_json(sweep: str, cluster: str, states: dict[str, RunState], catalog: RunCatalog) -> dict[str, Any]:
    runs = []
    for run_id, state in states.items():
        details = catalog.details(run_id, state)
        runs.append(
            {
                "run_id": run_id,
                "state": state.state,
                "reason": state.reason,
                "job_id": state.job_id,
                "spec": spec_document(details.spec) if details.spec is not None else None,
                "elapsed_s": details.elapsed_s,
                "submitted_by": details.submitted_by,
            }
        )
    return {"sweep": sweep, "cluster": cluster, "counts": count_states(states), "runs": runs}
