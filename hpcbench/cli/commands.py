"""The commands that plan and submit runs or read results: their options and help.

What a command does is imported when it runs: ``--help`` and a shell that completes a word need none of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpcbench.cli.common import (
    RETRY_STATES,
    cluster_filter_option,
    cluster_option,
    complete_choices,
    complete_columns,
    complete_files,
    complete_runs,
    complete_sweeps,
    filter_options,
    json_option,
    model_folder_option,
    out_option,
    output_options,
    overrides_option,
    plan_options,
    sources_argument,
    sweep_argument,
    where_option,
)

over_budget_option = click.option(
    "--yes", "over_budget", is_flag=True,
    help="Submit even if the runs may cost more than the budget of the sweep or the cluster.",
)  # fmt: skip
remeasure_option = click.option(
    "--remeasure", is_flag=True,
    help="Also repeat runs that were measured in another environment; their results move to the archive.",
)  # fmt: skip


@click.command()
@click.argument("files", nargs=-1, required=True, shell_complete=complete_files)
@overrides_option
@json_option
def check(**options: Any) -> None:
    """Validate sweeps and profiles.

    FILES are TOML files, or names of sweeps. Every mistake in all of them is listed, with file and line.
    """
    from hpcbench.cli.sweep_commands import check_files

    check_files(**options)


@click.command()
@plan_options
@output_options
def plan(**options: Any) -> None:
    """Show what SWEEP would run on a cluster: runs, jobs, finished runs, infeasible points and the reasons.

    The plan includes the predicted duration of the runs, and those that will not fit into memory.
    """
    from hpcbench.cli.sweep_commands import show_plan

    show_plan(**options)


@click.command()
@plan_options
@out_option("Write scripts and task files there.", metavar="DIR")
@output_options
def render(**options: Any) -> None:
    """Show the exact bytes that submit would send for SWEEP: job scripts and task files."""
    from hpcbench.cli.sweep_commands import render_sweep

    render_sweep(**options)


@click.command()
@plan_options
@click.option("--wait", "waits", is_flag=True, help="Stay until all runs have ended; send the jobs that had to wait.")
@click.option("--dry-run", "only_tries", is_flag=True, help="Send nothing: step the runs as `dry-run` does.")
@click.option("--dry-run-first", "tries_first", is_flag=True, help="Do so first, and submit if every one would run.")
@over_budget_option
@remeasure_option
@output_options
def submit(**options: Any) -> None:
    """Submit the runs of SWEEP that have no result yet and return at once.

    Submitting again is harmless: finished, queued and running runs are left alone, and jobs that could not be sent
    before are sent.
    """
    from hpcbench.cli.run_commands import submit_sweep

    submit_sweep(**options)


@click.command()
@click.argument("sweep", required=False, shell_complete=complete_sweeps)
@cluster_option()
@overrides_option
@click.option(
    "--model", metavar="M", shell_complete=complete_choices, help="Without SWEEP: run this model once, with --strategy."
)
@click.option("--strategy", metavar="S", shell_complete=complete_choices, help="The strategy of that run.")
@click.option(
    "--dataset", metavar="D", shell_complete=complete_choices, help="Its data set. (default: by the kind of the model)"
)
@click.option("--nodes", metavar="N", type=click.IntRange(min=1), help="Its nodes. (default: 1)")
@click.option("--tasks-per-node", metavar="T", type=click.IntRange(min=1), help="Its ranks on each node. (default: 1)")
@click.option("--batch-size", metavar="B", type=click.IntRange(min=1), help="Its samples per replica. (default: 32)")
@click.option("--name", metavar="N", help="Its name as a sweep. (default: model, strategy and a hash)")
@over_budget_option
@remeasure_option
@output_options
def run(**options: Any) -> None:
    """Submit SWEEP, wait with a live screen, print the table. Ctrl-C leaves the screen; the runs go on.

    `run --model M --strategy S` runs one configuration without a sweep's file; --set sets its other parameters.
    """
    from hpcbench.cli.run_commands import run_sweep

    run_sweep(**options)


@click.command()
@sweep_argument
@cluster_filter_option
@click.option(
    "--run",
    "prefix",
    metavar="RUN_ID",
    shell_complete=complete_runs,
    help="Only this run; its first digits are enough.",
)
@click.option("--where", metavar="EXPR", help="Only runs whose parameters satisfy the expression.")
@click.option("--wait", "waits", is_flag=True, help="Stay until they have ended.")
@output_options
def cancel(**options: Any) -> None:
    """Stop the runs of SWEEP that are queued or running. Their measurements are kept; submit runs them again.

    Stopping takes a moment. Until a run has ended, `submit` treats it as running; use --wait.
    """
    from hpcbench.cli.cancel_command import cancel_sweep

    cancel_sweep(**options)


@click.command()
@plan_options
@click.option(
    "--status", "statuses", multiple=True, type=click.Choice(RETRY_STATES),
    help="Statuses to submit again (default: all but oom, unsupported, skipped).",
)  # fmt: skip
@over_budget_option
@click.option("--time-limit", metavar="TIME", help="A longer limit, for example '2 h'; the run ids stay the same.")
@output_options
def retry(**options: Any) -> None:
    """Submit again the runs of SWEEP that failed, timed out, were stopped or lost."""
    from hpcbench.cli.run_commands import retry_sweep

    retry_sweep(**options)


@click.command()
@sources_argument
@cluster_filter_option
@out_option(".json .csv .parquet .xlsx .md or .tex")
@output_options
def collect(**options: Any) -> None:
    """Gather the results of sweeps, trees or bundles, or of the whole tree, into one file or onto standard output.

    A run that is in several of them is taken from the first.
    """
    from hpcbench.cli.results_commands import collect_sources

    collect_sources(**options)


@click.command()
@sources_argument
@cluster_filter_option
@click.option(
    "--by",
    metavar="KEYS",
    shell_complete=complete_columns,
    help="Parameters that get one row for each value (comma-separated).",
)
@click.option(
    "--pivot", metavar="KEY", shell_complete=complete_columns, help="Parameter that gets one column for each value."
)
@click.option(
    "--metric",
    "metrics",
    metavar="M",
    shell_complete=complete_columns,
    help="Metrics to show (comma-separated): samples_per_s, speedup, ...",
)
@where_option
@click.option("--baseline", metavar="EXPR", help="Baseline of speed-ups (default: one device).")
@click.option(
    "--scaling", type=click.Choice(["weak", "strong"]),
    help="Scaling over devices: the batch is fixed per replica (weak) or in total (strong).",
)  # fmt: skip
@click.option("--best", is_flag=True, help="Show the fastest configuration in each cell instead of the median.")
@click.option(
    "--sort",
    metavar="COLUMN",
    shell_complete=complete_columns,
    help="Order of the rows; -COLUMN has the largest first.",
)
@click.option("--layout", metavar="NAME", help="Layout of a paper's table: ddlbench, paradl.")
@out_option(".csv .json .md .tex .xlsx or .parquet")
@output_options
def table(**options: Any) -> None:
    """Print the results of sweeps, trees or bundles, or of the whole tree, as a table.

    Without --by, --pivot, --metric, --best, --scaling or --layout every configuration is a row.
    """
    from hpcbench.cli.results_commands import show_results

    show_results(**options)


@click.command()
@click.argument("kind", required=False, shell_complete=complete_choices)
@sources_argument
@filter_options
@click.option(
    "--by",
    metavar="KEYS",
    shell_complete=complete_columns,
    help="Parameters that get their own line, comma-separated (default: strategy).",
)
@click.option("--predict", is_flag=True, help="Add predictions: lines in scaling, points in predicted.")
@out_option(".png .svg .pdf .html or .json")
@output_options
def plot(**options: Any) -> None:
    """Draw the results of sweeps, trees or bundles, or of the whole tree.

    Without KIND all kinds are listed with what each shows.
    """
    from hpcbench.cli.report_commands import draw_plot

    draw_plot(**options)


@click.command()
@click.argument("sources", metavar="[BASE] NEW", nargs=-1, shell_complete=complete_sweeps, required=True)
@cluster_filter_option
@click.option(
    "--metric",
    metavar="M",
    shell_complete=complete_columns,
    default="step_time_s",
    show_default=True,
    help="Metric to compare.",
)
@where_option
@click.option(
    "--since", metavar="DATE", help="Compare results of one source before a date with later ones: 2026-11-20[T18:00]."
)
@click.option(
    "--threshold", metavar="PERCENT", type=click.FloatRange(0, 100), default=2.0, show_default=True,
    help="Minimum relative change to report.",
)  # fmt: skip
@click.option(
    "--reference", metavar="FILE", type=click.Path(path_type=Path), help="TOML file with bands that NEW must lie in."
)
@out_option(".md .csv .json .tex .xlsx or .parquet")
@click.option("--junit", metavar="FILE", type=click.Path(path_type=Path), help="JUnit XML for a CI server.")
@click.option("--allow-empty", is_flag=True, help="Exit code 0 if no configuration is on both sides.")
@output_options
def compare(**options: Any) -> None:
    """Compare the launches of BASE and NEW, configuration by configuration.

    BASE and NEW are sweeps, trees or bundles. Exit code 1 if NEW is slower, fails, or lies outside a band; 2 if
    nothing can be compared.
    """
    from hpcbench.cli.compare_command import compare_sources

    compare_sources(**options)


@click.command()
@sources_argument
@filter_options
@click.option(
    "--bound", metavar="SHARE", type=click.FloatRange(0, 1, min_open=True), default=0.8, show_default=True,
    help="Efficiency threshold.",
)  # fmt: skip
@click.option("--predict", is_flag=True, help="Show predictions beside measurements on the page.")
@out_option("One HTML page that needs no network.", metavar="FILE.html")
@output_options
def report(**options: Any) -> None:
    """Report the findings of sweeps, trees or bundles: the fastest strategy at each scale, and its significance.

    Further findings: crossovers between strategies, loss of efficiency, strategies that do not fit into memory,
    failures and their reasons, and inconclusive comparisons.
    """
    from hpcbench.cli.report_commands import report_findings

    report_findings(**options)


@click.command()
@sweep_argument
@cluster_filter_option
@out_option("A .tar.gz (default: SWEEP.hpcbench.tar.gz).")
@click.option("--logs", is_flag=True, help="Include the logs of ranks and jobs: the last 16 MiB of each.")
@output_options
def bundle(**options: Any) -> None:
    """Pack SWEEP into one file for others: its record, results, scripts and task files, the start markers and
    rank files of the attempts that count, and a list with the SHA-256 of each.

    `hpcbench table FILE` and `hpcbench collect FILE` read it without unpacking it.

    Names of people, machines, accounts and folders stay in it: read it before you publish it.
    """
    from hpcbench.cli.report_commands import pack_sweep

    pack_sweep(**options)


@click.command()
@plan_options
@click.option(
    "--where", metavar="EXPR", help="Only runs that satisfy the expression, for example 'strategy == \"ddp\" and fits'."
)
@output_options
def predict(**options: Any) -> None:
    """Predict step time, bottleneck and memory of every run of SWEEP on a cluster.

    Nothing is submitted and no scheduler is queried. The machine parameters come from the cluster's newest calibration,
    or from its profile; the lines above the table name the source and every default value. Measured results of the
    cluster adjust predictions of similar runs; each row states which.
    """
    from hpcbench.cli.oracle_commands import predict_sweep

    predict_sweep(**options)


@click.command()
@click.option(
    "--model",
    metavar="M",
    shell_complete=complete_choices,
    help="A shipped model (hpcbench models) or module:function.",
)
@click.option("--dataset", metavar="D", shell_complete=complete_choices, help="Data set to train on.")
@click.option("--input-size", metavar="N", type=click.IntRange(min=1), help="Edge length or tokens, not the dataset's.")
@cluster_option()
@click.option("--nodes", metavar="N", type=click.IntRange(min=1), multiple=True, help="May be repeated. (default: 1)")
@click.option("--tasks-per-node", metavar="T", type=click.IntRange(min=1), help="(default: a node's devices, or 1)")
@click.option("--batch-size", metavar="B", type=click.IntRange(min=1), help="Samples per replica and step.")
@click.option(
    "--global-batch-size", metavar="G", type=click.IntRange(min=1), help="Samples per step over all replicas."
)
@click.option(
    "--precision",
    metavar="P",
    default="fp32",
    show_default=True,
    help="fp64, fp32, tf32, bf16, fp16, or bf16_params: bf16 parameters with fp32 master weights.",
)
@click.option("--optimizer", metavar="O", default="sgd", show_default=True, help="sgd, adam or adamw.")
@click.option("--partition", metavar="P", help="Partition of the profile. (default: the profile's)")
@click.option("--objective", metavar="O", default="samples_per_s", show_default=True,
              help="samples_per_s, step_time_s or node_hours (of an epoch).")  # fmt: skip
@click.option("--top", metavar="N", type=click.IntRange(min=1), default=10, show_default=True, help="Rows of a table.")
@out_option("Write the sweep that measures the best.")
@model_folder_option
@output_options
def recommend(**options: Any) -> None:
    """Rank every strategy and degree for a model on a cluster by their predictions.

    Decoders of published training runs on a device that was learned from such runs are ranked by their layouts: data,
    sharded, tensor, pipeline and context parallelism, micro-batches and recomputation, also those that are priced only.

    Infeasible candidates are listed with the limit that excludes them. The output ends with a sweep that measures the
    best.
    """
    from hpcbench.cli.oracle_commands import rank_strategies

    rank_strategies(**options)


@click.command()
@sources_argument
@filter_options
@click.option("--cases", "every", is_flag=True, help="Also list every configuration.")
@click.option("--busy", "takes_disturbed", is_flag=True, help="Compare even if others disturbed every run.")
@out_option(".json: everything; .csv .md .tex .xlsx .parquet: every configuration.")
@output_options
def validate(**options: Any) -> None:
    """Compare measurements with the predictions of the oracle and of simple predictors.

    Each prediction leaves out the results of its own configuration. A failed run counts as a wrong prediction, unless
    the prediction was that it does not fit in memory.
    """
    from hpcbench.cli.validate_command import validate_predictions

    validate_predictions(**options)
