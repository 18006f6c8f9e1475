"""Which layers a model calls in what order, and how channels lie in what goes in: one forward pass without numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcbench.errors import WorkerError
from hpcbench.parallel.channels import Layer
from hpcbench.worker.channels.layers import CONVOLUTIONS, DROPOUTS, NORMS

LAYERS = (*CONVOLUTIONS, nn.Linear)
_TAG = "_hpcbench_channels"

_BY_ELEMENT = {
    "relu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "elu", "mish", "softplus", "sigmoid",
    "tanh", "exp", "abs", "neg", "clamp", "clamp_min", "clamp_max", "pow", "sqrt", "add", "sub", "mul", "div",
    "clone", "detach", "alias", "_to_copy",
}  # fmt: skip
_BY_CHANNEL = {
    "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "constant_pad_nd", "mean", "sum",
    "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_trilinear3d",
}  # fmt: skip
_SHAPES = {"view", "_unsafe_view", "_reshape_alias", "squeeze", "unsqueeze", "expand"}


class Call(NamedTuple):
    """A module that takes part in a split, as it was called."""

    name: str
    module: nn.Module
    channels: int
    """Of what goes in, as far as they are split; 0 where it is whole: the sample, or what was computed of it alone."""
    features: int
    """Entries of dim 1 that belong to one channel."""


class Probed(NamedTuple):
    """What was seen; problems are what makes channels of a split tensor more than their ranks' own affair."""

    calls: list[Call]
    problems: list[str]
    refused: list[str]
    """What no split is made for, whole activations or not."""

    def layers(self) -> dict[str, Layer]:
        """The layers by name, in the order of their calls."""
        named = [call for call in self.calls if isinstance(call.module, LAYERS)]
        return {call.name: _layer(call, is_last=call is named[-1]) for call in named}


def probe(model: nn.Module, shape: tuple[int, ...]) -> Probed:
    """What ``model`` does with samples of ``shape`` (channels first). No memory, no arithmetic, no random numbers.

    Raises ``WorkerError`` (``unsupported``) where it cannot be run without numbers.
    """
    seen = _Probe()
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


class _Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks every tensor with its channels and follows the marks through what happens between layers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[Call] = []
        self._problems: list[tuple[int, str]] = []
        self._refused: list[str] = []
        self._inside = 0
        self._kept: list[Any] = []

    def found(self) -> Probed:
        """Problems behind the last layer are none: what it gives is whole."""
        last = sum(isinstance(call.module, LAYERS) for call in self._calls)
        problems = dict.fromkeys(text for layers, text in self._problems if layers < last)
        return Probed(self._calls, list(problems), list(dict.fromkeys(self._refused)))

    def hooks(self, name: str, module: nn.Module) -> list[Any]:
        """Hooks for a module that is known as a whole."""
        if type(module) not in (*LAYERS, *NORMS, *DROPOUTS):
            return []
        return [
            module.register_forward_pre_hook(self._before(name)),
            module.register_forward_hook(self._after(name)),
        ]

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            channels = _channels(args[0])
            self._inside += 1
            features, left = divmod(args[0].shape[1], channels) if channels else (1, 0)
            self._calls.append(Call(name, module, channels, max(features, 1)))
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
            self._mark(output, output.shape[1] if isinstance(module, LAYERS) else _channels(args[0]))

        return hook

    def _mark(self, tensor: Tensor, channels: int) -> None:
        setattr(tensor, _TAG, channels)
        self._kept.append(tensor)

    def _problem(self, text: str) -> None:
        layers = sum(isinstance(call.module, LAYERS) for call in self._calls)
        self._problems.append((layers, text))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._inside:
            self._follow(func, args, kwargs or {}, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        channels = max((_channels(one) for one in given), default=0)
        if channels == 0:
            return
        name = func.overloadpacket.__name__
        results = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        if not _keeps_channels(name, args, given, results):
            self._problem(f"{name} on a tensor whose channels are split")
        for result in results:
            self._mark(result, channels)


def _keeps_channels(name: str, args: Any, given: list[Tensor], results: list[Tensor]) -> bool:
    """Whether a rank can do this with its own channels alone."""
    first = given[0]
    channels = max(_channels(one) for one in given)
    if any(one.numel() > 1 and (_channels(one), one.shape[:2]) != (channels, first.shape[:2]) for one in given):
        return False
    plain = name.removesuffix("_") if not name.startswith("_") else name
    if plain in ("mean", "sum"):
        dims = [dim % first.dim() for dim in args[1]] if len(args) > 1 and args[1] else [0]
        return min(dims) > 1
    if plain == "constant_pad_nd":
        return len(args[1]) <= 2 * (first.dim() - 2)
    if plain in _SHAPES:
        shape = results[0].shape
        return len(shape) >= 2 and shape[0] == first.shape[0] and shape[1] % channels == 0
    return plain in _BY_ELEMENT or plain in _BY_CHANNEL


def _channels(tensor: Tensor) -> int:
    return int(getattr(tensor, _TAG, 0))


def _layer(call: Call, is_last: bool) -> Layer:
    module, is_first = call.module, call.channels == 0
    if isinstance(module, nn.Linear):
        features = 1 if is_first else call.features
        return Layer(module.in_features // features, module.out_features, 1, features, is_first, is_last)
    assert isinstance(module, CONVOLUTIONS), "a layer"
    return Layer(module.in_channels, module.out_channels, module.groups, is_first=is_first, is_last=is_last)
