"""The commands ``init``, ``doctor``, ``schema``, ``data`` and ``models``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.text import Text

from hpcbench.cli.common import (
    cluster_option,
    complete_choices,
    json_option,
    make_console,
    model_folder_option,
    output_options,
    plain_table,
    print_json,
    print_message,
)
from hpcbench.cli.progress import report_progress
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.fileio import printable_text
from hpcbench.paths import data_folder, expand_path
from hpcbench.report.models_view import find_layer_tables, layers_table, models_json, models_table, sort_layer_tables
from hpcbench.results.data_folder import list_datasets
from hpcbench.results.results_tree import ResultsTree
from hpcbench.site.cluster_doctor import DoctorCheck, check_cluster
from hpcbench.site.project_setup import make_json_schema, make_samples, share_results, write_project
from hpcbench.units import format_bytes, pluralize
from hpcbench.workloads.datasets import DATASETS

_SORT_KEYS = ("order", "parameters", "forward_flops", "backward_flops", "activation_bytes")


@click.command()
@cluster_option()
@click.option("--no-job", is_flag=True, help="Check on this machine only; submit nothing.")
@output_options
def doctor(cluster_name: str, no_job: bool, results: ResultsTree, as_json: bool) -> None:
    """Check the requirements of a cluster's jobs, and print the command that installs a missing part.

    If the cluster's scheduler answers, a short job checks on one node.
    """
    # Imported here: the other commands of this file submit nothing.
    profile, source = load_cluster(cluster_name)
    findings = check_cluster(profile, source, results.root, None if no_job else print_message)
    if as_json:
        print_json({"cluster": profile.name, "findings": findings})
    else:
        _print_checks(profile.name, findings)
    sys.exit(3 if any(finding.needed and not finding.works for finding in findings) else 0)


def _print_checks(cluster: str, checks: Sequence[DoctorCheck]) -> None:
    """Print the checks and a verdict. No line is cut: those with commands are there to be copied."""
    console, width = make_console(), max((len(check.what) for check in checks), default=0) + 2
    for title, needed, style in (("required", True, "red"), ("optional", False, "dim")):
        group = [check for check in checks if check.needed is needed]
        if group:
            console.print(title)
        for check in group:
            state = Text("ok", style="green") if check.works else Text("missing", style=style)
            state.pad_right(9 - len(state))
            line = Text.assemble("  ", state, f"{check.what:{width}}", printable_text(check.detail))
            line.rstrip()
            console.print(line, soft_wrap=True)
            if check.mend:
                console.print(Text(f"{'':11}{printable_text(check.mend)}"), soft_wrap=True)
    absent = {
        needed: [check.what for check in checks if not check.works and check.needed is needed]
        for needed in (True, False)
    }
    verdict = f"{cluster} is not ready, missing: {', '.join(absent[True])}" if absent[True] else f"{cluster} is ready"
    verdict += "".join(
        f"; scheduler {check.detail}" for check in checks if (check.what, check.needed) == ("scheduler", False)
    )
    rest = f"; {pluralize(len(absent[False]), 'optional part')} missing: {', '.join(absent[False])}"
    console.print(Text(verdict + rest * bool(absent[False])), soft_wrap=True)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--shared", "group", metavar="GROUP", help="Make the results folder writable for this group.")
def init(folder: Path, group: str | None) -> None:
    """Write a project folder to start from: a sweep, a profile to copy, schemas for the editor.

    Files that exist are left unchanged.
    """
    written = write_project(folder)
    if group is not None:
        print_message(f"{share_results(folder, group)} is shared by the group {group}")
    for path in written:
        print_message(f"wrote {path}")
    if written:
        print_message(f"next: cd {folder} && hpcbench run quickstart")
    else:
        print_message(f"nothing to write: {folder} has everything already")


@click.command()
@click.argument("kind", type=click.Choice(["cluster", "sweep", "result"]))
def schema(kind: str) -> None:
    """Print the JSON Schema of a cluster profile, a sweep or a result."""
    print_json(make_json_schema(kind))


@click.group()
def data() -> None:
    """Make synthetic samples for runs with data = "files", and list data sets."""


_data_folder_option = click.option(
    "--folder", metavar="DIR", help="The data folder (default: $HPCBENCH_DATA, the profile's data_folder, or data)."
)


@data.command("make")
@click.argument("datasets", nargs=-1, required=True, metavar="DATASET...", shell_complete=complete_choices)
@click.option("--size", type=click.IntRange(min=1), metavar="N", help="Edge length or tokens (default: the set's own).")
@click.option("--samples", type=click.IntRange(min=1), metavar="N",
              help="Number of distinct samples (default: a few minutes' worth).")  # fmt: skip
@_data_folder_option
@cluster_option("local")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Processes (default: one per core).")
@json_option
def make_data(
    datasets: tuple[str, ...],
    size: int | None,
    samples: int | None,
    folder: str | None,
    cluster_name: str,
    workers: int | None,
    as_json: bool,
) -> None:
    """Make synthetic samples of each DATASET, in parallel.

    Existing samples are kept: an interrupted command continues, and two at the same time do no harm.
    """
    synthetic = [name for name, dataset in DATASETS.items() if dataset.synthetic]
    for name in datasets:
        if name not in synthetic:
            reason = "is real and needs no files" if name in DATASETS else "is unknown"
            raise ConfigError(f"dataset {name!r} {reason}", hint=did_you_mean(name, synthetic))
    profile, _ = load_cluster(cluster_name)
    target = expand_path(data_folder(folder, profile.data_folder))
    for name in datasets:
        progress = None
        with report_progress(name) as show_progress:
            for progress in make_samples(profile, target, name, size=size, samples=samples, workers=workers):
                show_progress(progress.done, progress.samples)
        if progress is not None:
            print_message(f"{name}: {progress.samples} samples in {target}")
    if as_json:
        print_json({"folder": str(target), "datasets": list_datasets(target)})


@data.command("list")
@_data_folder_option
@cluster_option("local")
@json_option
def list_data(folder: str | None, cluster_name: str, as_json: bool) -> None:
    """List the data sets in the data folder: synthetic samples, and files of real data sets."""
    profile, _ = load_cluster(cluster_name)
    target = expand_path(data_folder(folder, profile.data_folder))
    listings = list_datasets(target)
    if as_json:
        print_json({"folder": str(target), "datasets": listings})
        return
    print_message(f"# {target}")
    if not listings:
        print_message("nothing is there: hpcbench data make DATASET makes samples")
        return
    rows = [
        (
            listing.dataset,
            listing.kind,
            "" if listing.size is None else str(listing.size),
            "" if listing.samples is None else f"{listing.samples:,}",
            "" if listing.bytes is None else format_bytes(listing.bytes),
            Text("complete", style="green") if listing.complete else Text("incomplete", style="red"),
            listing.detail,
        )
        for listing in listings
    ]
    headings = ("dataset", "kind", "size", "samples", "bytes", "", "")
    make_console().print(plain_table(headings, rows, right_aligned=("size", "samples", "bytes")))


@click.command()
@click.option(
    "--model",
    "names",
    metavar="M",
    multiple=True,
    shell_complete=complete_choices,
    help="Only this one; may be repeated.",
)
@click.option(
    "--dataset",
    "datasets",
    metavar="D",
    multiple=True,
    shell_complete=complete_choices,
    help="Only with this one; may be repeated.",
)
@click.option("--input-size", metavar="N", type=click.IntRange(min=1), help="Edge length or tokens, not the dataset's.")
@click.option("--layers", "by_layer", is_flag=True, help="Every layer of one model on one dataset.")
@click.option("--sort", type=click.Choice(_SORT_KEYS), default="order", help="Largest first by this. (default: order)")
@model_folder_option
@json_option
def models(
    names: tuple[str, ...], datasets: tuple[str, ...], input_size: int | None, by_layer: bool, sort: str,
    model_folder: Path, as_json: bool,
) -> None:  # fmt: skip
    """Show parameters, FLOPs and activation memory of every model on every dataset that it takes.

    The numbers of the shipped models come with the package. A custom model (module:function) and other input sizes
    are measured on first use, which takes torch and a few seconds.
    """
    tables = sort_layer_tables(find_layer_tables(names, datasets, input_size, model_folder), sort)
    if as_json:
        print_json(models_json(tables, sort))
        return
    screen = make_console()
    if not by_layer:
        screen.print(models_table(tables))
        return
    if len(tables) > 1:
        pairs = ", ".join(f"{table.model} on {table.dataset}" for table in tables[:5])
        hint = f"name one with --model and --dataset: {pairs}{', ...' if len(tables) > 5 else ''}"
        raise ConfigError(f"--layers shows one pair, and {len(tables)} were asked for", hint=hint)
    screen.print(layers_table(tables[0], sort, screen.width))
