"""Sizes of a run's parameters and buffers, from the table of its layers."""

from __future__ import annotations

from math import prod

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.layers import LayerTable, TensorShape
from hpcbench.parallel.memo import of_run

FP32_BYTES = 4
FP64_BYTES = 8
HALF_BYTES = 2


def element_bytes(spec: RunSpec, tensor: TensorShape) -> int:
    """Of one number of ``tensor`` in the run: fp64 widens floating-point ones, autocast leaves weights as they are."""
    wide = spec.precision == "fp64" and tensor.bytes_per_element == FP32_BYTES
    return FP64_BYTES if wide else tensor.bytes_per_element


def elements(tensor: TensorShape) -> int:
    """How many numbers it has."""
    return prod(tensor.shape)


def tensor_bytes(spec: RunSpec, tensor: TensorShape) -> int:
    """Size of one parameter or buffer."""
    return elements(tensor) * element_bytes(spec, tensor)


@of_run("precision")
def parameter_bytes(spec: RunSpec, table: LayerTable) -> list[int]:
    """Sizes of the table's ``parameter_tensors``."""
    return [tensor_bytes(spec, tensor) for tensor in table.parameter_tensors]


@of_run("precision")
def buffer_bytes(spec: RunSpec, table: LayerTable) -> list[int]:
    """Sizes of the table's ``buffers``."""
    return [tensor_bytes(spec, tensor) for tensor in table.buffers]
