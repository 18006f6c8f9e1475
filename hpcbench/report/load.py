"""Results of trees, sweeps and bundles together, as one polars frame: what every table starts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hpcbench.errors import ConfigError
from hpcbench.paths import results_folder
from hpcbench.report.names import with_option
from hpcbench.results.columns import collected_frame, schema
from hpcbench.results.index import indexed
from hpcbench.results.store import ClusterTree, ResultsTree

if TYPE_CHECKING:
    import polars

_TABLES = ("spec.options", "spec.model_options", "spec.env")
_SAME_RESULT = ["cluster", "run_id", "attempt", "status", "metrics.step_time_s.mean"]


def load(
    *sources: str | Path, results: str | Path | None = None, clusters: Sequence[str] | None = None
) -> polars.DataFrame:
    """Every result of ``sources``: results trees, clusters' folders in them, bundles, and names or files of sweeps.

    Sweeps are looked for in the tree ``results`` (else ``$HPCBENCH_RESULTS``, else ``results``); without sources it is
    the whole of that tree. One row a run, columns named by their path in ``result.json`` (docs/schemas/result.json):
    ``spec.strategy``, ``metrics.step_time_s.median``, ``spec.options.bucket_mb``; seconds, bytes and samples/s. What
    was not measured is null; ``status`` says how a run ended, ``broken`` that its file cannot be read.

    Raises ``HpcbenchError`` where there is no such source or it may not be read.
    """
    tree = ResultsTree(results_folder(str(results) if results is not None else None))
    return with_options(gather(tree, [str(one) for one in sources], clusters))


def gather(
    tree: ResultsTree,
    sources: Sequence[str],
    clusters: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> polars.DataFrame:
    """As ``load``, with some columns of ``columns.schema`` only; tables of options stay text (JSON)."""
    import polars

    wanted = None if columns is None else list(dict.fromkeys([*columns, *_SAME_RESULT]))
    frames = [_source(one, clusters, wanted) for one in sources if is_place(one)]
    named = [one for one in sources if not is_place(one)]
    if named:
        frames.append(_sweeps(tree, named, clusters, wanted))
    if not sources:
        frames.append(_indexed(clusters_of(tree, clusters), wanted))
    frame = polars.concat(frames)
    if len(frames) > 1:
        # The same result in a tree and in a bundle made of it is one launch.
        frame = frame.unique(_SAME_RESULT, keep="first", maintain_order=True)
    return frame


def is_place(source: str) -> bool:
    """Whether ``source`` is a bundle or a folder rather than a sweep: a bare name only where results lie in it."""
    from hpcbench.results.bundle import is_bundle

    if is_bundle(source) or (not source.endswith(".toml") and "/" in source):
        return True
    return Path(source, "runs").is_dir() or any(Path(source).glob("*/runs"))


def trees_in(source: str, clusters: Sequence[str] | None) -> list[ClusterTree]:
    """The clusters' trees of a folder: of a results tree, or the one that it is. Raises ``ConfigError`` for none."""
    folder = Path(source)
    if not folder.is_dir():
        raise ConfigError(
            f"no folder {source}", hint="a results tree, a cluster's folder in one, or a bundle is needed"
        )
    if (folder / "runs").is_dir():
        return [ClusterTree(folder.absolute())] if not clusters or folder.absolute().name in clusters else []
    return clusters_of(ResultsTree(folder.absolute()), clusters)


def clusters_of(tree: ResultsTree, clusters: Sequence[str] | None) -> list[ClusterTree]:
    """Those of ``clusters``, or all that the tree has."""
    return [tree.cluster(name) for name in clusters or tree.clusters()]


def _source(source: str, clusters: Sequence[str] | None, columns: Sequence[str] | None) -> polars.DataFrame:
    from hpcbench.results.bundle import is_bundle
    from hpcbench.results.unbundle import collect_bundle

    if is_bundle(source):
        frame = collected_frame(collect_bundle(Path(source), clusters))
        return frame if columns is None else frame.select(columns)
    return _indexed(trees_in(source, clusters), columns)


def _indexed(trees: Sequence[ClusterTree], columns: Sequence[str] | None) -> polars.DataFrame:
    import polars

    frames = [indexed(tree, columns) for tree in trees]
    return polars.concat(frames) if frames else collected_frame([]).select(columns or list(schema()))


def _sweeps(
    tree: ResultsTree, names: Sequence[str], clusters: Sequence[str] | None, columns: Sequence[str] | None
) -> polars.DataFrame:
    """The runs of some sweeps, in the order of the sweeps."""
    import polars

    from hpcbench.report.select import select_sweeps

    meant: dict[str, dict[str, None]] = {}
    chosen: list[str | None] = [*clusters] if clusters else [None]
    for cluster in chosen:
        for name, record in select_sweeps(tree, names, cluster):
            meant.setdefault(name, {}).update(dict.fromkeys(record.run_ids))
    frames = []
    for name, run_ids in meant.items():
        order = polars.DataFrame({"run_id": list(run_ids)}, schema={"run_id": polars.String})
        frame = order.join(indexed(tree.cluster(name), columns), on="run_id", how="inner", maintain_order="left")
        frames.append(frame.select(columns or list(schema())))
    return polars.concat(frames)


def with_options(frame: polars.DataFrame) -> polars.DataFrame:
    """``frame`` with a column for each option that any run sets, and warnings as lists.

    An option that is a number in one run and a word in another is text in all.
    """
    import polars

    for table in _TABLES:
        texts = frame[table].unique().drop_nulls().to_list()
        for key in sorted({key for text in texts for key in msgspec.json.decode(text)}):
            frame = with_option(frame, f"{table}.{key}")
    return frame.with_columns(
        polars.col("warnings").fill_null("[]").str.json_decode(polars.List(polars.String)).alias("warnings")
    )
