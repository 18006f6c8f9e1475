"""Which strategies can split a model of one's own, once its layers are known."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.resolve import table_exclusion_reason
from tests.layer_tables import table_of

DATASETS = {"resnet18": "cifar10", "gpt": "tokens"}


@pytest.mark.parametrize(
    ("table", "strategy", "degrees", "reason"),
    [
        ("resnet18", "ddp", {"dp_degree": 64}, None),
        ("resnet18", "tensor", {"tp_degree": 2}, "tensor splits transformer blocks, and mine:net has none"),
        ("resnet18", "1f1b", {"pp_degree": 2, "tp_degree": 2}, "1f1b splits transformer blocks, and mine:net has none"),
        ("resnet18", "1f1b", {"pp_degree": 2}, None),
        ("resnet18", "pipedream", {"pp_degree": 64}, "pipedream on 64 stages, but mine:net"),
        ("resnet18", "filter", {"tp_degree": 2}, None),
        ("resnet18", "filter", {"tp_degree": 999}, "tp_degree 999, but filter of mine:net needs a channel"),
        ("resnet18", "spatial", {"sp_degree": 2}, None),
        ("resnet18", "spatial", {"sp_degree": 64}, "spatial on 64 ranks as 64x1"),
        ("gpt", "tensor", {"tp_degree": 2}, None),
        ("gpt", "1f1b", {"pp_degree": 2, "tp_degree": 2}, None),
        ("gpt", "channel", {"tp_degree": 2}, "channel splits convolutions and what lies between them"),
    ],
)
def test_a_custom_models_infeasible_split_has_a_reason(
    table: str, strategy: str, degrees: dict[str, Any], reason: str | None
) -> None:
    found = table_of(table, DATASETS[table])
    spec = RunSpec(model="mine:net", dataset=DATASETS[table], strategy=strategy, batch_size=64, **degrees)
    said = table_exclusion_reason(spec, found)
    assert said is None if reason is None else (said or "").startswith(reason)
