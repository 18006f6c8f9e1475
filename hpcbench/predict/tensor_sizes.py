"""Bytes of numbers, parameters, buffers and activations, and the tensors that an optimizer keeps and moves."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.gradient_buckets import MASTER_UPDATE_CAP_BYTES, fill_buckets, sum_bytes_at
from hpcbench.strategies.layer_table import LOSS_ROW_NAME, LayerRow, LayerTable, TensorShape, cached_by_run_fields
from hpcbench.workloads.datasets import BATCH_SLOTS, DATASETS, LARGE_SAMPLE_NUMBERS, is_resident, sample_shape

FP32_BYTES = 4
FP64_BYTES = 8
HALF_BYTES = 2
_INDEX_BYTES = 8
"""A token or a class."""


def parameter_number_bytes(spec: RunSpec) -> int:
    """Return the bytes of one number of a parameter or of a sum: autocast leaves weights in fp32."""
    return {"fp64": FP64_BYTES, "bf16_params": HALF_BYTES}.get(spec.precision, FP32_BYTES)


def wide_number_bytes(spec: RunSpec) -> int:
    """Return the bytes of one number of the loss and of BatchNorm's statistics: fp32 at least."""
    return max(parameter_number_bytes(spec), FP32_BYTES)


_WIDE_KINDS = ("LayerNorm", "RMSNorm", "Embedding", "TransformerBlock.other")
"""Kinds of layers that work with the residual stream of a transformer, which autocast leaves in fp32."""

_SHARED_INPUT_LAYERS = ("attention.key", "attention.value", "mlp.gate")
"""Layers whose input an earlier layer of their block has, too."""


def row_number_bytes(spec: RunSpec, layer: LayerRow) -> int:
    """Return the bytes of one number that a row keeps."""
    if layer.name == LOSS_ROW_NAME:
        return wide_number_bytes(spec)
    return parameter_number_bytes(spec) if layer.kind in _WIDE_KINDS else activation_number_bytes(spec)


def saved_row_bytes(spec: RunSpec, layer: LayerRow, samples: int) -> int:
    """Return the bytes that autograd keeps for a row of one device, autocast's copies included.

    Autocast casts the output of a norm for each of the layers that use it.
    """
    kept, number_bytes = layer.activation_bytes * samples + layer.activation_fixed_bytes, row_number_bytes(spec, layer)
    # The places of maxima are integers in every precision.
    is_pool = layer.kind.startswith("MaxPool") and number_bytes < FP32_BYTES
    places = min(prod(layer.output_shape) * _INDEX_BYTES * samples, kept) if is_pool else 0
    is_cast_again = spec.precision in ("bf16", "fp16") and layer.name.endswith(_SHARED_INPUT_LAYERS)
    copies = input_bytes(layer) * samples * HALF_BYTES // FP32_BYTES if is_cast_again else 0
    return (kept - places) * number_bytes // FP32_BYTES + places + copies + cast_weight_bytes(spec, layer)


def cast_weight_bytes(spec: RunSpec, layer: LayerRow) -> int:
    """Return the bytes of autocast's copy of a weight, which is kept for the gradient of the row's input.

    A tied weight is none of its row's parameters, and is cast all the same.
    """
    if spec.precision not in ("bf16", "fp16") or not layer.kind.startswith(("Linear", "Conv")):
        return 0
    numbers = layer.parameters
    if layer.kind == "Linear":
        numbers = int(layer.attributes["in_features"]) * int(layer.attributes["out_features"])
    return numbers * HALF_BYTES


def activation_number_bytes(spec: RunSpec) -> int:
    """Return the bytes of one number of an activation."""
    return HALF_BYTES if spec.compute_precision in ("bf16", "fp16") else parameter_number_bytes(spec)


def element_bytes(spec: RunSpec, tensor: TensorShape) -> int:
    """Return the bytes of one number of ``tensor`` in the run: only fp32 tensors follow the run's precision."""
    return parameter_number_bytes(spec) if tensor.bytes_per_element == FP32_BYTES else tensor.bytes_per_element


def element_count(tensor: TensorShape) -> int:
    return prod(tensor.shape)


def tensor_bytes(spec: RunSpec, tensor: TensorShape) -> int:
    """Return the size of one parameter in the run."""
    return element_count(tensor) * element_bytes(spec, tensor)


@cached_by_run_fields("precision")
def parameter_bytes(spec: RunSpec, table: LayerTable) -> list[int]:
    """Return the sizes of the table's ``parameter_tensors``."""
    return [tensor_bytes(spec, tensor) for tensor in table.parameter_tensors]


@cached_by_run_fields("precision")
def buffer_bytes(spec: RunSpec, table: LayerTable) -> list[int]:
    """Return the sizes of the table's ``buffers``."""
    return [one_buffer_bytes(spec, tensor) for tensor in table.buffers]


def one_buffer_bytes(spec: RunSpec, tensor: TensorShape) -> int:
    """Return the size of a buffer in the run."""
    is_floating = tensor.bytes_per_element == FP32_BYTES
    return element_count(tensor) * (wide_number_bytes(spec) if is_floating else tensor.bytes_per_element)


def input_bytes(layer: LayerRow) -> int:
    """Return the bytes of a row's input, per sample, in fp32."""
    return prod(layer.input_shape) * FP32_BYTES


def input_gradient_bytes(layer: LayerRow) -> int:
    """Return the bytes per sample, in fp32, of the gradients of a row's input while the row runs backwards.

    That of the loss is computed from another one, of the logarithms of probabilities.
    """
    return input_bytes(layer) * (2 if layer.name == LOSS_ROW_NAME else 1)


def weight_layout_copies(spec: RunSpec, layer: LayerRow) -> int:
    """Return how often the library holds a layer's weight in a layout of its own, gradients in 3-D too (measured).

    The library is oneDNN, which has no fp64: torch's own convolutions read the weight as it is.
    """
    if spec.precision == "fp64":
        return 0
    return {"Conv3d": 4}.get(layer.kind, int(layer.kind.startswith("Conv")))


def held_sample_bytes(spec: RunSpec, table: LayerTable) -> int:
    """Return the bytes of the samples and targets that a rank holds on its device, whichever layers it computes.

    They are the batches that the steps take turns with, or the set as a whole and a batch of it, or a batch that has
    been copied from the host.
    """
    dataset, batch = DATASETS[spec.dataset], spec.batch_size
    targets = {"class": 1, "values": 0, "tokens": table.input_size}[dataset.target] * _INDEX_BYTES
    each = _sample_bytes(spec, table) + targets + (dataset.outputs * FP32_BYTES if dataset.target == "values" else 0)
    if is_resident(spec.dataset, spec.data):
        return (dataset.samples + dataset.held_out + batch) * each
    is_large = prod(sample_shape(spec.dataset, table.input_size)) >= LARGE_SAMPLE_NUMBERS
    return (1 if spec.data != "device" or is_large else BATCH_SLOTS) * batch * each


def saved_sample_bytes(spec: RunSpec, table: LayerTable) -> int:
    """Return the bytes per sample of activations that are views of the held samples: the first layer's input.

    Autocast makes a copy of it in half precision, and a rank that computes a part of a volume one of the part.
    """
    is_cast = spec.precision in ("bf16", "fp16") and DATASETS[spec.dataset].kind != "tokens"
    if is_cast or spec.sp_degree > 1:
        return 0
    input_bytes = next((layer.activation_bytes for layer in table.layers if layer.activation_bytes), 0)
    return min(input_bytes * parameter_number_bytes(spec) // FP32_BYTES, _sample_bytes(spec, table))


def _sample_bytes(spec: RunSpec, table: LayerTable) -> int:
    is_tokens = DATASETS[spec.dataset].kind == "tokens"
    numbers = prod(sample_shape(spec.dataset, table.input_size))
    return numbers * (_INDEX_BYTES if is_tokens else parameter_number_bytes(spec))


class OptimizerTensors(NamedTuple):
    """Tensors of a parameter's size that an optimizer needs for each parameter."""

    states: int
    """Kept between steps: momentum, or Adam's two moments."""
    temporaries: int
    """Alive while the parameter is updated."""
    moved: int
    """Read and written by an update: the weight twice and its gradient, and every state twice."""


def optimizer_tensors(spec: RunSpec) -> OptimizerTensors:
    """Return the tensors of the run's optimizer, as many of a parameter's size.

    An fp32 tensor of master weights is two of a bf16 parameter.
    """
    if spec.optimizer in ("adam", "adamw"):
        tensors = OptimizerTensors(2, 2, 7)
    else:
        tensors = OptimizerTensors(1, 0, 5) if spec.momentum else OptimizerTensors(0, 0, 3)
    if spec.precision != "bf16_params":
        return tensors
    # Casting reads and writes a gradient, and reads the master weight and writes the parameter.
    return OptimizerTensors(*(2 * count for count in (tensors.states + 1, tensors.temporaries, tensors.moved + 3)))


def update_temporary_bytes(spec: RunSpec, owned: Sequence[int]) -> tuple[int, int]:
    """Return the bytes alive during an update of parameters of ``owned`` bytes beside those that are kept.

    The second number is of temporary tensors that only a CPU has: the fused updates of cuda need none.
    """
    temporaries = max(owned, default=0) * optimizer_tensors(spec).temporaries
    if spec.precision != "bf16_params":
        return (temporaries, 0) if spec.precision == "fp16" else (0, temporaries)
    fp32_bytes = [size // HALF_BYTES * FP32_BYTES for size in owned]
    parts = fill_buckets(fp32_bytes, MASTER_UPDATE_CAP_BYTES, MASTER_UPDATE_CAP_BYTES)
    return max((sum_bytes_at(fp32_bytes, places) for places in parts), default=0), temporaries
