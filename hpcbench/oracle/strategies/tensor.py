"""Tensor parallelism of transformers (Shoeybi et al. 2019; Korthikanti et al. 2022): what a rank passes and holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.cost import Memory
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
        """Parts of what is split, all of the rest."""
        model = SplitModel(spec, table, rank)
        parameters = sum(model.parameter_bytes(name, shape) for name, shape, _ in table.parameter_tensors)
        states = 2 if spec.optimizer != "sgd" else int(spec.momentum > 0)
        return Memory(
            parameters_bytes=parameters,
            gradients_bytes=parameters,
            optimizer_bytes=states * parameters,
            activations_bytes=model.activations_kept(),
            communication_bytes=sum(call.payload_bytes * call.count for call in model.gradients_sent()),
        )


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
        tensors = self.table.parameter_tensors
        sizes = [(self._is_partial(name), self.parameter_bytes(name, shape)) for name, shape, _ in tensors]
        for is_partial, group_size in ((False, self.spec.dp_degree), (True, self.spec.dp_degree * self.ranks)):
            chosen = [size for partial, size in sizes if partial == is_partial]
            if group_size > 1:
                for payload in bucket_bytes(chosen, _CAP_BYTES):
                    yield Traffic(operation="all_reduce", group_size=group_size, payload_bytes=payload)

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

    def activations_kept(self) -> int:
        """From the forward pass for the backward pass of one micro-batch, the largest moment of both."""
        kept = [0] * (self.table.blocks + 1)
        for layer in self.table.layers:
            kept[layer.block] += self._kept_bytes(layer) * self.samples + layer.activation_fixed_bytes
        if self.spec.precision == "bf16":
            for block, cast_bytes in self._cast_weights():
                kept[block] += cast_bytes
        if not self.spec.activation_checkpointing:
            return sum(kept)
        of_block = max(kept[self.rows[name].block] for name in self.blocks)
        own_input = self._own_numbers() * self.wide_bytes
        inner = max(len(self._features(f"{name}.mlp.up")) for name in self.blocks)
        # The backward pass of a block begins with these gradients, while all that it keeps is still there.
        gradients = self.samples * self.tokens * (inner + self.width) * self.sent_bytes
        inputs = len(self.blocks) * own_input
        return inputs + max(of_block - own_input + gradients, own_input + kept[-2] + kept[-1])

    def _cast_weights(self) -> Iterator[tuple[int, int]]:
        """Block and bytes of autocast's copy of a weight, which lives as long as what it was multiplied with."""
        for name, shape, _ in self.table.parameter_tensors:
            layer, _, kind = name.rpartition(".")
            row = self.rows.get(layer)
            if kind == "weight" and row is not None and row.kind in ("Linear", "Conv2d"):
                yield row.block, self.parameter_bytes(name, shape) // 2

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
