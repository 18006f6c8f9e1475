"""The estimate of a step's operators, which `plan` warns by, against the count of dry runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.strategy_cost import count_operators
from hpcbench.results.probe_records import DryRunTask
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.layer_table import read_shipped_table
from hpcbench.worker.dry_run.__main__ import answer_task
from tests.library_stand_ins import library_stand_ins

pytestmark = pytest.mark.slow

NOT_FOR = {"resnet18": {"tensor"}, "vit": {"filter", "channel", "spatial"}}
"""Strategies that cannot split the model."""
SHARE_LOW, SHARE_HIGH = 0.6, 1.1
"""The estimate is to be from below: a warning that is wrong costs more than one that is missing."""


def spec_of(key: str, model: str, ranks: int = 2, micro_batches: int = 4, **more: Any) -> RunSpec:
    entry = STRATEGIES[key]
    values: dict[str, Any] = {entry.own_degree: ranks} if entry.own_degree else {}
    if entry.own_degree == "pp_degree":
        values["micro_batches"] = micro_batches
    if entry.drives_several_devices:
        values["devices_per_task"] = ranks
    elif key != "single":
        values["tasks_per_node"] = ranks
        if not entry.own_degree:
            values["dp_degree"] = ranks
    values |= {"model": model, "dataset": "cifar10", "batch_size": 8}
    return RunSpec(strategy=key, **{**values, **more})


def check_estimate(spec: RunSpec, low: float = SHARE_LOW, high: float = SHARE_HIGH) -> None:
    with library_stand_ins(spec, torch.device("cpu", 0)):
        answer = answer_task(DryRunTask(index=0, spec=spec, device="cuda"))
    table = read_shipped_table(spec.model, spec.dataset)
    assert answer.figures is not None, answer.reason
    assert table is not None
    estimate, counted = count_operators(spec, table), answer.figures.operators
    print(f"{spec.strategy} {spec.model}: {estimate} estimated, {counted} counted, {estimate / counted:.2f}")
    assert low <= estimate / counted <= high


@pytest.mark.parametrize("model", NOT_FOR)
@pytest.mark.parametrize("key", STRATEGIES)
def test_every_strategy(key: str, model: str) -> None:
    if key not in NOT_FOR[model]:
        check_estimate(spec_of(key, model))


@pytest.mark.parametrize(
    ("key", "model", "more"),
    [
        ("single", "resnet18", {"precision": "bf16"}),
        ("single", "vit", {"precision": "bf16"}),
        ("ddp", "resnet50", {}),
        ("ddp", "vit", {"precision": "bf16", "activation_checkpointing": True}),
        ("ddp", "resnet18", {"micro_batches": 4}),
        ("fsdp", "vit", {"micro_batches": 4}),
        ("fsdp", "resnet18", {"ranks": 8, "precision": "bf16"}),
        ("filter", "resnet18", {"ranks": 4}),
        ("channel", "resnet18", {"options": {"form": "gathered"}}),
        ("spatial", "resnet18", {"ranks": 4}),
        ("spatial", "vgg11", {}),
        ("gpipe", "vit", {"ranks": 4, "micro_batches": 8}),
        ("pipedream", "resnet50", {"ranks": 4, "micro_batches": 8}),
    ],
)
def test_other_shapes(key: str, model: str, more: dict[str, Any]) -> None:
    check_estimate(spec_of(key, model, **more))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_params"])
@pytest.mark.parametrize(
    ("model", "dataset", "low"),
    # RMSNorm is six operators on a CPU, on which dry runs step, and one on cuda.
    [("resnet50", "imagenet", 0.8), ("vit_b16", "imagenet", 0.8), ("gpt_125m", "tokens", 0.8), ("llama_1b", "tokens", 0.68)],
)  # fmt: skip
def test_one_device(model: str, dataset: str, low: float, precision: str) -> None:
    spec = spec_of("single", model, dataset=dataset, batch_size=1 if dataset == "tokens" else 8, precision=precision)
    # The update of master weights is not the same everywhere.
    check_estimate(spec, low - 0.1 * (precision == "bf16_params"), 1.2)
