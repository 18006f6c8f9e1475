"""Tensor parallelism of transformers (Shoeybi et al. 2019; Korthikanti et al. 2022): what a rank passes and holds."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.live import Kept, Row, held_at_peak, in_turn, input_bytes, layouts, sent_at_once
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.tensors import FP32_BYTES
from hpcbench.parallel.buckets import BUCKET_CAP_MB, MIB, bucket_bytes
from hpcbench.parallel.catalog import strategy
from hpcbench.parallel.layers import LOSS, Layer, LayerTable
from hpcbench.parallel.mesh import Mesh
from hpcbench.parallel.shard import even_ranges
from hpcbench.parallel.tensor import BLOCK, head_ranges
from hpcbench.parallel.traffic import Traffic, merged

_CAP_BYTES = int(BUCKET_CAP_MB * MIB)
_COLUMNS = ("attention.query", "attention.key", "attention.value", "mlp.up")
_ROWS = ("attention.output", "mlp.down")
_LAST_LAYERS = {"attention": "output", "mlp": "down"}
_NORMS = ("norm1", "norm2")
_LOWERED = ("Linear", "Conv2d", "Attention", "Mlp")
"""Kinds of layers that autocast computes in bf16."""


class TensorCost:
    """Exact traffic, and the parts of memory that are largest at different moments of a step."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Collectives of the forward and backward passes, micro-batch by micro-batch, and the gradients' buckets."""
        model = SplitModel(spec, table, rank)
        calls = list(model.activations_sent()) * spec.micro_batches if model.ranks > 1 else []
        return merged([*calls, *model.gradients_sent()])

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """Parts of what is split, all of the rest, at the moment at which they are most."""
        model = SplitModel(spec, table, rank)
        sizes = [model.parameter_bytes(name, shape) for name, shape, _ in table.parameter_tensors]
        kept = Kept(sum(sizes), sizes, in_turn(spec, table), sizes)
        underway = [0] * len(table.layers)
        for is_sent in model.sent_gradients():
            for row, size in enumerate(
                sent_at_once(table, [size * sent for size, sent in zip(sizes, is_sent, strict=True)])
            ):
                underway[row] += size
        return held_at_peak(spec, table, kept, underway, model.backward_rows())


def activations_kept(spec: RunSpec, table: LayerTable, rank: int) -> int:
    """What is kept from the forward pass of a micro-batch when its backward pass begins, without recomputation."""
    return sum(row.kept for row in SplitModel(spec, table, rank).backward_rows())


class SplitModel:
    """One rank's view of a table of layers."""

    def __init__(self, spec: RunSpec, table: LayerTable, rank: int) -> None:
        options = {name: one.default for name, one in strategy(spec.strategy).options.items()} | spec.options
        self.spec, self.table = spec, table
        self.place, self.ranks = Mesh.of(spec).coordinates(rank).tp, spec.tp_degree
        self.by_tokens = bool(options.get("sequence_parallel")) and self.ranks > 1
        self.rows = {layer.name: layer for layer in table.layers}
        self.blocks = [layer.name for layer in table.layers if layer.kind == BLOCK]
        self.tokens, self.width = self.rows[self.blocks[0]].input_shape
        self.head = _language_head(table) if options.get("vocabulary_parallel") and self.ranks > 1 else None
        self.wide_bytes = 8 if spec.precision == "fp64" else 4
        self.sent_bytes = 2 if spec.precision == "bf16" else self.wide_bytes
        self.samples = spec.batch_size // spec.micro_batches

    def activations_sent(self) -> Iterator[Traffic]:
        """Of one micro-batch, on several ranks."""
        again = self.spec.activation_checkpointing
        for name in self.blocks:
            # A block computed again ends with the last layer that keeps something: what comes after is not repeated.
            drops = self.rows[f"{name}.dropout2"].attributes["p"] > 0
            yield from self._enters(self.sent_bytes, forwards=2 + 2 * again, backwards=2)
            yield from self._leaves(self.sent_bytes, forwards=2 + again * (1 + drops), backwards=2)
        if self.head is None:
            if self.by_tokens:
                first, last = self.rows[self.blocks[0]].block, self.rows[self.blocks[-1]].block
                assert last - first + 1 == len(self.blocks), "transformer blocks one after another"
                # The activations are parted before the first of them, and joined after the last.
                yield from [self._call("all_gather", self._own_numbers() * self.wide_bytes)] * 2
            return
        drops = self.rows["0.dropout"].attributes["p"] > 0
        yield from self._leaves(self.wide_bytes, forwards=1 + again * drops, backwards=1)
        yield from self._enters(self.sent_bytes, forwards=1 + again, backwards=1)
        positions = self.samples * self.tokens
        yield self._call("all_reduce", positions * self.wide_bytes)
        yield self._call("all_reduce", 2 * positions * self.wide_bytes)

    def gradients_sent(self) -> Iterator[Traffic]:
        """Once a step: whole gradients across replicas, those of own tokens among all ranks."""
        sizes = [self.parameter_bytes(name, shape) for name, shape, _ in self.table.parameter_tensors]
        group_sizes = (self.spec.dp_degree, self.spec.dp_degree * self.ranks)
        for is_sent, group_size in zip(self.sent_gradients(), group_sizes, strict=True):
            chosen = [size for size, sent in zip(sizes, is_sent, strict=True) if sent]
            for payload in bucket_bytes(chosen, _CAP_BYTES):
                yield Traffic(operation="all_reduce", group_size=group_size, payload_bytes=payload)

    def sent_gradients(self) -> tuple[list[bool], list[bool]]:
        """Of every tensor: whether its gradient goes across replicas, and whether it goes among all ranks."""
        partial = [self._is_partial(name) for name, _, _ in self.table.parameter_tensors]
        return [not one and self.spec.dp_degree > 1 for one in partial], partial

    def parameter_bytes(self, name: str, shape: list[int]) -> int:
        """Of the rank's part of a parameter."""
        numbers = 1
        for extent in shape:
            numbers *= extent
        layer, _, kind = name.rpartition(".")
        dim = 0 if layer.endswith(_COLUMNS) else 1 if layer.endswith(_ROWS) and kind == "weight" else None
        if self._block_of(layer) is not None and dim is not None:
            return numbers // shape[dim] * len(self._features(layer)) * self.wide_bytes
        if self.head is not None and name in ("0.tokens.weight", f"{self.head}.output.weight"):
            return numbers // shape[0] * len(self._words()) * self.wide_bytes
        return numbers * self.wide_bytes

    def backward_rows(self) -> list[Row]:
        """What every row costs the rank; see ``oracle.live``.

        What attention and MLP keep between their layers is there until the last of these has run backwards.
        """
        cast = dict(self._cast_weights()) if self.spec.precision == "bf16" else {}
        kept = {
            layer.name: self._kept_bytes(layer) * self.samples + layer.activation_fixed_bytes + cast.get(layer.name, 0)
            for layer in self.table.layers
        }
        for inner, last in ((f"{name}.{one}", last) for name in self.blocks for one, last in _LAST_LAYERS.items()):
            kept[f"{inner}.{last}"] += kept[inner]
            kept[inner] = 0
        return [self._backward_row(layer, kept[layer.name]) for layer in self.table.layers]

    def _backward_row(self, layer: Layer, kept: int) -> Row:
        given, made = self._flow_shares(layer)
        number_bytes = self.sent_bytes if layer.kind.startswith(_LOWERED) else self.wide_bytes
        scale = self.samples * Fraction(number_bytes, FP32_BYTES)
        flows = (input_bytes(layer) * given + layer.output_bytes * made) * scale
        # Activations that blocks share by tokens without an embedding that parts them are parted within the first one.
        is_whole = self.head is None and layer.name.startswith(f"{self.blocks[0]}.")
        first = input_bytes(layer) * (1 if is_whole else given)
        laid_out = layer.parameters * self.wide_bytes * layouts(layer)
        return Row(kept, int(flows) + laid_out, int(first * self.samples * Fraction(self.wide_bytes, FP32_BYTES)))

    def _flow_shares(self, layer: Layer) -> tuple[Fraction, Fraction]:
        """The rank's parts of a row's input and output."""
        whole, inner = Fraction(1), layer.name.partition(".")[2]
        tokens = Fraction(len(self._own_tokens()), self.tokens)
        if self._block_of(layer.name) is not None:
            if not inner.startswith(("attention", "mlp")):
                return tokens, tokens
            kind = "attention" if inner.startswith("attention") else "mlp"
            features = Fraction(len(self._features(layer.name)), self._features_of_all(layer.name, kind))
            if inner in _COLUMNS:
                return whole, features
            return features, whole if inner in _ROWS else features
        if self.head is not None and layer.name == f"{self.head}.norm":
            return tokens, whole
        if self.head is not None and layer.name in (f"{self.head}.output", LOSS):
            words = Fraction(len(self._words()), self.rows["0.tokens"].attributes["num_embeddings"])
            return (words, whole) if layer.name == LOSS else (whole, words)
        return whole, whole

    def _cast_weights(self) -> Iterator[tuple[str, int]]:
        """Row and bytes of autocast's copy of a weight, which lives as long as what it was multiplied with."""
        for name, shape, _ in self.table.parameter_tensors:
            layer, _, kind = name.rpartition(".")
            row = self.rows.get(layer)
            if kind == "weight" and row is not None and row.kind in ("Linear", "Conv2d"):
                yield layer, self.parameter_bytes(name, shape) // 2

    def _call(self, operation: str, payload_bytes: int) -> Traffic:
        return Traffic(operation=operation, group_size=self.ranks, payload_bytes=payload_bytes)

    def _own_numbers(self) -> int:
        """Of an activation between split layers, padded to the rank with most tokens."""
        tokens = -(-self.tokens // self.ranks) if self.by_tokens else self.tokens
        return self.samples * tokens * self.width

    def _enters(self, number_bytes: int, forwards: int, backwards: int) -> Iterator[Traffic]:
        """Before column layers."""
        own = self._own_numbers() * number_bytes
        if self.by_tokens:
            yield from [self._call("all_gather", own)] * forwards
            yield from [self._call("reduce_scatter", own * self.ranks)] * backwards
        else:
            yield from [self._call("all_reduce", own)] * backwards

    def _leaves(self, number_bytes: int, forwards: int, backwards: int) -> Iterator[Traffic]:
        """After row layers, and after the embedding."""
        own = self._own_numbers() * number_bytes
        if self.by_tokens:
            yield from [self._call("reduce_scatter", own * self.ranks)] * forwards
            yield from [self._call("all_gather", own)] * backwards
        else:
            yield from [self._call("all_reduce", own)] * forwards

    def _block_of(self, name: str) -> str | None:
        """The transformer block that a module is in, or is."""
        block = name.partition(".")[0]
        return block if block in self.blocks else None

    def _features(self, layer: str) -> range:
        """The rank's own, of a split layer."""
        block, _, inner = layer.partition(".")
        if inner.startswith("mlp"):
            up: Any = self.rows[f"{block}.mlp.up"].attributes
            return even_ranges(up["out_features"], self.ranks)[self.place]
        head_width = self.rows[f"{block}.attention"].attributes["head_width"]
        heads = self.rows[f"{block}.attention.query"].attributes["out_features"] // head_width
        return head_ranges(heads, head_width, self.ranks)[self.place]

    def _words(self) -> range:
        """The rank's own part of the vocabulary."""
        return even_ranges(self.rows["0.tokens"].attributes["num_embeddings"], self.ranks)[self.place]

    def _own_tokens(self) -> range:
        return even_ranges(self.tokens, self.ranks)[self.place] if self.by_tokens else range(self.tokens)

    def _is_partial(self, name: str) -> bool:
        """Whether the parameter's gradient is of the own tokens alone."""
        if not self.by_tokens:
            return False
        layer = name.rpartition(".")[0]
        if self._block_of(layer) is not None:
            return layer.endswith(_NORMS) or name.endswith(tuple(f"{row}.bias" for row in _ROWS))
        return self.head is not None and layer in ("0.positions", f"{self.head}.norm")

    def _kept_bytes(self, layer: Layer) -> int:
        """What autograd keeps of one call, per sample: of the whole layer's by the share of it that the rank has."""
        kept, inner = layer.activation_bytes * self.wide_bytes // 4, layer.name.partition(".")[2]
        if self.spec.precision == "bf16" and layer.kind.startswith(_LOWERED):
            kept //= 2
        by_tokens = (len(self._own_tokens()), self.tokens)
        parts, whole = 1, 1
        if self._block_of(layer.name) is not None:
            if inner in ("attention", "attention.output", "mlp", "mlp.down"):
                kind = "attention" if inner.startswith("attention") else "mlp"
                parts, whole = len(self._features(layer.name)), self._features_of_all(layer.name, kind)
            elif inner in (*_NORMS, "dropout1", "dropout2"):
                parts, whole = by_tokens
        elif self.head is not None and layer.name in ("0.dropout", f"{self.head}.norm"):
            parts, whole = by_tokens
        elif self.head is not None and layer.name == LOSS:
            parts, whole = len(self._words()), layer.input_shape[-1]
        return kept * parts // whole

    def _features_of_all(self, layer: str, kind: str) -> int:
        block = layer.partition(".")[0]
        row = self.rows[f"{block}.attention.query" if kind == "attention" else f"{block}.mlp.up"]
        features: int = row.attributes["out_features"]
        return features


def _language_head(table: LayerTable) -> str | None:
    """Name of the block of a language model that ends with the vocabulary's scores."""
    inner = {layer.kind for layer in table.layers if layer.block == 0}
    last = str(table.blocks - 1)
    names = [layer.name for layer in table.layers if layer.block == table.blocks - 1]
    is_language = {"Embedding", "Embedding.other"} <= inner and names == [f"{last}.norm", f"{last}.output"]
    return last if is_language else None
