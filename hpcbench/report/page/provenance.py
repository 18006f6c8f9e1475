"""What was run where and when: runs by cluster, sweep and environment, and what each environment was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from hpcbench.fileio import brief
from hpcbench.report.answers.answer import listed
from hpcbench.report.page.grid import Grid, grid
from hpcbench.results.schema import OK, RunResult
from hpcbench.units import format_bytes

if TYPE_CHECKING:
    import polars

MOST_READ = 1000
"""Whole results that are read for their provenance: the more there are, the more they are alike."""
_MOST_VALUES = 12
_MOST_ENVIRONMENTS = 8


def runs_grid(frame: polars.DataFrame) -> Grid:
    """Runs by cluster, sweep and environment: how many, how they ended, when."""
    import polars as pl

    keys = ["cluster", "sweep", "environment_digest"]
    time_ns = pl.col("file.mtime_ns")
    rows = frame.group_by(keys, maintain_order=True).agg(
        pl.len().alias("runs"), (pl.col("status") == OK).sum().alias("ok"),
        pl.col("status").filter(pl.col("status") != OK), time_ns.min().alias("first"), time_ns.max().alias("last"),
    ).sort(keys, nulls_last=True)  # fmt: skip
    table = [
        [row["cluster"], row["sweep"], row["environment_digest"], row["runs"], row["ok"], _counts(row["status"]),
         _moment(row["first"]), _moment(row["last"])]
        for row in rows.iter_rows(named=True)
    ]  # fmt: skip
    names = [*keys, "runs", "ok", "others", "first", "last"]
    headings = {"environment_digest": "environment", "others": "not ok", "first": "first result", "last": "last result"}
    notes = ["times are UTC, of when a result was put in place"] if any(line[6] for line in table) else []
    return grid(
        "runs", "Runs by cluster, sweep and environment", names, table, headings=headings, notes=notes, filters=False
    )


def _counts(statuses: Sequence[str]) -> str:
    return ", ".join(f"{statuses.count(one)} {brief(one)}" for one in sorted(set(statuses)))


def _moment(time_ns: int | None) -> str | None:
    if time_ns is None:
        return None
    return datetime.fromtimestamp(time_ns // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M")


def sampled(frame: polars.DataFrame) -> list[tuple[str, str]]:
    """Cluster and id of the runs whose provenance is read: all, or as many of each environment."""
    import polars as pl

    keys = ["cluster", "environment_digest"]
    ended = frame.filter(pl.col("config_id").is_not_null())
    if len(ended) > MOST_READ:
        share = max(1, MOST_READ // max(1, len(ended.select(keys).unique())))
        ended = ended.group_by(keys, maintain_order=True).head(share).head(MOST_READ)
    return list(ended.select("cluster", "run_id").iter_rows())


def environments_grid(results: Iterable[RunResult], runs: int) -> Grid | None:
    """A row per fact and a column per environment: hosts, devices, software; ``None`` where nothing is known."""
    found: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    read = 0
    for result in results:
        read += 1
        facts = found.setdefault((result.cluster, result.environment_digest or "unknown"), {})
        for name, fact in _FACTS.items():
            for value in fact(result.provenance):
                facts.setdefault(name, {})[value] = None
    known = dict(sorted((key, facts) for key, facts in found.items() if facts)[:_MOST_ENVIRONMENTS])
    if not known:
        return None
    names = ["fact", *(f"{cluster} {digest}" for cluster, digest in known)]
    table = [
        [name, *(listed(list(facts.get(name, {})), _MOST_VALUES) for facts in known.values())]
        for name in _FACTS if any(name in facts for facts in known.values())
    ]  # fmt: skip
    notes = [f"read from {read} of {runs} runs"] if read < runs else []
    if len(found) > _MOST_ENVIRONMENTS:
        notes.append(f"the first {_MOST_ENVIRONMENTS} of {len(found)} environments")
    return grid(
        "environments", "What it was measured on", names, table, notes=notes, filters=False,
        headings={"fact": "", **{name: name for name in names[1:]}},
    )  # fmt: skip


def _text(*path: str) -> Callable[[dict[str, Any]], list[str]]:
    def values(provenance: dict[str, Any]) -> list[str]:
        found: Any = provenance
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        if found in (None, "", [], {}):
            return []
        return [brief(str(one)) for one in found] if isinstance(found, list) else [brief(str(found))]

    return values


def _memory(provenance: dict[str, Any]) -> list[str]:
    size = provenance.get("memory_bytes")
    return [format_bytes(size)] if isinstance(size, int) and 0 < size < 2**60 else []


def _packages(provenance: dict[str, Any]) -> list[str]:
    given = provenance.get("packages")
    return [brief(f"{name} {version}") for name, version in given.items()] if isinstance(given, dict) else []


_FACTS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "hosts": _text("hosts"), "device": _text("device"), "GPU": _text("gpu_model"), "processor": _text("cpu_model"),
    "logical cores": _text("cores"), "memory of a host": _memory, "partition": _text("job", "partition"),
    "launcher": _text("launcher"), "hpcbench": _text("hpcbench"), "commit": _text("hpcbench_commit"),
    "torch": _text("torch"), "CUDA": _text("cuda"), "NCCL": _text("nccl"), "driver": _text("driver"),
    "Python": _text("python"), "packages": _packages, "system": _text("os"), "kernel": _text("kernel"),
    "container": _text("container"), "submissions": _text("submission"),
}  # fmt: skip
