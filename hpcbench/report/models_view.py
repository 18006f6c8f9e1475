"""Tables of the shipped and custom models: one row per model and dataset, or one row per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.fileio import printable_excerpt
from hpcbench.predict.layer_table_cache import load_layer_table
from hpcbench.report.table_model import Column, View, text_column
from hpcbench.report.table_output import PrintedView
from hpcbench.strategies.layer_table import LayerRow, LayerTable, LayerTableRequest
from hpcbench.strategies.resolve import InfeasiblePoint, single_device_run
from hpcbench.units import format_bytes, format_count
from hpcbench.workloads.datasets import DATASETS
from hpcbench.workloads.models import MODELS, check_custom_model, is_custom_model
from hpcbench.workloads.models import get_model as catalog_model

_UNITS_NOTE = (
    "per sample, fp32. FLOP: two per multiply-add of convolutions, matrix products and attention; backward without "
    "recomputation. activations: tensors that autograd keeps from the forward pass for the backward pass."
)

_WIDE_TERMINAL = 100
_MAX_LINE_PART = 13


def find_layer_tables(
    models: Sequence[str], datasets: Sequence[str], input_size: int | None, folder: Path
) -> list[LayerTable]:
    """Return the tables of all named models with all named data sets that they take; without names, of all.

    Args:
        models: names of shipped models, or ``module:function`` of custom ones.
        datasets: names of data sets.
        input_size: pixels or tokens; ``None`` for the data set's own.
        folder: the folder of custom models.

    Raises:
        ConfigError: a name is unknown, or no model takes any of the data sets.
    """
    for name in datasets:
        if name not in DATASETS:
            raise ConfigError(f"unknown dataset {name!r}", hint=did_you_mean(name, DATASETS))
    for name in models:
        if not is_custom_model(name):
            catalog_model(name)
        elif problem := check_custom_model(name, folder.resolve(), "--model"):
            raise problem
        elif not datasets:
            message = f"{name} is a custom model: its data sets are unknown"
            raise ConfigError(message, where="--model", hint="name one with --dataset")
    requests, reasons = [], []
    for model in models or MODELS:
        for dataset in datasets or DATASETS:
            spec = single_device_run(model, dataset, input_size)
            if isinstance(spec, InfeasiblePoint):
                reasons.append(spec.reason)
                continue
            model_folder = str(folder.resolve()) if is_custom_model(model) else None
            requests.append(
                LayerTableRequest(model=model, dataset=dataset, input_size=input_size, model_folder=model_folder)
            )
    if not requests:
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise ConfigError(f"no such model takes such a dataset: {reasons[0]}{more}")
    return [load_layer_table(request) for request in requests]


def sort_layer_tables(tables: list[LayerTable], sort: str) -> list[LayerTable]:
    """``tables`` by a total, the largest first; unchanged for ``order``."""
    return tables if sort == "order" else sorted(tables, key=lambda table: -getattr(table.totals(), sort))


def sort_layers(layers: list[LayerRow], sort: str) -> list[LayerRow]:
    """``layers`` by a figure, the largest first; for ``order`` in the order of execution."""
    return layers if sort == "order" else sorted(layers, key=lambda layer: -getattr(layer, sort))


def models_json(tables: list[LayerTable], sort: str) -> dict[str, Any]:
    """Return ``{"models": [...]}`` with every layer as an object."""
    return {
        "models": [
            {
                "model": table.model, "dataset": table.dataset, "input_size": table.input_size, "blocks": table.blocks,
                **{name: getattr(table.totals(), name) for name in _TOTALS},
                "layers": [msgspec.structs.asdict(layer) for layer in sort_layers(table.layers, sort)],
            }
            for table in tables
        ]
    }  # fmt: skip


_TOTALS = ("parameters", "forward_flops", "backward_flops", "activation_bytes", "activation_fixed_bytes")


def models_table(tables: list[LayerTable]) -> PrintedView:
    """One row per pair of model and data set."""
    columns = [
        text_column("model", attrgetter("model"), is_key=True, folds=True),
        text_column("dataset", attrgetter("dataset"), is_key=True, folds=True),
        Column("input_size", "size", attrgetter("input_size"), lambda table: str(table.input_size)),
        *_figure_columns(lambda table: table.totals(), lambda value, form: form(value)),
        Column("layers", "layers", lambda table: len(table.layers)),
    ]
    return PrintedView(View.from_rows("", columns, tables, [_UNITS_NOTE]))


def layers_table(table: LayerTable, sort: str, width: int) -> PrintedView:
    """One row per layer and one for their sums; below ``_WIDE_TERMINAL`` columns long names are cut at their dots."""
    totals = table.totals()
    columns = [
        text_column("layer", lambda layer: "all" if layer is totals else _fold_at_dots(layer.name, width), is_key=True),
        text_column("kind", lambda layer: "" if layer is totals else _fold_at_dots(layer.kind, width)),
        text_column("output", lambda layer: "" if layer is totals else "x".join(map(str, layer.output_shape))),
        *_figure_columns(lambda layer: layer, lambda value, form: form(value) if value else ""),
    ]
    title = f"{table.model} on {table.dataset}, input size {table.input_size}: {table.blocks} blocks"
    fixed = f" Plus {format_bytes(totals.activation_fixed_bytes)} per batch of any size."
    notes = [_UNITS_NOTE + (fixed if totals.activation_fixed_bytes else "")]
    return PrintedView(View.from_rows(title, columns, [*sort_layers(table.layers, sort), totals], notes))


def _figure_columns(read: Callable[[Any], Any], show: Callable[[float, Callable[[float], str]], str]) -> list[Column]:
    """Parameters, FLOP and activations of ``read(row)``; ``show`` formats a value."""

    def column(name: str, heading: str, form: Callable[[float], str], compact: str = "") -> Column:
        value = attrgetter(name)
        return Column(name, heading, lambda row: value(read(row)), lambda row: show(value(read(row)), form),
                      compact_heading=compact)  # fmt: skip

    return [
        column("parameters", "params", format_count),
        column("forward_flops", "forward FLOP", format_count, "forward\nFLOP"),
        column("backward_flops", "backward FLOP", format_count, "backward\nFLOP"),
        column("activation_bytes", "activations", format_bytes, "activa-\ntions"),
    ]


def _fold_at_dots(name: str, width: int) -> str:
    lines = [""]
    for part in printable_excerpt(name).replace(".", ".\0").split("\0"):
        if width < _WIDE_TERMINAL and lines[-1] and len(lines[-1] + part) > _MAX_LINE_PART:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
