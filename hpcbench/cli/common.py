"""Options and helpers that several commands share: finding sweeps, loading plans, printing JSON, text and tables."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from hpcbench.errors import EXIT_RUNS_FAILED, ConfigError, did_you_mean
from hpcbench.fileio import escape_control_characters, printable_text
from hpcbench.paths import project_folder, results_folder, search_folders
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import FAILED_STATUSES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hpcbench.submit.plan import SweepPlan
    from hpcbench.submit.run_state import RunState

_Function = TypeVar("_Function", bound=Callable[..., Any])

sources_argument = click.argument("sources", metavar="[SWEEP|TREE|BUNDLE]...", nargs=-1)
cluster_filter_option = click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
where_option = click.option(
    "--where", metavar="EXPR",
    help="Only runs that satisfy the expression, for example 'nodes == 4 and strategy != \"single\"'.",
)  # fmt: skip
results_option = click.option(
    "--results", metavar="DIR", help="The results tree (default: $HPCBENCH_RESULTS or results)."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on standard output, nothing else."
)
model_folder_option = click.option(
    "--model-folder", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False), default=".",
    help="Folder with the module of a custom model. (default: this folder)",
)  # fmt: skip


def cluster_option(default: str | None = None) -> Callable[[_Function], _Function]:
    """``--cluster NAME``; required without a default."""
    if default is None:
        return click.option("--cluster", "cluster_name", metavar="NAME", required=True, help="The cluster's profile.")
    text = f"The cluster's profile. (default: {default})"
    return click.option("--cluster", "cluster_name", metavar="NAME", default=default, help=text)


def out_option(text: str, metavar: str = "FILE") -> Callable[[_Function], _Function]:
    """``--out FILE``, with ``text`` as its help."""
    return click.option("--out", metavar=metavar, type=click.Path(path_type=Path), help=text)


def results_tree(results: str | None) -> ResultsTree:
    """The results tree that the command works on; ``results`` is the value of ``--results``."""
    return ResultsTree(results_folder(results))


def find_sweep_file(name: str) -> Path:
    """Find the file of a sweep.

    Args:
        name: A path, or the name of a file in a ``sweeps`` folder.

    Raises:
        ConfigError: There is no such file.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        if not path.is_file():
            near = sorted(str(other) for other in path.parent.glob("*.toml")) if path.parent.is_dir() else []
            raise ConfigError(f"no sweep file {name!r}", hint=did_you_mean(name, near))
        return path
    sweeps: dict[str, Path] = {}
    for folder in search_folders("sweeps"):
        for file in sorted(folder.glob("*.toml")):
            sweeps.setdefault(file.stem, file)
    if name not in sweeps:
        raise ConfigError(f"no sweep {name!r}", hint=did_you_mean(name, sweeps))
    return sweeps[name]


def load_plan(sweep: str, cluster_name: str, results: str | None) -> SweepPlan:
    """The plan of a sweep on a cluster.

    Args:
        sweep: As ``find_sweep_file`` takes it.
        cluster_name: Name of the cluster's profile.
        results: The value of ``--results``.

    Raises:
        ConfigError: The sweep or the profile is missing or invalid.
    """
    # Imported here: `status` and `table` need no pydantic.
    from hpcbench.config.cluster_profile import load_cluster
    from hpcbench.config.sweep_loader import load_sweep
    from hpcbench.submit.plan import make_plan

    loaded = load_sweep(find_sweep_file(sweep))
    profile, _ = load_cluster(cluster_name)
    plan = make_plan(loaded, profile, results_tree(results).cluster(profile.name))
    # It lives until the command ends; collecting garbage in it would make large sweeps cost more per run.
    gc.freeze()
    return plan


def runs_exit_code(states: dict[str, RunState]) -> int:
    """1 if a run failed, timed out, was stopped or lost; 0 otherwise."""
    return EXIT_RUNS_FAILED if {state.state for state in states.values()} & {*FAILED_STATUSES, "lost"} else 0


def print_json(document: Any) -> None:
    """Print ``document`` on standard output; control sequences of a terminal are escaped as JSON allows."""
    text = escape_control_characters(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.buffer.flush()


def make_console(*, stderr: bool = False) -> Console:
    """A rich console that does not guess at styles in text that users wrote."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def plain_table(
    headings: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right_aligned: Collection[str] = ()
) -> Table:
    """A table without lines.

    Args:
        headings: One for each column; no line of headings if all are empty.
        rows: Cells as text, made printable, or with a style of their own.
        right_aligned: Headings of columns with numbers.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=any(headings))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right_aligned else "left")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable_text(cell)) for cell in row))
    return table


def print_message(text: str) -> None:
    """Print a message for the person on standard error."""
    click.echo(printable_text(text), err=True)


def print_text(text: str) -> None:
    """Print ``text`` on standard output: unchanged into a file or a pipe, without control characters on a terminal."""
    click.echo(printable_text(text) if sys.stdout.isatty() else text, nl=False)


def project_relative(path: Path) -> str:
    """``path`` relative to the project folder if it lies inside, else unchanged."""
    try:
        return str(path.resolve().relative_to(project_folder()))
    except ValueError:
        return str(path)
