"""Whole results of trees, sweeps and bundles: what the frame does not hold, such as single steps, is in them alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from hpcbench.report.load import clusters_of, is_place, trees_in
from hpcbench.report.select import select_sweeps
from hpcbench.results.collect import Collected, collect
from hpcbench.results.schema import RunResult
from hpcbench.results.store import ClusterTree, ResultsTree


def collected(
    results: ResultsTree,
    sources: Sequence[str],
    clusters: Sequence[str] | None = None,
    wanted: Collection[tuple[str, str]] | None = None,
) -> Iterator[Collected]:
    """What the sources hold, each run once, taken from the first that has it.

    Of ``wanted`` (cluster, run_id) alone where that is given: no other file is read, but in bundles.
    """
    from hpcbench.results.bundle import is_bundle
    from hpcbench.results.unbundle import collect_bundle

    if not sources:
        for one in clusters_of(results, clusters):
            yield from _of_tree(one, wanted)
        return
    seen: set[tuple[str, str]] = set()

    def fresh(entries: Iterable[Collected]) -> Iterator[Collected]:
        for entry in entries:
            key = (entry.cluster, entry.run_id)
            if key not in seen and (wanted is None or key in wanted):
                seen.add(key)
                yield entry

    chosen: list[str | None] = [*clusters] if clusters else [None]
    named = [one for one in sources if not is_place(one)]
    for cluster in chosen if named else []:
        for name, record in select_sweeps(results, named, cluster):
            left = [one for one in record.run_ids if (name, one) not in seen]
            if wanted is not None:
                left = [one for one in left if (name, one) in wanted]
            yield from fresh(collect(results.cluster(name), left))
    for source in filter(is_place, sources):
        if is_bundle(source):
            yield from fresh(collect_bundle(Path(source), clusters))
            continue
        for tree in trees_in(source, clusters):
            yield from fresh(_of_tree(tree, wanted))


def whole_results(
    results: ResultsTree, sources: Sequence[str], clusters: Sequence[str] | None, wanted: Collection[tuple[str, str]]
) -> list[RunResult]:
    """The results of ``wanted`` (cluster, run_id) that can be read, under the name of the tree that they lie in."""
    from msgspec.structs import replace

    entries = collected(results, sources, clusters, frozenset(wanted))
    return [replace(one.result, cluster=one.cluster) for one in entries if one.result is not None]


def _of_tree(tree: ClusterTree, wanted: Collection[tuple[str, str]] | None) -> Iterator[Collected]:
    if wanted is None:
        return collect(tree)
    return collect(tree, [run_id for cluster, run_id in wanted if cluster == tree.root.name])
