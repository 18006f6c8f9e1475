"""The one registry: what each strategy is called, which degrees it takes, who runs it, and which models there are.

Runtimes are named in strings and imported on use, so that a login node reads this without torch.
"""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hpcbench.config.spec import RunSpec
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.parallel.entry import Option, Strategy
from hpcbench.parallel.own_model import is_own
from hpcbench.parallel.strategies import channels, data, fairscale_pipe, pipedream, pipeline, probes, spatial, tensor

REFERENCES = {
    "data_parallel": "hpcbench.worker.reference:train_reference",
    "pipeline": "hpcbench.worker.pipeline.reference:train_pipeline",
    "pipedream": "hpcbench.worker.reference_pipedream:train_pipedream_reference",
}
"""Trainings in one process that strategies are compared with, by name."""

STRATEGIES: dict[str, Strategy] = {
    **data.STRATEGIES,
    **channels.STRATEGIES,
    **spatial.STRATEGIES,
    **tensor.STRATEGIES,
    **pipeline.STRATEGIES,
    **pipedream.STRATEGIES,
    **fairscale_pipe.STRATEGIES,
}

PROBES: dict[str, Strategy] = probes.PROBES
"""Runs of a calibration; nobody would train with them."""

ALIASES: dict[str, str] = {**channels.ALIASES, **spatial.ALIASES, **tensor.ALIASES, **pipeline.ALIASES}
"""Names of hybrids, each for the strategy that is one as soon as it has replicas; a run knows the latter alone."""


def named() -> dict[str, Strategy]:
    """Every name that a sweep may use, with the strategy that it stands for."""
    return {**STRATEGIES, **PROBES, **{alias: STRATEGIES[key] for alias, key in ALIASES.items()}}


class Model(NamedTuple):
    """``builder`` is ``module:function``; ``min_size`` is the smallest edge length that it takes."""

    builder: str
    kind: str | None
    """The kind of data set that it takes: ``images``, ``volumes`` or ``tokens``; ``None`` is left to the model."""
    min_size: int
    description: str
    options: dict[str, Option]
    own: bool = False
    """A user's own, which alone knows its options."""


def strategy(key: str) -> Strategy:
    """The entry of ``key``; ``ConfigError`` with the nearest key where there is none."""
    key = ALIASES.get(key, key)
    found = STRATEGIES.get(key) or PROBES.get(key)
    if found is None:
        raise ConfigError(f"unknown strategy {key!r}", hint=did_you_mean(key, named()))
    return found


def chosen_options(spec: RunSpec) -> dict[str, Any]:
    """The options of the run's strategy, defaults filled in."""
    return {name: option.default for name, option in strategy(spec.strategy).options.items()} | spec.options


def excluded_by(spec: RunSpec) -> str | None:
    """Why the run's strategy cannot do what it asks for, as far as integers and names tell."""
    named = strategy(spec.strategy).limit
    if named is None:
        return None
    reason: str | None = _resolve(named)(spec)
    return reason


def resolve_runtime(key: str) -> Any:
    """The runtime class of a strategy. Imports torch: for the worker alone."""
    return _resolve(strategy(key).runtime)


def resolve_cost(key: str) -> Any:
    """The cost class of a strategy (``oracle.cost.Cost``)."""
    cost = strategy(key).cost
    assert cost is not None, f"{key} has no cost"
    return _resolve(cost)


def resolve_reference(key: str) -> Any:
    """The function that trains a strategy's reference (``worker.reference.train_reference``). For the worker alone."""
    return _resolve(REFERENCES[strategy(key).reference])


def _resolve(named: str) -> Any:
    module, _, name = named.partition(":")
    return getattr(importlib.import_module(module), name)


@cache
def models() -> dict[str, Model]:
    """Every shipped model, read from the literal ``MODELS`` tables of the model files without importing them."""
    folder = Path(__file__).resolve().parent.parent / "worker" / "models"
    found: dict[str, Model] = {}
    for path in sorted(folder.glob("*.py")):
        for name, entry in _models_table(path).items():
            options = {
                key: Option(_KINDS[kind], default, description)
                for key, (kind, default, description) in entry.get("options", {}).items()
            }
            builder = f"hpcbench.worker.models.{path.stem}:{entry['builder']}"
            found[name] = Model(builder, entry["kind"], entry["min_size"], entry["description"], options)
    return found


_KINDS = {"bool": bool, "int": int, "float": float, "str": str}


def _models_table(path: Path) -> dict[str, Any]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", None) for target in node.targets] == ["MODELS"]:
            table: dict[str, Any] = ast.literal_eval(node.value)
            return table
    return {}


def model(key: str) -> Model:
    """The entry of ``key``, also of a user's own; ``ConfigError`` with the nearest name where there is none."""
    if is_own(key):
        return Model(key, None, 1, "a user's own model", {}, own=True)
    if key not in models():
        raise ConfigError(f"unknown model {key!r}", hint=did_you_mean(key, models()))
    return models()[key]
