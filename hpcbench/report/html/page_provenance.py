"""Provenance tables of the HTML page, and the sweep and commands that reproduce its results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from msgspec import structs

from hpcbench.config.run_spec import RunSpec, spec_document
from hpcbench.config.sweep_file import TABLE_PARAMETERS
from hpcbench.fileio import printable_excerpt
from hpcbench.report.findings.finding import join_words
from hpcbench.report.html.page_elements import HtmlTable, make_html_table
from hpcbench.results.schema import STATUS_OK, RunResult
from hpcbench.units import format_bytes

if TYPE_CHECKING:
    import polars

MAX_PROVENANCE_READ = 1000
"""Whole results that are read for their provenance: the more there are, the more they are alike."""
_MAX_VALUES = 12
_MAX_ENVIRONMENTS = 8


def runs_html_table(frame: polars.DataFrame) -> HtmlTable:
    """Runs by cluster, sweep and environment: how many, how they ended, when."""
    import polars as pl

    keys = ["cluster", "sweep", "environment_digest"]
    time_ns = pl.col("file.mtime_ns")
    rows = frame.group_by(keys, maintain_order=True).agg(
        pl.len().alias("runs"), (pl.col("status") == STATUS_OK).sum().alias("ok"),
        pl.col("status").filter(pl.col("status") != STATUS_OK), time_ns.min().alias("first"),
        time_ns.max().alias("last"),
    ).sort(keys, nulls_last=True)  # fmt: skip
    table = [
        [row["cluster"], row["sweep"], row["environment_digest"], row["runs"], row["ok"], _status_counts(row["status"]),
         _format_time_ns(row["first"]), _format_time_ns(row["last"])]
        for row in rows.iter_rows(named=True)
    ]  # fmt: skip
    names = [*keys, "runs", "ok", "others", "first", "last"]
    headings = {"environment_digest": "environment", "others": "not ok", "first": "first result", "last": "last result"}
    notes = ["times are UTC, of when a result was put in place"] if any(line[6] for line in table) else []
    return make_html_table(
        "runs", "Runs by cluster, sweep and environment", names, table, headings=headings, notes=notes, filters=False
    )


def _status_counts(statuses: Sequence[str]) -> str:
    return ", ".join(f"{statuses.count(one)} {printable_excerpt(one)}" for one in sorted(set(statuses)))


def _format_time_ns(time_ns: int | None) -> str | None:
    if time_ns is None:
        return None
    return datetime.fromtimestamp(time_ns // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M")


def sample_runs(frame: polars.DataFrame) -> list[tuple[str, str]]:
    """Cluster and id of the runs whose provenance is read: all, or as many of each environment."""
    import polars as pl

    keys = ["cluster", "environment_digest"]
    ended = frame.filter(pl.col("config_id").is_not_null())
    if len(ended) > MAX_PROVENANCE_READ:
        share = max(1, MAX_PROVENANCE_READ // max(1, len(ended.select(keys).unique())))
        ended = ended.group_by(keys, maintain_order=True).head(share).head(MAX_PROVENANCE_READ)
    return list(ended.select("cluster", "run_id").iter_rows())


def environments_html_table(results: Iterable[RunResult], runs: int) -> HtmlTable | None:
    """A row per fact and a column per environment: hosts, devices, software; ``None`` where nothing is known."""
    found: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    read = 0
    for result in results:
        read += 1
        facts = found.setdefault((result.cluster, result.environment_digest or "unknown"), {})
        for name, fact in _ENVIRONMENT_FACTS.items():
            for value in fact(result.provenance):
                facts.setdefault(name, {})[value] = None
    known = dict(sorted((key, facts) for key, facts in found.items() if facts)[:_MAX_ENVIRONMENTS])
    if not known:
        return None
    names = ["fact", *(f"{cluster} {digest}" for cluster, digest in known)]
    table = [
        [name, *(join_words(list(facts.get(name, {})), _MAX_VALUES) for facts in known.values())]
        for name in _ENVIRONMENT_FACTS if any(name in facts for facts in known.values())
    ]  # fmt: skip
    notes = [f"read from {read} of {runs} runs"] if read < runs else []
    if len(found) > _MAX_ENVIRONMENTS:
        notes.append(f"the first {_MAX_ENVIRONMENTS} of {len(found)} environments")
    return make_html_table(
        "environments", "What it was measured on", names, table, notes=notes, filters=False,
        headings={"fact": "", **{name: name for name in names[1:]}},
    )  # fmt: skip


def _provenance_texts(*path: str) -> Callable[[dict[str, Any]], list[str]]:
    def values(provenance: dict[str, Any]) -> list[str]:
        found: Any = provenance
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        if found in (None, "", [], {}):
            return []
        return (
            [printable_excerpt(str(one)) for one in found]
            if isinstance(found, list)
            else [printable_excerpt(str(found))]
        )

    return values


def _memory_texts(provenance: dict[str, Any]) -> list[str]:
    size = provenance.get("memory_bytes")
    return [format_bytes(size)] if isinstance(size, int) and 0 < size < 2**60 else []


def _package_texts(provenance: dict[str, Any]) -> list[str]:
    given = provenance.get("packages")
    return (
        [printable_excerpt(f"{name} {version}") for name, version in given.items()] if isinstance(given, dict) else []
    )


_ENVIRONMENT_FACTS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "hosts": _provenance_texts("hosts"),
    "device": _provenance_texts("device"),
    "GPU": _provenance_texts("gpu_model"),
    "processor": _provenance_texts("cpu_model"),
    "logical cores": _provenance_texts("cores"),
    "memory of a host": _memory_texts,
    "partition": _provenance_texts("job", "partition"),
    "launcher": _provenance_texts("launcher"),
    "hpcbench": _provenance_texts("hpcbench"),
    "commit": _provenance_texts("hpcbench_commit"),
    "torch": _provenance_texts("torch"),
    "CUDA": _provenance_texts("cuda"),
    "NCCL": _provenance_texts("nccl"),
    "driver": _provenance_texts("driver"),
    "Python": _provenance_texts("python"),
    "packages": _package_texts,
    "system": _provenance_texts("os"),
    "kernel": _provenance_texts("kernel"),
    "container": _provenance_texts("container"),
    "submissions": _provenance_texts("submission"),
}


MAX_SWEEP_POINTS = 200
_SPEC_DEFAULTS = {one.name: one.default for one in structs.fields(RunSpec) if not one.required}


def reproducing_sweep_toml(specs: Sequence[RunSpec], repeats: int, name: str = "again") -> str | None:
    """A sweep of ``specs``, each so often; ``None`` where they are too many to be read.

    Every parameter that is not at its default stands in it, degrees included, so that the runs keep their names.
    """
    points: dict[str, dict[str, Any]] = {}
    for spec in specs:
        point = {
            key: value
            for key, value in spec_document(spec).items()
            if key not in ("spec_version", "repeat") and value != _SPEC_DEFAULTS.get(key)
        }
        points[json.dumps(point, sort_keys=True)] = point
    if not points or len(points) > MAX_SWEEP_POINTS:
        return None
    given = list(points.values())
    fixed = {key: value for key, value in given[0].items() if all(one.get(key) == value for one in given)}
    # A table of options is joined with that of the fixed ones, so it is fixed for all or for none.
    lines = [f'name = "{name}"', f"repeats = {repeats}", "", "[fixed]", *_toml_settings(fixed)]
    for point in given if len(given) > 1 else []:
        own = {key: value for key, value in point.items() if key not in fixed}
        lines += ["", "[[include]]", *_toml_settings(own)]
    return "\n".join(lines) + "\n"


def _toml_settings(values: dict[str, Any]) -> list[str]:
    """A line each; tables by their dotted names, as sweeps are written."""
    lines = []
    for key, value in values.items():
        if key in TABLE_PARAMETERS and isinstance(value, dict):
            lines += [f"{key}.{_toml_key(name)} = {_toml_value(one)}" for name, one in value.items()]
        else:
            lines.append(f"{key} = {_toml_value(value)}")
    return lines


def _toml_key(name: str) -> str:
    return name if name.replace("_", "a").replace("-", "a").isalnum() and name.isascii() else _toml_value(name)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # JSON's strings and numbers are TOML's, but for DEL.
    return json.dumps(value).replace("\x7f", "\\u007f")


def reproducing_commands(
    sources: Sequence[str], clusters: Sequence[str], where: str | None, *, has_sweep: bool
) -> list[str]:
    """What made this page, and what would measure it again."""
    narrowed = ["--where", where] if where else []
    made = shlex.join(["hpcbench", "report", *sources, *narrowed, "--out", "report.html"])
    if not has_sweep:
        return [made]
    again = [shlex.join(["hpcbench", "submit", "again.toml", "--cluster", cluster]) for cluster in clusters]
    return [made, *again, shlex.join(["hpcbench", "report", "again", *narrowed, "--out", "report.html"])]
