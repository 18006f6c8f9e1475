"""Channels are traced through a model, and operations that mix split ones are refused, without any rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hpcbench.errors import WorkerError
from hpcbench.strategies.channel.channel_split import ChannelLayer, ChannelScheme, splittable_layers
from hpcbench.strategies.channel.train import split_model_channels, trace_channels
from hpcbench.strategies.channel.train.layers import ChannelSplitLayer
from hpcbench.strategies.layer_table import LayerTableRequest
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.layers import make_layer_table
from hpcbench.worker.models.build import build_meta_model
from tests.worker.helpers import make_spec

IMAGE = (3, 8, 8)


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def around(middle: nn.Module, channels: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), middle, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 5), nn.Softmax(1)
    )


def divided(model: nn.Sequential, ranks: int = 2, form: str = "sharded", strategy: str = "filter") -> nn.Sequential:
    split_model_channels(model, IMAGE, ChannelScheme(strategy, form), RankGroup(tuple(range(ranks)), 0, None))
    return model


@pytest.mark.parametrize(
    ("middle", "channels"),
    [
        (Of(torch.relu), 4),
        (Of(lambda x: 0.5 * x + torch.tanh(x)), 4),
        (nn.Sequential(nn.BatchNorm2d(4), nn.Hardswish(), nn.Dropout(0.5)), 4),
        (nn.Upsample(scale_factor=2), 4),
        (nn.ZeroPad2d(1), 4),
        (Of(lambda x: x.mean(3, keepdim=True)), 4),
        (nn.Conv2d(4, 6, 3, groups=2), 6),
    ],
)
def test_layers_within_channels_need_no_communication(middle: nn.Module, channels: int) -> None:
    found = trace_channels(around(middle, channels), IMAGE)
    assert found.problems == []
    *_, last = found.layers().values()
    assert last == ChannelLayer(channels, 5, features=4, is_last=True)
    divided(around(middle, channels))


@pytest.mark.parametrize(
    ("middle", "channels", "said"),
    [
        (Of(lambda x: torch.cat([x, x], 1)), 8, "cat on a tensor whose channels are split"),
        (Of(lambda x: torch.softmax(x, 1)), 4, "_softmax on"),
        (Of(lambda x: x - x.mean(1, keepdim=True)), 4, "mean on"),
        (Of(lambda x: x.flip(1)), 4, "flip on"),
        (Of(lambda x: x.transpose(1, 2)), 6, "transpose on"),
        (Of(lambda x: x * torch.ones(1, 4, 1, 1, device=x.device)), 4, "mul on"),
        (nn.GroupNorm(2, 4), 4, "native_group_norm on"),
        (nn.ConvTranspose2d(4, 4, 3), 4, "convolution on"),
        (Of(lambda x: x[:, :2]), 2, "slice on"),
    ],
)
def test_layers_across_channels_need_the_gathered_form(middle: nn.Module, channels: int, said: str) -> None:
    with pytest.raises(WorkerError, match=f"filter in its sharded form cannot split this model: .*{said}") as caught:
        divided(around(middle, channels))
    assert caught.value.status == "unsupported"
    assert "gathered" in (caught.value.hint or "")
    whole = divided(around(middle, channels), form="gathered")
    assert isinstance(whole[0], ChannelSplitLayer)
    assert isinstance(whole[4], nn.Linear)


def test_models_that_cannot_be_split_are_refused_with_the_reason() -> None:
    shared = nn.Conv2d(4, 4, 1)
    tied = nn.Conv2d(4, 4, 1)
    tied.weight = shared.weight
    with pytest.raises(WorkerError, match="layers share a weight"):
        divided(around(nn.Sequential(shared, tied)), form="gathered")
    with pytest.raises(WorkerError, match="cannot be followed"):
        divided(around(Of(lambda x: x * x.sum().item())))
    with pytest.raises(WorkerError, match="there is no convolution and no linear layer"):
        divided(nn.Sequential(nn.ReLU()))


class Mixed(nn.Module):
    """Linear layers across places, as a perceptron of patches has them: the second dimension holds no channels."""

    def __init__(self) -> None:
        super().__init__()
        self.across, self.own = nn.Linear(36, 36), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.across(x.flatten(2)).transpose(1, 2)).transpose(1, 2).reshape(x.shape)  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["sharded", "gathered"])
def test_linear_layers_of_several_dims_are_refused(form: str) -> None:
    with pytest.raises(WorkerError, match="across, a linear layer, is given 3 dims") as caught:
        divided(around(Mixed()), form=form)
    assert (caught.value.status, caught.value.hint) == ("unsupported", "use ddp or fsdp")


def test_too_many_channel_ranks_are_refused_with_the_largest_degree() -> None:
    with pytest.raises(WorkerError, match="filter over 6 ranks") as caught:
        divided(around(nn.ReLU()), ranks=6)
    assert caught.value.hint == "the largest tp_degree that works is 4"


@pytest.mark.parametrize(
    ("model", "dataset", "size"),
    [
        ("resnet50", "imagenet", 64),
        ("resnet18", "digits", None),
        ("vgg11", "imagenet", 64),
        ("mobilenetv2", "imagenet", 64),
        ("mobilenetv2", "digits", None),
        ("cosmoflow", "cosmoflow", 16),
    ],
)
def test_traced_layers_are_those_of_the_layer_table(model: str, dataset: str, size: int | None) -> None:
    """The oracle's table and the worker's trace have the same channels in the same order."""
    spec = make_spec(model=model, dataset=dataset, input_size=size)
    found = trace_channels(
        build_meta_model(spec), {"imagenet": (3, 64, 64), "digits": (1, 8, 8), "cosmoflow": (4, 16, 16, 16)}[dataset]
    )
    assert found.problems == []
    table = make_layer_table(LayerTableRequest(model=model, dataset=dataset, input_size=size))
    assert list(found.layers().values()) == splittable_layers(table)
