"""One tensor-parallel rank of a transformer: its parameters, communication, memory and row times (Shoeybi et al.
2019)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel, RowShare, row_kernels
from hpcbench.oracle.model_parallel import (
    NO_COMM,
    CommOp,
    LayerComm,
    ReductionPlan,
    RowEvents,
    comm_events,
    copy_event,
    model_parallel_step,
    unsharded_row_events,
)
from hpcbench.oracle.peak_memory import FP32_BYTES, RowMemory, input_bytes, weight_layout_copies
from hpcbench.oracle.placement import place_group
from hpcbench.oracle.step_time import StepBreakdown
from hpcbench.oracle.stream_simulator import ComputeEvent
from hpcbench.parallel.catalog import get_strategy
from hpcbench.parallel.gradient_buckets import DEFAULT_BUCKET_CAP_MB, MIB, fill_buckets
from hpcbench.parallel.layer_table import LOSS_ROW_NAME, LayerRow, LayerTable
from hpcbench.parallel.mesh import RankMesh, even_ranges
from hpcbench.parallel.strategies.tensor import TRANSFORMER_BLOCK_KIND, head_feature_ranges
from hpcbench.parallel.traffic import Traffic

_BUCKET_CAP_BYTES = int(DEFAULT_BUCKET_CAP_MB * MIB)
COLUMN_PARALLEL = ("attention.query", "attention.key", "attention.value", "mlp.up")
ROW_PARALLEL = ("attention.output", "mlp.down")
_FIRST_COLUMN_LAYERS = ("attention.query", "mlp.up")
"""The first layers that use what has entered."""
_TOKEN_EMBEDDING = "0.tokens"  # noqa: S105
_LAST_LAYER_OF = {"attention": "output", "mlp": "down"}
_NORMS = ("norm1", "norm2")
_AUTOCAST_KINDS = ("Linear", "Conv2d", "Attention", "Mlp")
"""Kinds of layers that autocast computes in bf16."""


class Fraction(NamedTuple):
    """So many of a whole."""

    own: int
    whole: int


class TensorParallelRank:
    """One rank's view of a table of layers."""

    def __init__(self, spec: RunSpec, table: LayerTable, rank: int) -> None:
        options = {name: one.default for name, one in get_strategy(spec.strategy).options.items()} | spec.options
        self.spec, self.table = spec, table
        self.place, self.ranks = RankMesh.of(spec).coordinates(rank).tp, spec.tp_degree
        self.by_tokens = bool(options.get("sequence_parallel")) and self.ranks > 1
        self.rows = {layer.name: layer for layer in table.layers}
        self.blocks = {layer.name: layer for layer in table.layers if layer.kind == TRANSFORMER_BLOCK_KIND}
        """In their order."""
        self.first, self.last = next(iter(self.blocks)), next(reversed(self.blocks))
        self.tokens, self.width = self.blocks[self.first].input_shape
        self.head = _language_head(table) if options.get("vocabulary_parallel") and self.ranks > 1 else None
        self.wide_bytes = 8 if spec.precision == "fp64" else 4
        self.sent_bytes = 2 if spec.precision == "bf16" else self.wide_bytes
        self.samples = spec.batch_size // spec.micro_batches

    def activations_sent(self) -> Iterator[Traffic]:
        """Of one micro-batch, on several ranks."""
        for layer in self.table.layers:
            yield from self.around(layer).calls(self.spec.activation_checkpointing)

    def around(self, layer: LayerRow) -> LayerComm:
        """What happens before and after a row on several ranks (Shoeybi et al. 2019, figure 3)."""
        block, _, inner = layer.name.partition(".")
        if block in self.blocks:
            return self._around_in_block(block, inner)
        if self.head is None:
            return NO_COMM
        if layer.name == _TOKEN_EMBEDDING:
            drops = self.rows["0.dropout"].attributes["p"] > 0
            return self._after_rows(self.wide_bytes, is_left_again=drops)
        if layer.name == f"{self.head}.output":
            return self._before_columns()
        if layer.name == LOSS_ROW_NAME:
            positions = self.samples * self.tokens * self.wide_bytes
            sums = [CommOp("", 0, self._call("all_reduce", size)) for size in (positions, 2 * positions)]
            return NO_COMM._replace(leave=sums)
        return NO_COMM

    def _around_in_block(self, block: str, inner: str) -> LayerComm:
        if inner in _FIRST_COLUMN_LAYERS:
            return self._before_columns()
        if inner in ROW_PARALLEL:
            # A block computed again ends with the last layer that keeps something: what comes after is not repeated.
            drops = self.rows[f"{block}.dropout2"].attributes["p"] > 0
            return self._after_rows(self.sent_bytes, is_left_again=drops or inner != ROW_PARALLEL[-1])
        if self.head is None and self.by_tokens:
            # The activations are parted before the first block and joined after the last.
            own = self._own_numbers() * self.wide_bytes
            narrowed, gathered = CommOp("narrow", own, None), self._gather(own)
            if (block, inner) == (self.first, _NORMS[0]):
                return NO_COMM._replace(enter=[narrowed], enter_backward=[gathered])
            if (block, inner) == (self.last, ""):
                return NO_COMM._replace(leave=[gathered], leave_backward=[narrowed])
        return NO_COMM

    def _before_columns(self) -> LayerComm:
        own = self._own_numbers() * self.sent_bytes
        if not self.by_tokens:
            return NO_COMM._replace(enter_backward=[CommOp("all_reduce", own, self._call("all_reduce", own))])
        return NO_COMM._replace(enter=[self._gather(own)], enter_backward=[self._scatter(own)])

    def _after_rows(self, number_bytes: int, is_left_again: bool) -> LayerComm:
        own = self._own_numbers() * number_bytes
        if not self.by_tokens:
            return LayerComm([], [CommOp("all_reduce", 0, self._call("all_reduce", own))], [], [], is_left_again)
        return LayerComm([], [self._scatter(own)], [self._gather(own)], [], is_left_again)

    def _gather(self, own_bytes: int) -> CommOp:
        return CommOp("all_gather", own_bytes * self.ranks, self._call("all_gather", own_bytes))

    def _scatter(self, own_bytes: int) -> CommOp:
        return CommOp("reduce_scatter", own_bytes * self.ranks, self._call("reduce_scatter", own_bytes * self.ranks))

    def gradients_sent(self) -> Iterator[Traffic]:
        """Once a step: whole gradients across replicas, those of own tokens among all ranks."""
        sizes = [self.parameter_bytes(name, shape) for name, shape, _ in self.table.parameter_tensors]
        group_sizes = (self.spec.dp_degree, self.spec.dp_degree * self.ranks)
        for found, group_size in zip(self.gradient_buckets(sizes), group_sizes, strict=True):
            for places in found:
                payload = sum(sizes[place] for place in places)
                yield Traffic(operation="all_reduce", group_size=group_size, payload_bytes=payload)

    def gradient_buckets(self, sizes: list[int]) -> list[list[list[int]]]:
        """Places of the tensors in each bucket that goes across replicas, and in each that goes among all ranks."""
        chosen = [[place for place, sent in enumerate(is_sent) if sent] for is_sent in self.sent_gradients()]
        return [
            [
                [places[one] for one in bucket]
                for bucket in fill_buckets([sizes[place] for place in places], _BUCKET_CAP_BYTES)
            ]
            for places in chosen
        ]

    def sent_gradients(self) -> tuple[list[bool], list[bool]]:
        """Of every tensor: whether its gradient goes across replicas, and whether it goes among all ranks."""
        partial = [self._is_partial(name) for name, _, _ in self.table.parameter_tensors]
        return [not one and self.spec.dp_degree > 1 for one in partial], partial

    @property
    def tokens_share(self) -> float:
        """Of what lies between split layers."""
        return len(self._own_tokens) / self.tokens

    @property
    def words_share(self) -> float:
        """Of a vocabulary."""
        return len(self._words) / int(self.rows[_TOKEN_EMBEDDING].attributes["num_embeddings"])

    def parameter_bytes(self, name: str, shape: list[int]) -> int:
        """Of the rank's part of a parameter."""
        layer, _, kind = name.rpartition(".")
        dim = 0 if layer.endswith(COLUMN_PARALLEL) else 1 if layer.endswith(ROW_PARALLEL) and kind == "weight" else None
        if dim is None or self._block_of(layer) is None:
            return self._numbers(name, shape) * self.wide_bytes
        return prod(shape) // shape[dim] * len(self._features(layer)) * self.wide_bytes

    def _numbers(self, name: str, shape: list[int]) -> int:
        """Of a parameter that is whole, or split by words."""
        if self.head is not None and name in (f"{_TOKEN_EMBEDDING}.weight", f"{self.head}.output.weight"):
            return prod(shape) // shape[0] * len(self._words)
        return prod(shape)

    def head_width(self, block: str) -> int:
        """Features of one head."""
        found: int = self.rows[f"{block}.attention"].attributes["head_width"]
        return found

    def backward_rows(self) -> list[RowMemory]:
        """What every row costs the rank; see ``oracle.live``.

        What attention and MLP keep between their layers is there until the last of these has run backwards.
        """
        cast = dict(self._cast_weights()) if self.spec.precision == "bf16" else {}
        kept = {
            layer.name: self._kept_bytes(layer) * self.samples + layer.activation_fixed_bytes + cast.get(layer.name, 0)
            for layer in self.table.layers
        }
        for inner, last in ((f"{name}.{one}", last) for name in self.blocks for one, last in _LAST_LAYER_OF.items()):
            kept[f"{inner}.{last}"] += kept[inner]
            kept[inner] = 0
        return [self._backward_row(layer, kept[layer.name]) for layer in self.table.layers]

    def _backward_row(self, layer: LayerRow, kept: int) -> RowMemory:
        given, made = self.flow_shares(layer)
        number_bytes = self.sent_bytes if layer.kind.startswith(_AUTOCAST_KINDS) else self.wide_bytes
        whole_in, whole_out = (size * self.samples // FP32_BYTES for size in (input_bytes(layer), layer.output_bytes))
        flows = whole_in * given.own * made.whole + whole_out * made.own * given.whole
        # Activations that blocks share by tokens without an embedding that parts them are parted within the first one.
        first = Fraction(1, 1) if self.head is None and layer.name.startswith(f"{self.first}.") else given
        laid_out = layer.parameters * self.wide_bytes * weight_layout_copies(layer)
        return RowMemory(
            kept,
            flows * number_bytes // (given.whole * made.whole) + laid_out,
            whole_in * self.wide_bytes * first.own // first.whole,
        )

    def flow_shares(self, layer: LayerRow) -> tuple[Fraction, Fraction]:
        """The rank's parts of what is alive of a row's input and output."""
        whole, (block, _, inner) = Fraction(1, 1), layer.name.partition(".")
        tokens = Fraction(len(self._own_tokens), self.tokens)
        if block in self.blocks:
            if not inner.startswith(("attention", "mlp")):
                return tokens, tokens
            kind = "attention" if inner.startswith("attention") else "mlp"
            features = Fraction(len(self._features(layer.name)), self._features_of_all(layer.name, kind))
            if inner in COLUMN_PARALLEL:
                return whole, features
            return features, whole if inner in ROW_PARALLEL else features
        if self.head is not None and layer.name == f"{self.head}.norm":
            return tokens, whole
        if self.head is not None and layer.name in (f"{self.head}.output", LOSS_ROW_NAME):
            words = Fraction(len(self._words), self.rows[_TOKEN_EMBEDDING].attributes["num_embeddings"])
            return (words, whole) if layer.name == LOSS_ROW_NAME else (whole, words)
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

    def _block_of(self, name: str) -> str | None:
        """The transformer block that a module is in, or is."""
        block = name.partition(".")[0]
        return block if block in self.blocks else None

    def _features(self, layer: str) -> range:
        """The rank's own, of a split layer."""
        block, _, inner = layer.partition(".")
        if inner.startswith("mlp"):
            up: Any = self.rows[f"{block}.mlp.up"].attributes
            return _own_range(up["out_features"], self.ranks, self.place)
        head_width = self.head_width(block)
        heads = self.rows[f"{block}.attention.query"].attributes["out_features"] // head_width
        return _own_heads(heads, head_width, self.ranks, self.place)

    @cached_property
    def _words(self) -> range:
        """The rank's own part of the vocabulary."""
        return _own_range(self.rows[_TOKEN_EMBEDDING].attributes["num_embeddings"], self.ranks, self.place)

    @cached_property
    def _own_tokens(self) -> range:
        return _own_range(self.tokens, self.ranks, self.place) if self.by_tokens else range(self.tokens)

    def _is_partial(self, name: str) -> bool:
        """Whether the parameter's gradient is of the own tokens alone."""
        if not self.by_tokens:
            return False
        layer = name.rpartition(".")[0]
        if self._block_of(layer) is not None:
            return layer.endswith(_NORMS) or name.endswith(tuple(f"{row}.bias" for row in ROW_PARALLEL))
        return self.head is not None and layer in ("0.positions", f"{self.head}.norm")

    def _kept_bytes(self, layer: LayerRow) -> int:
        """What autograd keeps of one call, per sample: of the whole layer's by the share of it that the rank has."""
        kept = layer.activation_bytes * self.wide_bytes // 4
        if self.spec.precision == "bf16" and layer.kind.startswith(_AUTOCAST_KINDS):
            kept //= 2
        share = self.kept_share(layer)
        return kept * share.own // share.whole

    def kept_share(self, layer: LayerRow) -> Fraction:
        """Of what autograd keeps of one call on one device, the rank's."""
        inner, by_tokens = layer.name.partition(".")[2], Fraction(len(self._own_tokens), self.tokens)
        if self._block_of(layer.name) is not None:
            if inner in ("attention", "attention.output", "mlp", "mlp.down"):
                kind = "attention" if inner.startswith("attention") else "mlp"
                return Fraction(len(self._features(layer.name)), self._features_of_all(layer.name, kind))
            if inner in (*_NORMS, "dropout1", "dropout2"):
                return by_tokens
        elif self.head is not None and layer.name in ("0.dropout", f"{self.head}.norm"):
            return by_tokens
        elif self.head is not None and layer.name == LOSS_ROW_NAME:
            return Fraction(len(self._words), layer.input_shape[-1])
        return Fraction(1, 1)

    def _features_of_all(self, layer: str, kind: str) -> int:
        block = layer.partition(".")[0]
        row = self.rows[f"{block}.attention.query" if kind == "attention" else f"{block}.mlp.up"]
        features: int = row.attributes["out_features"]
        return features


@lru_cache(maxsize=1024)
def _own_range(total: int, ranks: int, place: int) -> range:
    return even_ranges(total, ranks)[place]


@lru_cache(maxsize=1024)
def _own_heads(heads: int, head_width: int, ranks: int, place: int) -> range:
    return head_feature_ranges(heads, head_width, ranks)[place]


def _language_head(table: LayerTable) -> str | None:
    """Name of the block of a language model that ends with the vocabulary's scores."""
    inner = {layer.kind for layer in table.layers if layer.block == 0}
    last = str(table.blocks - 1)
    names = [layer.name for layer in table.layers if layer.block == table.blocks - 1]
    is_language = {"Embedding", "Embedding.other"} <= inner and names == [f"{last}.norm", f"{last}.output"]
    return last if is_language else None


_EMBEDDING_ROW = "0.tokens"
_ROWS_AFTER_EMBEDDING = ("0.dropout", "0")
"""Rows behind the sum over the words."""


def tensor_step(clock: CostModel, model: TensorParallelRank) -> StepBreakdown:
    """A step of the rank that ``model`` belongs to."""
    spec, table = model.spec, model.table
    rows = tensor_row_events(clock, model) if model.ranks > 1 else unsharded_row_events(clock, spec, table)
    sizes = [model.parameter_bytes(name, shape) for name, shape, _ in table.parameter_tensors]
    groups = (("dp", place_group(spec, "dp")), ("dp tp", place_group(spec, "dp", "tp")))
    reducers = [
        ReductionPlan(group, lane, places)
        for (lane, group), places in zip(groups, model.gradient_buckets(sizes), strict=True)
        if places
    ]
    return model_parallel_step(clock, spec, table, rows, sizes, reducers)


def tensor_row_events(clock: CostModel, model: TensorParallelRank) -> list[RowEvents]:
    """What one of several ranks does in a micro-batch, row by row."""
    made: dict[tuple[object, ...], RowEvents] = {}
    found = []
    for layer in model.table.layers:
        key = _row_cost_key(model, layer)
        if key not in made:
            made[key] = _row_events(clock, model, layer)
        found.append(made[key])
    return found


def _row_cost_key(model: TensorParallelRank, layer: LayerRow) -> tuple[object, ...]:
    """Equal for rows that take equal time: most blocks are alike."""
    block, _, inner = layer.name.partition(".")
    if block not in model.blocks or block in (model.first, model.last):
        return (layer.name,)
    flops, moved_bytes = layer.forward_flops, layer.forward_moved_bytes
    return inner, model.head_width(block), flops, moved_bytes, layer.parameters, layer.output_bytes


def _row_events(clock: CostModel, model: TensorParallelRank, layer: LayerRow) -> RowEvents:
    spec, group, around = model.spec, place_group(model.spec, "tp"), model.around(layer)
    passes = row_kernels(spec, layer, model.samples, tensor_row_share(model, layer))
    enter, leave, before, after = (
        comm_events(clock, spec, moves, group)
        for moves in (around.enter, around.leave, around.leave_backward, around.enter_backward)
    )
    if layer.name.endswith(ROW_PARALLEL):
        # The bias is added to what has been summed over the ranks.
        leave.append(copy_event(clock, spec, passes.forward.output_bytes * model.tokens_share))
    forward, backward = [ComputeEvent(clock.kernel_s(passes.forward))], [ComputeEvent(clock.kernel_s(passes.backward))]
    if layer.name == _EMBEDDING_ROW and model.head is not None:
        # Vectors and gradients of other ranks' words are set to zero.
        masked = copy_event(clock, spec, passes.forward.output_bytes)
        forward.append(masked)
        backward.append(masked)
    again = [*enter, *forward, *(leave if around.is_left_again else ())]
    return RowEvents([*enter, *forward, *leave], [*before, *backward], again, after)


def tensor_row_share(model: TensorParallelRank, layer: LayerRow) -> RowShare:
    """The rank's part of a row."""
    given, made = (part.own / part.whole for part in model.flow_shares(layer))
    if layer.name.endswith(COLUMN_PARALLEL) or layer.name == f"{model.head}.output":
        return RowShare(made, given, made, made)
    if layer.name.endswith(ROW_PARALLEL):
        return RowShare(given, given, made, given)
    if model.head is not None and layer.name in (*_ROWS_AFTER_EMBEDDING, f"{model.head}.norm"):
        given = made = model.tokens_share
    weights = model.words_share if layer.name == _EMBEDDING_ROW and model.head is not None else 1.0
    return RowShare(given, given, made, weights)
