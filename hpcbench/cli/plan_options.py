"""Options of commands that plan runs: the sweep, and the cluster that it runs on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import click

from hpcbench.cli.common import Function, print_message, results_tree
from hpcbench.config.cluster_profile import find_cluster_profiles, is_profile_path, load_cluster
from hpcbench.config.default_cluster import default_cluster
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.paths import search_folders
from hpcbench.submit.plan import SweepPlan, make_plan

_CLUSTER_HELP = "The cluster's profile, by name or path. (default: HPCBENCH_CLUSTER, hpcbench.toml, this machine's)"


def _chosen_cluster(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str:
    """``name``, else the default cluster, which is printed with its reason."""
    if name is not None:
        return name
    chosen = default_cluster()
    print_message(f"cluster {chosen.name}: {chosen.reason}")
    return chosen.name


def cluster_option(default: str | None = None) -> Callable[[Function], Function]:
    """``--cluster NAME``; without a default of its own the command uses ``default_cluster``."""
    if default is None:
        return click.option(
            "--cluster", "cluster_name", metavar="NAME|FILE", callback=_chosen_cluster, help=_CLUSTER_HELP
        )
    text = f"The cluster's profile. (default: {default})"
    return click.option("--cluster", "cluster_name", metavar="NAME", default=default, help=text)


cluster_argument = click.argument("name", metavar="[NAME|FILE]", required=False, callback=_chosen_cluster)
"""The cluster as ``--cluster`` takes it, for commands about clusters."""


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
        cluster_name: Name or path of the cluster's profile.
        results: The value of ``--results``.

    Raises:
        ConfigError: The sweep or the profile is missing or invalid.
    """
    loaded = load_sweep(find_sweep_file(sweep))
    profile, source = load_cluster(cluster_name)
    plan = make_plan(loaded, profile, results_tree(results).cluster(profile.name))
    if is_profile_path(cluster_name) and find_cluster_profiles().get(profile.name) != source.path.resolve():
        plan.profile_file = source.path.resolve()
    # It lives until the command ends; collecting garbage in it would make large sweeps cost more per run.
    gc.freeze()
    return plan
