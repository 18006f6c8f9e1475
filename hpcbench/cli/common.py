"""Options that several commands share and their completion, and printing.

``--help`` and a shell that asks while the user types wait for this module: it imports little, and completion no more
than its own answer needs."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcbench.errors import ConfigError
from hpcbench.fileio import escape_control_characters, printable_text
from hpcbench.paths import is_visible, project_folder, results_folder, search_folders
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.units import pluralize

if TYPE_CHECKING:
    from hpcbench.submit.run_state import RunState
    from hpcbench.submit.watcher import RunCatalog

Function = TypeVar("Function", bound=Callable[..., Any])
_MAX_RUNS = 1000
_CLUSTER_HELP = "The cluster's profile, by name or path. (default: HPCBENCH_CLUSTER, hpcbench.toml, this machine's)"
RETRY_STATES = ("failed", "timeout", "cancelled", "preempted", "oom", "unsupported", "skipped", "lost")


def open_results(folder: str | None) -> ResultsTree:
    """The results tree that a command works on; ``folder`` is the value of ``--results``."""
    return ResultsTree(results_folder(folder))


def _trees(context: click.Context) -> list[ClusterTree]:
    results = open_results(context.params.get("results"))
    return [results.cluster(name) for name in results.clusters()]


def _matching(names: Iterable[str], incomplete: str, *, or_file: bool = False) -> list[CompletionItem]:
    """The names that begin so, after paths of files: click's script for bash drops all names that come before them."""
    files = [CompletionItem(incomplete, type="file")] if or_file else []
    return files + [CompletionItem(name) for name in sorted(set(names)) if name.startswith(incomplete)]


def _names_in(kind: str, patterns: Iterable[str]) -> set[str]:
    return {
        path.stem for folder in search_folders(kind) for pattern in patterns for path in folder.glob(f"{pattern}.toml")
    }


def complete_sweeps(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of sweep files and of sweeps in the results; paths of files."""
    recorded = {path.stem for tree in _trees(context) for path in (tree.root / "sweeps").glob("[!.]*.json")}
    return _matching(_names_in("sweeps", ["*", "*/*"]) | recorded, incomplete, or_file=True)


def complete_clusters(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of profiles; paths of files."""
    return _matching(_names_in("clusters", ["*", "*/*"]), incomplete, or_file=True)


def complete_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Arguments of ``check``: names of sweeps and profiles; paths of files."""
    profiles = complete_clusters(context, parameter, incomplete)[1:]
    return [*complete_sweeps(context, parameter, incomplete), *profiles]


def complete_runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of runs, and for a command that takes both, names of sweeps."""
    run_ids = [run_id for tree in _trees(context) for run_id in tree.run_ids() if run_id.startswith(incomplete)]
    sweeps = complete_sweeps(context, parameter, incomplete)[1:] if parameter.name == "run_id" else []
    return [*sweeps, *_matching(run_ids[:_MAX_RUNS], incomplete)]


_CHOICES = {
    "kind": "hpcbench.report.plots.plotting:PLOTS",
    "state": "hpcbench.submit.run_state:RUN_STATES",
    "model": "hpcbench.workloads.models:MODELS",
    "strategy": "hpcbench.strategies.catalog:selectable_strategies",
    "dataset": "hpcbench.workloads.datasets:DATASETS",
    "column": "hpcbench.report.column_names:column_choices",
    "set": "hpcbench.config.sweep_file:parameter_types",
}
"""The names that an option or argument takes: a collection, or a function that returns one."""


def _choices(name: str) -> Iterable[str]:
    module, _, attribute = _CHOICES[name].partition(":")
    choices = getattr(importlib.import_module(module), attribute)
    names: Iterable[str] = choices() if callable(choices) else choices
    return names


def complete_choices(_context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Kinds of plots, states, models, strategies or data sets, by the name of the option or argument."""
    return _matching(_choices(parameter.opts[0].removeprefix("--").removesuffix("s")), incomplete)


def complete_columns(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The last of comma-separated columns."""
    before, comma, _ = incomplete.rpartition(",")
    return _matching((f"{before}{comma}{name}" for name in _choices("column")), incomplete)


def complete_overrides(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The parameters of ``--set``."""
    prefix = "grid." * incomplete.startswith("grid.")
    return _matching((f"{prefix}{name}=" for name in _choices("set")), incomplete)


sources_argument = click.argument("sources", metavar="[SWEEP|TREE|BUNDLE]...", nargs=-1, shell_complete=complete_sweeps)
sweep_argument = click.argument("sweep", shell_complete=complete_sweeps)
cluster_filter_option = click.option(
    "--cluster", "cluster_name", metavar="NAME", help="Only this cluster.", shell_complete=complete_clusters,
    callback=lambda _context, _parameter, name: Path(name).stem if name and name.endswith(".toml") else name,
)  # fmt: skip
run_prefix_option = click.option(
    "--run",
    "prefix",
    metavar="RUN_ID",
    help="Only this run; its first digits are enough.",
    shell_complete=complete_runs,
)
where_option = click.option(
    "--where", metavar="EXPR",
    help="Only runs that satisfy the expression, for example 'nodes == 4 and strategy != \"single\"'.",
)  # fmt: skip
results_option = click.option(
    "--results", metavar="DIR", help="The results tree (default: $HPCBENCH_RESULTS or results).",
    callback=lambda context, _parameter, folder: folder if context.resilient_parsing else open_results(folder),
)  # fmt: skip
"""The parameter ``results`` is the ``ResultsTree``."""


def _open_existing(context: click.Context, _parameter: click.Parameter, folder: str | None) -> Any:
    if context.resilient_parsing:
        return folder
    tree = open_results(folder)
    if folder is not None and not is_visible(tree.root):
        raise ConfigError(f"there is no folder {tree.root}{_near_folder(tree.root)}", where="--results")
    return tree


read_results_option = click.option(
    "--results", metavar="DIR", help="The results tree (default: $HPCBENCH_RESULTS or results).",
    callback=_open_existing,
)  # fmt: skip
"""Like ``results_option``, for commands that only read: a folder that is absent is a mistake in its name."""
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


def all_of(*options: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """One decorator for several options, in the order of ``--help``."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _chosen_cluster(context: click.Context, _parameter: click.Parameter, name: str | None) -> str:
    """``name``, else the default cluster, which is printed with its reason."""
    if name is not None or context.resilient_parsing:
        return name or ""
    # Imported here: `--help` and completion read no profile.
    from hpcbench.config.cluster_profile import default_cluster

    chosen = default_cluster()
    print_message(f"using cluster {chosen.name}, because {chosen.reason}")
    return chosen.name


def cluster_option(default: str | None = None) -> Callable[[Function], Function]:
    """``--cluster NAME``; without a default of its own the command uses ``default_cluster``."""
    if default is None:
        return click.option(
            "--cluster", "cluster_name", metavar="NAME|FILE", callback=_chosen_cluster, help=_CLUSTER_HELP,
            shell_complete=complete_clusters,
        )  # fmt: skip
    text = f"The cluster's profile. (default: {default})"
    return click.option(
        "--cluster", "cluster_name", metavar="NAME", default=default, help=text, shell_complete=complete_clusters
    )


cluster_argument = click.argument(
    "name", metavar="[NAME|FILE]", required=False, callback=_chosen_cluster, shell_complete=complete_clusters
)
"""The cluster as ``--cluster`` takes it, for commands about clusters."""
overrides_option = click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, shell_complete=complete_overrides,
    help="Change the sweep for this command: steps=5, grid.batch_size=8,16, repeats=5. May be repeated.",
)  # fmt: skip
plan_options = all_of(sweep_argument, cluster_option(), overrides_option)
"""The parameters ``sweep``, ``cluster_name`` and ``overrides`` of ``load_plan``."""
output_options = all_of(results_option, json_option)
read_options = all_of(read_results_option, json_option)
filter_options = all_of(cluster_filter_option, where_option)


def filter_runs(catalog: RunCatalog, states: Mapping[str, RunState], where: str, sweep: str) -> dict[str, RunState]:
    """The runs of ``sweep`` that satisfy ``where``; a message states that there are none."""
    chosen = catalog.satisfying(states, where)
    if states and not chosen:
        print_message(f"none of the {pluralize(len(states), 'run')} of {sweep} satisfies --where {where!r}")
    return chosen


def runs_with_prefix(states: Mapping[str, RunState], prefix: str, sweep: str) -> dict[str, RunState]:
    """The runs of ``sweep`` whose id begins with ``prefix``; a message states that there are none."""
    chosen = {run_id: state for run_id, state in states.items() if run_id.startswith(prefix)}
    if states and not chosen:
        runs = pluralize(len(states), "run")
        print_message(f"none of the {runs} of {sweep} has an id that begins with --run {printable_text(prefix)!r}")
    return chosen


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
        named = f"{tree.root} (--results, HPCBENCH_RESULTS){_near_folder(tree.root)}"
        return f"no results in {title}: there is no folder {named}"
    return f"no results yet in {title}"


def _near_folder(folder: Path) -> str:
    """The question whether a folder of a similar name is meant; empty without one."""
    near = difflib.get_close_matches(folder.name, [path.name for path in folder.parent.glob("*/")], n=1)
    return f"; did you mean {folder.parent / near[0]}?" if near else ""


def print_json(document: Any) -> None:
    """Print ``document`` on standard output; control sequences of a terminal are escaped as JSON allows."""
    text = escape_control_characters(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.buffer.flush()


def make_console(*, stderr: bool = False) -> Console:
    """A rich console that does not guess at styles in text that users wrote."""
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
