"""Filter and channel parallelism (Dryden et al. 2019; ParaDL, Kahira et al.

2021) and their hybrids with data parallelism.

A forward pass on the meta device records the layers of a model and the channels of their inputs; layers are then
replaced by this rank's part, under the same names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.strategies.channel import (
    ChannelLayer,
    ChannelScheme,
    channel_extents,
    channel_split,
    fits_degree,
    largest_channel_degree,
)
from hpcbench.parallel.workloads import sample_shape
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.strategies.channel.channel_layers import (
    CONVOLUTIONS,
    DROPOUTS,
    NORMS,
    ChannelShards,
    ChannelSplitDropout,
    ChannelSplitLayer,
    split_batch_norm,
)
from hpcbench.worker.strategies.model_parallel import ModelParallelStrategy

SPLITTABLE_LAYERS = (*CONVOLUTIONS, nn.Linear)
_CHANNELS_ATTRIBUTE = "_hpcbench_channels"

_ELEMENTWISE_OPS = {
    "relu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "elu", "mish", "softplus", "sigmoid",
    "tanh", "exp", "abs", "neg", "clamp", "clamp_min", "clamp_max", "pow", "sqrt", "add", "sub", "mul", "div",
    "clone", "detach", "alias", "_to_copy",
}  # fmt: skip
_PER_CHANNEL_OPS = {
    "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "constant_pad_nd", "mean", "sum",
    "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_trilinear3d",
}  # fmt: skip
_RESHAPE_OPS = {"view", "_unsafe_view", "_reshape_alias", "squeeze", "unsqueeze", "expand"}


class ModuleCall(NamedTuple):
    """A module that takes part in a split, as it was called."""

    name: str
    module: nn.Module
    channels: int
    """Of what goes in, as far as they are split; 0 where it is whole: the sample, or what was computed of it alone."""
    features: int
    """Entries of dim 1 that belong to one channel."""


class ChannelTrace(NamedTuple):
    """What was seen; problems are what makes channels of a split tensor more than their ranks' own affair."""

    calls: list[ModuleCall]
    problems: list[str]
    refused: list[str]
    """What no split is made for, whole activations or not."""

    def layers(self) -> dict[str, ChannelLayer]:
        """The layers by name, in the order of their calls."""
        named = [call for call in self.calls if isinstance(call.module, SPLITTABLE_LAYERS)]
        return {call.name: _layer_of_call(call, is_last=call is named[-1]) for call in named}


def trace_channels(model: nn.Module, shape: tuple[int, ...]) -> ChannelTrace:
    """What ``model`` does with samples of ``shape`` (channels first). No memory, no arithmetic, no random numbers.

    Raises ``WorkerError`` (``unsupported``) where it cannot be run without numbers.
    """
    seen = _ChannelTracer()
    handles = [handle for name, module in model.named_modules() for handle in seen.hooks(name, module)]
    own = (*model.named_parameters(), *model.named_buffers())
    state = {name: torch.empty_like(tensor, device="meta") for name, tensor in own}
    dtype = next((one.dtype for one in model.parameters()), torch.float32)
    sample = torch.empty(2, *shape, device="meta", dtype=dtype)
    try:
        with torch.no_grad(), seen:
            torch.func.functional_call(model, state, (sample,))
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise WorkerError(
            f"the model's channels cannot be followed: {type(error).__name__}: {first}",
            status="unsupported",
            hint="a model whose forward pass reads values cannot be split by channels: use ddp or fsdp",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return seen.found()


class _ChannelTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks every tensor with its channels and follows the marks through what happens between layers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[ModuleCall] = []
        self._problems: list[tuple[int, str]] = []
        self._refused: list[str] = []
        self._inside = 0
        self._kept: list[Any] = []

    def found(self) -> ChannelTrace:
        """Problems behind the last layer are none: what it gives is whole."""
        last = sum(isinstance(call.module, SPLITTABLE_LAYERS) for call in self._calls)
        problems = dict.fromkeys(text for layers, text in self._problems if layers < last)
        return ChannelTrace(self._calls, list(problems), list(dict.fromkeys(self._refused)))

    def hooks(self, name: str, module: nn.Module) -> list[Any]:
        """Hooks for a module that is known as a whole."""
        if type(module) not in (*SPLITTABLE_LAYERS, *NORMS, *DROPOUTS):
            return []
        return [
            module.register_forward_pre_hook(self._before(name)),
            module.register_forward_hook(self._after(name)),
        ]

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            channels = _channels_of(args[0])
            self._inside += 1
            features, left = divmod(args[0].shape[1], channels) if channels else (1, 0)
            self._calls.append(ModuleCall(name, module, channels, max(features, 1)))
            if left:
                self._problem(f"{name} is given {channels} channels in {args[0].shape[1]} entries")
            if isinstance(module, nn.Linear) and args[0].dim() != 2:
                self._refused.append(f"{name}, a linear layer, is given {args[0].dim()} dims")
            if isinstance(module, CONVOLUTIONS) and features != 1:
                self._problem(f"{name}, a convolution, is given several entries a channel")

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self._inside -= 1
            self._mark(output, output.shape[1] if isinstance(module, SPLITTABLE_LAYERS) else _channels_of(args[0]))

        return hook

    def _mark(self, tensor: Tensor, channels: int) -> None:
        setattr(tensor, _CHANNELS_ATTRIBUTE, channels)
        self._kept.append(tensor)

    def _problem(self, text: str) -> None:
        layers = sum(isinstance(call.module, SPLITTABLE_LAYERS) for call in self._calls)
        self._problems.append((layers, text))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._inside:
            self._follow(func, args, kwargs or {}, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        channels = max((_channels_of(one) for one in given), default=0)
        if channels == 0:
            return
        name = func.overloadpacket.__name__
        results = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        if not _preserves_channels(name, args, given, results):
            self._problem(f"{name} on a tensor whose channels are split")
        for result in results:
            self._mark(result, channels)


def _preserves_channels(name: str, args: Any, given: list[Tensor], results: list[Tensor]) -> bool:
    """Whether a rank can do this with its own channels alone."""
    first = given[0]
    channels = max(_channels_of(one) for one in given)
    if any(one.numel() > 1 and (_channels_of(one), one.shape[:2]) != (channels, first.shape[:2]) for one in given):
        return False
    plain = name.removesuffix("_") if not name.startswith("_") else name
    if plain in ("mean", "sum"):
        dims = [dim % first.dim() for dim in args[1]] if len(args) > 1 and args[1] else [0]
        return min(dims) > 1
    if plain == "constant_pad_nd":
        return len(args[1]) <= 2 * (first.dim() - 2)
    if plain in _RESHAPE_OPS:
        shape = results[0].shape
        return len(shape) >= 2 and shape[0] == first.shape[0] and shape[1] % channels == 0
    return plain in _ELEMENTWISE_OPS or plain in _PER_CHANNEL_OPS


def _channels_of(tensor: Tensor) -> int:
    return int(getattr(tensor, _CHANNELS_ATTRIBUTE, 0))


def _layer_of_call(call: ModuleCall, is_last: bool) -> ChannelLayer:
    module, is_first = call.module, call.channels == 0
    if isinstance(module, nn.Linear):
        features = 1 if is_first else call.features
        return ChannelLayer(module.in_features // features, module.out_features, 1, features, is_first, is_last)
    assert isinstance(module, CONVOLUTIONS), "a layer"
    return ChannelLayer(module.in_channels, module.out_channels, module.groups, is_first=is_first, is_last=is_last)


def split_model_channels(model: nn.Module, shape: tuple[int, ...], scheme: ChannelScheme, group: RankGroup) -> None:
    """Leave in ``model``, which takes samples of ``shape``, this rank's parts of its layers. In place.

    Raises ``WorkerError`` (``unsupported``) where the model does what cannot be split, or has too few channels.
    """
    found = trace_channels(model, shape)
    layers = found.layers()
    _check_splittable(model, found, layers, scheme, group.size)
    done: set[str] = set()
    for call in found.calls:
        if call.name in done:
            continue
        done.add(call.name)
        if isinstance(call.module, SPLITTABLE_LAYERS):
            split = channel_split(layers[call.name], scheme, group.size)
            if split.by or split.enter.forward:
                part = ChannelSplitLayer(call.module, layers[call.name], split, group)
                _replace_module(model, call.module, part)
        elif scheme.form == "sharded" and not _is_outside_layers(call, found):
            _split_norm_or_dropout(model, call, group)


def _split_norm_or_dropout(model: nn.Module, call: ModuleCall, group: RankGroup) -> None:
    shares = ChannelShards(group, channel_extents(call.channels, group.size, call.features))
    if isinstance(call.module, NORMS):
        split_batch_norm(call.module, shares)
    elif isinstance(call.module, DROPOUTS):
        _replace_module(model, call.module, ChannelSplitDropout(call.module, shares))


def _is_outside_layers(call: ModuleCall, found: ChannelTrace) -> bool:
    """Before the first layer, and behind the last."""
    places = [place for place, one in enumerate(found.calls) if isinstance(one.module, SPLITTABLE_LAYERS)]
    return call.channels == 0 or found.calls.index(call) > places[-1]


def _replace_module(model: nn.Module, old: nn.Module, part: nn.Module) -> None:
    """Everywhere: a layer may be called under several names."""
    for owner in list(model.modules()):
        for name, child in list(owner._modules.items()):
            if child is old:
                owner._modules[name] = part


def _check_splittable(
    model: nn.Module, found: ChannelTrace, layers: dict[str, ChannelLayer], scheme: ChannelScheme, degree: int
) -> None:
    problems = [*found.refused, *(found.problems if scheme.form == "sharded" else ())]
    users = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    if any(count > 1 for count in users.values()):
        problems.append("layers share a weight")
    if not layers:
        problems.append("there is no convolution and no linear layer")
    seen: dict[str, ModuleCall] = {}
    for call in found.calls:
        other = seen.setdefault(call.name, call)
        if (other.channels, other.features) != (call.channels, call.features):
            problems.append(f"{call.name} is called with different channels")
    if problems:
        raise WorkerError(
            f"{scheme.strategy} in its {scheme.form} form cannot split this model: {'; '.join(problems[:3])}",
            status="unsupported",
            hint="use ddp or fsdp"
            if scheme.form == "gathered" or found.refused
            else 'try options.form = "gathered", or use ddp or fsdp',
        )
    if not fits_degree(list(layers.values()), scheme, degree):
        most = largest_channel_degree(list(layers.values()), scheme, degree)
        raise WorkerError(
            f"{scheme.strategy} over {degree} ranks: a layer has fewer channels than that",
            status="unsupported",
            hint=f"the largest tp_degree that works is {most}",
        )


class FilterStrategy(ModelParallelStrategy):
    """The ranks along ``tp`` each compute some of every layer's output channels."""

    axis = "tp"
    key = "filter"

    def divide(self, model: nn.Sequential, spec: RunSpec) -> nn.Sequential:
        """See ``channels.divide``."""
        scheme = ChannelScheme(self.key, self.options["form"], self.options["split_last"])
        if self.own.size > 1:
            split_model_channels(model, sample_shape(spec.dataset, spec.input_size), scheme, self.own)
        return model


class ChannelStrategy(FilterStrategy):
    """The ranks along ``tp`` each take some of every layer's input channels and add up what they make of them."""

    key = "channel"
