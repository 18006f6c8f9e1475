"""``report``: findings in words, in the terminal or as one page that opens without a network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcbench.cli.common import console, json_option, print_json, results_option, say, tree
from hpcbench.errors import ConfigError

if TYPE_CHECKING:
    import polars

    from hpcbench.report.answers.doubts import Unfinished
    from hpcbench.report.names import Condition
    from hpcbench.report.page.build import Subject
    from hpcbench.results.schema import RunResult
    from hpcbench.results.store import ResultsTree


@click.command()
@click.argument("sources", metavar="[SWEEP|TREE|BUNDLE]...", nargs=-1)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@click.option("--where", metavar="EXPR", help="Only runs for which it holds: 'nodes == 4 and strategy != \"single\"'.")
@click.option(
    "--bound", metavar="SHARE", type=click.FloatRange(0, 1, min_open=True), default=0.8, show_default=True,
    help="The least efficiency that is good enough.",
)  # fmt: skip
@click.option("--predict", is_flag=True, help="On the page, what the oracle says beside what was measured.")
@click.option("--out", metavar="FILE.html", type=click.Path(path_type=Path), help="One page that needs no network.")
@results_option
@json_option
def report(
    *,
    sources: tuple[str, ...],
    cluster_name: str | None,
    where: str | None,
    bound: float,
    predict: bool,
    out: Path | None,
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

    if out is not None and out.suffix not in _PAGES:
        raise ConfigError(f"cannot write {out}: a report is a page", hint=f"endings: {', '.join(_PAGES)}")
    condition = Condition(where, "--where") if where else None
    clusters = [cluster_name] if cluster_name else None
    frame = gather(tree(results), sources, clusters)
    title = ", ".join(Path(one).name for one in sources) if sources else str(tree(results).root)
    sweeps = _unfinished(tree(results), sources, clusters, frame)
    if out is not None:
        from hpcbench.report.page.build import Subject

        whole = partial(_whole, tree(results), sources, clusters)
        foretold = _foretold(frame, condition, tree(results)) if predict else {}
        _write_page(out, frame, Subject(title, sources, condition, bound, sweeps, whole, **foretold))
        say(f"report on {len(frame)} runs written to {out}")
    if out is not None and not as_json:
        return
    findings = find(frame, condition, bound, sweeps)
    if as_json:
        print_json(findings_json(findings, [*sources]))
    elif not findings.answers:
        say(f"no results {f'for which {where}' if where else 'yet'} in {title}")
    else:
        console().print(renderable(findings, f"{title}{f', {where}' if where else ''}"))


_PAGES = (".html", ".htm")


def _foretold(frame: polars.DataFrame, where: Condition | None, results: ResultsTree) -> dict[str, polars.DataFrame]:
    from hpcbench.report.groups import chosen
    from hpcbench.report.predicted import compared_frame, scaling_frame
    from hpcbench.report.validation import Forecasts

    forecasts, narrowed = Forecasts(results), chosen(frame, where)
    return {"predicted": compared_frame(narrowed, forecasts), "lines": scaling_frame(narrowed, forecasts)}


def _write_page(out: Path, frame: polars.DataFrame, subject: Subject) -> None:
    from hpcbench.fileio import write_atomic
    from hpcbench.report.page.build import page

    write_atomic(out, page(frame, subject).encode())


def _unfinished(
    results: ResultsTree, sources: Sequence[str], clusters: Sequence[str] | None, frame: polars.DataFrame
) -> list[Unfinished]:
    """How many runs of the sweeps that are named have no result."""
    from hpcbench.report.answers.doubts import Unfinished
    from hpcbench.report.load import is_place
    from hpcbench.report.select import select_sweeps

    named = [one for one in sources if not is_place(one)]
    chosen: list[str | None] = [*clusters] if clusters else [None]
    there = set(frame.select("cluster", "run_id").iter_rows())
    return [
        Unfinished(record.sweep, name, sum((name, one) not in there for one in record.run_ids), len(record.run_ids))
        for cluster in (chosen if named else [])
        for name, record in select_sweeps(results, named, cluster)
    ]


def _whole(
    results: ResultsTree, sources: Sequence[str], clusters: Sequence[str] | None, wanted: Sequence[tuple[str, str]]
) -> list[RunResult]:
    from hpcbench.report.whole import whole_results

    return whole_results(results, sources, clusters, wanted)
