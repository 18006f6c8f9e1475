"""The registry of strategies, calibration probes and models: one entry per name.
Runtimes and costs are named by strings and imported on use, so that a login node reads the registry without torch."""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hpcbench.config.run_spec import OptionValue, RunSpec
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.parallel.strategies import channel, data, pipeline, probes, spatial, tensor
from hpcbench.parallel.strategy_entry import HybridAlias, Option, Parallelism, StrategyEntry
from hpcbench.parallel.workloads import is_custom_model

REFERENCE_TRAINERS = {
    "data_parallel": "hpcbench.worker.verification.reference:train_reference",
    "pipeline": "hpcbench.worker.verification.reference_pipelines:train_pipeline_reference",
    "pipedream": "hpcbench.worker.verification.reference_pipelines:train_pipedream_reference",
}
"""Trainings in one process that strategies are compared with, by name; the reports of verification have the name."""

STRATEGIES: dict[str, StrategyEntry] = {
    **data.STRATEGIES,
    **channel.STRATEGIES,
    **spatial.STRATEGIES,
    **tensor.STRATEGIES,
    **pipeline.STRATEGIES,
}

PROBES: dict[str, StrategyEntry] = probes.PROBES
"""Runs of a calibration instead of trainings."""

ALIASES: dict[str, HybridAlias] = {**channel.ALIASES, **spatial.ALIASES, **tensor.ALIASES, **pipeline.ALIASES}
"""Names of hybrids; a resolved run has the strategy's own name."""


def selectable_strategies() -> dict[str, StrategyEntry]:
    """Return every name that a sweep may use, with the entry that it stands for."""
    return {**STRATEGIES, **PROBES, **{name: STRATEGIES[alias.strategy] for name, alias in ALIASES.items()}}


def representative(parallelism: Parallelism) -> str:
    """Return the key of the strategy that hpcbench itself chooses for ``parallelism``.

    >>> representative("single_device")
    'single'
    """
    return next(key for key, entry in STRATEGIES.items() if entry.represents == parallelism)


SINGLE_DEVICE = representative("single_device")
"""The strategy that every speed-up, and the overhead of every other strategy, refers to."""


class ModelEntry(NamedTuple):
    """The registry entry of a model.

    Example:
        >>> entry = get_model("resnet18")
        >>> entry.kind, entry.min_size
        ('images', 8)
    """

    builder: str
    """``"module:function"`` of the function that builds the model; the worker imports it."""
    kind: str | None
    """The kind of data set that it takes: ``images``, ``volumes`` or ``tokens``; ``None`` is left to the model."""
    min_size: int
    """The smallest input that it accepts: edge length in pixels or voxels, or tokens."""
    description: str
    options: dict[str, Option]
    own: bool = False
    """Whether it is a user's own model, which checks its options itself."""
    input_size: int | None = None
    """Default input size, in tokens or as an edge length; ``None`` for the data set's own."""


def get_strategy(key: str) -> StrategyEntry:
    """Return the entry of ``key``, a strategy, probe or alias; ``ConfigError`` with the nearest key if unknown."""
    alias = ALIASES.get(key)
    if alias is not None:
        return STRATEGIES[alias.strategy]
    entry = STRATEGIES.get(key) or PROBES.get(key)
    if entry is None:
        raise ConfigError(f"unknown strategy {key!r}", hint=did_you_mean(key, selectable_strategies()))
    return entry


def options_with_defaults(spec: RunSpec) -> dict[str, OptionValue]:
    """The options of the run's strategy, defaults filled in."""
    return {name: option.default for name, option in get_strategy(spec.strategy).options.items()} | spec.options


def exclusion_reason(spec: RunSpec) -> str | None:
    """Return the reason why the run's strategy cannot execute it, as far as integers and names determine it."""
    entry = get_strategy(spec.strategy)
    if spec.precision == "bf16_params" and entry.without_bf16_params is not None:
        return f"{spec.strategy} with bf16_params: {entry.without_bf16_params}; use bf16, ddp or fsdp"
    return None if entry.exclusion is None else entry.exclusion(spec)


def load_object(reference: str) -> object:
    """Import the object that ``"module:name"`` of a registry entry refers to.

    The typed functions are ``worker.strategies.base.resolve_runtime`` and ``oracle.strategies.base.resolve_cost``:
    this package imports neither torch nor the oracle.
    """
    module, _, name = reference.partition(":")
    loaded: object = getattr(importlib.import_module(module), name)
    return loaded


@cache
def shipped_model_entries() -> dict[str, ModelEntry]:
    """Every shipped model, read from the literal tables of the model files without importing them.

    A file has ``FAMILIES``, the values that several models share, and ``MODELS``: family, default input size and
    description. A family may name another one as its ``base``, whose entries it has where it states none of its own.
    """
    folder = Path(__file__).resolve().parent.parent / "worker" / "models"
    entries: dict[str, ModelEntry] = {}
    for path in sorted(folder.glob("*.py")):
        tables: dict[str, dict[str, Any]] = {"FAMILIES": {}, "MODELS": {}}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in tables:
                tables[node.targets[0].id] = ast.literal_eval(node.value)
        for name, (family, input_size, description) in tables["MODELS"].items():
            shared = tables["FAMILIES"][family]
            base = tables["FAMILIES"].get(shared.get("base"), {})
            declarations = base.get("options", {}) | shared.get("options", {})
            options = {key: Option(*declaration) for key, declaration in declarations.items()}
            shared = base | shared
            builder = f"hpcbench.worker.models.{path.stem}:{shared['builder']}"
            entries[name] = ModelEntry(
                builder, shared["kind"], shared["min_size"], description, options, input_size=input_size
            )
    return entries


def get_model(key: str) -> ModelEntry:
    """The entry of ``key``, also of a user's own; ``ConfigError`` with the nearest name where there is none."""
    if is_custom_model(key):
        return ModelEntry(key, None, 1, "a user's own model", {}, own=True)
    if key not in shipped_model_entries():
        raise ConfigError(f"unknown model {key!r}", hint=did_you_mean(key, shipped_model_entries()))
    return shipped_model_entries()[key]
