"""Results of trees, sweeps and bundles as one polars frame, or as full result objects."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hpcbench.errors import ConfigError
from hpcbench.paths import results_folder
from hpcbench.report.column_names import with_option_column
from hpcbench.report.sweep_selection import select_sweeps
from hpcbench.results.frame import collected_frame, column_types
from hpcbench.results.index import read_indexed_results
from hpcbench.results.results_tree import ClusterTree, CollectedResult, ResultsTree, collect_results
from hpcbench.results.schema import RunResult

if TYPE_CHECKING:
    import polars

_OPTION_TABLES = ("spec.options", "spec.model_options", "spec.env")
_RESULT_KEY = ["cluster", "run_id", "attempt", "status", "metrics.step_time_s.mean"]


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
    return with_all_option_columns(load_frame(tree, [str(one) for one in sources], clusters))


def load_frame(
    tree: ResultsTree,
    sources: Sequence[str],
    clusters: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> polars.DataFrame:
    """As ``load``, with some columns of ``columns.schema`` only; tables of options stay text (JSON)."""
    import polars

    wanted = None if columns is None else list(dict.fromkeys([*columns, *_RESULT_KEY]))
    frames = [_load_source(one, clusters, wanted) for one in sources if is_results_path(one)]
    named = [one for one in sources if not is_results_path(one)]
    if named:
        frames.append(_load_sweeps(tree, named, clusters, wanted))
    if not sources:
        frames.append(_load_indexed(cluster_trees(tree, clusters), wanted))
    frame = polars.concat(frames)
    if len(frames) > 1:
        # The same result in a tree and in a bundle made of it is one launch.
        frame = frame.unique(_RESULT_KEY, keep="first", maintain_order=True)
    return frame


def is_results_path(source: str) -> bool:
    """Whether ``source`` is a bundle or a folder rather than a sweep: a bare name only where results lie in it."""
    from hpcbench.results.bundle_archive import is_bundle_path

    if is_bundle_path(source) or (not source.endswith(".toml") and "/" in source):
        return True
    return Path(source, "runs").is_dir() or any(Path(source).glob("*/runs"))


def cluster_trees_in(source: str, clusters: Sequence[str] | None) -> list[ClusterTree]:
    """The clusters' trees of a folder: of a results tree, or the one that it is. Raises ``ConfigError`` for none."""
    folder = Path(source)
    if not folder.is_dir():
        raise ConfigError(
            f"no folder {source}", hint="a results tree, a cluster's folder in one, or a bundle is needed"
        )
    if (folder / "runs").is_dir():
        return [ClusterTree(folder.absolute())] if not clusters or folder.absolute().name in clusters else []
    return cluster_trees(ResultsTree(folder.absolute()), clusters)


def cluster_trees(tree: ResultsTree, clusters: Sequence[str] | None) -> list[ClusterTree]:
    """Those of ``clusters``, or all that the tree has."""
    return [tree.cluster(name) for name in clusters or tree.clusters()]


def _load_source(source: str, clusters: Sequence[str] | None, columns: Sequence[str] | None) -> polars.DataFrame:
    from hpcbench.results.bundle_archive import collect_bundle_results, is_bundle_path

    if is_bundle_path(source):
        frame = collected_frame(collect_bundle_results(Path(source), clusters))
        return frame if columns is None else frame.select(columns)
    return _load_indexed(cluster_trees_in(source, clusters), columns)


def _load_indexed(trees: Sequence[ClusterTree], columns: Sequence[str] | None) -> polars.DataFrame:
    import polars

    frames = [read_indexed_results(tree, columns) for tree in trees]
    return polars.concat(frames) if frames else collected_frame([]).select(columns or list(column_types()))


def _load_sweeps(
    tree: ResultsTree, names: Sequence[str], clusters: Sequence[str] | None, columns: Sequence[str] | None
) -> polars.DataFrame:
    """The runs of some sweeps, in the order of the sweeps."""
    import polars

    from hpcbench.report.sweep_selection import select_sweeps

    meant: dict[str, dict[str, None]] = {}
    chosen: list[str | None] = [*clusters] if clusters else [None]
    for cluster in chosen:
        for name, record in select_sweeps(tree, names, cluster):
            meant.setdefault(name, {}).update(dict.fromkeys(record.run_ids))
    frames = []
    for name, run_ids in meant.items():
        order = polars.DataFrame({"run_id": list(run_ids)}, schema={"run_id": polars.String})
        frame = order.join(
            read_indexed_results(tree.cluster(name), columns), on="run_id", how="inner", maintain_order="left"
        )
        frames.append(frame.select(columns or list(column_types())))
    return polars.concat(frames)


def with_all_option_columns(frame: polars.DataFrame) -> polars.DataFrame:
    """``frame`` with a column for each option that any run sets, and warnings as lists.

    An option that is a number in one run and a word in another is text in all.
    """
    import polars

    for table in _OPTION_TABLES:
        texts = frame[table].unique().drop_nulls().to_list()
        for key in sorted({key for text in texts for key in msgspec.json.decode(text)}):
            frame = with_option_column(frame, f"{table}.{key}")
    return frame.with_columns(
        polars.col("warnings").fill_null("[]").str.json_decode(polars.List(polars.String)).alias("warnings")
    )


def iter_collected(
    results: ResultsTree,
    sources: Sequence[str],
    clusters: Sequence[str] | None = None,
    wanted: Collection[tuple[str, str]] | None = None,
) -> Iterator[CollectedResult]:
    """What the sources hold, each run once, taken from the first that has it.

    Of ``wanted`` (cluster, run_id) alone where that is given: no other file is read, but in bundles.
    """
    from hpcbench.results.bundle_archive import collect_bundle_results, is_bundle_path

    if not sources:
        for one in cluster_trees(results, clusters):
            yield from _collect_tree(one, wanted)
        return
    seen: set[tuple[str, str]] = set()

    def fresh(entries: Iterable[CollectedResult]) -> Iterator[CollectedResult]:
        for entry in entries:
            key = (entry.cluster, entry.run_id)
            if key not in seen and (wanted is None or key in wanted):
                seen.add(key)
                yield entry

    chosen: list[str | None] = [*clusters] if clusters else [None]
    named = [one for one in sources if not is_results_path(one)]
    for cluster in chosen if named else []:
        for name, record in select_sweeps(results, named, cluster):
            left = [one for one in record.run_ids if (name, one) not in seen]
            if wanted is not None:
                left = [one for one in left if (name, one) in wanted]
            yield from fresh(collect_results(results.cluster(name), left))
    for source in filter(is_results_path, sources):
        if is_bundle_path(source):
            yield from fresh(collect_bundle_results(Path(source), clusters))
            continue
        for tree in cluster_trees_in(source, clusters):
            yield from fresh(_collect_tree(tree, wanted))


def full_results(
    results: ResultsTree, sources: Sequence[str], clusters: Sequence[str] | None, wanted: Collection[tuple[str, str]]
) -> list[RunResult]:
    """The results of ``wanted`` (cluster, run_id) that can be read, under the name of the tree that they lie in."""
    from msgspec.structs import replace

    entries = iter_collected(results, sources, clusters, frozenset(wanted))
    return [replace(one.result, cluster=one.cluster) for one in entries if one.result is not None]


def _collect_tree(tree: ClusterTree, wanted: Collection[tuple[str, str]] | None) -> Iterator[CollectedResult]:
    if wanted is None:
        return collect_results(tree)
    return collect_results(tree, [run_id for cluster, run_id in wanted if cluster == tree.root.name])
