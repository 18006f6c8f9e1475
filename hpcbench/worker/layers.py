"""``python -m hpcbench.worker.layers``: the table of a model's layers, from fake tensors: no memory, no arithmetic.

Reads a request as JSON from standard input and prints the answer; ``--all FOLDER`` writes the tables of all shipped
pairs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hpcbench.config.spec import RunSpec
from hpcbench.errors import HpcbenchError, WorkerError
from hpcbench.parallel.datasets import DATASETS, input_shape
from hpcbench.parallel.layers import (
    Layer,
    LayerAnswer,
    LayerRequest,
    LayerTable,
    TensorShape,
    encode_table,
    own_size,
    table_path,
)
from hpcbench.parallel.pairs import pair, shipped_pairs
from hpcbench.parallel.resolve import Dropped
from hpcbench.worker.layer_trace import Traced, trace
from hpcbench.worker.models.build import build_shapes

HOST = torch.device("cpu")

_BATCHES = (2, 4)
"""What grows with the batch is told from what does not by two sizes; BatchNorm needs more than one value."""

_ATTRIBUTES = (
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "transposed",
    "in_features", "out_features", "num_features", "normalized_shape", "num_embeddings", "embedding_dim",
    "embed_dim", "num_heads", "head_dim", "head_width", "causal", "output_size", "ceil_mode", "p",
)  # fmt: skip
"""Names under which torch's modules, and ours, hold what a split of the layer has to know."""


def layer_table(request: LayerRequest) -> LayerTable:
    """The table of a model on a data set.

    Raises ``WorkerError`` where the model cannot take the data set, cannot be built or run with fake tensors, or needs
    a package that is not there (``unsupported``).
    """
    spec = pair(request.model, request.dataset, request.input_size, request.model_options)
    if isinstance(spec, Dropped):
        raise WorkerError(spec.reason)
    return table_of(build_shapes(spec, request.model_folder), spec)


def table_of(model: nn.Sequential, spec: RunSpec) -> LayerTable:
    """The table of ``model``, which lies on the meta device and is changed.

    Raises ``WorkerError`` where it cannot be run with fake tensors.
    """
    with _fake_tensors(spec):
        give_storage(model)
        rows = [_trace(model, spec, batch) for batch in _BATCHES]
    names = {id(module): name for name, module in model.named_modules()}
    return LayerTable(
        model=spec.model,
        dataset=spec.dataset,
        input_size=spec.input_size or own_size(spec.dataset),
        model_options=spec.model_options,
        blocks=len(model),
        parameter_tensors=_shapes(model.named_parameters()),
        buffers=_shapes(model.named_buffers()),
        layers=_layers(model, rows, names),
    )


@contextmanager
def _fake_tensors(spec: RunSpec) -> Iterator[None]:
    """Tensors with shapes and storages but without memory."""
    try:
        with FakeTensorMode():
            yield
    except HpcbenchError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise WorkerError(
            f"{spec.model} cannot be measured with fake tensors: {type(error).__name__}: {first}",
            hint="a model whose forward pass reads values (.item(), data-dependent shapes) has no table of layers",
        ) from error


def give_storage(model: nn.Module, device: torch.device = HOST) -> None:
    """From the meta device to fake tensors of a real one: attention and others choose what they do by the device."""
    made: dict[int, Tensor] = {}

    def on_host(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
        return made[id(tensor)]

    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for held in holders:
            for name, value in held.items():
                if isinstance(value, Tensor):
                    held[name] = on_host(value)


def _trace(model: nn.Sequential, spec: RunSpec, batch: int) -> list[Traced]:
    model.train().zero_grad(set_to_none=True)
    return trace(model, *blank_batch(spec, batch))


def blank_batch(spec: RunSpec, batch: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a run's shapes and types, all zero."""
    dataset, shape = DATASETS[spec.dataset], input_shape(spec.dataset, spec.input_size)
    whole = torch.int64
    inputs = torch.zeros(batch, *shape, dtype=whole if dataset.kind == "tokens" else torch.float32)
    if dataset.target == "values":
        return inputs, torch.zeros(batch, dataset.outputs)
    return inputs, torch.zeros(batch, *(shape if dataset.target == "tokens" else ()), dtype=whole)


def _shapes(tensors: Iterable[tuple[str, Tensor]]) -> list[TensorShape]:
    return [TensorShape(name, list(tensor.shape), tensor.element_size()) for name, tensor in tensors]


def _layers(model: nn.Sequential, traced: list[list[Traced]], names: dict[int, str]) -> list[Layer]:
    small, large = traced
    owned = _owned_parameters(model, small, names)
    places = {name: place for place, (name, _) in enumerate(model.named_children())}
    layers = []
    for number, (a, b) in enumerate(zip(small, large, strict=True)):
        parameters = owned.get(number, 0)
        if not (parameters or a.does_something() or (a.is_leaf and not _is_nothing(a.module))):
            continue
        place = len(model) if a.module is None else places.get(a.name.partition(".")[0], 0)
        layers.append(_layer(a, b, parameters, place))
    return layers


def _layer(a: Traced, b: Traced, parameters: int, block: int) -> Layer:
    kind = "Loss" if a.module is None else type(a.module).__name__ + ("" if a.is_leaf else ".other")
    activation = _per_sample(a.activation_bytes, b.activation_bytes)
    return Layer(
        name=a.name,
        block=block,
        kind=kind,
        input_shape=_sample_shape(a.input_shape, b.input_shape),
        output_shape=_sample_shape(a.output_shape, b.output_shape),
        parameters=parameters,
        forward_flops=_per_sample(a.flops[0], b.flops[0]),
        backward_flops=_per_sample(a.flops[1], b.flops[1]),
        activation_bytes=activation,
        activation_fixed_bytes=max(a.activation_bytes - _BATCHES[0] * activation, 0),
        output_bytes=_per_sample(a.output_bytes, b.output_bytes),
        forward_moved_bytes=_per_sample(a.moved_bytes[0], b.moved_bytes[0]),
        backward_moved_bytes=_per_sample(a.moved_bytes[1], b.moved_bytes[1]),
        attributes=_attributes(a.module) | ({"heads": a.heads} if a.heads else {}),
    )


def _per_sample(small: int, large: int) -> int:
    return (large - small) // (_BATCHES[1] - _BATCHES[0])


def _sample_shape(small: list[int], large: list[int]) -> list[int]:
    """Without the batch, which may be a dim of its own or, where a module flattens, a part of one."""
    shape: list[int] = []
    for a, b in zip(small, large, strict=True):
        own = a // _BATCHES[0] if a != b else a
        if own != 1 or a == b:
            shape.append(own)
    return shape


def _is_nothing(module: nn.Module | None) -> bool:
    """Place-holders that hand their input on."""
    return isinstance(module, (nn.Identity, nn.Sequential))


def _owned_parameters(model: nn.Module, rows: list[Traced], names: dict[int, str]) -> dict[int, int]:
    """Trained numbers by row: the first of their module, or of the nearest one around it that was called."""
    first: dict[str, int] = {}
    for number, row in enumerate(rows):
        if row.module is not None:
            first.setdefault(names[id(row.module)], number)
    owned: dict[int, int] = {}
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        while owner not in first:
            owner = owner.rpartition(".")[0]
        owned[first[owner]] = owned.get(first[owner], 0) + parameter.numel()
    return owned


def _attributes(module: nn.Module | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _ATTRIBUTES:
        value = getattr(module, name, None)
        if isinstance(value, tuple) and all(isinstance(one, int) for one in value):
            found[name] = list(value)
        elif isinstance(value, (bool, int, float, str)):
            found[name] = value
    return found


def answer(data: bytes) -> LayerAnswer:
    """What is printed for a request."""
    try:
        return LayerAnswer(table=layer_table(msgspec.json.decode(data, type=LayerRequest)))
    except WorkerError as error:
        return LayerAnswer(error=error.message, hint=error.hint)
    except HpcbenchError as error:
        return LayerAnswer(error=error.message, hint=error.hint, is_input=True)


def write_all(folder: Path) -> None:
    """The tables of all shipped pairs; those of pairs that are no more are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {table_path(model, dataset).name: (model, dataset) for model, dataset in shipped_pairs()}
    for path in folder.glob("*.json"):
        if path.name not in wanted:
            path.unlink()
    for name, (model, dataset) in wanted.items():
        table = layer_table(LayerRequest(model=model, dataset=dataset))
        (folder / name).write_bytes(encode_table(table))


def main() -> int:
    """Answer the request on standard input, or write all tables."""
    parser = argparse.ArgumentParser(prog="python -m hpcbench.worker.layers", description=__doc__)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="write the tables of all shipped pairs there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.all is not None:
        write_all(given.all)
        return 0
    sys.stdout.buffer.write(msgspec.json.encode(answer(sys.stdin.buffer.read())) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
