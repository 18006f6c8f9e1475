"""The command ``completion``, and what it completes: sweeps, clusters, ids of runs, columns, parameters, plots, states,
models, strategies and data sets.

A shell asks while the user types: nothing here imports more than its own answer needs."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class

from hpcbench.paths import results_folder, search_folders
from hpcbench.results.results_tree import ClusterTree, ResultsTree

_VARIABLE = "_HPCBENCH_COMPLETE"
_SHELLS = ("bash", "zsh", "fish")
_MAX_RUNS = 1000


def _trees(context: click.Context) -> list[ClusterTree]:
    results = ResultsTree(results_folder(context.params.get("results")))
    return [results.cluster(name) for name in results.clusters()]


def _matching(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(set(names)) if name.startswith(incomplete)]


def _matching_or_file(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    """``names`` after paths of files: click's script for bash drops all names that come before them."""
    return [CompletionItem(incomplete, type="file"), *_matching(names, incomplete)]


def _names_in(kind: str, patterns: Iterable[str]) -> set[str]:
    return {
        path.stem for folder in search_folders(kind) for pattern in patterns for path in folder.glob(f"{pattern}.toml")
    }


def complete_sweeps(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of sweep files and of sweeps in the results; paths of files."""
    recorded = {path.stem for tree in _trees(context) for path in (tree.root / "sweeps").glob("[!.]*.json")}
    return _matching_or_file(_names_in("sweeps", ["*"]) | recorded, incomplete)


def complete_clusters(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of profiles; paths of files."""
    names = _names_in("clusters", ["*", "*/*"])
    return _matching_or_file(names, incomplete)


def complete_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Arguments of ``check``: names of sweeps and profiles; paths of files."""
    profiles = _matching(_names_in("clusters", ["*", "*/*"]), incomplete)
    return [*complete_sweeps(context, parameter, incomplete), *profiles]


def complete_runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of runs, and for a command that takes both, names of sweeps."""
    run_ids = [run_id for tree in _trees(context) for run_id in tree.run_ids() if run_id.startswith(incomplete)]
    sweeps = complete_sweeps(context, parameter, incomplete)[1:] if parameter.name == "run_id" else []
    return [*sweeps, *_matching(run_ids[:_MAX_RUNS], incomplete)]


def complete_columns(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The last of comma-separated columns."""
    from hpcbench.report.column_names import column_choices

    before, comma, _ = incomplete.rpartition(",")
    return _matching((f"{before}{comma}{name}" for name in column_choices()), incomplete)


def complete_overrides(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The parameters of ``--set``."""
    from hpcbench.config.sweep_file import parameter_types

    prefix = "grid." * incomplete.startswith("grid.")
    return _matching((f"{prefix}{name}=" for name in parameter_types()), incomplete)


_CHOICES = {
    "kind": "hpcbench.report.plots.plotting:PLOTS",
    "state": "hpcbench.cli.status_commands:RUN_STATES",
    "model": "hpcbench.parallel.catalog:shipped_model_entries",
    "strategy": "hpcbench.parallel.catalog:selectable_strategies",
    "dataset": "hpcbench.parallel.workloads:DATASETS",
}
"""The names that an option or argument takes: a collection, or a function that returns one."""


def complete_choices(_context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Kinds of plots, states, models, strategies or data sets, by the name of the option or argument."""
    name = parameter.opts[0].removeprefix("--").removesuffix("s")
    module, _, attribute = _CHOICES[name].partition(":")
    choices = getattr(importlib.import_module(module), attribute)
    return _matching(choices() if callable(choices) else choices, incomplete)


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    bash: eval "$(hpcbench completion bash)"      in ~/.bashrc
    zsh:  eval "$(hpcbench completion zsh)"       in ~/.zshrc, after compinit
    fish: hpcbench completion fish | source       in ~/.config/fish/config.fish
    """
    root = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind is not None, shell
    source = kind.source_template % kind(root, {}, "hpcbench", _VARIABLE).source_vars()
    # click's script for fish cuts a value at its first comma, as in `--by strategy,batch_size`.
    click.echo(source.strip().replace('string split ","', 'string split -m 1 ","'))
