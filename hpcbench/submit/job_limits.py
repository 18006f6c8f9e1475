"""Limits on the jobs that a user may have queued and running: everywhere, and in single partitions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class JobLimit(NamedTuple):
    """A limit on jobs that the user may have queued and running, and the part of it that is left."""

    most: int
    free: int
    of: str
    """The place that it holds for, for messages."""


class SchedulerLimits(NamedTuple):
    """Limits on what may be submitted now."""

    max_array_size: int = 1
    """Jobs that one call may submit."""
    everywhere: JobLimit | None = None
    """The limit on all jobs; ``None``: none is known, or the number of queued jobs is not."""
    by_partition: Mapping[str | None, JobLimit] = MappingProxyType({})
    """The limits on the jobs of a partition, by its name in the profile."""

    def tightest(self, partition: str | None) -> JobLimit | None:
        """The limit that leaves the fewest jobs for ``partition``."""
        limits = [limit for limit in (self.everywhere, self.by_partition.get(partition)) if limit is not None]
        return min(limits, key=lambda limit: limit.free, default=None)

    def after(self, partition: str | None, jobs: int) -> SchedulerLimits:
        """The limits once ``jobs`` were submitted to ``partition``."""

        def reduced(limit: JobLimit) -> JobLimit:
            return limit._replace(free=limit.free - jobs)

        everywhere = reduced(self.everywhere) if self.everywhere is not None else None
        of_others = {key: reduced(limit) if key == partition else limit for key, limit in self.by_partition.items()}
        return self._replace(everywhere=everywhere, by_partition=of_others)
