"""``plot``: results as pictures, in the terminal or as files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import console, json_option, print_json, results_option, say, tree

if TYPE_CHECKING:
    import polars

    from hpcbench.report.plots.picture import Picture
    from hpcbench.results.schema import RunResult


@click.command()
@click.argument("kind", required=False)
@click.argument("sources", metavar="[SWEEP|TREE|BUNDLE]...", nargs=-1)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@click.option("--where", metavar="EXPR", help="Only runs for which it holds: 'nodes == 4 and strategy != \"single\"'.")
@click.option("--by", metavar="KEYS", help="What tells lines apart, comma between (default: the strategy).")
@click.option("--predict", is_flag=True, help="With what the oracle says: lines for scaling, points for predicted.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help=".png .svg .pdf .html or .json")
@results_option
@json_option
def plot(
    *,
    kind: str | None,
    sources: tuple[str, ...],
    cluster_name: str | None,
    where: str | None,
    by: str | None,
    predict: bool,
    out: Path | None,
    results: str | None,
    as_json: bool,
) -> None:
    """Draw the results of sweeps, trees or bundles, or of the whole tree; without KIND the kinds are listed."""
    from hpcbench.report.plots.catalog import PLOTS
    from hpcbench.report.plots.catalog import kind as kind_of

    if kind is None:
        if as_json:
            print_json({"kinds": [{"name": name, "summary": one.summary} for name, one in PLOTS.items()]})
            return
        for name, one in PLOTS.items():
            console().print(f"{name:14}{one.summary}")
        return
    kind_of(kind)
    if out is not None:
        from hpcbench.report.plots.save import check_ending

        check_ending(out)
    picture = _drawn(kind, sources, cluster_name, where, by, results, predict=predict)
    if as_json:
        print_json({"plots": [_document(picture)]})
    if out is not None:
        from hpcbench.report.plots.save import save

        save(picture, out)
        say(f"{picture.title} written to {out}")
        for note in picture.notes:
            say(note)
    if as_json or out is not None:
        return
    from hpcbench.report.plots.terminal import TerminalPicture

    console().print(TerminalPicture(picture))


def _drawn(
    kind: str, sources: Sequence[str], cluster: str | None, where: str | None, by: str | None, results: str | None,
    *, predict: bool,
) -> Picture:  # fmt: skip
    from hpcbench.report.groups import chosen
    from hpcbench.report.load import gather
    from hpcbench.report.names import Condition, column_of, sources_of
    from hpcbench.report.plots.catalog import columns_of, draw
    from hpcbench.report.plots.picture import Asked
    from hpcbench.report.predicted import SPECS
    from hpcbench.report.validation import Forecasts
    from hpcbench.report.whole import whole_results

    clusters = [cluster] if cluster else None
    keys = tuple(column_of(name.strip()) for name in by.split(",")) if by else ()
    condition = Condition(where, "--where") if where else None
    foretold = _foretold(kind) if predict else None
    columns = [*columns_of(kind), *sources_of(keys), *(condition.columns if condition else [])]
    columns += SPECS if foretold else ()
    tree_ = tree(results)
    frame = chosen(gather(tree_, sources, clusters, columns), condition)

    def whole(wanted: Sequence[tuple[str, str]]) -> Iterable[RunResult]:
        return whole_results(tree_, sources, clusters, wanted)

    predicted = foretold(frame, Forecasts(tree_), keys) if foretold else None
    return draw(kind, frame, Asked(keys, whole, predicted))


def _foretold(kind: str) -> Callable[..., polars.DataFrame]:
    """What makes the oracle's rows for a kind of plot."""
    from hpcbench.errors import ConfigError
    from hpcbench.report.predicted import compared_frame, scaling_frame

    made: dict[str, Callable[..., polars.DataFrame]] = {"scaling": scaling_frame, "predicted": compared_frame}
    if kind not in made:
        raise ConfigError(f"--predict: the plot {kind} shows no predictions", hint=f"choices: {', '.join(made)}")
    return made[kind]


def _document(picture: Picture) -> dict[str, Any]:
    return {
        "name": picture.name, "title": picture.title, "alt": picture.alt, "notes": picture.notes,
        "nothing": picture.nothing or None, "specification": picture.specification, "rows": picture.rows,
    }  # fmt: skip
