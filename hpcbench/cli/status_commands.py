"""The commands ``status`` and ``logs``: their options. What they do is imported when they run, as ``--help`` and a
shell that completes a word come here, too."""

from __future__ import annotations

from typing import Any

import click

from hpcbench.cli.common import (
    cluster_filter_option,
    complete_choices,
    complete_runs,
    complete_sweeps,
    output_options,
    where_option,
)


@click.command()
@click.argument("sweeps", nargs=-1, shell_complete=complete_sweeps)
@cluster_filter_option
@click.option("--watch", is_flag=True, help="Stay and show every change until no run is queued or running.")
@where_option
@click.option(
    "--state", "wanted", metavar="STATE", multiple=True, shell_complete=complete_choices,
    help="Only runs in this state; may be repeated.",
)  # fmt: skip
@click.option("--all", "lists_all", is_flag=True, help="Give every run a row.")
@click.option(
    "--audit", "audits", is_flag=True,
    help="Compare the scheduler's whole queue with the tree: jobs sent twice, held or empty, and what frees them.",
)  # fmt: skip
@output_options
def status(*, audits: bool, **options: Any) -> None:
    """Show the state of every run of SWEEPS, or of all sweeps in the tree.

    Runs that are neither ok nor planned have a row each: model, strategy, nodes x ranks, batch size, elapsed time.
    """
    if audits:
        from hpcbench.cli.cancel_command import show_audit

        show_audit(**options)
    from hpcbench.cli.status_output import show_status

    show_status(**options)


@click.command()
@click.argument("run_id", metavar="RUN_ID|SWEEP", shell_complete=complete_runs)
@cluster_filter_option
@click.option("--attempt", type=int, help="Number of the attempt (default: the newest).")
@click.option("--failed", is_flag=True, help="Of a sweep: only runs that failed, timed out, were stopped or lost.")
@where_option
@click.option("--follow", is_flag=True, help="Print new lines until the runs have ended.")
@output_options
def logs(**options: Any) -> None:
    """Print the logs of the ranks of a run, and of its job's script; or those of the runs of a sweep.

    The first digits of a run's id are enough.
    """
    from hpcbench.cli.status_output import show_logs

    show_logs(**options)
