"""Options and helpers that several commands share: finding sweeps, loading plans, printing JSON, text and tables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpcbench.errors import EXIT_RUNS_FAILED, ConfigError, did_you_mean
from hpcbench.paths import project_folder, results_folder, search_folders

if TYPE_CHECKING:
    from rich.console import Console

    from hpcbench.config.sweep_loader import Sweep
    from hpcbench.results.results_tree import ResultsTree
    from hpcbench.submit.plan import SweepPlan
    from hpcbench.submit.run_state import RunState

_Function = TypeVar("_Function", bound=Callable[..., Any])


def results_option(function: _Function) -> _Function:
    """``--results DIR``."""
    return click.option("--results", metavar="DIR", help="The results tree (default: $HPCBENCH_RESULTS or results).")(
        function
    )


def cluster_option(default: str | None = None) -> Callable[[_Function], _Function]:
    """``--cluster NAME``; required without a default."""
    if default is None:
        return click.option("--cluster", "cluster_name", metavar="NAME", required=True, help="The cluster's profile.")
    text = f"The cluster's profile. (default: {default})"
    return click.option("--cluster", "cluster_name", metavar="NAME", default=default, help=text)


def json_option(function: _Function) -> _Function:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output, nothing else.")(
        function
    )


def results_tree(results: str | None) -> ResultsTree:
    """The results tree that the command works on."""
    from hpcbench.results.results_tree import ResultsTree

    return ResultsTree(results_folder(results))


def find_sweep_file(given: str) -> Path:
    """The file of a sweep: a path, or the name of a file in a ``sweeps`` folder."""
    path = Path(given)
    if path.suffix == ".toml" or path.exists():
        if not path.is_file():
            near = sorted(str(other) for other in path.parent.glob("*.toml")) if path.parent.is_dir() else []
            raise ConfigError(f"no sweep file {given!r}", hint=did_you_mean(given, near))
        return path
    known = named_sweeps()
    if given not in known:
        raise ConfigError(f"no sweep {given!r}", hint=did_you_mean(given, known))
    return known[given]


def named_sweeps() -> dict[str, Path]:
    """The sweeps that can be named."""
    found: dict[str, Path] = {}
    for folder in search_folders("sweeps"):
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def load_plan(sweep: str, cluster_name: str, results: str | None) -> SweepPlan:
    """The plan of a sweep on a cluster."""
    import gc

    from hpcbench.config.cluster_profile import load_cluster
    from hpcbench.submit.plan import make_plan

    loaded: Sweep = _load_sweep(sweep)
    profile, _ = load_cluster(cluster_name)
    made = make_plan(loaded, profile, results_tree(results).cluster(profile.name))
    # It stays until the command ends; walking it again and again would make large sweeps cost more per run.
    gc.freeze()
    return made


def _load_sweep(given: str) -> Sweep:
    from hpcbench.config.sweep_loader import load_sweep

    return load_sweep(find_sweep_file(given))


def runs_exit_code(states: dict[str, RunState]) -> int:
    """1 where a run failed, timed out, was stopped or lost; 0 otherwise."""
    from hpcbench.results.schema import FAILED_STATUSES

    return EXIT_RUNS_FAILED if {state.state for state in states.values()} & {*FAILED_STATUSES, "lost"} else 0


def print_json(document: Any) -> None:
    """``document`` on standard output; what could steer a terminal is escaped as JSON allows."""
    import msgspec

    from hpcbench.fileio import escape_control_characters

    text = escape_control_characters(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.buffer.flush()


def make_console(*, stderr: bool = False) -> Console:
    """A rich console that does not guess at styles in text that users wrote."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def print_message(text: str) -> None:
    """A message for the person, kept off standard output."""
    from hpcbench.fileio import printable_text

    click.echo(printable_text(text), err=True)


def print_text(text: str) -> None:
    """``text`` on standard output: its very bytes for a file or a pipe, without control characters for a terminal."""
    from hpcbench.fileio import printable_text

    click.echo(printable_text(text) if sys.stdout.isatty() else text, nl=False)


def project_relative(path: Path) -> str:
    """``path`` relative to the project where it lies inside."""
    try:
        return str(path.resolve().relative_to(project_folder()))
    except ValueError:
        return str(path)
