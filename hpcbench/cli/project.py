"""``cluster``, ``schema``, ``doctor``, ``init``: the ground that sweeps stand on."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hpcbench.cli.common import console, json_option, print_json, results_option, say, shorten, show_text
from hpcbench.fileio import printable


@click.group()
def cluster() -> None:
    """List and show cluster profiles."""


@cluster.command("list")
@json_option
def list_clusters(as_json: bool) -> None:
    """List every profile that --cluster takes: the project's, yours, the shipped ones."""
    from hpcbench.config.load import cluster_paths, load_cluster_file
    from hpcbench.errors import HpcbenchError

    entries = []
    for name, path in cluster_paths().items():
        try:
            profile, _ = load_cluster_file(path)
        except HpcbenchError as error:
            entries.append({"name": name, "description": f"broken: {error}", "file": shorten(path), "verified": ""})
            continue
        entries.append(
            {
                "name": name,
                "description": profile.description,
                "file": shorten(path),
                "verified": profile.verified,
            }
        )
    if as_json:
        print_json({"clusters": entries})
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("name", "verified", "description", "file"):
        table.add_column(heading)
    for entry in entries:
        table.add_row(*(Text(printable(entry[key])) for key in ("name", "verified", "description", "file")))
    console().print(table)


@cluster.command("show")
@click.argument("name")
@json_option
def show_cluster(name: str, as_json: bool) -> None:
    """Show a profile as it was written; --json fills in every default."""
    from hpcbench.config.load import load_cluster

    profile, source = load_cluster(name)
    if as_json:
        print_json(profile.model_dump(mode="json"))
        return
    say(f"# {source.path}")
    show_text(source.text)


@click.command()
@click.argument("kind", type=click.Choice(["cluster", "sweep", "result"]))
def schema(kind: str) -> None:
    """Print the JSON Schema of a cluster profile, a sweep or a result."""
    from hpcbench.results.json_schema import json_schema

    print_json(json_schema(kind))


@click.command()
@click.option("--cluster", "cluster_name", metavar="NAME", default="local", help="For its jobs. (default: local)")
@results_option
@json_option
def doctor(cluster_name: str, results: str | None, as_json: bool) -> None:
    """Say what works here for the jobs of a cluster, what is missing, and the command that mends it."""
    from hpcbench.config.load import load_cluster
    from hpcbench.paths import results_folder
    from hpcbench.submit.doctor import examine

    profile, _ = load_cluster(cluster_name)
    findings = examine(profile, results_folder(results))
    broken = [finding for finding in findings if not finding.works and finding.needed]
    if as_json:
        print_json({"cluster": profile.name, "findings": findings})
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0))
        for finding in findings:
            mark = (
                Text("ok", style="green")
                if finding.works
                else Text("missing", style="red" if finding.needed else "dim")
            )
            table.add_row(mark, *(Text(printable(one)) for one in (finding.what, finding.detail, finding.mend)))
        console().print(table)
    sys.exit(3 if broken else 0)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def init(folder: Path) -> None:
    """Write a project folder to start from: a sweep, a profile to copy, schemas for the editor.

    Files that exist are left as they are.
    """
    from hpcbench.submit.project import write_project

    written = write_project(folder)
    for path in written:
        say(f"wrote {path}")
    if not written:
        say(f"nothing to write: {folder} has everything already")
        return
    say(f"next: cd {folder} && hpcbench run quickstart")
