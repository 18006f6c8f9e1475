"""Results of trees, sweeps and bundles as one polars frame, as full result objects, or as files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import polars as pl

from hpcbench.errors import ConfigError
from hpcbench.fileio import open_atomic, write_atomic
from hpcbench.paths import is_visible, results_folder
from hpcbench.report.column_names import with_option_column
from hpcbench.report.table_files import csv_cell, excel_bytes, parquet_bytes, view_encoder
from hpcbench.report.table_model import Column, View, short_name
from hpcbench.results.bundle_archive import collect_bundle_results, is_bundle_path
from hpcbench.results.frame import FILE_COLUMNS, collected_frame, column_types
from hpcbench.results.index import read_indexed_results
from hpcbench.results.results_tree import ClusterTree, CollectedResult, ResultsTree, collect_results
from hpcbench.results.schema import RunResult, result_document
from hpcbench.submit.submission_record import select_sweeps
from hpcbench.units import or_empty

_OPTION_TABLES = ("spec.options", "spec.model_options", "spec.env")
LAUNCH_KEY = ["cluster", "run_id", "attempt", "status", "metrics.step_time_s.mean"]


def load(
    *sources: str | Path, results: str | Path | None = None, clusters: Sequence[str] | None = None, short: bool = False
) -> pl.DataFrame:
    """Return the results of ``sources`` as a frame with one row per run.

    Columns are named by their path in ``result.json`` (docs/schemas/result.json): ``spec.strategy``,
    ``metrics.step_time_s.median``, ``spec.options.bucket_mb``; in seconds, bytes and samples/s. Missing figures are
    null; ``status`` is the end of a run, ``broken`` for a file that cannot be read.

        frame = hpcbench.load("scaling", clusters=["snellius"])

    Args:
        sources: results trees, clusters' folders in them, bundles, and names or files of sweeps; none for the whole
            tree ``results``.
        results: the tree of the sweeps; else ``$HPCBENCH_RESULTS``, else ``results``.
        clusters: only these.
        short: name columns as the commands do: ``strategy``, ``step_time_s``, ``options.bucket_mb``.

    Raises:
        HpcbenchError: there is no such source, or it may not be read.
    """
    tree = ResultsTree(results_folder(str(results) if results is not None else None))
    frame = with_all_option_columns(load_frame(tree, [str(source) for source in sources], clusters))
    if not short:
        return frame
    names = {column: short_name(column) for column in frame.columns}
    unique = Counter(names.values())
    return frame.rename({column: name for column, name in names.items() if unique[name] == 1})


def load_frame(
    tree: ResultsTree,
    sources: Sequence[str],
    clusters: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> pl.DataFrame:
    """Return the results of ``sources`` like ``load``, but with tables of options as JSON text.

    Args:
        tree: the tree of named sweeps, and the source if there is no other.
        sources: as in ``load``.
        clusters: only these.
        columns: only these of ``frame.column_types()``, and those that identify a launch.
    """
    wanted = None if columns is None else list(dict.fromkeys([*columns, *LAUNCH_KEY]))
    frames = []
    for source in filter(is_results_path, sources):
        if is_bundle_path(source):
            frame = collected_frame(collect_bundle_results(Path(source), clusters))
            frames.append(frame if wanted is None else frame.select(wanted))
        else:
            frames.append(_load_indexed(cluster_trees_in(source, clusters), wanted))
    sweeps = [source for source in sources if not is_results_path(source)]
    if sweeps:
        frames.append(_load_sweeps(tree, sweeps, clusters, wanted))
    if not sources:
        frames.append(_load_indexed(cluster_trees(tree, clusters), wanted))
    frame = pl.concat(frames)
    if len(frames) > 1:
        # The same result in a tree and in a bundle of it is one launch.
        frame = frame.unique(LAUNCH_KEY, keep="first", maintain_order=True)
    return frame


def is_results_path(source: str) -> bool:
    """Whether ``source`` is a bundle or a folder rather than a sweep: a bare name only if results lie in it."""
    if is_bundle_path(source) or (not source.endswith(".toml") and "/" in source):
        return True
    return Path(source, "runs").is_dir() or any(Path(source).glob("*/runs"))


def cluster_trees_in(source: str, clusters: Sequence[str] | None) -> list[ClusterTree]:
    """Return the clusters' trees in a results tree, or the one that the folder is; ``ConfigError`` for neither."""
    folder = Path(source)
    if not folder.is_dir():
        reason = f"{source} is not a folder" if is_visible(folder) else f"no folder {source}"
        raise ConfigError(reason, hint="a results tree, a cluster's folder in one, or a bundle is needed")
    if (folder / "runs").is_dir():
        return [ClusterTree(folder.absolute())] if not clusters or folder.absolute().name in clusters else []
    return cluster_trees(ResultsTree(folder.absolute()), clusters)


def cluster_trees(tree: ResultsTree, clusters: Sequence[str] | None) -> list[ClusterTree]:
    """Return the trees of ``clusters``, or of all clusters."""
    return [tree.cluster(name) for name in clusters or tree.clusters()]


def _load_indexed(trees: Sequence[ClusterTree], columns: Sequence[str] | None) -> pl.DataFrame:
    frames = [read_indexed_results(tree, columns) for tree in trees]
    return pl.concat(frames) if frames else collected_frame([]).select(columns or list(column_types()))


def _sweep_runs(tree: ResultsTree, sweeps: Sequence[str], clusters: Sequence[str] | None) -> dict[str, list[str]]:
    """The run ids of ``sweeps`` by cluster, each once, in the order of the sweeps."""
    run_ids: dict[str, dict[str, None]] = {}
    selected: Sequence[str | None] = clusters or [None]
    for cluster in selected:
        for name, record in select_sweeps(tree, sweeps, cluster):
            run_ids.setdefault(name, {}).update(dict.fromkeys(record.run_ids))
    return {name: list(ids) for name, ids in run_ids.items()}


def _load_sweeps(
    tree: ResultsTree, sweeps: Sequence[str], clusters: Sequence[str] | None, columns: Sequence[str] | None
) -> pl.DataFrame:
    frames = []
    for name, run_ids in _sweep_runs(tree, sweeps, clusters).items():
        order = pl.DataFrame({"run_id": run_ids}, schema={"run_id": pl.String})
        results = read_indexed_results(tree.cluster(name), columns)
        frame = order.join(results, on="run_id", how="inner", maintain_order="left")
        frames.append(frame.select(columns or list(column_types())))
    return pl.concat(frames)


def with_all_option_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """Return ``frame`` with a column for each option that any run sets, and warnings as lists.

    An option that is a number in one run and a word in another is text in all.
    """
    for table in _OPTION_TABLES:
        texts = frame[table].unique().drop_nulls().to_list()
        for key in sorted({key for text in texts for key in msgspec.json.decode(text)}):
            frame = with_option_column(frame, f"{table}.{key}")
    return frame.with_columns(pl.col("warnings").fill_null("[]").str.json_decode(pl.List(pl.String)).alias("warnings"))


def iter_collected(
    results: ResultsTree,
    sources: Sequence[str],
    clusters: Sequence[str] | None = None,
    wanted: Collection[tuple[str, str]] | None = None,
) -> Iterator[CollectedResult]:
    """Yield the full results of ``sources``, each run once, from the first source that has it.

    ``wanted``: only these (cluster, run_id); other files are not read, except in bundles.
    """
    seen: set[tuple[str, str]] = set()
    for entry in _iter_all(results, sources, clusters, wanted):
        key = (entry.cluster, entry.run_id)
        if key not in seen and (wanted is None or key in wanted):
            seen.add(key)
            yield entry


def _iter_all(
    results: ResultsTree, sources: Sequence[str], clusters: Sequence[str] | None,
    wanted: Collection[tuple[str, str]] | None,
) -> Iterator[CollectedResult]:  # fmt: skip
    sweeps = [source for source in sources if not is_results_path(source)]
    for name, run_ids in _sweep_runs(results, sweeps, clusters).items() if sweeps else ():
        chosen = [run_id for run_id in run_ids if wanted is None or (name, run_id) in wanted]
        yield from collect_results(results.cluster(name), chosen)
    trees = [] if sources else cluster_trees(results, clusters)
    for source in filter(is_results_path, sources):
        if is_bundle_path(source):
            yield from collect_bundle_results(Path(source), clusters)
        else:
            trees += cluster_trees_in(source, clusters)
    for tree in trees:
        ids = None if wanted is None else [run_id for cluster, run_id in wanted if cluster == tree.root.name]
        yield from collect_results(tree, ids)


def full_results(
    results: ResultsTree, sources: Sequence[str], clusters: Sequence[str] | None, wanted: Collection[tuple[str, str]]
) -> list[RunResult]:
    """Return the readable results of ``wanted`` (cluster, run_id), with the cluster of the tree that they lie in."""
    entries = iter_collected(results, sources, clusters, frozenset(wanted))
    return [
        msgspec.structs.replace(entry.result, cluster=entry.cluster) for entry in entries if entry.result is not None
    ]


_MAY_CHANGE_IN_CSV = r"^[=+\-@]|[^ -~]"


def _frame_csv(frame: pl.DataFrame) -> bytes:
    # Hardly any text changes: polars finds those that may in one pass.
    texts = pl.col(pl.String)
    suspects = frame.select(texts.filter(texts.str.contains(_MAY_CHANGE_IN_CSV)).unique().implode())
    changed = {}
    for column in suspects:
        if escaped := {text: cell for text in column[0] if (cell := csv_cell(text)) != text}:
            changed[column.name] = pl.col(column.name).replace(escaped)
    return frame.with_columns(**changed).write_csv().encode()


_FRAME_ENCODERS: dict[str, Callable[[pl.DataFrame], bytes]] = {
    ".csv": _frame_csv, ".parquet": parquet_bytes, ".xlsx": excel_bytes,
}  # fmt: skip


def export_json(results: Iterable[RunResult], path: Path) -> int:
    """Write ``{"results": [...]}``, result by result, and return their number."""
    count = 0
    with open_atomic(path) as file:
        file.write(b'{"results": [')
        for result in results:
            text = msgspec.json.format(msgspec.json.encode(result_document(result)), indent=1)
            file.write(b",\n" + text if count else b"\n" + text)
            count += 1
        file.write(b"\n]}\n")
    return count


def export_table(frame: pl.DataFrame, path: Path) -> None:
    """Write results in the format that the file's ending names: one row per run as in ``load``, lists as text."""
    encode = view_encoder(path)
    frame = with_all_option_columns(frame.drop(FILE_COLUMNS)).with_columns(pl.col("warnings").list.join("; "))
    nested = [name for name, dtype in frame.schema.items() if dtype.is_nested()]
    frame = frame.with_columns(
        pl.Series(name, [None if value is None else str(value) for value in frame[name].to_list()], dtype=pl.String)
        for name in nested
    )
    if path.suffix in _FRAME_ENCODERS:
        write_atomic(path, _FRAME_ENCODERS[path.suffix](frame))
        return
    columns = [Column(name, name, is_number=dtype.is_numeric()) for name, dtype in frame.schema.items()]
    raw = [list(row) for row in frame.iter_rows()]
    write_atomic(path, encode(View("results", columns, raw, [[or_empty(value) for value in row] for row in raw])))
