"""The runs of these tests: every strategy of the registry with three kinds of models, on 8 and on 64 GPUs."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.catalog import STRATEGIES, exclusion_reason
from hpcbench.strategies.layer_table import LayerTable, read_shipped_table
from hpcbench.strategies.resolve import table_exclusion_reason
from tests.cuda.stub_answers import DEVICES
from tests.parity_cases import parity_cases

MODELS = {
    "cnn": ("resnet18", "cifar10"),
    "transformer": ("vit", "cifar10"),
    "volumes": ("cosmoflow", "cosmoflow"),
}
"""A model and its data set by kind. Shapes of volumes are whole: fake tensors have no size."""
WORLDS = (8, 64)
STEPPED = [key for key in STRATEGIES if key != "horovod"]
"""Horovod reduces in a thread of its own, which no recorder follows."""
_STAGES, _PARTS = 4, 4


def gpu_run(key: str, kind: str, ranks: int, **more: Any) -> RunSpec:
    """Return a run of strategy ``key`` with the model of ``kind`` on ``ranks`` GPUs; replicas fill what is left."""
    entry, (model, dataset) = STRATEGIES[key], MODELS[kind]
    values: dict[str, Any] = {"batch_size": 8, "micro_batches": 2, "optimizer": "adam"}
    if entry.own_degree is None:
        ranks = 1
    elif (devices := parity_cases(key)[0].devices_per_task) > 1:
        # One process drives all devices.
        ranks, devices = 1, _STAGES
        values |= {entry.own_degree: devices, "devices_per_task": devices, "micro_batches": 4}
    elif entry.own_degree == "dp_degree":
        values["dp_degree"] = ranks
    elif entry.own_degree == "pp_degree":
        # Two chunks a stage: the transformer has too few blocks for four of them, and the CNN's are uneven.
        stages = 2 if key == "interleaved_1f1b" and kind != "volumes" else _STAGES
        micro_batches = 1 if key == "model" else 4
        values |= {"pp_degree": stages, "dp_degree": ranks // stages, "micro_batches": micro_batches}
    else:
        values |= {entry.own_degree: _PARTS, "dp_degree": ranks // _PARTS}
    values |= {"nodes": max(1, ranks // DEVICES), "tasks_per_node": min(ranks, DEVICES), **more}
    return RunSpec(model=model, dataset=dataset, strategy=key, **values)


def exclusion(spec: RunSpec) -> str | None:
    """Return why the strategy excludes the run's model, as ``hpcbench plan`` says it; ``None`` if it does not."""
    return exclusion_reason(spec) or table_exclusion_reason(spec, table_of(spec))


def ranks_to_step(spec: RunSpec) -> list[int]:
    """Return the first rank, an inner one and the last one; the inner one is no first of any group of a pipeline."""
    return sorted({0, spec.ranks // 2 + 1 if spec.ranks > DEVICES else min(1, spec.ranks - 1), spec.ranks - 1})


def table_of(spec: RunSpec) -> LayerTable:
    """Return the shipped layer table of the run's model."""
    return _shipped_table(spec.model, spec.dataset, spec.input_size, json.dumps(spec.model_options))


@cache
def _shipped_table(model: str, dataset: str, input_size: int | None, options: str) -> LayerTable:
    table = read_shipped_table(model, dataset, input_size, json.loads(options))
    assert table is not None, f"{model} on {dataset} has no shipped table"
    return table
