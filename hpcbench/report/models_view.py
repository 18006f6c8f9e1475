"""Tables of the shipped and custom models: one row per model and dataset, or one row per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.fileio import printable_excerpt, printable_text
from hpcbench.forecast.layer_table_cache import load_layer_table
from hpcbench.parallel.catalog import get_model as catalog_model
from hpcbench.parallel.catalog import shipped_model_entries as shipped_models
from hpcbench.parallel.layer_table import LayerRow, LayerTable, LayerTableRequest
from hpcbench.parallel.resolve import InfeasiblePoint, single_device_run
from hpcbench.parallel.workloads import DATASETS, check_custom_model, is_custom_model
from hpcbench.units import format_bytes, format_count

_UNITS_NOTE = (
    "per sample, fp32. FLOP: two per multiply-add of convolutions, matrix products and attention; backward without "
    "recomputation. activations: what autograd keeps from the forward pass for the backward pass."
)

_WIDE_TERMINAL = 100
_MAX_LINE_PART = 13


def find_layer_tables(
    models: Sequence[str], datasets: Sequence[str], input_size: int | None, folder: Path
) -> list[LayerTable]:
    """The tables of all named models with all named data sets that they take; all where none is named.

    ``folder`` is where a user's own model is found. ``ConfigError`` where a name is unknown or where nothing fits.
    """
    _check_names(models, datasets, folder)
    requests, reasons = [], []
    for model in models or shipped_models():
        for dataset in datasets or DATASETS:
            found = single_device_run(model, dataset, input_size)
            if isinstance(found, InfeasiblePoint):
                reasons.append(found.reason)
                continue
            place = str(folder.resolve()) if is_custom_model(model) else None
            requests.append(LayerTableRequest(model=model, dataset=dataset, input_size=input_size, model_folder=place))
    if not requests:
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise ConfigError(f"no such model takes such a dataset: {reasons[0]}{more}")
    return [load_layer_table(request) for request in requests]


def _check_names(models: Sequence[str], datasets: Sequence[str], folder: Path) -> None:
    for name in datasets:
        if name not in DATASETS:
            raise ConfigError(f"unknown dataset {name!r}", hint=did_you_mean(name, DATASETS))
    for name in models:
        if not is_custom_model(name):
            catalog_model(name)
        elif problem := check_custom_model(name, folder.resolve(), "--model"):
            raise problem
        elif not datasets:
            message = f"{name} is your own model: only you know which data sets it takes"
            raise ConfigError(message, where="--model", hint="name one with --dataset")


def sort_layer_tables(tables: list[LayerTable], sort: str) -> list[LayerTable]:
    """Largest first, or as they are."""
    return tables if sort == "order" else sorted(tables, key=lambda one: -getattr(one.totals(), sort))


def sort_layers(layers: list[LayerRow], sort: str) -> list[LayerRow]:
    """Largest first, or in the order of execution."""
    return layers if sort == "order" else sorted(layers, key=lambda one: -getattr(one, sort))


def models_json(tables: list[LayerTable], sort: str) -> dict[str, Any]:
    """``{"models": [...]}``, every layer as an object with its columns' names."""
    documents = []
    for table in tables:
        totals = table.totals()
        documents.append(
            {
                "model": table.model,
                "dataset": table.dataset,
                "input_size": table.input_size,
                "blocks": table.blocks,
                "parameters": totals.parameters,
                "forward_flops": totals.forward_flops,
                "backward_flops": totals.backward_flops,
                "activation_bytes": totals.activation_bytes,
                "activation_fixed_bytes": totals.activation_fixed_bytes,
                "layers": [msgspec.structs.asdict(layer) for layer in sort_layers(table.layers, sort)],
            }
        )
    return {"models": documents}


def models_table(tables: list[LayerTable]) -> RenderableType:
    """One row a pair."""
    shown = _new_table(
        ("model", "dataset"), ("size", "params", "forward\nFLOP", "backward\nFLOP", "activa-\ntions", "layers")
    )
    for table in tables:
        totals = table.totals()
        shown.add_row(
            _brief_text(table.model), _brief_text(table.dataset),
            str(table.input_size), format_count(totals.parameters),
            format_count(totals.forward_flops), format_count(totals.backward_flops),
            format_bytes(totals.activation_bytes), str(len(table.layers)),
        )  # fmt: skip
    return Group(shown, Text(""), Text(_UNITS_NOTE, style="dim"))


def layers_table(table: LayerTable, sort: str, width: int) -> RenderableType:
    """One row a layer, the sums below; long names are cut at their dots where ``width`` columns are few."""
    totals = table.totals()
    shown = _new_table(("layer", "kind", "output"), ("params", "forward\nFLOP", "backward\nFLOP", "activa-\ntions"))
    for layer in sort_layers(table.layers, sort):
        shown.add_row(
            _fold_at_dots(layer.name, width), _fold_at_dots(layer.kind, width),
            "x".join(str(extent) for extent in layer.output_shape),
            _nonzero_text(layer.parameters), _nonzero_text(layer.forward_flops), _nonzero_text(layer.backward_flops),
            _nonzero_text(layer.activation_bytes, format_bytes),
        )  # fmt: skip
    shown.add_section()
    shown.add_row(
        "all", "", "",
        format_count(totals.parameters), format_count(totals.forward_flops), format_count(totals.backward_flops),
        format_bytes(totals.activation_bytes),
    )  # fmt: skip
    title = f"{table.model} on {table.dataset}, input size {table.input_size}: {table.blocks} blocks"
    fixed = f" And {format_bytes(totals.activation_fixed_bytes)} a batch, whatever its size."
    notes = _UNITS_NOTE + (fixed if totals.activation_fixed_bytes else "")
    return Group(Text(printable_text(title), style="bold"), Text(""), shown, Text(""), Text(notes, style="dim"))


def _new_table(names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in names:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _brief_text(name: str) -> Text:
    return Text(printable_excerpt(name))


def _fold_at_dots(name: str, width: int) -> Text:
    lines = [""]
    for part in printable_excerpt(name).replace(".", ".\0").split("\0"):
        if width < _WIDE_TERMINAL and lines[-1] and len(lines[-1] + part) > _MAX_LINE_PART:
            lines.append("")
        lines[-1] += part
    return Text("\n".join(lines))


def _nonzero_text(value: int, form: Callable[[float], str] = format_count) -> str:
    return form(value) if value else ""
