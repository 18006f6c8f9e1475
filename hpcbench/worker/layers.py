"""``python -m hpcbench.worker.layers``: the layer table of a model, computed with fake tensors.

Reads a request as JSON from standard input and prints the answer; ``--all FOLDER`` writes the tables of all shipped
pairs."""

from __future__ import annotations

import argparse
import gzip
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import HpcbenchError, WorkerError
from hpcbench.strategies import layer_table
from hpcbench.strategies.resolve import InfeasiblePoint, shipped_model_dataset_pairs, single_device_run
from hpcbench.worker.measure.layer_trace import TracedLayer, trace_layers
from hpcbench.worker.model_execution import avoid_cumulative_averages
from hpcbench.worker.models.build import build_meta_model
from hpcbench.workloads.datasets import DATASETS, sample_shape

HOST_DEVICE = torch.device("cpu")

_TRACED_BATCH_SIZES = (2, 4)
"""Two batch sizes separate the bytes and FLOP that grow with the batch from the rest; BatchNorm needs more than one
value."""

_MODULE_ATTRIBUTES = (
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "transposed",
    "in_features", "out_features", "num_features", "normalized_shape", "num_embeddings", "embedding_dim",
    "embed_dim", "num_heads", "head_dim", "head_width", "kv_heads", "causal", "output_size", "ceil_mode", "p",
)  # fmt: skip
"""Names under which torch's modules, and ours, hold the attributes that a split of the layer reads."""


def make_layer_table(request: layer_table.LayerTableRequest) -> layer_table.LayerTable:
    """The table of a model on a data set.

    Raises ``WorkerError`` where the model cannot take the data set, cannot be built or run with fake tensors, or needs
    a package that is not there (``unsupported``).
    """
    spec = single_device_run(request.model, request.dataset, request.input_size, request.model_options)
    if isinstance(spec, InfeasiblePoint):
        raise WorkerError(spec.reason)
    return trace_layer_table(build_meta_model(spec, request.model_folder), spec)


def trace_layer_table(model: nn.Sequential, spec: RunSpec) -> layer_table.LayerTable:
    """The table of ``model``, which lies on the meta device and is changed.

    Raises ``WorkerError`` where it cannot be run with fake tensors.
    """
    with _fake_tensors(spec):
        allocate_fake_storage(model)
        model.train()
        traced = []
        for batch in _TRACED_BATCH_SIZES:
            model.zero_grad(set_to_none=True)
            traced.append(trace_layers(model, *zero_batch(spec, batch)))
    return layer_table.LayerTable(
        model=spec.model,
        dataset=spec.dataset,
        input_size=spec.input_size or layer_table.default_input_size(spec.dataset),
        model_options=spec.model_options,
        blocks=len(model),
        parameter_tensors=_tensor_shapes(model.named_parameters()),
        buffers=_tensor_shapes(model.named_buffers()),
        layers=_layer_rows(model, *traced),
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
        first = str(error).strip().partition("\n")[0]
        hint = "a model whose forward pass reads values (.item(), data-dependent shapes) has no table of layers"
        message = f"{spec.model} cannot be measured with fake tensors: {type(error).__name__}: {first}"
        raise WorkerError(message, hint=hint) from error


def allocate_fake_storage(model: nn.Module, device: torch.device = HOST_DEVICE) -> None:
    """Move a model from the meta device to fake tensors of a real one: attention chooses its kernel by the device."""
    avoid_cumulative_averages(model)
    replaced: dict[int, Tensor] = {}

    def on_host(tensor: Tensor) -> Tensor:
        if id(tensor) not in replaced:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            replaced[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
        return replaced[id(tensor)]

    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for holder in holders:
            holder.update({name: on_host(value) for name, value in holder.items() if isinstance(value, Tensor)})


def zero_batch(spec: RunSpec, batch: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a run's shapes and types, all zero."""
    dataset, shape = DATASETS[spec.dataset], sample_shape(spec.dataset, spec.input_size)
    inputs = torch.zeros(batch, *shape, dtype=torch.int64 if dataset.kind == "tokens" else torch.float32)
    if dataset.target == "values":
        return inputs, torch.zeros(batch, dataset.outputs)
    return inputs, torch.zeros(batch, *(shape if dataset.target == "tokens" else ()), dtype=torch.int64)


def _tensor_shapes(tensors: Iterable[tuple[str, Tensor]]) -> list[layer_table.TensorShape]:
    return [layer_table.TensorShape(name, list(tensor.shape), tensor.element_size()) for name, tensor in tensors]


def _layer_rows(model: nn.Sequential, small: list[TracedLayer], large: list[TracedLayer]) -> list[layer_table.LayerRow]:
    owned = _parameters_by_row(model, small)
    blocks = {name: index for index, (name, _) in enumerate(model.named_children())}
    layers = []
    for number, (a, b) in enumerate(zip(small, large, strict=True)):
        # Place-holders hand their input on.
        computes = a.is_leaf and not isinstance(a.module, (nn.Identity, nn.Sequential))
        if owned[number] or a.is_active() or computes:
            block = len(model) if a.module is None else blocks.get(a.name.partition(".")[0], 0)
            layers.append(_layer_row(a, b, owned[number], block))
    return layers


def _layer_row(a: TracedLayer, b: TracedLayer, parameters: int, block: int) -> layer_table.LayerRow:
    kind = "Loss" if a.module is None else type(a.module).__name__ + ("" if a.is_leaf else ".other")
    activation = _per_sample(a.activation_bytes, b.activation_bytes)
    return layer_table.LayerRow(
        name=a.name,
        block=block,
        kind=kind,
        input_shape=_sample_shape(a.input_shape, b.input_shape),
        output_shape=_sample_shape(a.output_shape, b.output_shape),
        parameters=parameters,
        forward_flops=_per_sample(a.flops[0], b.flops[0]),
        backward_flops=_per_sample(a.flops[1], b.flops[1]),
        activation_bytes=activation,
        activation_fixed_bytes=max(a.activation_bytes - _TRACED_BATCH_SIZES[0] * activation, 0),
        output_bytes=_per_sample(a.output_bytes, b.output_bytes),
        forward_moved_bytes=_per_sample(a.moved_bytes[0], b.moved_bytes[0]),
        backward_moved_bytes=_per_sample(a.moved_bytes[1], b.moved_bytes[1]),
        attributes=_module_attributes(a.module) | ({"heads": a.heads} if a.heads else {}),
    )


def _per_sample(small: int, large: int) -> int:
    return (large - small) // (_TRACED_BATCH_SIZES[1] - _TRACED_BATCH_SIZES[0])


def _sample_shape(small: list[int], large: list[int]) -> list[int]:
    """Return the shape of one sample, from the shapes at both traced batch sizes.

    The batch may be a dim of its own or, where a module flattens, a factor of one.
    """
    shape: list[int] = []
    for a, b in zip(small, large, strict=True):
        extent = a // _TRACED_BATCH_SIZES[0] if a != b else a
        if extent != 1 or a == b:
            shape.append(extent)
    return shape


def _parameters_by_row(model: nn.Module, rows: list[TracedLayer]) -> Counter[int]:
    """Return the trained numbers by row: the first of their module, or of the nearest one around it that was called."""
    first: dict[str, int] = {}
    names = {id(module): name for name, module in model.named_modules()}
    for number, row in enumerate(rows):
        if row.module is not None:
            first.setdefault(names[id(row.module)], number)
    owned: Counter[int] = Counter()
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        while owner not in first:
            owner = owner.rpartition(".")[0]
        owned[first[owner]] += parameter.numel()
    return owned


def _module_attributes(module: nn.Module | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for name in _MODULE_ATTRIBUTES:
        value = getattr(module, name, None)
        if isinstance(value, tuple) and all(isinstance(extent, int) for extent in value):
            attributes[name] = list(value)
        elif isinstance(value, (bool, int, float, str)):
            attributes[name] = value
    return attributes


def answer_request(data: bytes) -> layer_table.LayerTableResponse:
    """Return the output for a request."""
    try:
        return layer_table.LayerTableResponse(
            table=make_layer_table(msgspec.json.decode(data, type=layer_table.LayerTableRequest))
        )
    except HpcbenchError as error:
        is_input = not isinstance(error, WorkerError)
        return layer_table.LayerTableResponse(error=error.message, hint=error.hint, is_input=is_input)


def write_shipped_tables(folder: Path) -> None:
    """The tables of all shipped pairs; those of pairs that are no more are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {
        layer_table.shipped_table_path(model, dataset).name: (model, dataset)
        for model, dataset in shipped_model_dataset_pairs()
    }
    for path in folder.glob("*.json.gz"):
        if path.name not in wanted:
            path.unlink()
    for name, (model, dataset) in wanted.items():
        table = make_layer_table(layer_table.LayerTableRequest(model=model, dataset=dataset))
        (folder / name).write_bytes(gzip.compress(layer_table.encode_layer_table(table), mtime=0))


def main() -> int:
    """Answer the request on standard input, or write all tables."""
    parser = argparse.ArgumentParser(prog="python -m hpcbench.worker.layers", description=__doc__)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="write the tables of all shipped pairs there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.all is not None:
        write_shipped_tables(args.all)
        return 0
    sys.stdout.buffer.write(msgspec.json.encode(answer_request(sys.stdin.buffer.read())) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
