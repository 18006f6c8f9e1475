"""A results tree that is looked at again and again: of its results only those are read that may have changed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from hpcbench.results.folders import folders
from hpcbench.results.schema import OK, ResultHead
from hpcbench.results.store import ClusterTree

_SAME_TIME_S = 2.0
"""A change within this time of another may bear the same modification time."""


class RememberingTree(ClusterTree):
    """A ``ClusterTree`` whose ``heads`` costs one look at each folder ``runs/<first two hex>``, and what changed there.

    Whoever writes a result touches that folder. An ok result is read once: nothing but another ok one replaces it.
    ``head`` of one run alone always reads its file.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(root)
        self._clock = clock
        self._heads: dict[str, ResultHead] = {}
        self._ended: dict[str, float] = {}
        self._quiet: dict[str, int] = {}
        """Folders in which all is known, with the modification time (ns) that says so."""
        self._seen: dict[str, tuple[int, float]] = {}
        """Modification time (ns) of the others, and when it was seen first."""
        self._asked: set[str] = set()

    def heads(self, run_ids: Collection[str]) -> dict[str, ResultHead]:
        """As ``ClusterTree.heads``. Runs that were not asked for before are looked up, too."""
        moving = self._moving()
        names: dict[str, set[str]] = {}
        for run_id in run_ids:
            known, prefix = self._heads.get(run_id), run_id[:2]
            if known is not None and known.status == OK:
                continue
            if prefix not in moving and run_id in self._asked:
                continue
            if prefix not in names:
                names[prefix] = self._listed(prefix)
            if run_id in names[prefix]:
                self.head(run_id)
            else:
                self._heads.pop(run_id, None)
        self._asked.update(run_ids)
        return {run_id: self._heads[run_id] for run_id in run_ids if run_id in self._heads}

    def head(self, run_id: str) -> ResultHead | None:
        """The head of one result as its file is now."""
        head = super().head(run_id)
        if head is None:
            self._heads.pop(run_id, None)
            return None
        if head != self._heads.get(run_id):
            self._heads[run_id] = head
            with contextlib.suppress(OSError):
                self._ended[run_id] = os.lstat(self.root / "runs" / run_id[:2] / run_id / "result.json").st_mtime
        return head

    def known(self, run_id: str) -> ResultHead | None:
        """The head as it was read last."""
        return self._heads.get(run_id)

    def ended_unix_s(self, run_id: str) -> float | None:
        """When the result that counts was put in place; ``None`` where none has been read."""
        return self._ended.get(run_id) if run_id in self._heads else None

    def _moving(self) -> set[str]:
        """The folders whose results may not be those that are known."""
        now_s = self._clock()
        moving = set()
        for prefix, mtime_ns in folders(self).items():
            if self._quiet.get(prefix) == mtime_ns:
                continue
            moving.add(prefix)
            since = self._seen.get(prefix)
            if since is None or since[0] != mtime_ns:
                self._seen[prefix] = (mtime_ns, now_s)
            elif now_s - since[1] > _SAME_TIME_S:
                # It is read once more now; later changes cannot bear this time any more.
                self._quiet[prefix] = mtime_ns
        return moving

    def _listed(self, prefix: str) -> set[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return set(os.listdir(self.root / "runs" / prefix))
        return set()
