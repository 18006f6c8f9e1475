"""A tensor-parallel rank of a transformer: its parameters, and its rows with communication, memory and kernels.

Shoeybi et al. 2019, figure 3; with ``sequence_parallel`` Korthikanti et al. 2022. An MLP over two ranks, with what
enters and leaves the split layers in brackets (the operations of the backward pass in lower case)::

    x --[ -  , all_reduce]--> up 0 | up 1 (columns) --> down 0 | down 1 (rows) --[ALL_REDUCE, - ]--> y
    x --[ALL_GATHER, reduce_scatter]--> up | up --> down | down --[REDUCE_SCATTER, all_gather]--> y   by tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import RowShare, row_kernels
from hpcbench.predict.model_parallel import ReductionPlan, plan_reductions
from hpcbench.predict.placement import place_group
from hpcbench.predict.row_cost import CollectiveOp, ComputeOp, RowCost, RowOp, copy_op
from hpcbench.predict.tensor_sizes import (
    FP32_BYTES,
    activation_number_bytes,
    input_bytes,
    input_gradient_bytes,
    parameter_number_bytes,
    row_number_bytes,
    weight_layout_copies,
    wide_number_bytes,
)
from hpcbench.strategies.catalog import options_with_defaults
from hpcbench.strategies.layer_table import LOSS_ROW_NAME, LayerRow, LayerTable
from hpcbench.strategies.mesh import RankMesh, even_ranges
from hpcbench.strategies.tensor.entry import TRANSFORMER_BLOCK_KIND, head_feature_ranges

COLUMN_PARALLEL = ("attention.query", "attention.key", "attention.value", "mlp.up", "mlp.gate")
ROW_PARALLEL = ("attention.output", "mlp.down")
_KEYS_AND_VALUES = ("attention.key", "attention.value")
_FIRST_COLUMN_LAYERS = ("attention.query", "mlp.up")
"""The first layers that use what has entered."""
_TOKEN_EMBEDDING = "0.tokens"  # noqa: S105
_ROWS_AFTER_EMBEDDING = ("0.dropout", "0")
_NORMS = ("norm1", "norm2")


class Fraction(NamedTuple):
    """The fraction ``part`` of ``total``, both integers, so that bytes are rounded once."""

    part: int
    total: int

    @property
    def value(self) -> float:
        return self.part / self.total


_WHOLE = Fraction(1, 1)


class RowFractions(NamedTuple):
    """The rank's parts of a row: of its input and output while they are alive, and of its saved activations."""

    inputs: Fraction = _WHOLE
    outputs: Fraction = _WHOLE
    saved: Fraction = _WHOLE


class TensorParallelRank:
    """The part of a layer table that a tensor-parallel rank computes."""

    def __init__(self, spec: RunSpec, table: LayerTable, rank: int) -> None:
        options = options_with_defaults(spec)
        self.spec, self.table = spec, table
        self.index, self.degree = RankMesh.of(spec).coordinates(rank).tp, spec.tp_degree
        self.sequence_parallel = bool(options.get("sequence_parallel")) and self.degree > 1
        self.rows = {layer.name: layer for layer in table.layers}
        self.blocks = {layer.name: layer for layer in table.layers if layer.kind == TRANSFORMER_BLOCK_KIND}
        """Transformer blocks by name, in their order."""
        self.first, self.last = next(iter(self.blocks)), next(reversed(self.blocks))
        self.tokens, self.width = self.blocks[self.first].input_shape
        self.head = _language_head(table) if options.get("vocabulary_parallel") and self.degree > 1 else None
        self.number_bytes, self.sent_bytes = parameter_number_bytes(spec), activation_number_bytes(spec)
        self.samples = spec.batch_size // spec.micro_batches

    def describe_rows(self) -> list[RowCost]:
        """Return every row of the table; the rows of equal blocks are described once."""
        cost_by_kind: dict[tuple[object, ...], RowCost] = {}
        costs = []
        for layer in self.table.layers:
            key = self._kind_of(layer)
            if key not in cost_by_kind:
                cost_by_kind[key] = self._with_memory(self._operations(layer), layer)
            costs.append(cost_by_kind[key])
        return costs

    def _kind_of(self, layer: LayerRow) -> tuple[object, ...]:
        block, _, inner = layer.name.partition(".")
        if block not in self.blocks or block in (self.first, self.last):
            return (layer.name,)
        sizes = layer.forward_flops, layer.forward_moved_bytes, layer.parameters, layer.output_bytes
        return inner, self._head_width(block), *sizes, layer.activation_bytes, layer.activation_fixed_bytes

    def _operations(self, layer: LayerRow) -> RowCost:
        block, _, inner = layer.name.partition(".")
        kernels = row_kernels(self.spec, layer, self.samples, self.row_share(layer))
        forward: list[RowOp] = [ComputeOp(kernels.forward)]
        backward: list[RowOp] = [ComputeOp(kernels.backward)]
        if self.degree == 1:
            return RowCost(forward, backward)
        # Activations between split layers, padded to the rank with most tokens.
        tokens = -(-self.tokens // self.degree) if self.sequence_parallel else self.tokens
        numbers, is_in_block, is_repeated = self.samples * tokens * self.width, block in self.blocks, False
        after_forward: list[RowOp] = []
        after_backward: list[RowOp] = []
        if (is_in_block and inner in _FIRST_COLUMN_LAYERS) or layer.name == f"{self.head}.output":
            after_backward, entering = self._sums_and_gathers(numbers * self.sent_bytes)
            forward = [*entering, *forward]
            if not self.sequence_parallel:
                after_backward = [copy_op(self.spec, numbers * self.sent_bytes), *after_backward]
        elif is_in_block and inner in ROW_PARALLEL:
            after_forward, entering = self._sums_and_gathers(numbers * self.sent_bytes)
            backward = [*entering, *backward]
            # A block computed again ends with the last layer that keeps something: what comes after is not repeated.
            is_repeated = self.rows[f"{block}.dropout2"].attributes["p"] > 0 or inner != ROW_PARALLEL[-1]
            if f"{layer.name}.bias" in self._parameter_names:
                # It is added to what has been summed over the ranks.
                after_forward.append(copy_op(self.spec, kernels.forward.output_bytes * self._token_fraction.value))
        elif self.head is None:
            # The activations are parted before the first block and joined after the last.
            if self.sequence_parallel and (block, inner) == (self.first, _NORMS[0]):
                forward = [copy_op(self.spec, numbers * self.number_bytes), *forward]
                after_backward = self._gather(numbers * self.number_bytes)
            elif self.sequence_parallel and (block, inner) == (self.last, ""):
                after_forward = self._gather(numbers * self.number_bytes)
                backward = [copy_op(self.spec, numbers * self.number_bytes), *backward]
        elif layer.name == _TOKEN_EMBEDDING:
            after_forward, entering = self._sums_and_gathers(numbers * self.number_bytes)
            # Vectors and gradients of other ranks' words are set to zero.
            masked = copy_op(self.spec, kernels.forward.output_bytes)
            forward, backward = [*forward, masked], [*entering, *backward, masked]
            is_repeated = self.rows["0.dropout"].attributes["p"] > 0
        elif layer.name == LOSS_ROW_NAME:
            positions = self.samples * self.tokens * wide_number_bytes(self.spec)
            after_forward = [self._call("all_reduce", size) for size in (positions, 2 * positions)]
        recompute = [*forward, *(after_forward if is_repeated else ())]
        return RowCost([*forward, *after_forward], backward, after_backward, recompute)

    def _sums_and_gathers(self, size_bytes: int) -> tuple[list[RowOp], list[RowOp]]:
        """Return how activations or gradients are summed over the ranks, and how they are gathered the other way."""
        if not self.sequence_parallel:
            return [self._call("all_reduce", size_bytes)], []
        whole_bytes = size_bytes * self.degree
        return [copy_op(self.spec, whole_bytes), self._call("reduce_scatter", whole_bytes)], self._gather(size_bytes)

    def _gather(self, part_bytes: int) -> list[RowOp]:
        return [copy_op(self.spec, part_bytes * self.degree), self._call("all_gather", part_bytes)]

    def _call(self, operation: str, payload_bytes: int) -> CollectiveOp:
        return CollectiveOp(operation, payload_bytes, place_group(self.spec, "tp"), "tp")

    def _with_memory(self, operations: RowCost, layer: LayerRow) -> RowCost:
        fractions = self.fractions(layer)
        inputs, outputs = fractions.inputs, fractions.outputs
        number_bytes = row_number_bytes(self.spec, layer)
        whole_in, whole_out, gradient_in = (
            size * self.samples // FP32_BYTES
            for size in (input_bytes(layer), layer.output_bytes, input_gradient_bytes(layer))
        )
        scores = 0
        if layer.name == LOSS_ROW_NAME and self.head is not None:
            # One part of the vocabulary has one gradient; scores of half precision stay beside their wide copy.
            gradient_in, scores = whole_in, whole_in * (self.sent_bytes < FP32_BYTES) * self.sent_bytes
        gradients = gradient_in * inputs.part * outputs.total + whole_out * outputs.part * inputs.total
        # Activations parted by tokens without an embedding that parts them are parted within the first block.
        first = _WHOLE if self.head is None and layer.name.startswith(f"{self.first}.") else inputs
        weights = layer.parameters * self.number_bytes * weight_layout_copies(self.spec, layer)
        return operations._replace(
            saved_bytes=self._saved_bytes(layer),
            working_bytes=gradients * number_bytes // (inputs.total * outputs.total)
            + scores * inputs.part // inputs.total
            + weights,
            block_input_bytes=whole_in * self.number_bytes * first.part // first.total,
        )

    def _saved_bytes(self, layer: LayerRow) -> int:
        """Return the bytes that autograd keeps for a row.

        Attention and MLP keep tensors between their layers: these live until the last layer has run backwards.
        """
        block, _, inner = layer.name.partition(".")
        if block in self.blocks and inner in ("attention", "mlp"):
            return 0
        saved = self._row_saved_bytes(layer)
        if block in self.blocks and inner in ROW_PARALLEL:
            saved += self._row_saved_bytes(self.rows[f"{block}.{inner.partition('.')[0]}"])
        return saved

    def _row_saved_bytes(self, layer: LayerRow) -> int:
        per_sample = layer.activation_bytes * row_number_bytes(self.spec, layer) // FP32_BYTES
        fraction = self.fractions(layer).saved
        per_sample = per_sample * fraction.part // fraction.total
        return per_sample * self.samples + layer.activation_fixed_bytes + self._cast_weight_bytes.get(layer.name, 0)

    @cached_property
    def _cast_weight_bytes(self) -> dict[str, int]:
        """Return by row the bytes of autocast's copy of a weight, which lives as long as the row's activations."""
        if self.spec.precision != "bf16":
            return {}
        names = [(tensor.name.rpartition("."), tensor) for tensor in self.table.parameter_tensors]
        return {
            layer: self.parameter_bytes(tensor.name, tensor.shape) // 2
            for (layer, _, kind), tensor in names
            if kind == "weight" and layer in self.rows and self.rows[layer].kind in ("Linear", "Conv2d")
        }

    def fractions(self, layer: LayerRow) -> RowFractions:
        """Return the rank's parts of a row's input, output and saved activations."""
        block, _, inner = layer.name.partition(".")
        tokens = self._token_fraction
        if block in self.blocks:
            if not inner.startswith(("attention", "mlp")):
                is_saved_by_tokens = inner in (*_NORMS, "dropout1", "dropout2")
                return RowFractions(tokens, tokens, tokens if is_saved_by_tokens else _WHOLE)
            features = self._feature_fraction(layer.name)
            if inner in COLUMN_PARALLEL:
                return RowFractions(outputs=features)
            if inner in ROW_PARALLEL:
                return RowFractions(inputs=features, saved=features)
            return RowFractions(features, features, features if inner in ("attention", "mlp") else _WHOLE)
        if self.head is None:
            return RowFractions()
        words = self._word_fraction
        return {
            "0.dropout": RowFractions(saved=tokens),
            f"{self.head}.norm": RowFractions(inputs=tokens, saved=tokens),
            f"{self.head}.output": RowFractions(outputs=words),
            LOSS_ROW_NAME: RowFractions(inputs=words, saved=words),
        }.get(layer.name, RowFractions())

    def row_share(self, layer: LayerRow) -> RowShare:
        """Return the rank's part of a row's kernels."""
        fractions = self.fractions(layer)
        inputs, outputs = fractions.inputs.value, fractions.outputs.value
        if layer.name.endswith(COLUMN_PARALLEL) or layer.name == f"{self.head}.output":
            return RowShare(outputs, inputs, outputs, outputs)
        if layer.name.endswith(ROW_PARALLEL):
            return RowShare(inputs, inputs, outputs, inputs)
        if self.head is not None and layer.name in (*_ROWS_AFTER_EMBEDDING, f"{self.head}.norm"):
            inputs = outputs = self._token_fraction.value
        is_split_embedding = layer.name == _TOKEN_EMBEDDING and self.head is not None
        weights = self._word_fraction.value if is_split_embedding else 1.0
        return RowShare(inputs, inputs, outputs, weights)

    def reductions(self, sizes: Sequence[int]) -> list[ReductionPlan]:
        """Return the reductions of gradients: over replicas, and over all ranks those of the rank's own tokens."""
        partial = [self._is_partial(tensor.name) for tensor in self.table.parameter_tensors]
        parts = (([not is_partial for is_partial in partial], ("dp",)), (partial, ("dp", "tp")))
        return plan_reductions(self.spec, sizes, parts)

    def _is_partial(self, name: str) -> bool:
        """Return whether the gradient of a parameter is of the rank's own tokens alone."""
        if not self.sequence_parallel:
            return False
        layer = name.rpartition(".")[0]
        if layer.partition(".")[0] in self.blocks:
            return layer.endswith(_NORMS) or name.endswith(tuple(f"{row}.bias" for row in ROW_PARALLEL))
        return self.head is not None and layer in ("0.positions", f"{self.head}.norm")

    def parameter_bytes(self, name: str, shape: Sequence[int]) -> int:
        """Return the bytes of the rank's part of a parameter."""
        layer, _, kind = name.rpartition(".")
        dim = 0 if layer.endswith(COLUMN_PARALLEL) else 1 if layer.endswith(ROW_PARALLEL) and kind == "weight" else None
        numbers = prod(shape)
        if dim is not None and layer.partition(".")[0] in self.blocks:
            numbers = numbers // shape[dim] * self._feature_fraction(layer).part
        elif self.head is not None and name in (f"{_TOKEN_EMBEDDING}.weight", f"{self.head}.output.weight"):
            numbers = numbers // shape[0] * self._word_fraction.part
        return numbers * self.number_bytes

    def _head_width(self, block: str) -> int:
        return int(self.rows[f"{block}.attention"].attributes["head_width"])

    def _feature_fraction(self, layer: str) -> Fraction:
        """Return the rank's features of a split layer: whole heads of an attention, with their keys and values."""
        block, _, inner = layer.partition(".")
        split_row = "mlp.up" if inner.startswith("mlp") else "attention.query"
        split_row = inner if inner in _KEYS_AND_VALUES else split_row
        features = int(self.rows[f"{block}.{split_row}"].attributes["out_features"])
        if inner.startswith("mlp"):
            ranges = _even_ranges(features, self.degree)
        else:
            heads = int(self.rows[f"{block}.attention.key"].attributes["out_features"]) // self._head_width(block)
            ranges = _head_ranges(heads, features // heads, self.degree)
        return Fraction(len(ranges[self.index]), features)

    @cached_property
    def _parameter_names(self) -> set[str]:
        return {tensor.name for tensor in self.table.parameter_tensors}

    @cached_property
    def _word_fraction(self) -> Fraction:
        """The rank's part of the vocabulary."""
        words = int(self.rows[_TOKEN_EMBEDDING].attributes["num_embeddings"])
        return Fraction(len(_even_ranges(words, self.degree)[self.index]), words)

    @cached_property
    def _token_fraction(self) -> Fraction:
        """The rank's part of activations between split layers."""
        degree, index = (self.degree, self.index) if self.sequence_parallel else (1, 0)
        return Fraction(len(_even_ranges(self.tokens, degree)[index]), self.tokens)


_even_ranges = lru_cache(maxsize=1024)(even_ranges)
_head_ranges = lru_cache(maxsize=1024)(head_feature_ranges)


def _language_head(table: LayerTable) -> str | None:
    """Return the name of the block of a language model that ends with the vocabulary's scores."""
    first = {layer.name for layer in table.layers if layer.block == 0}
    last = str(table.blocks - 1)
    names = [layer.name for layer in table.layers if layer.block == table.blocks - 1]
    is_language = {_TOKEN_EMBEDDING, "0.dropout"} <= first and names == [f"{last}.norm", f"{last}.output"]
    return last if is_language else None
