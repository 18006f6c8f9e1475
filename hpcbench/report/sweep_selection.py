"""Selection of the sweeps that a command works on, by name or file, on one cluster or on all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcbench.errors import ConfigError, StorageError, did_you_mean
from hpcbench.results.results_tree import RUN_ID_PATTERN, ClusterTree, ResultsTree
from hpcbench.submit.submission_record import SweepRecord, read_sweep_record


def select_sweeps(tree: ResultsTree, given: Sequence[str], cluster: str | None) -> list[tuple[str, SweepRecord]]:
    """Cluster and record of each sweep that ``given`` names; all of them where nothing is given.

    Raises ``ConfigError`` with the nearest name where a sweep or cluster has nothing in the tree.
    """
    clusters = tree.clusters()
    if cluster is not None and cluster not in clusters:
        raise ConfigError(f"no results of cluster {cluster!r} in {tree.root}", hint=did_you_mean(cluster, clusters))
    known: dict[str, list[tuple[str, SweepRecord]]] = {}
    broken: dict[str, Path] = {}
    for name in [cluster] if cluster else clusters:
        one = tree.cluster(name)
        for path in sorted(one.path("sweeps").glob("[!.]*.json")):
            record = _read_record(one, path.stem)
            if record is not None:
                known.setdefault(path.stem, []).append((name, record))
            else:
                broken[path.stem] = path
    wanted = [sweep_name(one) for one in given] or sorted(known)
    for name in wanted:
        if name not in known:
            if name in broken:
                raise StorageError(
                    f"{broken[name]} is a link, or no record of a sweep", hint="submit the sweep again to write it anew"
                )
            raise ConfigError(
                f"sweep {name!r} has nothing in {tree.root}",
                hint=did_you_mean(name, known) if known else "submit or run a sweep first",
            )
    return [entry for name in wanted for entry in known[name]]


def _read_record(tree: ClusterTree, name: str) -> SweepRecord | None:
    """The record called ``name``; ``None`` where somebody put something else there."""
    try:
        record = read_sweep_record(tree, name)
    except (StorageError, ValueError, RecursionError):
        return None
    if record is None or record.sweep != name or not all(RUN_ID_PATTERN.fullmatch(one) for one in record.run_ids):
        return None
    return record


def sweep_name(given: str) -> str:
    """The name of a sweep that was given as a name or as a file."""
    if not given.endswith(".toml"):
        return given
    from hpcbench.config.sweep_loader import load_sweep

    return load_sweep(Path(given)).name
