"""``logs``, ``cancel``, ``retry``: what a person does when a run does not go as it should."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcbench.cli.common import cluster_option, load_plan, results_option, say, tree
from hpcbench.cli.runs import check_sent, over_budget_option

if TYPE_CHECKING:
    from hpcbench.results.store import ClusterTree
    from hpcbench.submit.state import RunState

RETRIED = ("failed", "timeout", "cancelled", "preempted", "oom", "unsupported", "skipped", "lost")

BY_DEFAULT = ("failed", "timeout", "cancelled", "preempted", "lost")
_PART_CHARACTERS = 2**20


@click.command()
@click.argument("run_id")
@click.option("--attempt", type=int, help="Which attempt (default: the newest).")
@results_option
def logs(run_id: str, attempt: int | None, results: str | None) -> None:
    """Print what the ranks of RUN_ID said, and its job's script. The first digits of the id are enough."""
    from hpcbench.errors import ConfigError
    from hpcbench.results.attempts import Attempt, attempt_numbers

    cluster_tree, full = _find_run(run_id, results)
    folder = cluster_tree.run_folder(full)
    numbers = attempt_numbers(folder)
    if attempt is not None and attempt not in numbers:
        have = ", ".join(str(number) for number in numbers) or "none"
        raise ConfigError(f"run {full} has no attempt {attempt}", hint=f"it has: {have}")
    if not numbers:
        say(f"run {full} on {cluster_tree.root.name} has not begun")
        return
    chosen = Attempt(folder, attempt or numbers[-1])
    say(f"run {full} on {cluster_tree.root.name}, attempt {chosen.number} of {numbers[-1]}")
    for path in (chosen.folder / "out.log", chosen.folder / "err.log", *_job_logs(cluster_tree, full)):
        _print_log(cluster_tree, path)


def _find_run(prefix: str, results: str | None) -> tuple[ClusterTree, str]:
    from hpcbench.errors import ConfigError

    found = [
        (one, run_id)
        for name in tree(results).clusters()
        for one in [tree(results).cluster(name)]
        for run_id in one.run_ids()
        if run_id.startswith(prefix)
    ]
    if len(found) != 1:
        names = [f"{one.root.name}/{run_id}" for one, run_id in found[:10]]
        hint = f"it could be: {', '.join(names)}" if found else "hpcbench status lists the runs"
        raise ConfigError(f"{len(found) or 'no'} runs begin with {prefix!r} in {tree(results).root}", hint=hint)
    return found[0]


def _job_logs(cluster_tree: ClusterTree, run_id: str) -> list[Path]:
    from hpcbench.submit.tickets import find_tickets

    ticket = find_tickets(cluster_tree, {run_id}).get(run_id)
    log = ticket.job_log() if ticket else None
    return [log] if log else []


def _print_log(cluster_tree: ClusterTree, path: Path) -> None:
    """Print a log part by part, however long it is; nothing where it is empty or cannot be read."""
    from hpcbench.errors import StorageError
    from hpcbench.fileio import UnsafeFileError, open_regular, printable

    try:
        cluster_tree.path(*path.relative_to(cluster_tree.root).parts)
        descriptor = open_regular(path)
    except (StorageError, UnsafeFileError) as error:
        say(f"---- {path} ----\npassed over: {error}")
        return
    except OSError:
        return
    with open(descriptor, encoding="utf-8", errors="replace", newline="") as file:
        last = ""
        while part := file.read(_PART_CHARACTERS):
            if not last:
                say(f"---- {path} ----")
            click.echo(printable(part), nl=False)
            last = part
        if last and not last.endswith("\n"):
            click.echo()


@click.command()
@click.argument("sweep")
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only on this cluster.")
@click.option("--run", "prefix", metavar="RUN_ID", help="Only this run; its first digits are enough.")
@click.option("--where", metavar="EXPR", help="Only runs for which the expression over their parameters holds.")
@click.option("--wait", "waits", is_flag=True, help="Stay until they have ended.")
@results_option
def cancel(
    sweep: str, cluster_name: str | None, prefix: str | None, where: str | None, waits: bool, results: str | None
) -> None:
    """Stop the runs of SWEEP that are queued or running. They leave what they measured; submit runs them again.

    A run that is under way needs a moment to end, and until then submit takes it for one that goes on: wait for it.
    """
    import time

    from hpcbench.config.load import load_cluster
    from hpcbench.report.select import select_sweeps
    from hpcbench.submit.cancel import cancel_runs
    from hpcbench.submit.state import run_states

    for cluster, record in select_sweeps(tree(results), (sweep,), cluster_name):
        profile, _ = load_cluster(cluster)
        cluster_tree = tree(results).cluster(cluster)
        states = run_states(cluster_tree, record.run_ids, profile, time.time())
        states = {key: state for key, state in states.items() if key.startswith(prefix or "")}
        if where is not None:
            states = _where(cluster_tree, states, where)
        cancelled = cancel_runs(cluster_tree, states, profile)
        running = sum(states[key].state == "running" for key in cancelled)
        still = f", {running} of them under way: --wait stays until they have ended" if running and not waits else ""
        say(f"{record.sweep} on {cluster}: {len(cancelled)} runs told to stop{still}")
        if waits:
            from hpcbench.submit.wait import wait
            from hpcbench.submit.watch import Watcher

            wait(Watcher(cluster_tree.root, profile, {record.sweep: cancelled}), profile, lambda _: None)


def _where(cluster_tree: ClusterTree, states: dict[str, RunState], text: str) -> dict[str, RunState]:
    import msgspec

    from hpcbench.config.expand import names
    from hpcbench.config.expression import Expression
    from hpcbench.config.load import COMPUTED
    from hpcbench.config.spec import RunSpec
    from hpcbench.submit.submission_record import read_specs, submissions_of

    condition = Expression(text, [*RunSpec.__struct_fields__, *COMPUTED], "--where")
    specs = {key: spec for entry in submissions_of(cluster_tree) for key, spec in read_specs(*entry).items()}
    return {
        key: state
        for key, state in states.items()
        if key in specs and condition.holds(names(msgspec.structs.asdict(specs[key])))
    }


@click.command()
@click.argument("sweep")
@cluster_option()
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(RETRIED),
    help="Which (default: all but oom, unsupported, skipped).",
)
@over_budget_option
@click.option("--time-limit", metavar="TIME", help="A larger limit, for instance '2 h'; the runs stay the same runs.")
@results_option
def retry(
    sweep: str,
    cluster_name: str,
    statuses: tuple[str, ...],
    over_budget: bool,
    time_limit: str | None,
    results: str | None,
) -> None:
    """Submit again the runs of SWEEP that failed, timed out, were stopped or lost."""
    import msgspec

    from hpcbench.errors import ConfigError
    from hpcbench.submit.submit import Choice, submit
    from hpcbench.units import parse_quantity

    made = load_plan(sweep, cluster_name, results)
    if time_limit is not None:
        try:
            minutes = parse_quantity(time_limit, "time") / 60
        except ValueError as error:
            raise ConfigError(str(error), where="--time-limit") from None
        made.runs = {key: msgspec.structs.replace(spec, time_limit_min=minutes) for key, spec in made.runs.items()}
    choice = Choice(frozenset(statuses or BY_DEFAULT), only_again=True, over_budget=over_budget)
    submitted = submit(made, tree(results).cluster(made.profile.name), choice, say)
    say(f"sweep {made.sweep.name} on {made.profile.name}: {len(submitted.run_ids)} runs submitted again")
    check_sent(submitted.sent, waits=False)
