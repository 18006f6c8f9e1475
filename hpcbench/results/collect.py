"""Read results back: of some sweeps or of a whole tree. A broken file is an entry with a reason, never a crash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from hpcbench.errors import StorageError
from hpcbench.results.schema import RunResult
from hpcbench.results.store import ClusterTree


@dataclass(frozen=True)
class Collected:
    """A result, or why there is none."""

    cluster: str
    run_id: str
    result: RunResult | None
    problem: str = ""


def collect(tree: ClusterTree, run_ids: Iterable[str] | None = None) -> Iterator[Collected]:
    """The results of ``run_ids``, or of every run in the tree; runs without a result are passed over.

    A result that cannot be read, and a link where a run should be, are entries with the reason.
    """
    if run_ids is None:
        yield from link_entries(tree)
    for run_id in tree.run_ids() if run_ids is None else run_ids:
        try:
            result = tree.read_result(run_id)
        except msgspec.MsgspecError as error:
            yield Collected(tree.root.name, run_id, None, f"result.json is broken: {error}")
            continue
        except StorageError as error:
            yield Collected(tree.root.name, run_id, None, str(error).replace("\n ", ";"))
            continue
        if result is not None:
            yield Collected(tree.root.name, run_id, result)


def link_entries(tree: ClusterTree) -> Iterator[Collected]:
    """An entry for every link in place of the folders that hold runs."""
    for link in tree.links():
        name = link.relative_to(tree.root).as_posix()
        yield Collected(tree.root.name, name, None, f"{link} is a link: none is followed inside a results tree")
