"""The commands ``init``, ``doctor``, ``schema``, ``data`` and ``models``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import cluster_option, json_option, make_console, print_json, print_message, results_option
from hpcbench.fileio import printable_text

if TYPE_CHECKING:
    from hpcbench.results.data_folder import DatasetListing


@click.command()
@click.argument("kind", type=click.Choice(["cluster", "sweep", "result"]))
def schema(kind: str) -> None:
    """Print the JSON Schema of a cluster profile, a sweep or a result."""
    from hpcbench.results.json_schema import make_json_schema

    print_json(make_json_schema(kind))


@click.command()
@click.option("--cluster", "cluster_name", metavar="NAME", default="local", help="For its jobs. (default: local)")
@click.option("--no-job", is_flag=True, help="Look from here only; submit nothing.")
@results_option
@json_option
def doctor(cluster_name: str, no_job: bool, results: str | None, as_json: bool) -> None:
    """Say what works for the jobs of a cluster, what is missing, and the command that mends it.

    Where the cluster has a scheduler that answers, a short job on one node looks from inside.
    """
    from hpcbench.config.cluster_profile import load_cluster
    from hpcbench.paths import results_folder
    from hpcbench.site.cluster_doctor import check_cluster

    profile, _ = load_cluster(cluster_name)
    findings = check_cluster(profile, results_folder(results), None if no_job else print_message)
    broken = [finding for finding in findings if not finding.works and finding.needed]
    if as_json:
        print_json({"cluster": profile.name, "findings": findings})
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0))
        for finding in findings:
            mark = (
                Text("ok", style="green")
                if finding.works
                else Text("missing", style="red" if finding.needed else "dim")
            )
            table.add_row(mark, *(Text(printable_text(one)) for one in (finding.what, finding.detail, finding.mend)))
        make_console().print(table)
    sys.exit(3 if broken else 0)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def init(folder: Path) -> None:
    """Write a project folder to start from: a sweep, a profile to copy, schemas for the editor.

    Files that exist are left as they are.
    """
    from hpcbench.site.project_setup import write_project

    written = write_project(folder)
    for path in written:
        print_message(f"wrote {path}")
    if not written:
        print_message(f"nothing to write: {folder} has everything already")
        return
    print_message(f"next: cd {folder} && hpcbench run quickstart")


@click.group()
def data() -> None:
    """Make samples for runs with data = "files", and list what is there."""


def _data_folder_option(function: Any) -> Any:
    text = "The data folder (default: $HPCBENCH_DATA, the profile's data_folder, or data)."
    return click.option("--folder", metavar="DIR", help=text)(function)


@data.command("make")
@click.argument("datasets", nargs=-1, required=True, metavar="DATASET...")
@click.option("--size", type=click.IntRange(min=1), metavar="N", help="Edge length or tokens (default: the set's own).")
@click.option(
    "--samples", type=click.IntRange(min=1), metavar="N", help="How many different ones (default: made in minutes)."
)
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
    """Make samples of each DATASET, in parallel.

    What is there is left alone: a maker that was stopped goes on where it was, and two at once do no harm.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from hpcbench.config.cluster_profile import load_cluster
    from hpcbench.site.project_setup import SampleRequest, make_samples

    _check_datasets(datasets)
    profile, _ = load_cluster(cluster_name)
    where = _resolve_data_folder(folder, profile.data_folder)
    screen = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bar:
        for name in datasets:
            task = bar.add_task(name, total=None)
            made = None
            for made in make_samples(profile, where, SampleRequest(name, size, samples, workers)):
                bar.update(task, completed=made.done, total=made.samples)
            if made is not None:
                print_message(f"{name}: {made.samples} samples in {where}")
    if as_json:
        from hpcbench.results.data_folder import list_datasets

        print_json({"folder": str(where), "datasets": list_datasets(where)})


@data.command("list")
@_data_folder_option
@cluster_option("local")
@json_option
def list_data(folder: str | None, cluster_name: str, as_json: bool) -> None:
    """List the sets in the data folder: made ones, and the sets' own files."""
    from hpcbench.config.cluster_profile import load_cluster
    from hpcbench.results.data_folder import list_datasets

    profile, _ = load_cluster(cluster_name)
    where = _resolve_data_folder(folder, profile.data_folder)
    found = list_datasets(where)
    if as_json:
        print_json({"folder": str(where), "datasets": found})
        return
    print_message(f"# {where}")
    if not found:
        print_message("nothing is there: hpcbench data make DATASET makes samples")
        return
    _show_datasets(found)


def _show_datasets(found: list[DatasetListing]) -> None:
    from rich.table import Table
    from rich.text import Text

    from hpcbench.fileio import printable_text
    from hpcbench.units import format_bytes

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("dataset", "kind", "size", "samples", "bytes", "", ""):
        table.add_column(heading, justify="right" if heading in ("size", "samples", "bytes") else "left")
    for one in found:
        cells = (
            one.dataset,
            one.kind,
            "" if one.size is None else str(one.size),
            "" if one.samples is None else f"{one.samples:,}",
            "" if one.bytes is None else format_bytes(one.bytes),
        )
        state = Text("complete", style="green") if one.complete else Text("incomplete", style="red")
        table.add_row(*(Text(printable_text(cell)) for cell in cells), state, Text(printable_text(one.detail)))
    make_console().print(table)


def _resolve_data_folder(given: str | None, of_profile: str | None) -> Path:
    from hpcbench.paths import data_folder, expand_path

    return expand_path(data_folder(given, of_profile))


def _check_datasets(datasets: tuple[str, ...]) -> None:
    from hpcbench.errors import ConfigError, did_you_mean
    from hpcbench.parallel.workloads import DATASETS

    known = [name for name, one in DATASETS.items() if one.synthetic]
    for name in datasets:
        if name not in known:
            why = "is real and needs no files" if name in DATASETS else "is unknown"
            raise ConfigError(f"dataset {name!r} {why}", hint=did_you_mean(name, known))


_SORT_KEYS = ("order", "parameters", "forward_flops", "backward_flops", "activation_bytes")


@click.command()
@click.option("--model", "names", metavar="M", multiple=True, help="Only this one; may be repeated.")
@click.option("--dataset", "datasets", metavar="D", multiple=True, help="Only with this one; may be repeated.")
@click.option("--input-size", metavar="N", type=click.IntRange(min=1), help="Edge length or tokens, not the dataset's.")
@click.option("--layers", "by_layer", is_flag=True, help="Every layer of one model on one dataset.")
@click.option("--sort", type=click.Choice(_SORT_KEYS), default="order", help="Largest first by this. (default: order)")
@click.option("--model-folder", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False),
              default=".", help="Where the module of a model of your own is. (default: this folder)")  # fmt: skip
@json_option
def models(
    names: tuple[str, ...], datasets: tuple[str, ...], input_size: int | None, by_layer: bool, sort: str,
    model_folder: Path, as_json: bool,
) -> None:  # fmt: skip
    """Show parameters, FLOPs and activation memory of every model on every dataset that it takes.

    The numbers of the shipped models come with the package. A model of your own, module:function, and other
    input sizes are measured when they are first asked for, which takes torch and a few seconds.
    """
    from hpcbench.errors import ConfigError
    from hpcbench.report.models_view import (
        find_layer_tables,
        layers_table,
        models_json,
        models_table,
        sort_layer_tables,
    )

    tables = sort_layer_tables(find_layer_tables(names, datasets, input_size, model_folder), sort)
    if as_json:
        print_json(models_json(tables, sort))
        return
    if not by_layer:
        make_console().print(models_table(tables))
        return
    if len(tables) > 1:
        pairs = ", ".join(f"{table.model} on {table.dataset}" for table in tables[:5])
        hint = f"name one with --model and --dataset: {pairs}{', ...' if len(tables) > 5 else ''}"
        raise ConfigError(f"--layers shows one pair, and {len(tables)} were asked for", hint=hint)
    screen = make_console()
    screen.print(layers_table(tables[0], sort, screen.width))
