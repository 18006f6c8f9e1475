"""The command ``dry-run``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import click
import msgspec

from hpcbench.cli.common import (
    make_console,
    output_options,
    plain_table,
    plan_options,
    print_json,
    print_message,
    project_relative,
    where_option,
)
from hpcbench.cli.load_plan import load_plan
from hpcbench.cli.progress import report_progress
from hpcbench.config.run_spec import run_label, spec_document
from hpcbench.config.sweep_loader import spec_condition
from hpcbench.errors import EXIT_OK, EXIT_RUNS_FAILED, ConfigError
from hpcbench.predict.dry_runs import distinct_configurations, dry_run_configurations
from hpcbench.results.probe_records import DryRun
from hpcbench.results.results_tree import ResultsTree
from hpcbench.units import format_bytes, pluralize


@click.command("dry-run")
@plan_options
@where_option
@output_options
def dry_run(
    sweep: str, cluster_name: str, overrides: tuple[str, ...], where: str | None, results: ResultsTree, as_json: bool
) -> None:
    """Build and step every configuration of SWEEP without devices, on tensors that have shapes but no numbers.

    For each one: whether it would run, its peak memory and the layer at the peak, operators and collectives per
    step, and the lines where the host waits for the device. Needs torch here; its build for CPUs is enough. The
    exit code is 1 unless every configuration is ok.
    """
    plan = load_plan(sweep, cluster_name, results, overrides)
    other = next((spec.workload for spec in plan.runs.values() if spec.workload != "training"), None)
    if other is not None:
        message = f"a dry run builds trainings of hpcbench, and this sweep has runs of the workload {other!r}"
        raise ConfigError(message, where=str(plan.sweep.source.path), hint="hpcbench plan shows its runs")
    if plan.dropped:
        verb = "is" if len(plan.dropped) == 1 else "are"
        print_message(
            f"{pluralize(len(plan.dropped), 'point')} {verb} infeasible: "
            f"hpcbench plan {project_relative(plan.sweep.source.path)} --cluster "
            f"{plan.profile_file or plan.profile.name} lists the reasons"
        )
    configurations = distinct_configurations(plan.runs.values())
    if where is not None:
        is_wanted = spec_condition(where)
        configurations = {key: spec for key, spec in configurations.items() if is_wanted(spec)}
        if not configurations:
            raise ConfigError(f"no run of {plan.sweep.name} satisfies {where}", where="--where")
    with report_progress("dry run") as show_progress:
        dry_runs = dry_run_configurations(plan, configurations, show_progress)
    _show_dry_runs(dry_runs, as_json=as_json)
    sys.exit(EXIT_OK if all(entry.outcome == "ok" for entry in dry_runs) else EXIT_RUNS_FAILED)


def _show_dry_runs(dry_runs: Sequence[DryRun], *, as_json: bool) -> None:
    """Print ``dry_runs`` as JSON, or as a table with the reasons of those that are not ok and the sites of waits."""
    if as_json:
        print_json(
            {"dry_runs": [msgspec.to_builtins(entry) | {"spec": spec_document(entry.spec)} for entry in dry_runs]}
        )
        return
    headings = ("configuration", "outcome", "peak memory", "in layer", "operators", "collectives", "waits")
    rows = [
        (
            run_label(entry.spec),
            entry.outcome,
            "" if entry.peak_memory_bytes is None else format_bytes(entry.peak_memory_bytes),
            entry.peak_layer or "",
            *(
                "" if number is None else f"{number:,}"
                for number in (entry.operators, entry.collectives, entry.host_syncs)
            ),
        )
        for entry in dry_runs
    ]
    screen = make_console()
    screen.print(plain_table(headings, rows, right_aligned=("peak memory", "operators", "collectives", "waits")))
    reasons = Counter(f"{entry.outcome}: {entry.reason}" for entry in dry_runs if entry.reason)
    sites = Counter(site for entry in dry_runs for site in entry.host_sync_sites)
    modelled = Counter(name for entry in dry_runs for name in entry.modelled)
    simulated = "Simulated parts (docs/dry-run.md)"
    for title, counter in (("Reasons", reasons), ("The host waits for the device", sites), (simulated, modelled)):
        if counter:
            screen.print(f"\n{title}")
        for text, count in counter.items():
            screen.print(f"  {text} ({pluralize(count, 'configuration')})")
    outcomes = Counter(entry.outcome for entry in dry_runs)
    summary = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    seconds = sum(entry.seconds for entry in dry_runs)
    print_message(f"{pluralize(len(dry_runs), 'configuration')}: {summary}; {seconds:.0f} s of computation")
