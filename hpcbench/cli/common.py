"""Options and helpers that several commands share: the results tree, printing of JSON, text and tables."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from hpcbench.cli.completion import complete_clusters, complete_sweeps
from hpcbench.errors import EXIT_RUNS_FAILED
from hpcbench.fileio import escape_control_characters, printable_text
from hpcbench.paths import project_folder, results_folder
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import FAILED_STATUSES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hpcbench.submit.run_state import RunState

Function = TypeVar("Function", bound=Callable[..., Any])

sources_argument = click.argument("sources", metavar="[SWEEP|TREE|BUNDLE]...", nargs=-1, shell_complete=complete_sweeps)
sweep_argument = click.argument("sweep", shell_complete=complete_sweeps)
cluster_filter_option = click.option(
    "--cluster", "cluster_name", metavar="NAME", help="Only this cluster.", shell_complete=complete_clusters,
    callback=lambda _context, _parameter, name: Path(name).stem if name and name.endswith(".toml") else name,
)  # fmt: skip
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


def out_option(text: str, metavar: str = "FILE") -> Callable[[Function], Function]:
    """``--out FILE``, with ``text`` as its help."""
    return click.option("--out", metavar=metavar, type=click.Path(path_type=Path), help=text)


def results_tree(results: str | None) -> ResultsTree:
    """The results tree that the command works on; ``results`` is the value of ``--results``."""
    return ResultsTree(results_folder(results))


def runs_exit_code(states: dict[str, RunState]) -> int:
    """1 if a run failed, timed out, was stopped or lost; 0 otherwise."""
    return EXIT_RUNS_FAILED if {state.state for state in states.values()} & {*FAILED_STATUSES, "lost"} else 0


def why_nothing(tree: ResultsTree, sources: Sequence[str], runs: int, where: str | None = None) -> str:
    """Why there is nothing to show: a filter, a missing folder, or no results yet.

    Args:
        tree: The tree of the sweeps in ``sources``.
        sources: As the command was given them.
        runs: Number of runs before the filter.
        where: The filter.
    """
    title = ", ".join(sources) or str(tree.root)
    if where is not None and runs:
        return f"none of the {runs} runs in {title} satisfies --where {where!r}"
    if not tree.root.is_dir() and tree.root != project_folder() / "results":
        near = difflib.get_close_matches(tree.root.name, [path.name for path in tree.root.parent.glob("*/")], n=1)
        hint = f"; did you mean {tree.root.parent / near[0]}?" if near else ""
        return f"no results in {title}: there is no folder {tree.root} (--results, HPCBENCH_RESULTS){hint}"
    return f"no results yet in {title}"


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
        table.add_column(heading, justify="right" if heading in right_aligned else "left", overflow="fold")
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
