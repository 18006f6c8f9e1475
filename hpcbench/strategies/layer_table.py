"""The layer table of a model (shapes, parameters, FLOPs and activation bytes per layer), its JSON format, and caches
keyed by a table's identity.
"""

from __future__ import annotations

import gzip
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache, wraps
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from hpcbench.errors import ConfigError
from hpcbench.paths import layer_tables_folder
from hpcbench.workloads.datasets import DATASETS

LAYER_TABLE_VERSION = 2
"""Raised when a column's meaning or the file changes: an older table in a cache is then made anew."""

LOSS_ROW_NAME = "loss"
"""Name of the last row."""


class LayerRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A call of a leaf module, or the operations of a module outside of its children.

    Shapes exclude the batch. FLOPs and bytes are those of one sample in fp32; other precisions scale the bytes.

    Example:
        >>> row = table.layers[0]
        >>> row.name, row.kind, row.input_shape, row.output_shape, row.parameters
        ('0.0', 'Conv2d', [1, 8, 8], [64, 8, 8], 576)
    """

    name: str
    """Qualified name of the module; ``loss`` for the loss."""
    block: int
    """Place in the model's sequence of blocks; one past the last for the loss."""
    kind: str
    """The module's class; with ``.other`` appended: operations of a module that has children, outside of them."""
    input_shape: list[int]
    """Shape of the first input tensor, without the batch."""
    output_shape: list[int]
    parameters: int
    """Numbers that are trained, counted where they are first used: tied ones once."""
    forward_flops: int
    """Two per multiply-add of convolutions, matrix products and attention; nothing else is counted."""
    backward_flops: int
    """FLOPs of the gradients that the layer computes, without recomputation."""
    activation_bytes: int
    """Bytes that autograd keeps for the backward pass, each storage at its first user; no parameters, no buffers."""
    activation_fixed_bytes: int
    """The part of it that does not grow with the batch (BatchNorm's statistics), for the whole batch."""
    output_bytes: int
    """Size of the output tensor."""
    forward_moved_bytes: int
    """Bytes that the operations of the forward pass read and write, as if nothing stayed in a cache; no parameters."""
    backward_moved_bytes: int
    attributes: dict[str, Any] = {}
    """Attributes that a split of the layer needs: kernel, stride, padding, groups, channels, features, heads."""


class TensorShape(NamedTuple):
    """A parameter or buffer of the model, in the model's own order."""

    name: str
    shape: list[int]
    bytes_per_element: int = 4


class LayerTotals(NamedTuple):
    """Sums over the layers. ``largest_activation`` is the layer that keeps most."""

    parameters: int
    forward_flops: int
    backward_flops: int
    activation_bytes: int
    activation_fixed_bytes: int
    largest_activation: str
    largest_parameters: str


class LayerTable(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of a model's layers on one sample of a data set, in the order of execution, with the loss last.

    The table depends on the model, its options, the data set and the input size, and on no strategy: costs and limits
    of strategies are computed from it. ``read_shipped_table`` returns the table of a shipped model;
    ``python -m hpcbench.worker.layers`` measures that of any other.

    Example:
        >>> table = read_shipped_table("resnet18", "cifar10")
        >>> table.blocks, table.totals().parameters, table.flops_per_sample()
        (10, 11173962, 3328997376)
    """

    version: int = LAYER_TABLE_VERSION
    model: str
    dataset: str
    input_size: int
    model_options: dict[str, Any] = {}
    """Options that differ from the model's defaults."""
    blocks: int
    """Length of the model's sequence of blocks: where a pipeline may cut it."""
    parameter_tensors: list[TensorShape]
    """Parameters in the order of ``parameters()``, tied ones once; they fill the gradient buckets."""
    buffers: list[TensorShape]
    columns: tuple[str, ...] = LayerRow.__struct_fields__
    """The meaning of the rows' entries."""
    layers: list[LayerRow]

    def totals(self) -> LayerTotals:
        """The sums over all layers, the loss included."""
        summed = [field for field in LayerTotals._fields if not field.startswith("largest")]
        return LayerTotals(
            **{field: sum(getattr(layer, field) for layer in self.layers) for field in summed},
            largest_activation=max(self.layers, key=lambda layer: layer.activation_bytes).name,
            largest_parameters=max(self.layers, key=lambda layer: layer.parameters).name,
        )

    def rows_by_block(self) -> list[list[LayerRow]]:
        """The rows of each block; the loss belongs to the last one."""
        blocks: list[list[LayerRow]] = [[] for _ in range(self.blocks)]
        for row in self.layers:
            blocks[min(row.block, self.blocks - 1)].append(row)
        return blocks

    @property
    def is_transformer(self) -> bool:
        return any("heads" in row.attributes or "num_heads" in row.attributes for row in self.layers)

    def flops_per_sample(self) -> int:
        """Forward and backward, of the whole model."""
        return sum(layer.forward_flops + layer.backward_flops for layer in self.layers)


class StoredLayerTable(LayerTable, frozen=True, kw_only=True):
    """The form of a table in its file: of equal blocks in succession the first alone."""

    repeated_blocks: dict[int, int] = {}
    """Number of equal blocks in succession, by the number of the first one: ``{1: 80}`` means blocks 1 to 80."""


class LayerTableRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The model and data set of a layer table; ``input_size`` is the data set's own where absent."""

    model: str
    dataset: str
    input_size: int | None = None
    model_options: dict[str, Any] = {}
    model_folder: str | None = None
    """Absolute path of the folder that a user's own model is in."""


class LayerTableResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The output of the worker's module: the table, or why there is none."""

    error: str = ""
    hint: str | None = None
    is_input: bool = False
    """Whether the request is wrong."""
    table: LayerTable | None = None


def first_rows_by_name(rows: Sequence[LayerRow]) -> dict[str, int]:
    """Return the index of the first row of every name."""
    return {row.name: index for index, row in reversed(list(enumerate(rows)))}


def owning_row(tensor: str, rows_by_name: Mapping[str, int]) -> int | None:
    """Return the row of the innermost module around ``tensor`` that is in ``rows_by_name``; ``None`` without any."""
    owner = tensor.rpartition(".")[0]
    while owner and owner not in rows_by_name:
        owner = owner.rpartition(".")[0]
    return rows_by_name.get(owner)


def default_input_size(dataset: str) -> int:
    """The default input size of a data set."""
    return DATASETS[dataset].shape[-1]


def shipped_table_path(model: str, dataset: str) -> Path:
    """Return the package's file of a pair's table."""
    return layer_tables_folder() / f"{model}-{dataset}.json.gz"


def read_shipped_table(
    model: str, dataset: str, input_size: int | None = None, options: Mapping[str, Any] | None = None
) -> LayerTable | None:
    """The shipped table; ``None`` where the package has none.

    ``input_size`` is the model's or the data set's own where it is absent; ``options`` are those that differ from the
    model's defaults.
    """
    if ":" in model or options:
        return None
    path = shipped_table_path(model, dataset)
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    table = _read_shipped_file(path, (state.st_mtime_ns, state.st_size))
    return table if input_size in (None, table.input_size) else None


@lru_cache(maxsize=16)
def _read_shipped_file(path: Path, _: tuple[int, int]) -> LayerTable:
    """The file as it was then: limits of strategies ask for the same table for every point of a sweep."""
    return decode_layer_table(gzip.decompress(path.read_bytes()), str(path))


def decode_layer_table(data: bytes, where: str) -> LayerTable:
    """Decode a table; ``ConfigError`` if ``data`` is none of this version."""
    try:
        table = msgspec.json.decode(data, type=StoredLayerTable)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a table of layers: {error}", where=where) from error
    if table.version != LAYER_TABLE_VERSION or table.columns != LayerRow.__struct_fields__:
        raise ConfigError(
            f"a table of layers of another version ({table.version}, not {LAYER_TABLE_VERSION})", where=where
        )
    return _unfolded(table)


def encode_layer_table(table: LayerTable) -> bytes:
    """Encode ``table`` as JSON with one line per layer, so that a diff shows the changed layers."""
    encode = msgspec.json.encode
    lines: list[bytes] = []
    stored = _folded(table)
    for name in StoredLayerTable.__struct_fields__:
        value = getattr(stored, name)
        if isinstance(value, list):
            inner = b",\n".join(encode(entry) for entry in value)
            lines.append(encode(name) + (b":[\n" + inner + b"\n]" if inner else b":[]"))
        else:
            lines.append(encode(name) + b":" + encode(value))
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


_LISTS_BY_BLOCK = ("parameter_tensors", "buffers", "layers")


def _block_of(entry: LayerRow | TensorShape) -> int:
    """Return the number of an entry's block; -1 for a name that does not begin with one."""
    first = entry.name.partition(".")[0]
    return int(first) if first.isdecimal() else -1


def _folded(table: LayerTable) -> StoredLayerTable:
    """Return ``table`` without the entries of blocks that equal the block before them but for their number."""
    fields = msgspec.structs.asdict(table)
    contents: list[list[tuple[str, bytes]]] = [[] for _ in range(table.blocks)]
    for name in _LISTS_BY_BLOCK:
        entries = [entry for entry in fields[name] if entry.name != LOSS_ROW_NAME]
        numbers = [_block_of(entry) for entry in entries]
        if numbers != sorted(numbers) or not set(numbers) <= set(range(table.blocks)):
            return StoredLayerTable(**fields)
        for number, entry in zip(numbers, entries, strict=True):
            contents[number].append((name, msgspec.json.encode(_renumbered(entry, 0))))
    runs: dict[int, int] = {}
    for _, same in groupby(range(table.blocks), key=contents.__getitem__):
        first, *others = same
        if others:
            runs[first] = 1 + len(others)
    dropped = {first + number for first, count in runs.items() for number in range(1, count)}
    remaining = {name: [entry for entry in fields[name] if _block_of(entry) not in dropped] for name in _LISTS_BY_BLOCK}
    return StoredLayerTable(**(fields | remaining), repeated_blocks=runs)


def _unfolded(stored: StoredLayerTable) -> LayerTable:
    fields = {name: getattr(stored, name) for name in LayerTable.__struct_fields__}
    if stored.repeated_blocks:
        fields |= {name: list(_with_repeats(fields[name], stored.repeated_blocks)) for name in _LISTS_BY_BLOCK}
    return LayerTable(**fields)


def _with_repeats(entries: Iterable[Any], runs: Mapping[int, int]) -> Iterable[Any]:
    for block, group in groupby(entries, key=_block_of):
        first = list(group)
        yield from first
        for number in range(block + 1, block + runs.get(block, 1)):
            yield from (_renumbered(entry, number) for entry in first)


def _renumbered(entry: Any, block: int) -> Any:
    """Return ``entry`` as one of ``block``."""
    _, dot, inner = entry.name.partition(".")
    name = f"{block}{dot}{inner}"
    if isinstance(entry, TensorShape):
        return entry._replace(name=name)
    return msgspec.structs.replace(entry, name=name, block=block)


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def memoized(size: int, key: Callable[..., tuple[Any, Hashable]]) -> Callable[[FunctionT], FunctionT]:
    """Cache the last ``size`` results of a function by the value of ``key`` for its arguments.

    ``key`` returns an object, distinguished by its identity, and a hashable value.
    """

    def decorate(function: FunctionT) -> FunctionT:
        answers: OrderedDict[tuple[int, Hashable], tuple[Any, Any]] = OrderedDict()

        @wraps(function)
        def remembered(*arguments: Any, **named: Any) -> Any:
            owner, others = key(*arguments, **named)
            entry = answers.get((id(owner), others))
            # An identity may come again when its first owner is gone: not while that is kept here.
            if entry is None:
                entry = answers[id(owner), others] = (owner, function(*arguments, **named))
                if len(answers) > size:
                    answers.popitem(last=False)
            return entry[1]

        return remembered  # type: ignore[return-value]

    return decorate


def cached_by_identity(size: int) -> Callable[[FunctionT], FunctionT]:
    """Ask the function once for each first argument, by identity, and each of the others, which are hashable.

    The last ``size`` answers are remembered. They are shared, and must be immutable.
    """
    return memoized(size, lambda first, *others, **named: (first, (*others, *sorted(named.items()))))


def cached_by_run_fields(*parameters: str) -> Callable[[FunctionT], FunctionT]:
    """Cache a function whose list depends on the table and ``parameters`` of the run alone; callers get copies."""
    chosen = attrgetter(*parameters)

    def decorate(function: FunctionT) -> FunctionT:
        remembered = memoized(_MAX_CACHED_LISTS, lambda spec, table: (table, chosen(spec)))(function)
        return wraps(function)(lambda spec, table: list(remembered(spec, table)))  # type: ignore[return-value]

    return decorate


_MAX_CACHED_LISTS = 64
