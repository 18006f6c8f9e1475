"""Filter and channel parallelism and their hybrids with data parallelism.

A forward pass on the meta device records the layers of a model and the channels of their inputs; layers are then
replaced by this rank's part, under the same names. Sources: Dryden et al. 2019; ParaDL, Kahira et al. 2021.

The weight [out, in] of one layer on two ranks::

               filter            channel
               +--------+        +----+----+
               | rank 0 |        |rank|rank|
    out        +--------+        | 0  | 1  |
               | rank 1 |        |    |    |
               +--------+        +----+----+
                   in                in
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.strategies.channel.channel_split import (
    ChannelLayer,
    ChannelScheme,
    channel_extents,
    channel_scheme,
    channel_split,
    fits_degree,
    largest_channel_degree,
)
from hpcbench.strategies.channel.train.layers import (
    CONVOLUTIONS,
    DROPOUTS,
    NORMS,
    ChannelSplitDropout,
    ChannelSplitLayer,
    split_batch_norm,
)
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.model_execution import avoid_cumulative_averages
from hpcbench.worker.model_parallel_layers import ModelParallelStrategy, TensorSharding
from hpcbench.workloads.datasets import sample_shape

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
    """One call of a module that takes part in a split."""

    name: str
    module: nn.Module
    channels: int
    """Split channels of the input; 0 if the input is whole: the sample, or computed from it without layers."""
    features: int
    """Entries of dim 1 that belong to one channel."""


class ChannelTrace(NamedTuple):
    """The calls of a forward pass, and why activations or layers cannot be split."""

    calls: list[ModuleCall]
    problems: list[str]
    """Operations that mix the channels of a split activation."""
    refused: list[str]
    """Layers that cannot be split in any form."""

    def layers(self) -> dict[str, ChannelLayer]:
        """Return the splittable layers by name, in the order of their calls."""
        layer_calls = [call for call in self.calls if isinstance(call.module, SPLITTABLE_LAYERS)]
        return {call.name: _layer_of_call(call, is_last=call is layer_calls[-1]) for call in layer_calls}


def trace_channels(model: nn.Module, shape: tuple[int, ...]) -> ChannelTrace:
    """Record the layers of ``model`` and the channels between them, without memory, arithmetic or random numbers.

    Args:
        model: The model, on any device.
        shape: Shape of one sample, channels first.

    Raises:
        WorkerError: ``unsupported`` if the model cannot run on the meta device.
    """
    tracer = _ChannelTracer()
    cumulative = avoid_cumulative_averages(model)
    handles = [handle for name, module in model.named_modules() for handle in tracer.hook(name, module)]
    tensors = (*model.named_parameters(), *model.named_buffers())
    state = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    samples = torch.empty(2, *shape, device="meta", dtype=dtype)
    try:
        with torch.no_grad(), tracer:
            torch.func.functional_call(model, state, (samples,))
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise unsupported(
            f"the model's channels cannot be followed: {type(error).__name__}: {first_line}",
            "a model whose forward pass reads values cannot be split by channels: use ddp or fsdp",
        ) from error
    finally:
        for norm in cumulative:
            norm.momentum = None
        for handle in handles:
            handle.remove()
    return tracer.trace()


class _ChannelTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tags every tensor with its number of split channels and propagates the tags through the operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[ModuleCall] = []
        self._problems: list[tuple[int, str]] = []
        """Problems of the module, each with the number of layers that were called before it."""
        self._refused: list[str] = []
        self._depth = self._layers_called = 0
        self._tagged: list[Any] = []
        self._within: list[str] = []
        """Names of the modules that are being called, outermost first."""

    def trace(self) -> ChannelTrace:
        """Return the trace. Problems behind the last layer are none: its output is whole."""
        problems = dict.fromkeys(text for layers, text in self._problems if layers < self._layers_called)
        return ChannelTrace(self._calls, list(problems), list(dict.fromkeys(self._refused)))

    def hook(self, name: str, module: nn.Module) -> list[Any]:
        """Hook ``module``. The operators within a layer, normalisation or dropout need not be followed."""
        if type(module) not in (*SPLITTABLE_LAYERS, *NORMS, *DROPOUTS):
            return [
                module.register_forward_pre_hook(lambda *_: self._within.append(name)),
                module.register_forward_hook(lambda *_: self._within.pop() and None),
            ]
        return [
            module.register_forward_pre_hook(partial(self._before, name)),
            module.register_forward_hook(self._after),
        ]

    def _before(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        channels = _channels_of(inputs[0])
        self._depth += 1
        features, remainder = divmod(inputs[0].shape[1], channels) if channels else (1, 0)
        self._calls.append(ModuleCall(name, module, channels, max(features, 1)))
        self._layers_called += isinstance(module, SPLITTABLE_LAYERS)
        if remainder:
            self._add_problem(f"{name} is given {channels} channels in {inputs[0].shape[1]} entries")
        if isinstance(module, nn.Linear) and inputs[0].dim() != 2:
            self._refused.append(f"{name}, a linear layer, is given {inputs[0].dim()} dims")
        if isinstance(module, CONVOLUTIONS) and features != 1:
            self._add_problem(f"{name}, a convolution, is given several entries a channel")

    def _after(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._depth -= 1
        self._tag(output, output.shape[1] if isinstance(module, SPLITTABLE_LAYERS) else _channels_of(inputs[0]))

    def _tag(self, tensor: Tensor, channels: int) -> None:
        setattr(tensor, _CHANNELS_ATTRIBUTE, channels)
        self._tagged.append(tensor)

    def _add_problem(self, text: str) -> None:
        self._problems.append((self._layers_called, text))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._depth:
            return out
        inputs = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        channels = max((_channels_of(tensor) for tensor in inputs), default=0)
        if channels:
            name = func.overloadpacket.__name__
            results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            if not _preserves_channels(name, args, inputs, results):
                self._add_problem(f"{name} on a tensor whose channels are split, in {self._within[-1] or 'the model'}")
            for result in results:
                self._tag(result, channels)
        return out


def _preserves_channels(name: str, args: Any, inputs: list[Tensor], results: list[Tensor]) -> bool:
    """Whether a rank can compute this operator with its own channels only."""
    first = inputs[0]
    channels = max(map(_channels_of, inputs))
    layout = (channels, first.shape[:2])
    if any(tensor.numel() > 1 and (_channels_of(tensor), tensor.shape[:2]) != layout for tensor in inputs):
        return False
    operator = name.removesuffix("_") if not name.startswith("_") else name
    if operator in ("mean", "sum"):
        dims = [dim % first.dim() for dim in args[1]] if len(args) > 1 and args[1] else [0]
        return min(dims) > 1
    if operator == "constant_pad_nd":
        return len(args[1]) <= 2 * (first.dim() - 2)
    if operator in _RESHAPE_OPS:
        shape = results[0].shape
        return len(shape) >= 2 and shape[0] == first.shape[0] and shape[1] % channels == 0
    return operator in _ELEMENTWISE_OPS or operator in _PER_CHANNEL_OPS


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
    """Replace the layers of ``model`` by this rank's parts, in place.

    Args:
        model: The whole model.
        shape: Shape of one sample, channels first.
        scheme: The strategy and its form.
        group: The ranks that share a replica.

    Raises:
        WorkerError: ``unsupported`` if the model has operators that cannot be split, or too few channels.
    """
    trace = trace_channels(model, shape)
    layers = trace.layers()
    _check_splittable(model, trace, layers, scheme, group.size)
    last = max(number for number, call in enumerate(trace.calls) if call.name in layers)
    replaced: set[str] = set()
    for number, call in enumerate(trace.calls):
        if call.name in replaced:
            continue
        replaced.add(call.name)
        extents = channel_extents(call.channels, group.size, call.features)
        if isinstance(call.module, SPLITTABLE_LAYERS):
            split = channel_split(layers[call.name], scheme, group.size)
            if split.by or split.enter.forward:
                _replace_module(model, call.module, ChannelSplitLayer(call.module, layers[call.name], split, group))
        elif scheme.form != "sharded" or call.channels == 0 or number > last:
            continue  # Its input is whole: before the first layer, behind the last, or in the gathered form.
        elif isinstance(call.module, NORMS):
            split_batch_norm(call.module, extents, group.place)
        elif isinstance(call.module, DROPOUTS):
            _replace_module(
                model, call.module, ChannelSplitDropout(call.module, TensorSharding(1, extents), group.place)
            )


def _replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace ``old`` under all its names: a layer may be called under several."""
    for owner in list(model.modules()):
        for name, child in list(owner._modules.items()):
            if child is old:
                owner._modules[name] = new


def _check_splittable(
    model: nn.Module, trace: ChannelTrace, layers: dict[str, ChannelLayer], scheme: ChannelScheme, degree: int
) -> None:
    problems = [*trace.refused, *(trace.problems if scheme.form == "sharded" else ())]
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for own_name, parameter in module.named_parameters(path, recurse=False, remove_duplicate=False):
            if (other := names.setdefault(id(parameter), own_name)) != own_name:
                problems.append(f"layers share a weight, {other} and {own_name}")
    if not layers:
        problems.append("there is no convolution and no linear layer")
    first_calls: dict[str, ModuleCall] = {}
    for call in trace.calls:
        first = first_calls.setdefault(call.name, call)
        if (first.channels, first.features) != (call.channels, call.features):
            problems.append(f"{call.name} is called with different channels")
    if problems:
        other_form = "" if scheme.form == "gathered" or trace.refused else 'try options.form = "gathered", or '
        message = f"{scheme.strategy} in its {scheme.form} form cannot split this model: {'; '.join(problems[:3])}"
        raise unsupported(message, f"{other_form}use ddp or fsdp")
    if not fits_degree(list(layers.values()), scheme, degree):
        largest = largest_channel_degree(list(layers.values()), scheme, degree)
        message = f"{scheme.strategy} over {degree} ranks: a layer has fewer channels than that"
        raise unsupported(message, f"the largest tp_degree that works is {largest}")


class FilterStrategy(ModelParallelStrategy):
    """The ranks along ``tp`` each compute some of every layer's output channels."""

    axis = "tp"

    def split_model(self, model: nn.Sequential, spec: RunSpec) -> nn.Sequential:
        """Replace layers by this rank's parts; raises what ``split_model_channels`` raises."""
        if self.group.size > 1:
            split_model_channels(model, sample_shape(spec.dataset, spec.input_size), channel_scheme(spec), self.group)
        return model


class ChannelStrategy(FilterStrategy):
    """The ranks along ``tp`` each take some of every layer's input channels and add up their partial outputs."""


TRAININGS = {
    "filter": FilterStrategy,
    "channel": ChannelStrategy,
}
"""The training of each strategy."""
