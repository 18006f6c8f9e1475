from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcbench.parallel.catalog import models
from hpcbench.worker.models.build import build_model, build_shapes, parameter_count
from tests.worker.helpers import make_spec

LARGE = 224

# The counts of DDLBench's and torchvision's models.
COUNTS = [
    ("resnet18", "digits", {}, 11_172_810),
    ("resnet18", "mnist", {}, 11_172_810),
    ("resnet18", "cifar10", {}, 11_173_962),
    ("resnet18", "imagenet", {}, 11_689_512),
    ("vgg11", "mnist", {}, 9_229_962),
    ("vgg11", "cifar10", {}, 9_231_114),
    ("vgg11", "cifar10", {"batch_norm": False}, 9_225_610),
    ("vgg11", "imagenet", {}, 132_863_336),
]


@pytest.mark.parametrize(("model", "dataset", "options", "count"), COUNTS)
def test_parameter_counts(model: str, dataset: str, options: dict[str, Any], count: int) -> None:
    built = build_model(make_spec(model=model, dataset=dataset, model_options=options))
    assert parameter_count(built) == count


@pytest.mark.parametrize("model", sorted(models()))
@pytest.mark.parametrize("size", [8, 9, 17, 28, 32, 63, 64, 70])
def test_every_model_takes_every_size_from_its_smallest_on(model: str, size: int) -> None:
    built = build_model(make_spec(model=model, dataset="cifar10", input_size=size))
    assert isinstance(built, torch.nn.Sequential)
    assert len(built) > 5, "a sequential view of its blocks"
    assert built(torch.randn(2, 3, size, size)).shape == (2, 10)


@pytest.mark.parametrize("model", sorted(models()))
def test_one_channel_at_a_large_size(model: str) -> None:
    built = build_model(make_spec(model=model, dataset="mnist", input_size=64))
    assert built(torch.randn(2, 1, 64, 64)).shape == (2, 10)


@pytest.mark.parametrize("model", sorted(models()))
def test_the_seed_alone_decides_the_weights(model: str) -> None:
    def weights(**values: int) -> list[torch.Tensor]:
        torch.rand(3)
        return list(build_model(make_spec(model=model, **values)).parameters())

    same = zip(weights(seed=3), weights(seed=3), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    repeated = zip(weights(seed=2, repeat=1), weights(seed=3), strict=True)
    assert all(torch.equal(a, b) for a, b in repeated), "a repeat adds its number to the seed"
    assert not torch.equal(weights(seed=4)[0], weights(seed=3)[0])


@pytest.mark.parametrize("model", sorted(models()))
@pytest.mark.parametrize("values", [{}, {"input_size": 64, "channels_last": True, "precision": "fp64"}])
def test_shapes_are_the_models_without_its_numbers(model: str, values: dict[str, Any]) -> None:
    spec = make_spec(model=model, dataset="cifar10", **values)
    torch.manual_seed(5)
    shapes = build_shapes(spec)
    drawn = torch.rand(3)
    built = build_model(spec)
    assert [type(block) for block in shapes] == [type(block) for block in built]
    there, here = shapes.state_dict(), built.state_dict()
    assert {tensor.device.type for tensor in there.values()} == {"meta"}
    assert [(name, tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in there.items()] == [
        (name, tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in here.items()
    ]
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3)), "the generator is as it was"


def test_precision_and_memory_format() -> None:
    assert next(build_model(make_spec(precision="fp64")).parameters()).dtype == torch.float64
    convolution = next(build_model(make_spec(channels_last=True, dataset="cifar10")).parameters())
    assert convolution.is_contiguous(memory_format=torch.channels_last)


def test_the_large_forms_compute_what_torchvision_computes() -> None:
    from hpcbench.worker.models.vision import torchvision_models

    inputs = torch.randn(1, 3, 64, 64)
    for name in ("resnet18", "vgg11"):
        torch.manual_seed(0)
        whole = getattr(torchvision_models(), name)(weights=None, num_classes=1000).eval()
        ours = build_model(make_spec(model=name, dataset="imagenet", input_size=64)).eval()
        assert torch.equal(ours(inputs), whole(inputs)), name
