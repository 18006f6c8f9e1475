"""``cluster list|show|init|calibrate``: the profiles of clusters, and what was measured on them."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import click

from hpcbench.cli.common import (
    console,
    exit_code,
    json_option,
    print_json,
    results_option,
    say,
    shorten,
    show_text,
    tree,
)
from hpcbench.fileio import printable


@click.group()
def cluster() -> None:
    """List, show and write cluster profiles."""


@cluster.command("list")
@click.option("--here", "only_here", is_flag=True, help="Only those whose login nodes this machine is one of.")
@json_option
def list_clusters(only_here: bool, as_json: bool) -> None:
    """List every profile that --cluster takes: the project's, yours, the shipped ones.

    Those whose login nodes this machine is one of, as far as its name tells, come first and are marked.
    """
    entries = sorted(_entries(), key=lambda entry: not entry["here"])
    if only_here:
        entries = [entry for entry in entries if entry["here"]]
        if not entries:
            say(f"no profile knows this machine, {socket.getfqdn()}, as its login node: see docs/add-a-cluster.md")
    if as_json:
        print_json({"clusters": entries})
    if as_json or not entries:
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    headings = ("name", "here", "verified", "description", "file")
    for heading in headings:
        table.add_column(heading)
    for entry in entries:
        shown = {**entry, "here": "here" if entry["here"] else ""}
        table.add_row(*(Text(printable(shown[key])) for key in headings))
    console().print(table)


def _entries() -> list[dict[str, Any]]:
    from hpcbench.config.load import cluster_paths, load_cluster_file
    from hpcbench.errors import HpcbenchError
    from hpcbench.submit.site.here import is_here

    entries: list[dict[str, Any]] = []
    for name, path in cluster_paths().items():
        entry: dict[str, Any] = {"name": name, "file": shorten(path), "verified": "", "here": False}
        try:
            profile, _ = load_cluster_file(path)
        except HpcbenchError as error:
            entries.append({**entry, "description": f"broken: {error}"})
            continue
        here = is_here(profile.match)
        entries.append({**entry, "description": profile.description, "verified": profile.verified, "here": here})
    return entries


@cluster.command("show")
@click.argument("name")
@json_option
def show_cluster(name: str, as_json: bool) -> None:
    """Show a profile as it was written; --json fills in every default, and what it extends."""
    from hpcbench.config.load import load_cluster

    profile, source = load_cluster(name)
    if as_json:
        print_json(profile.model_dump(mode="json"))
        return
    say(f"# {source.path}")
    show_text(source.text)


@cluster.command("init")
@click.argument("name")
@click.option("--probe", "probes", is_flag=True, help="Also run a short job that looks at a node from inside.")
def init_cluster(name: str, probes: bool) -> None:
    """Write clusters/NAME.toml from the live scheduler: partitions, limits, nodes, devices, accounts.

    What the scheduler cannot know is there as a comment. A file that exists is left alone.
    """
    from hpcbench.config.load import load_cluster_file
    from hpcbench.errors import HpcbenchError
    from hpcbench.fileio import make_folder, write_atomic
    from hpcbench.paths import project_folder
    from hpcbench.submit.site.query import ask_site
    from hpcbench.submit.site.write import write_toml

    path = project_folder() / "clusters" / f"{name}.toml"
    base = _bare_profile(name, path)
    facts = ask_site(base)
    config_file = base.scheduler.config_file
    text = write_toml(name, facts, config_file=config_file)
    make_folder(path.parent)
    write_atomic(path, text.encode())
    if probes:
        from hpcbench.submit.site.probe import run_probe

        # The job asks as the profile says that was just written.
        try:
            probe = run_probe(load_cluster_file(path)[0], say)
        except HpcbenchError:
            say(f"wrote {shorten(path)} from the scheduler alone; to look at a node after all, move it away first")
            raise
        write_atomic(path, write_toml(name, facts, probe, config_file).encode())
    load_cluster_file(path)
    say(f"wrote {shorten(path)}")
    say(f"next: hpcbench check {shorten(path)} && hpcbench doctor --cluster {name}")


def _bare_profile(name: str, path: Path) -> Any:
    """A profile that only says how the scheduler is reached: as this shell does."""
    from hpcbench.config.cluster import ClusterProfile
    from hpcbench.config.validate import Source, validate
    from hpcbench.errors import ConfigError

    if path.exists():
        raise ConfigError(f"{path} exists", hint="choose another name, or move it away")
    config_file = os.environ.get("SLURM_CONF")
    data = {"name": name, "scheduler": {"config_file": config_file} if config_file else {}}
    return validate(ClusterProfile, data, Source(path, ""))


@cluster.command("calibrate")
@click.argument("name")
@click.option("--partition", metavar="NAME", help="The partition to measure. (default: the profile's)")
@click.option(
    "--from",
    "given",
    multiple=True,
    metavar="SWEEP|TREE",
    help="Measure nothing: fit from these sweeps' runs, or from all of a results tree. May be repeated.",
)
@click.option("--where", metavar="EXPR", help="Of --from, only runs for which it holds: 'devices == 1'.")
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="x.toml: write the sweep that would be run, and stop. x.json: write the calibration there, too.",
)
@click.option(
    "--budget",
    "budget_s",
    default=20.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds that the measurements of one run may take, about.",
)
@click.option(
    "--yes", "over_budget", is_flag=True, help="Measure even if that may cost more than the cluster's budget."
)
@results_option
@json_option
def calibrate_cluster(
    *, name: str, partition: str | None, given: tuple[str, ...], where: str | None, out: Path | None, budget_s: float,
    over_budget: bool, results: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure a cluster: a sweep of ordinary runs, submitted, waited for and fitted.

    What is interrupted goes on when the same command is given again. Predictions then take the newest calibration.
    """
    from hpcbench.cli import calibrate
    from hpcbench.config.load import load_cluster
    from hpcbench.errors import ConfigError
    from hpcbench.submit.calibrate import copy_to, text_of

    profile, _ = load_cluster(name)
    _check(profile, partition, out)
    if where is not None and not given:
        raise ConfigError("--where chooses among the runs of --from", hint="name sweeps or a results tree: --from")
    if out is not None and out.suffix == ".toml":
        copy_to(out, text_of(tree(results).cluster(profile.name), profile, partition, budget_s)[1].encode())
        say(f"wrote {shorten(out)}: hpcbench submit {out} --cluster {name} runs it")
        return
    states: dict[str, Any] = {}
    if given:
        found, path = calibrate.fit_given(profile, results, partition, given, where)
    else:
        found, path, states = calibrate.measure_and_fit(profile, results, partition, budget_s, over_budget)
    if out is not None:
        copy_to(out, path.read_bytes())
    calibrate.show(found, path, as_json=as_json)
    sys.exit(exit_code(states))


def _check(profile: Any, partition: str | None, out: Path | None) -> None:
    from hpcbench.errors import ConfigError, did_you_mean

    if partition is not None and partition not in profile.partitions:
        raise ConfigError(
            f"cluster {profile.name} has no partition {partition!r}", hint=did_you_mean(partition, profile.partitions)
        )
    if out is not None and out.suffix not in (".toml", ".json"):
        raise ConfigError(
            f"--out {out}: what kind of file is that?", hint="x.toml for the sweep, x.json for the calibration"
        )
