"""Layers as ranks get them that share one: some of the output channels, of the input channels, or of the positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

SPLITS = ("outputs", "inputs", "positions")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def sliced(module: nn.Module, x: Tensor, split: str, parts: int) -> tuple[nn.Module, Tensor] | None:
    """A new layer and the input for one of ``parts``; ``None`` where the layer cannot be split so."""
    if isinstance(module, nn.Linear):
        return _linear(module, x, split, parts)
    if isinstance(module, _CONVOLUTIONS):
        return _convolution(module, x, split, parts)
    return None


def _linear(module: nn.Linear, x: Tensor, split: str, parts: int) -> tuple[nn.Module, Tensor] | None:
    features_in, features_out = module.in_features, module.out_features
    if split == "positions":
        if x.dim() < 3 or x.shape[1] < parts:
            return None
        return module, _narrowed(x, 1, parts)
    whole = features_out if split == "outputs" else features_in
    if whole % parts:
        return None
    sizes = (features_in, whole // parts) if split == "outputs" else (whole // parts, features_out)
    made = nn.Linear(*sizes, bias=module.bias is not None, device=x.device, dtype=module.weight.dtype)
    return made, x if split == "outputs" else _narrowed(x, x.dim() - 1, parts)


def _convolution(module: Any, x: Tensor, split: str, parts: int) -> tuple[nn.Module, Tensor] | None:
    if split == "positions":
        extent, kernel = x.shape[2] // parts, module.dilation[0] * (module.kernel_size[0] - 1) + 1
        if x.shape[2] % parts or extent + 2 * _padding(module) < kernel:
            return None
        return module, _narrowed(x, 2, parts)
    whole = module.out_channels if split == "outputs" else module.in_channels
    if module.groups != 1 or whole % parts:
        return None
    channels = (module.in_channels, whole // parts) if split == "outputs" else (whole // parts, module.out_channels)
    made = type(module)(
        *channels, module.kernel_size, module.stride, module.padding, module.dilation,
        bias=module.bias is not None, device=x.device, dtype=module.weight.dtype,
    )  # fmt: skip
    if split == "outputs":
        return made, x
    return made, _narrowed(x, 1, parts)


def _padding(module: Any) -> int:
    return 0 if isinstance(module.padding, str) else int(module.padding[0])


def _narrowed(x: Tensor, dim: int, parts: int) -> Tensor:
    """The first part, in memory of its own and in the same order."""
    return x.narrow(dim, 0, x.shape[dim] // parts).clone()
