"""A results tree for repeated reading, as ``watch`` needs it: only results that may have changed are read again."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_OK, ResultSummary

_MAX_SINGLE_LOOKUPS = 50
"""So many are looked at one by one: there are more folders than that."""
_MTIME_RESOLUTION_S = 2.0
"""A change within this time of another may bear the same modification time."""


class IncrementalClusterTree(ClusterTree):
    """A ``ClusterTree`` whose ``heads`` costs a look at each folder ``runs/<first two hex>``, and what changed there.

    Whoever writes a result touches that folder. An ok result is read once: nothing but another ok one replaces it.
    ``head`` of one run alone always reads its file.
    """

    def __init__(
        self,
        root: Path,
        clock: Callable[[], float] = time.monotonic,
        superseded: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``superseded``: of runs that are measured again, the environment key of the result that is replaced."""
        super().__init__(root)
        self._clock, self._superseded = clock, superseded
        self._heads: dict[str, ResultSummary] = {}
        self._ended: dict[str, float] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        """Modification time (ns) of every folder, and when it was seen first."""
        self._settled: dict[str, int] = {}
        """Of runs that were read when their folder had had its modification time (ns) for a while: that time."""

    def summaries(self, run_ids: Collection[str]) -> dict[str, ResultSummary]:
        """As ``ClusterTree.heads``. Runs that were not asked for before are looked up, too."""
        wanted = [run_id for run_id in run_ids if not self._is_ok(run_id)]
        if len(wanted) <= _MAX_SINGLE_LOOKUPS:
            for run_id in wanted:
                self.summary(run_id)
        else:
            self._look_for(wanted)
        return {run_id: self._heads[run_id] for run_id in run_ids if run_id in self._heads}

    def _is_ok(self, run_id: str) -> bool:
        known = self._heads.get(run_id)
        return known is not None and known.status == STATUS_OK and not self.is_superseded(run_id, known)

    def is_superseded(self, run_id: str, head: ResultSummary) -> bool:
        """Whether it is still the result that a new measurement is to replace."""
        return head.environment_key is not None and head.environment_key == self._superseded.get(run_id)

    def _look_for(self, wanted: Collection[str]) -> None:
        """Read those of ``wanted`` that are in folders that have changed since each was read last."""
        now_s, mtimes_ns = self._clock(), self.prefix_mtimes_ns()
        for prefix, mtime_ns in mtimes_ns.items():
            if prefix not in self._seen or self._seen[prefix][0] != mtime_ns:
                self._seen[prefix] = (mtime_ns, now_s)
        names: dict[str, set[str]] = {}
        for run_id in wanted:
            prefix = run_id[:2]
            if prefix not in mtimes_ns:
                self._heads.pop(run_id, None)
                continue
            if self._settled.get(run_id) == mtimes_ns[prefix]:
                continue
            if prefix not in names:
                names[prefix] = self._listed(prefix)
            if run_id in names[prefix]:
                self.summary(run_id)
            else:
                self._heads.pop(run_id, None)
            if now_s - self._seen[prefix][1] > _MTIME_RESOLUTION_S:
                # Later changes cannot bear this time any more.
                self._settled[run_id] = mtimes_ns[prefix]

    def summary(self, run_id: str) -> ResultSummary | None:
        """The head of one result as its file is now."""
        head = super().summary(run_id)
        if head is None:
            self._heads.pop(run_id, None)
            return None
        if head != self._heads.get(run_id):
            self._heads[run_id] = head
            with contextlib.suppress(OSError):
                self._ended[run_id] = os.lstat(self.root / "runs" / run_id[:2] / run_id / "result.json").st_mtime
        return head

    def cached_summary(self, run_id: str) -> ResultSummary | None:
        """The head as it was read last."""
        return self._heads.get(run_id)

    def ended_unix_s(self, run_id: str) -> float | None:
        """When the result that counts was put in place; ``None`` where none has been read."""
        return self._ended.get(run_id) if run_id in self._heads else None

    def _listed(self, prefix: str) -> set[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return set(os.listdir(self.root / "runs" / prefix))
        return set()
