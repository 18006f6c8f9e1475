"""``python -m benchmarks.oracle.exam2``: sites of which no run was ever seen, predicted as a user of hpcbench would.

Each source of ``data/gpu_exam2_configs.csv.gz`` is a site: a profile, and a sweep of a command with a declared layout.
The predictions rest on the profiles, on these layouts, on the figures learned from other sources, and on the first
``pilots`` runs of the own source, which are results in the site's tree. Lines without pilots are never made again.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.config.sweep_file import settings_lines
from hpcbench.config.sweep_loader import Sweep, expand_sweep, load_sweep
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.prediction import NotPredicted, Prediction
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.results.schema import RunMetrics, RunResult
from hpcbench.results.timing_statistics import step_time_statistics
from hpcbench.strategies.resolve import PartitionLimits, resolve_point

FOLDER = Path(__file__).parent
PILOTS = FOLDER / "data" / "gpu_exam2_pilots.csv.gz"
CONFIGS = FOLDER / "data" / "gpu_exam2_configs.csv.gz"
PREDICTIONS = FOLDER / "gpu_exam2_predictions.csv"
REGISTERED = "b84cb01154d0fa131ab2c519c1967e906d7eb8d29d523ca43b9969ed2b9ce7ba"
"""SHA-256 of the file. The lines without pilots are by the code of commit f4b408bd, before the pilots were read; the
others by that of 3e678d80. None is ever made again."""
TOLERANCE, CONTEXT_TOLERANCE = 0.002, 0.02
"""Largest relative difference of a repeated prediction. The second one is for the site with context groups, whose
messages are priced since."""
WITH_CONTEXT = "simumax_b200"
GIB = 2.0**30

_OMNI_PATH = {"latency_s": 10e-6, "bandwidth_bytes_per_s": 12.5e9, "per_node": 4}
SITES: dict[str, dict[str, Any]] = {
    "vtrain_multi": {
        "extends": "a100-80gb-ib",
        "links": {"inter_node": {"latency_s": 10e-6, "bandwidth_bytes_per_s": 12.5e9, "per_node": 8}},
    },
    "bigscience_tr11": {"extends": "a100-80gb-ib", "links": {"inter_node": _OMNI_PATH}},
    "internevo": {"extends": "a100-80gb-ib", "links": {"inter_node": _OMNI_PATH}},
    "internevo_mem": {
        "extends": "a100-80gb-ib", "links": {"intra_node": {"latency_s": 5e-6, "bandwidth_bytes_per_s": 200e9}},
    },
    "simumax_a100": {
        "extends": "a100-80gb-pcie",
        "links": {"intra_node": {"latency_s": 10e-6, "bandwidth_bytes_per_s": 30e9, "shared": True}},
    },
    "simumax_b200": {"extends": "b200-180gb-ib"},
}  # fmt: skip
"""What differs from a shipped profile, as the table of configurations states it."""
SOFTWARE = {
    "vtrain_multi": "megatron_deepspeed", "bigscience_tr11": "megatron_deepspeed", "internevo": "other",
    "internevo_mem": "other", "simumax_a100": "megatron", "simumax_b200": "megatron",
}  # fmt: skip
PARAMETERS = (
    "row", "layers", "hidden", "ffn", "heads", "kv_heads", "vocabulary", "dp", "shards", "zero", "tp", "pp", "cp",
    "micro_batch", "global_batch", "sequence", "chunks", "optimizer_shards", "full_recompute",
)  # fmt: skip
_STEP_TIME = """
[[command.metrics]]
name = "step_time"
unit = "s"
better = "lower"
per = "step"
pattern = 'step ([0-9.]+)'
"""
_STORED_SCORES = ("megatron_deepspeed",)
_DEVICES_PER_NODE = 8


class Site(NamedTuple):
    """A source: its profile, its sweep, and the run of each row."""

    profile: ClusterProfile
    sweep: Sweep
    runs: dict[str, RunSpec]


def read_table(path: Path) -> dict[str, list[dict[str, str]]]:
    """Return the rows of a table by source."""
    rows: dict[str, list[dict[str, str]]] = defaultdict(list)
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows[row["source"]].append(row)
    return rows


def row_parameters(row: Mapping[str, str]) -> dict[str, int]:
    """Return the parameters of a row's run."""
    values = {name: int(row[name] or 1) for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "tp", "pp", "cp")}
    notes = row["notes"]
    vocabulary, multiple = int(row["vocab"]), 128 * values["tp"]
    if "before padding" in notes:
        vocabulary = ceil(vocabulary / multiple) * multiple
    group = re.search(r"zero1 group of (\d+)", notes)
    chunks = re.search(r"VP=(\d+)", notes)
    return values | {
        "row": int(row["id"]),
        "vocabulary": vocabulary,
        "dp": int(row["dp"] or 1),
        "shards": int(row["fsdp"] or 1),
        "zero": int(row["zero"] == "1"),
        "micro_batch": int(row["micro_batch"]),
        "global_batch": int(row["global_batch"]),
        "sequence": int(row["seq"]),
        "chunks": int(chunks[1]) if chunks else 1,
        "optimizer_shards": min(int(group[1]), int(row["dp"])) if group else 0,
        "full_recompute": int(row["recompute"] == "full"),
    }


def sweep_table(source: str, rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the sweep of a source without its axes: one command, whose parameters are a row's."""
    software, is_gpt = SOFTWARE[source], rows[0]["model"].startswith(("GPT", "BLOOM"))
    is_split_norm = "sequence parallelism; " in rows[0]["notes"] and "no sequence" not in rows[0]["notes"]
    terms = [name for name in PARAMETERS if name not in ("row", "full_recompute")]
    return {
        "name": source,
        "command": {
            "argv": ["train", *(f"--{name}={{{name}}}" for name in PARAMETERS)],
            "parameters": {name: {"type": "int", "default": 1} for name in PARAMETERS},
            "layout": {
                "model": "gpt3_175b" if is_gpt else "llama_8b",
                "software": software,
                **dict(zip(terms, terms, strict=True)),
                "recompute": "'full' if full_recompute else 'none'",
                "fused_attention": software not in _STORED_SCORES,
                "sequence_parallel": is_split_norm,
                "overlap": software == "other",
            },
        },
    }


def sweep_axes(rows: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """Return the values of every parameter, row by row."""
    values = [row_parameters(row) for row in rows]
    gpus = [int(row["gpus"]) for row in rows]
    return {
        "nodes": [ceil(count / _DEVICES_PER_NODE) for count in gpus],
        "tasks_per_node": [min(count, _DEVICES_PER_NODE) for count in gpus],
        **{name: [each[name] for each in values] for name in PARAMETERS},
    }


def load_site(source: str, rows: Sequence[Mapping[str, str]], folder: Path) -> Site:
    """Write a source's profile and sweep into ``folder``, and read them as hpcbench reads a user's."""
    profile_path, sweep_path = folder / f"{source}.toml", folder / f"{source}_sweep.toml"
    profile_path.write_text("\n".join(settings_lines({"name": source, **SITES[source]})), encoding="utf-8")
    lines = [*settings_lines(sweep_table(source, rows)), _STEP_TIME, "[[zip]]", *settings_lines(sweep_axes(rows))]
    sweep_path.write_text("\n".join(lines), encoding="utf-8")
    sweep = load_sweep(sweep_path)
    runs = {}
    for point in expand_sweep(sweep):
        spec = resolve_point(point, PartitionLimits("any")) if isinstance(point, dict) else None
        if not isinstance(spec, RunSpec):
            raise TypeError(f"{source}: a row is no run: {spec}")
        runs[str(spec.parameters["row"])] = spec
    return Site(load_cluster(str(profile_path))[0], sweep, runs)


def load_sites() -> Iterator[tuple[str, Site]]:
    """Yield the name and the site of every source."""
    with tempfile.TemporaryDirectory() as name:
        for source, rows in read_table(CONFIGS).items():
            yield source, load_site(source, rows, Path(name))


def write_pilots(site: Site, rows: Sequence[Mapping[str, str]], tree: ClusterTree) -> None:
    """Write published runs as the results of a site."""
    for row in rows:
        spec = site.runs[row["id"]]
        step_s, memory = (float(row[name] or 0) for name in ("step_time_s", "peak_mem_gib"))
        metrics = RunMetrics(
            step_time_s=step_time_statistics([step_s]) if step_s else None,
            peak_memory_bytes=round(memory * GIB) if memory else None,
        )
        tree.write_result(
            RunResult(
                run_id=run_id(spec), config_id=config_id(spec), attempt=1, sweep=site.sweep.name,
                cluster=site.profile.name, spec=spec, status="ok", metrics=metrics,
            )
        )  # fmt: skip


def predictions(pilots: int | None) -> Iterator[tuple[str, Prediction]]:
    """Predict every row from the first ``pilots`` runs of its source, ``None`` being all of them."""
    known = read_table(PILOTS) if pilots != 0 else {}
    with tempfile.TemporaryDirectory() as name:
        for source, site in load_sites():
            tree = ResultsTree(Path(name)).cluster(site.profile.name)
            order = sorted(known.get(source, ()), key=lambda row: int(row["pilot"]))
            write_pilots(site, order[:pilots], tree)
            forecast = Forecast(site.profile, tree, command=site.sweep.command)
            for row_id, spec in site.runs.items():
                prediction = forecast.predict(spec)
                if isinstance(prediction, NotPredicted):
                    raise TypeError(f"{source}, row {row_id}: {prediction.reason}")
                yield row_id, prediction


def csv_lines(pilots: str, predictions: Iterator[tuple[str, Prediction]]) -> list[list[str]]:
    """Return the lines of the table for one number of pilots."""
    return [
        [pilots, row_id, *(f"{value:.5g}" for value in (
            one.step_time_s, one.interval.low, one.interval.high, one.peak_memory_bytes / GIB,
        ))]
        for row_id, one in predictions
    ]  # fmt: skip


def repeated_lines() -> list[str]:
    """Return the lines of the predictions that rest on pilots."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for pilots, count in (("5", 5), ("all", None)):
        writer.writerows(csv_lines(pilots, predictions(count)))
    return text.getvalue().splitlines(keepends=True)


def check() -> list[str]:
    """Repeat the registered predictions that rest on pilots, and return the differences."""
    content = PREDICTIONS.read_bytes()
    if hashlib.sha256(content).hexdigest() != REGISTERED:
        return [f"{PREDICTIONS.name}: not the registered predictions"]
    in_context = {row["id"] for row in read_table(CONFIGS)[WITH_CONTEXT]}
    problems, lines = [], content.decode().splitlines(keepends=True)
    for before, after in zip([line for line in lines if line[0] in "5a"], repeated_lines(), strict=True):
        old, new = before.split(","), after.split(",")
        bound = CONTEXT_TOLERANCE if old[1] in in_context else TOLERANCE
        pairs = zip(map(float, old[2:]), map(float, new[2:]), strict=True)
        if old[:2] != new[:2] or any(abs(one - other) > bound * one for one, other in pairs):
            problems.append(f"{PREDICTIONS.name}: {before.strip()} committed, {after.strip()} now")
    return problems


def main() -> int:
    problems = check()
    print("\n".join(problems) or "all registered predictions are repeated")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
