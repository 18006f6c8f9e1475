"""Predictions of the ten configurations, made before any of them ran: ``python -m benchmarks.gpu_day predict``.

``predict`` and ``recommend`` give the step and the memory by the profile, ``dry-run`` the memory and the operators by
fake tensors. The file is committed, so that nothing of it can be fitted to the day.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu_day.machines import LARGE_MEMORY, NODES, write_profiles
from benchmarks.gpu_day.parts import day_parts, part_sweep
from benchmarks.gpu_day.shards import shard_specs
from hpcbench.config.run_spec import RunSpec, config_id
from hpcbench.fileio import encode_indented_json, write_atomic
from hpcbench.predict.dry_runs import dry_run_configurations
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.prediction import NotPredicted, Prediction
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.plan import make_plan

FILE = Path(__file__).with_name("predictions.json")
CORES = 16
"""Of the machine that is expected."""


class Expectation(msgspec.Struct, kw_only=True):
    """The predictions of a configuration."""

    spec: RunSpec
    step: Prediction | None = None
    """``None`` for a shard, whose step means nothing."""
    reason: str | None = None
    """Why there is no prediction."""
    dry_run_bytes: int | None = None
    dry_run_operators: int | None = None


def read_predictions() -> dict[str, dict[str, Expectation]]:
    """Return the committed predictions by device (``H100``) and ``config_id``; empty if there are none."""
    if not FILE.is_file():
        return {}
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, dict[str, Expectation]])


def write_predictions() -> None:
    """Predict the timed configurations and the shards for each device, and write the file."""
    documents: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for key in NODES:
            profile = write_profiles(Path(folder) / key, "cuda", key, CORES).alone
            singles = next(
                part for part in day_parts("full", large_memory=key in LARGE_MEMORY) if part.name == "singles"
            )
            plan = make_plan(part_sweep(singles), profile, ClusterTree(Path(folder) / "none"))
            forecast, expected = Forecast(profile), dict[str, Expectation]()
            for spec in plan.runs.values():
                prediction = forecast.predict(spec)
                entry = expected[config_id(spec)] = Expectation(spec=spec)
                if isinstance(prediction, NotPredicted):
                    entry.reason = prediction.reason
                else:
                    entry.step = prediction
            expected |= {config_id(spec): Expectation(spec=spec) for spec, _ in shard_specs("full")}
            configurations = {name: entry.spec for name, entry in expected.items()}
            for name, dry_run in zip(configurations, dry_run_configurations(plan, configurations), strict=True):
                expected[name].dry_run_bytes = dry_run.peak_memory_bytes
                expected[name].dry_run_operators = dry_run.operators
            documents[key] = expected
    write_atomic(FILE, encode_indented_json(documents))
