"""The plan of a command: its sweep, from a file or from options, on a cluster."""

from __future__ import annotations

import gc
import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from hpcbench.cli.common import print_message
from hpcbench.config.cluster_profile import ClusterProfile, find_cluster_profiles, is_profile_path, load_cluster
from hpcbench.config.sweep_file import apply_overrides, settings_lines
from hpcbench.config.sweep_loader import Sweep, load_sweep, parse_sweep
from hpcbench.config.toml_tables import NAME_PATTERN, TomlSource
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean
from hpcbench.fileio import write_file
from hpcbench.paths import is_visible, search_folders
from hpcbench.predict.command_layouts import layout_refusal
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.strategies.catalog import selectable_strategies
from hpcbench.submit.plan import SweepPlan, make_plan
from hpcbench.submit.submission_record import read_sweep_record
from hpcbench.workloads.models import MODELS

_DATASETS_BY_KIND = {"images": "cifar10", "volumes": "cosmoflow", "tokens": "tokens"}
_ONE_OFF_BATCH_SIZE = 32


def find_sweep_file(name: str, hint: str | None = None) -> Path:
    """Find the file of a sweep.

    Args:
        name: A path, or the name of a file in a ``sweeps`` folder or in a folder below it.
        hint: The hint where no file has that name; ``None``: the nearest names.

    Raises:
        ConfigError: There is no such file.
    """
    path = Path(name)
    if path.suffix == ".toml" or is_visible(path):
        if path.is_dir():
            raise ConfigError(f"{name} is a folder", hint="name a .toml file in it")
        if not path.is_file():
            near = sorted(str(other) for other in path.parent.glob("*.toml")) if path.parent.is_dir() else []
            raise ConfigError(f"no sweep file {name!r}", hint=did_you_mean(name, near))
        return path
    sweeps: dict[str, Path] = {}
    for folder in search_folders("sweeps"):
        for file in [*sorted(folder.glob("*.toml")), *sorted(folder.glob("*/*.toml"))]:
            sweeps.setdefault(file.stem, file)
    if name not in sweeps:
        raise ConfigError(f"no sweep {name!r}", hint=hint or did_you_mean(name, sweeps))
    return sweeps[name]


def load_plan(sweep: str | Sweep, cluster_name: str, results: ResultsTree, overrides: Sequence[str] = ()) -> SweepPlan:
    """The plan of a sweep on a cluster.

    Args:
        sweep: As ``find_sweep_file`` takes it, the name of a one-off run on the cluster, or a loaded sweep.
        cluster_name: Name or path of the cluster's profile.
        results: The results tree.
        overrides: The values of ``--set``.

    Raises:
        ConfigError: The sweep or the profile is missing or invalid.
    """
    profile, source = load_cluster(cluster_name)
    tree = results.cluster(profile.name)
    if isinstance(sweep, str):
        path = one_off_path(tree, sweep)
        if path is None or not path.is_file():
            path = find_sweep_file(sweep, _submitted_from(tree, sweep, cluster_name))
        sweep = load_sweep(path, overrides)
    plan = make_plan(sweep, profile, tree, layout_refusal(sweep.command), print_message)
    if is_profile_path(cluster_name) and find_cluster_profiles().get(profile.name) != source.path.resolve():
        plan.profile_file = source.path.resolve()
    # It lives until the command ends; collecting garbage in it would make large sweeps cost more per run.
    gc.freeze()
    return plan


def _submitted_from(tree: ClusterTree, name: str, cluster_name: str) -> str | None:
    """The command with the file from which a sweep was submitted, as a hint for its name."""
    record = read_sweep_record(tree, name) if re.fullmatch(NAME_PATTERN, name) else None
    if record is None or record.sweep_file is None:
        return None
    file = record.sweep_file.removeprefix(f"{Path.cwd()}/")
    command = shlex.join(["hpcbench", str(click.get_current_context().info_name), file, "--cluster", cluster_name])
    return f"it was submitted from {file}: {command}"


def sweep_argument(sweep: Sweep) -> str:
    """The word by which commands find a sweep: its name if its file lies in a folder of sweeps, else the file."""
    file = sweep.source.path
    is_named = not file.is_file() or (file.stem == sweep.name and "sweeps" in file.resolve().parts[-3:-1])
    return sweep.name if is_named else shlex.quote(str(file))


def one_off_path(tree: ClusterTree, name: str) -> Path | None:
    """The file in the results that keeps a sweep from the command line; ``None`` if ``name`` is not a sweep's name."""
    return tree.sweep_path(name).with_suffix(".toml") if re.fullmatch(NAME_PATTERN, name) else None


def keep_one_off(sweep: Sweep, tree: ClusterTree) -> None:
    """Write a sweep from the command line beside its record, so that ``retry`` and ``plan`` find it by its name."""
    path = one_off_path(tree, sweep.name)
    assert path is not None, sweep.name
    write_file(path, sweep.source.text.encode())
    print_message(f"run {sweep.name}: hpcbench status, table or retry {sweep.name}")


def one_off_sweep(name: str | None, parameters: Mapping[str, Any], overrides: Sequence[str]) -> Sweep:
    """The sweep of ``run --model M --strategy S``: one point, and what ``--set`` makes of it.

    Data set and batch size have defaults, which are printed. Without ``name`` the name follows from the parameters.

    Raises:
        ConfigError: An option is missing or invalid; all that are missing are named.
    """
    data: dict[str, Any] = {"fixed": {key: value for key, value in parameters.items() if value is not None}}
    origins = apply_overrides(data, overrides)
    fixed, grid = data["fixed"], data.get("grid", {})
    choices: dict[str, Iterable[str]] = {"model": MODELS, "strategy": selectable_strategies()}
    check_options({f"--{key}": names for key, names in choices.items() if key not in fixed | grid})
    defaults: dict[str, Any] = {}
    entry = MODELS.get(fixed.get("model"))
    if "dataset" not in fixed | grid and entry is not None and entry.kind in _DATASETS_BY_KIND:
        defaults["dataset"] = _DATASETS_BY_KIND[entry.kind]
    if not {"batch_size", "global_batch_size"} & {*fixed, *grid}:
        defaults["batch_size"] = _ONE_OFF_BATCH_SIZE
    if defaults:
        print_message("defaults: " + ", ".join(f"{key} {value}" for key, value in defaults.items()))
        data["fixed"] = fixed | defaults
    digest = hashlib.sha256(msgspec.json.encode(data, order="deterministic")).hexdigest()[:6]
    words = [str(fixed.get(key, key)).rpartition(":")[2] for key in choices]
    data["name"] = name or data.get("name") or "-".join([*words, digest])
    text = "".join(f"{line}\n" for line in settings_lines(data))
    return parse_sweep(data, TomlSource(Path("command line"), text, origins))


def print_if_predicted_only(profile: ClusterProfile) -> None:
    """Print that no job reaches the machine of a profile, and how to submit, if that is so."""
    if profile.scheduler.kind == "none":
        name = profile.name
        print_message(f'no job reaches {name}: to submit, write a profile of your site with extends = "{name}"')


def check_options(missing: Mapping[str, Iterable[str]], problems: Iterable[HpcbenchError] = ()) -> None:
    """Raise ``ConfigErrors`` with every option in ``missing``, each with its choices, and further ``problems``."""
    if missing:
        errors = [
            ConfigError(f"option {option} is missing", hint=f"choices: {', '.join(sorted(choices))}")
            for option, choices in missing.items()
        ]
        raise ConfigErrors([*errors, *problems])
