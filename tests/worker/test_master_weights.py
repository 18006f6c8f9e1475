"""Training with bf16 parameters and fp32 master weights, against arithmetic that is written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.data.train import SingleStrategy
from hpcbench.worker import model_execution
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.model_execution import MasterWeights, use_bf16_parameters
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import make_optimizer
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")


def spec_of(**more: Any) -> RunSpec:
    return make_spec(precision="bf16_params", **more)


def test_an_update_below_the_resolution_of_bf16_is_not_lost() -> None:
    """A hundred steps of 1e-4 move 1.0 by 0.01; a bf16 number keeps no step below 1/256 of its size."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    module = nn.ParameterList([weight])
    optimizer = make_optimizer(spec_of(optimizer="sgd", momentum=0.0, learning_rate=1e-4), module)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert isinstance(optimizer, MasterWeights)
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.99, dtype=torch.bfloat16), rtol=0, atol=0)


@pytest.mark.parametrize("cap_bytes", [1, 40, 2**20])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parameters_are_the_rounded_masters_of_the_same_optimizer_in_fp32(
    optimizer: str, cap_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_execution, "MASTER_UPDATE_CAP_BYTES", cap_bytes)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    use_bf16_parameters(module)
    masters = [nn.Parameter(parameter.detach().float()) for parameter in module.parameters()]
    spec = spec_of(optimizer=optimizer, weight_decay=0.1)
    ours, expected = make_optimizer(spec, module), make_optimizer(spec, nn.ParameterList(masters))
    assert not isinstance(expected, MasterWeights)
    for step in range(5):
        for number, (parameter, master) in enumerate(zip(module.parameters(), masters, strict=True)):
            # One without a gradient stays as it is.
            gradient = None if (step, number) == (2, 0) else torch.randn(parameter.shape).bfloat16()
            parameter.grad, master.grad = gradient, None if gradient is None else gradient.float()
        ours.step()
        expected.step()
        for parameter, master in zip(module.parameters(), masters, strict=True):
            assert torch.equal(parameter.detach(), master.detach().bfloat16())
    assert all(parameter.grad is not None for parameter in module.parameters())
    ours.zero_grad()
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
def test_batch_norm_is_that_of_fp32_weights(is_training: bool, momentum: float | None) -> None:
    torch.manual_seed(0)
    norm, plain = nn.BatchNorm2d(4, momentum=momentum), nn.BatchNorm2d(4, momentum=momentum)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(4))
        plain.weight.copy_(norm.weight.bfloat16())
    use_bf16_parameters(norm)
    norm.train(is_training), plain.train(is_training)
    x = torch.randn(8, 4, 3, 3).bfloat16()
    for _ in range(2):
        assert torch.equal(norm(x), plain(x))
    norm(x).float().square().sum().backward()
    plain(x).float().square().sum().backward()
    gradients = norm.weight.grad, plain.weight.grad
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert gradients[0].dtype == torch.bfloat16
    assert torch.equal(gradients[0], gradients[1].bfloat16())
    state: dict[str, Tensor] = plain.state_dict()
    for name, tensor in norm.state_dict().items():
        if name not in ("weight", "bias"):
            assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("model", ["resnet18", "vit"])
def test_a_step_has_bf16_parameters_gradients_and_activations(model: str) -> None:
    spec = spec_of(model=model, dataset="digits", optimizer="adam")
    strategy, feed, dtypes = SingleStrategy(), make_feed(spec, CPU), set[torch.dtype]()
    built = build_model(spec)
    for module in built.modules():
        module.register_forward_hook(lambda _module, _inputs, output: dtypes.add(output.dtype))
    strategy.setup(built, spec, RankContext(0, 1, CPU))
    loss = strategy.step(feed, 0)
    assert loss.dtype == torch.float32
    assert dtypes == {torch.bfloat16}
    assert {tensor.dtype for tensor in (*strategy.module.parameters(), *strategy.gradients().values())} == dtypes
    assert all(buffer.dtype != torch.bfloat16 for buffer in strategy.module.buffers())


def test_initial_weights_are_the_rounded_ones_of_fp32() -> None:
    rounded, plain = (build_model(make_spec(precision=name, model="vit")) for name in ("bf16_params", "fp32"))
    for (name, ours), (other, theirs) in zip(rounded.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs.bfloat16())
