"""The calls of a priced step come in the order in which a rank of many makes them."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.machine import nominal_machine
from hpcbench.strategies.layer_table import LayerTableRequest
from hpcbench.worker.layers import make_layer_table
from tests.distributed.fake import fake_calls
from tests.distributed.tensor_cases import small_vocabulary, tensor_case
from tests.layer_tables import table_of
from tests.predict.heard import heard_in_order

pytestmark = pytest.mark.slow

MACHINE = nominal_machine(load_cluster("slurmbox")[0])
SEQUENCE = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("model", "strategy", "more"),
    [
        ("vgg11", "filter", {}),
        ("resnet18", "channel", {"options": {"form": "gathered"}}),
        ("resnet18", "filter", {"activation_checkpointing": True}),
        ("vit", "tensor", {"options": SEQUENCE}),
        ("vit", "tensor", {"activation_checkpointing": True}),
        ("resnet18", "spatial", {}),
        ("vgg11", "spatial", {"options": {"global_pool": "gather", "overlap": False}}),
    ],
)
def test_priced_calls_are_in_the_order_of_a_rank(model: str, strategy: str, more: dict[str, Any]) -> None:
    own: dict[str, Any] = {"sp_degree" if strategy == "spatial" else "tp_degree": 2}
    spec = RunSpec(
        model=model, dataset="digits", strategy=strategy, batch_size=4, micro_batches=2, nodes=2, tasks_per_node=2,
        dp_degree=2, **own, **more,
    )  # fmt: skip
    table = table_of(model, "digits")
    assert heard_in_order(spec, table, MACHINE) == fake_calls(spec, 0).calls


@pytest.mark.parametrize("options", [{}, SEQUENCE])
def test_calls_keep_their_order_with_a_sharded_vocabulary(options: dict[str, Any]) -> None:
    spec = tensor_case(4, "gpt", dp_degree=2, options=options).spec
    with small_vocabulary():
        table = make_layer_table(
            LayerTableRequest(
                model="gpt", dataset="tokens", input_size=spec.input_size, model_options=spec.model_options
            )
        )
        assert heard_in_order(spec, table, MACHINE) == fake_calls(spec, 0).calls
