"""The commands ``cluster list``, ``cluster show`` and ``cluster init``."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import click

from hpcbench.cli.common import (
    complete_clusters,
    json_option,
    make_console,
    plain_table,
    print_json,
    print_message,
    print_text,
    project_relative,
)
from hpcbench.cli.lazy_group import LazyGroup
from hpcbench.config.cluster_profile import (
    ClusterProfile,
    find_cluster_profiles,
    is_login_node,
    load_cluster,
    load_cluster_file,
)
from hpcbench.config.toml_tables import TomlSource, parse_toml, validate_table
from hpcbench.errors import ConfigError, HpcbenchError, SubmitError
from hpcbench.fileio import write_atomic, write_file
from hpcbench.paths import project_folder
from hpcbench.site.node_probe import run_probe
from hpcbench.site.profile_writer import profile_toml
from hpcbench.site.slurm_facts import query_site
from hpcbench.submit.scheduler import find_command
from hpcbench.submit.slurm_queue import first_cluster

_COMMANDS = {
    "calibrate": (
        "hpcbench.cli.calibrate_commands:calibrate_cluster",
        "Measure a cluster and fit the oracle's machine.",
    ),
    "init": ("hpcbench.cli.cluster_commands:init_cluster", "Write a profile from the live scheduler."),
    "list": ("hpcbench.cli.cluster_commands:list_clusters", "List every profile that --cluster takes."),
    "show": ("hpcbench.cli.cluster_commands:show_cluster", "Show a profile."),
}


@click.group(cls=LazyGroup, lazy_commands=_COMMANDS)
def cluster() -> None:
    """List, show and write cluster profiles."""


@click.command("list")
@click.option("--here", "only_here", is_flag=True, help="Only profiles that name this machine as a login node.")
@json_option
def list_clusters(only_here: bool, as_json: bool) -> None:
    """List every profile that --cluster takes: the project's, yours, the shipped ones.

    Profiles that name this machine as a login node come first and are marked.
    """
    entries = [_profile_entry(name, path) for name, path in find_cluster_profiles().items()]
    entries.sort(key=lambda entry: not entry["here"])
    if only_here:
        entries = [entry for entry in entries if entry["here"]]
        if not entries:
            print_message(
                f"no profile knows this machine, {socket.getfqdn()}, as its login node: see docs/add-a-cluster.md"
            )
    if as_json:
        print_json({"clusters": entries})
    elif entries:
        # The path is in --json and in `cluster show`: it would leave no room for the description.
        headings = ("name", *(["here"] if any(entry["here"] for entry in entries) else []), "verified", "description")
        rows = [{**entry, "here": "here" if entry["here"] else ""} for entry in entries]
        make_console().print(plain_table(headings, [[row[heading] for heading in headings] for row in rows]))


def _profile_entry(name: str, path: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "file": project_relative(path), "verified": "", "here": False}
    try:
        profile, _ = load_cluster_file(path)
    except HpcbenchError as error:
        return {**entry, "description": f"broken: {str(error).splitlines()[0].replace(f'{path.parent}/', '')}"}
    here = is_login_node(profile.match)
    return {**entry, "description": profile.description, "verified": profile.verified, "here": here}


@click.command("show")
@click.argument("name", shell_complete=complete_clusters)
@json_option
def show_cluster(name: str, as_json: bool) -> None:
    """Show a profile as it was written; --json includes defaults and the profiles that it extends."""
    profile, source = load_cluster(name)
    if as_json:
        print_json(profile.model_dump(mode="json"))
        return
    print_message(f"# {source.path}")
    print_text(source.text)


@click.command("init")
@click.argument("name")
@click.option("--probe", "probes", is_flag=True, help="Also run a short job that examines a node.")
def init_cluster(name: str, probes: bool) -> None:
    """Write clusters/NAME.toml from the live scheduler: partitions, limits, nodes, devices, accounts.

    Settings that the scheduler does not contain are written as comments. A file that exists is left unchanged.
    """
    path = project_folder() / "clusters" / f"{name}.toml"
    if path.exists():
        raise ConfigError(f"{path} exists", hint="choose another name, or move it away")
    # The scheduler is reached as this shell reaches it.
    config_file = os.environ.get("SLURM_CONF")
    data = {"name": name, "scheduler": {"config_file": config_file} if config_file else {}}
    base = validate_table(ClusterProfile, data, TomlSource(path, ""))
    try:
        facts = query_site(base, first_cluster(base))
    except SubmitError as error:
        raise _no_scheduler(path, base, error) from None
    text = profile_toml(name, facts, config_file=base.scheduler.config_file)
    # A file is left only if commands can read it.
    validate_table(ClusterProfile, *parse_toml(text, path))
    write_file(path, text.encode())
    if probes:
        # The job is submitted with the profile that was just written.
        try:
            probe = run_probe(load_cluster_file(path)[0], print_message)
        except HpcbenchError:
            print_message(
                f"wrote {project_relative(path)} from the scheduler alone; to look at a node after all, move it "
                f"away first"
            )
            raise
        write_atomic(path, profile_toml(name, facts, probe, base.scheduler.config_file).encode())
    load_cluster_file(path)
    print_message(f"wrote {project_relative(path)}")
    print_message(f"next: hpcbench check {project_relative(path)} && hpcbench doctor --cluster {name}")


def _no_scheduler(path: Path, base: ClusterProfile, error: SubmitError) -> SubmitError:
    """The error of a machine without a SLURM that answers: the commands that it has, and the keys to fill in."""
    found = [str(command) for name in ("scontrol", "qsub") if (command := find_command(name, base))]
    message = f"no SLURM answers on {socket.getfqdn()}: found {' and '.join(found) or 'neither scontrol nor qsub'}"
    last = error.message.splitlines()[-1]
    hint = f"""run this on a login node of the cluster, with SLURM_CONF set if SLURM needs it ({last})
  or: hpcbench cluster show generic-slurm > {project_relative(path)}
  and fill in name, device, default_partition, [scheduler] kind ("pbs" for qsub, "local" without a scheduler),
  and [node] cores, memory_bytes, devices, device_type"""
    return SubmitError(message, hint=hint)
