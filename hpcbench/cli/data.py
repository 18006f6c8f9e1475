"""``data``: samples in files, made once and shared by all runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import cluster_option, console, json_option, print_json, say

if TYPE_CHECKING:
    from hpcbench.results.datafolder import Found


@click.group()
def data() -> None:
    """Make samples for runs with data = "files", and list what is there."""


def _folder_option(function: Any) -> Any:
    text = "The data folder (default: $HPCBENCH_DATA, the profile's data_folder, or data)."
    return click.option("--folder", metavar="DIR", help=text)(function)


@data.command("make")
@click.argument("datasets", nargs=-1, required=True, metavar="DATASET...")
@click.option("--size", type=click.IntRange(min=1), metavar="N", help="Edge length or tokens (default: the set's own).")
@click.option(
    "--samples", type=click.IntRange(min=1), metavar="N", help="How many different ones (default: made in minutes)."
)
@_folder_option
@cluster_option("local")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Processes (default: one per core).")
@json_option
def make(
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

    from hpcbench.config.load import load_cluster
    from hpcbench.submit.samples import Order, make_samples

    _check(datasets)
    profile, _ = load_cluster(cluster_name)
    where = _folder(folder, profile.data_folder)
    screen = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bar:
        for name in datasets:
            task = bar.add_task(name, total=None)
            made = None
            for made in make_samples(profile, where, Order(name, size, samples, workers)):
                bar.update(task, completed=made.done, total=made.samples)
            if made is not None:
                say(f"{name}: {made.samples} samples in {where}")
    if as_json:
        from hpcbench.results.datafolder import survey

        print_json({"folder": str(where), "datasets": survey(where)})


@data.command("list")
@_folder_option
@cluster_option("local")
@json_option
def list_data(folder: str | None, cluster_name: str, as_json: bool) -> None:
    """List the sets in the data folder: made ones, and the sets' own files."""
    from hpcbench.config.load import load_cluster
    from hpcbench.results.datafolder import survey

    profile, _ = load_cluster(cluster_name)
    where = _folder(folder, profile.data_folder)
    found = survey(where)
    if as_json:
        print_json({"folder": str(where), "datasets": found})
        return
    say(f"# {where}")
    if not found:
        say("nothing is there: hpcbench data make DATASET makes samples")
        return
    _show(found)


def _show(found: list[Found]) -> None:
    from rich.table import Table
    from rich.text import Text

    from hpcbench.fileio import printable
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
        table.add_row(*(Text(printable(cell)) for cell in cells), state, Text(printable(one.detail)))
    console().print(table)


def _folder(given: str | None, of_profile: str | None) -> Path:
    from hpcbench.paths import data_folder, expanded

    return expanded(data_folder(given, of_profile))


def _check(datasets: tuple[str, ...]) -> None:
    from hpcbench.errors import ConfigError, did_you_mean
    from hpcbench.parallel.datasets import DATASETS

    known = [name for name, one in DATASETS.items() if one.synthetic]
    for name in datasets:
        if name not in known:
            why = "is real and needs no files" if name in DATASETS else "is unknown"
            raise ConfigError(f"dataset {name!r} {why}", hint=did_you_mean(name, known))
