"""``bundle``: a sweep as one file for somebody else."""

from __future__ import annotations

from pathlib import Path

import click

from hpcbench.cli.common import results_option, say, tree


@click.command()
@click.argument("sweep")
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only from this cluster (default: all that have it).")
@click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path), help="A .tar.gz (default: SWEEP.hpcbench.tar.gz)."
)
@click.option("--logs", is_flag=True, help="With what the ranks and the jobs said: of each log the last 16 MiB.")
@click.option("--anonymous", is_flag=True, help="With stand-ins for people and machines; see above.")
@results_option
def bundle(
    sweep: str, cluster_name: str | None, out: Path | None, logs: bool, anonymous: bool, results: str | None
) -> None:
    """Pack SWEEP into one file for handing over: its record, results, scripts and task files, the start markers and
    rank files of the attempts that count, and a list with the SHA-256 of each.

    `hpcbench table FILE` and `hpcbench collect FILE` read it without unpacking it.

    --anonymous puts stand-ins (user-1, node-1, ...) in the place of accounts and real names of the files' owners, other
    people whose home folder is named, host names with and without domain, IP, MAC and e-mail addresses, SLURM accounts,
    numbers of users and groups, serial numbers of GPUs, home folders, and the paths of the results tree and the
    project: in values, keys, scripts, logs, errors and file names, and the same one everywhere. It leaves job ids,
    process ids, times, versions, hardware, the names of sweep, cluster, partitions and modules, descriptions, git
    commits, other paths, and variables, except where one of those names stands in them. A name that nothing but a log
    holds is not known as one: look through it before you publish it.
    """
    from hpcbench.errors import ConfigError
    from hpcbench.report.bundle import write_bundle
    from hpcbench.report.select import name_of, select_sweeps
    from hpcbench.results.bundle import ENDINGS, is_bundle
    from hpcbench.units import format_bytes

    out = out or Path(f"{name_of(sweep)}.hpcbench.tar.gz")
    if not is_bundle(out.name):
        raise ConfigError(f"cannot write {out}: unknown ending", hint=f"choices: {', '.join(ENDINGS)}")
    chosen = select_sweeps(tree(results), (sweep,), cluster_name)
    written = write_bundle(tree(results), chosen, out, logs=logs, anonymous=anonymous)
    for name, reason in written.left_out.items():
        say(f"left out: {name}: {reason}")
    say(f"{written.runs} runs, {written.files} files, {format_bytes(out.stat().st_size)} written to {out}")
