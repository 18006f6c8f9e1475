"""The order in which autograd completes gradients is the one that ``parallel.gradients`` reads from a layer table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.gradient_buckets import gradient_ready_order
from hpcbench.strategies.layer_table import LayerTableRequest
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.layers import make_layer_table
from hpcbench.worker.model_execution import MixedPrecision, summed_loss, wrap_blocks
from hpcbench.worker.models.build import build_model

CPU = torch.device("cpu")
TIED = {"tied": True, "context": 8}


def completed(spec: RunSpec) -> list[str]:
    """Names of the parameters, in the order in which their gradients are complete."""
    model, found = wrap_blocks(build_model(spec), spec).train(), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _, name=name: found.append(name)
        )
    inputs, targets = make_feed(spec, CPU).batch(0, 0)
    with MixedPrecision(spec.precision, CPU).autocast():
        outputs = model(inputs)
    summed_loss(outputs, targets).backward()  # type: ignore[no-untyped-call]
    return found


@pytest.mark.parametrize("more", [{}, {"precision": "bf16"}, {"activation_checkpointing": True}])
@pytest.mark.parametrize(
    ("model", "dataset", "given"),
    [
        ("resnet18", "digits", {}),
        ("resnet50", "digits", {}),
        ("vgg11", "digits", {}),
        ("vgg11", "digits", {"model_options": {"batch_norm": False}}),
        ("mobilenetv2", "digits", {}),
        ("vit", "digits", {}),
        ("gpt", "tokens", {"input_size": 8}),
        ("gpt", "tokens", {"input_size": 8, "model_options": TIED}),
        ("cosmoflow", "cosmoflow", {"input_size": 16}),
    ],
)
def test_gradients_are_complete_in_this_order(
    model: str, dataset: str, given: dict[str, Any], more: dict[str, Any]
) -> None:
    spec = RunSpec(model=model, dataset=dataset, strategy="single", batch_size=2, **given, **more)
    table = make_layer_table(
        LayerTableRequest(
            model=model, dataset=dataset, input_size=given.get("input_size"), model_options=spec.model_options
        )
    )
    names = [tensor.name for tensor in table.parameter_tensors]
    assert [names[place] for place in gradient_ready_order(table, spec.precision)] == completed(spec)
