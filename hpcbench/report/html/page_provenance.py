"""Provenance tables of the HTML page, and the sweep and commands that reproduce its results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

import polars as pl

from hpcbench.config.run_spec import RunSpec, spec_document
from hpcbench.config.sweep_file import sweep_toml
from hpcbench.fileio import printable_excerpt
from hpcbench.report.html.page_elements import HtmlTable, html_table, plain_columns
from hpcbench.report.phrases import join_words, status_counts
from hpcbench.results.schema import STATUS_OK, RunResult
from hpcbench.units import format_bytes

MAX_PROVENANCE_READ = 1000
"""At most so many full results are read for their provenance."""
_MAX_VALUES = 12
_MAX_ENVIRONMENTS = 8


def runs_html_table(frame: pl.DataFrame) -> HtmlTable:
    """Number, statuses and times of runs by cluster, sweep and environment."""
    keys = ["cluster", "sweep", "environment_digest"]
    time_ns = pl.col("file.mtime_ns")
    is_ok = pl.col("status") == STATUS_OK
    groups = frame.group_by(keys, maintain_order=True).agg(
        pl.len().alias("runs"), is_ok.sum().alias("ok"), pl.col("status").filter(~is_ok),
        time_ns.min().alias("first"), time_ns.max().alias("last"),
    ).sort(keys, nulls_last=True)  # fmt: skip
    table = [
        [*identity, runs, ok, status_counts(statuses), _format_time_ns(first), _format_time_ns(last)]
        for *identity, runs, ok, statuses, first, last in groups.iter_rows()
    ]
    names = [*keys, "runs", "ok", "others", "first", "last"]
    headings = {"environment_digest": "environment", "others": "not ok", "first": "first result", "last": "last result"}
    notes = ["times (UTC) of the result files"] if any(row[6] for row in table) else []
    columns = plain_columns(names, headings)
    return html_table("runs", "Runs by cluster, sweep and environment", columns, table, notes=notes, filters=False)


def _format_time_ns(time_ns: int | None) -> str | None:
    if time_ns is None:
        return None
    return datetime.fromtimestamp(time_ns // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M")


def sample_runs(frame: pl.DataFrame) -> list[tuple[str, str]]:
    """Return cluster and id of the runs whose provenance is read: all, or equally many of each environment."""
    keys = ["cluster", "environment_digest"]
    ended = frame.filter(pl.col("config_id").is_not_null())
    if len(ended) > MAX_PROVENANCE_READ:
        share = max(1, MAX_PROVENANCE_READ // max(1, len(ended.select(keys).unique())))
        ended = ended.group_by(keys, maintain_order=True).head(share).head(MAX_PROVENANCE_READ)
    return list(ended.select("cluster", "run_id").iter_rows())


def environments_html_table(results: Iterable[RunResult], runs: int) -> HtmlTable | None:
    """One row per fact and one column per environment: hosts, devices, software; ``None`` if nothing is known."""
    environments: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    read = 0
    for result in results:
        read += 1
        facts = environments.setdefault((result.cluster, result.environment_digest or "unknown"), {})
        for name, path in _ENVIRONMENT_FACTS.items():
            if texts := _fact_texts(result.provenance, path):
                facts.setdefault(name, {}).update(dict.fromkeys(texts))
    known = dict(sorted((key, facts) for key, facts in environments.items() if facts)[:_MAX_ENVIRONMENTS])
    if not known:
        return None
    names = ["fact", *(f"{cluster} {digest}" for cluster, digest in known)]
    table = [
        [name, *(join_words(list(facts.get(name, {})), _MAX_VALUES) for facts in known.values())]
        for name in _ENVIRONMENT_FACTS if any(name in facts for facts in known.values())
    ]  # fmt: skip
    notes = [f"read from {read} of {runs} runs"] if read < runs else []
    if len(environments) > _MAX_ENVIRONMENTS:
        notes.append(f"the first {_MAX_ENVIRONMENTS} of {len(environments)} environments")
    columns = plain_columns(names, {name: name for name in names})
    return html_table("environments", "Hardware and software", columns, table, notes=notes, filters=False)


def _fact_texts(provenance: dict[str, Any], path: str) -> list[str]:
    """The text of the value at ``path``, or of each value of a list there."""
    value: Any = provenance
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if path == "memory_bytes":
        value = format_bytes(value) if isinstance(value, int) and 0 < value < 2**60 else None
    elif path == "packages":
        value = [f"{name} {version}" for name, version in value.items()] if isinstance(value, dict) else None
    if value in (None, "", [], {}):
        return []
    return [printable_excerpt(str(part)) for part in (value if isinstance(value, list) else [value])]


_ENVIRONMENT_FACTS = {
    "hosts": "hosts", "device": "device", "GPU": "gpu_model", "processor": "cpu_model", "logical cores": "cores",
    "memory of a host": "memory_bytes", "partition": "job.partition", "launcher": "launcher", "hpcbench": "hpcbench",
    "commit": "hpcbench_commit", "torch": "torch", "CUDA": "cuda", "NCCL": "nccl", "driver": "driver",
    "Python": "python", "packages": "packages", "system": "os", "kernel": "kernel", "container": "container",
    "submissions": "submission",
}  # fmt: skip
"""Names of facts, and their paths in the provenance of a result."""
MAX_SWEEP_POINTS = 200


def reproducing_sweep_toml(specs: Sequence[RunSpec], repeats: int, name: str = "again") -> str | None:
    """Return a sweep of ``specs`` with ``repeats`` each; ``None`` above ``MAX_SWEEP_POINTS`` points.

    It contains every parameter that is not at its default, degrees included, so that the runs keep their ids.
    """
    points: dict[str, dict[str, Any]] = {}
    for spec in specs:
        point = {key: value for key, value in spec_document(spec).items() if key not in ("spec_version", "repeat")}
        points[json.dumps(point, sort_keys=True)] = point
    if not points or len(points) > MAX_SWEEP_POINTS:
        return None
    first, *others = points.values()
    # A table of options is merged with that of the fixed parameters, so it is fixed for all or for none.
    fixed = {key: value for key, value in first.items() if all(point.get(key) == value for point in others)}
    differing = [{key: value for key, value in point.items() if key not in fixed} for point in points.values()]
    return sweep_toml({"name": name, "repeats": repeats}, fixed, differing if others else [])


def reproducing_commands(
    sources: Sequence[str], clusters: Sequence[str], where: str | None, *, has_sweep: bool
) -> list[str]:
    """Return the command that made this page, and those that measure it again."""
    narrowed = ["--where", where] if where else []
    commands = [["hpcbench", "report", *sources, *narrowed, "--out", "report.html"]]
    if has_sweep:
        commands += [["hpcbench", "submit", "again.toml", "--cluster", cluster] for cluster in clusters]
        commands.append(["hpcbench", "report", "again", *narrowed, "--out", "report.html"])
    return [shlex.join(command) for command in commands]
