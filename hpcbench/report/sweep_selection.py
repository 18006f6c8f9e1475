"""Selection of the sweeps that a command works on, by name or file, on one cluster or on all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcbench.errors import ConfigError, StorageError, did_you_mean
from hpcbench.results.results_tree import RUN_ID_PATTERN, ClusterTree, ResultsTree
from hpcbench.submit.submission_record import SweepRecord, read_sweep_record


def select_sweeps(tree: ResultsTree, names: Sequence[str], cluster: str | None) -> list[tuple[str, SweepRecord]]:
    """Return cluster and record of each sweep in ``names`` (names or files), or of all sweeps without any.

    Raises ``ConfigError`` with the nearest name if a sweep or ``cluster`` has nothing in the tree.
    """
    clusters = tree.clusters()
    if cluster is not None and cluster not in clusters:
        raise ConfigError(f"no results of cluster {cluster!r} in {tree.root}", hint=did_you_mean(cluster, clusters))
    records: dict[str, list[tuple[str, SweepRecord]]] = {}
    broken: dict[str, Path] = {}
    for cluster_name in [cluster] if cluster else clusters:
        cluster_tree = tree.cluster(cluster_name)
        for path in sorted(cluster_tree.path("sweeps").glob("[!.]*.json")):
            record = _read_record(cluster_tree, path.stem)
            if record is not None:
                records.setdefault(path.stem, []).append((cluster_name, record))
            else:
                broken[path.stem] = path
    wanted = [sweep_name(name) for name in names] or sorted(records)
    for name in wanted:
        if name not in records and name in broken:
            hint = "submit the sweep again to write it anew"
            raise StorageError(f"{broken[name]} is a link, or no record of a sweep", hint=hint)
        if name not in records:
            hint = did_you_mean(name, records) if records else "submit or run a sweep first"
            raise ConfigError(f"sweep {name!r} has nothing in {tree.root}", hint=hint)
    return [entry for name in wanted for entry in records[name]]


def _read_record(tree: ClusterTree, name: str) -> SweepRecord | None:
    """Return the record called ``name``; ``None`` if the file is something else."""
    try:
        record = read_sweep_record(tree, name)
    except (StorageError, ValueError, RecursionError):
        return None
    is_valid = record is not None and record.sweep == name and all(map(RUN_ID_PATTERN.fullmatch, record.run_ids))
    return record if is_valid else None


def sweep_name(source: str) -> str:
    """Return the name of a sweep, which is a name or a TOML file."""
    if not source.endswith(".toml"):
        return source
    from hpcbench.config.sweep_loader import load_sweep

    return load_sweep(Path(source)).name
