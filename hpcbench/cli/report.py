"""``report``: findings in words, in the terminal or as one page that opens without a network."""

from __future__ import annotations

from pathlib import Path

import click

from hpcbench.cli.common import console, json_option, print_json, results_option, say, tree


@click.command()
@click.argument("sources", metavar="[SWEEP|TREE|BUNDLE]...", nargs=-1)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@click.option("--where", metavar="EXPR", help="Only runs for which it holds: 'nodes == 4 and strategy != \"single\"'.")
@click.option(
    "--bound", metavar="SHARE", type=click.FloatRange(0, 1, min_open=True), default=0.8, show_default=True,
    help="The least efficiency that is good enough.",
)  # fmt: skip
@results_option
@json_option
def report(
    *,
    sources: tuple[str, ...],
    cluster_name: str | None,
    where: str | None,
    bound: float,
    results: str | None,
    as_json: bool,
) -> None:
    """Say what the results of sweeps, trees or bundles show: the fastest strategy per scale, and how sure that is.

    Also where the fastest changes, where efficiency falls, what does not fit into memory, what failed and why, and
    what cannot be told.
    """
    from hpcbench.report.answers.find import find
    from hpcbench.report.answers.show import findings_json, renderable
    from hpcbench.report.load import gather
    from hpcbench.report.names import Condition

    condition = Condition(where, "--where") if where else None
    frame = gather(tree(results), sources, [cluster_name] if cluster_name else None)
    findings = find(frame, condition, bound)
    title = ", ".join(Path(one).name for one in sources) if sources else str(tree(results).root)
    if as_json:
        print_json(findings_json(findings, [*sources]))
        return
    if not findings.answers:
        say(f"no results yet in {title}")
        return
    console().print(renderable(findings, f"{title}{f', {where}' if where else ''}"))
