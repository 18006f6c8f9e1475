"""``schema``, ``doctor``, ``init``: the ground that sweeps stand on."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hpcbench.cli.common import console, json_option, print_json, results_option, say
from hpcbench.fileio import printable


@click.command()
@click.argument("kind", type=click.Choice(["cluster", "sweep", "result"]))
def schema(kind: str) -> None:
    """Print the JSON Schema of a cluster profile, a sweep or a result."""
    from hpcbench.results.json_schema import json_schema

    print_json(json_schema(kind))


@click.command()
@click.option("--cluster", "cluster_name", metavar="NAME", default="local", help="For its jobs. (default: local)")
@click.option("--no-job", is_flag=True, help="Look from here only; submit nothing.")
@results_option
@json_option
def doctor(cluster_name: str, no_job: bool, results: str | None, as_json: bool) -> None:
    """Say what works for the jobs of a cluster, what is missing, and the command that mends it.

    Where the cluster has a scheduler that answers, a short job on one node looks from inside.
    """
    from hpcbench.config.load import load_cluster
    from hpcbench.paths import results_folder
    from hpcbench.submit.doctor import examine

    profile, _ = load_cluster(cluster_name)
    findings = examine(profile, results_folder(results), None if no_job else say)
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
