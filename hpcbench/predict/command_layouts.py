"""Layouts of decoders that users' own programs train, as their sweeps declare them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from hpcbench.config.command import Command, CommandLayout, command_values
from hpcbench.config.expression import Expression
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, HpcbenchError
from hpcbench.predict.decoder.layout import SOFTWARE, Layout, check_layout
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_OK
from hpcbench.strategies.decoder_shapes import DecoderShape, named_shape
from hpcbench.submit.submission_record import read_sweep_record

LAYOUT_FIELDS = {"dp": "replicas", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
"""Names of ``[command.layout]`` that ``Layout`` calls otherwise."""
SHAPE_TERMS = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocabulary")
"""Names of ``[command.layout]`` that replace a dimension of the named decoder."""
_SWITCHES = ("compiled", "fused_attention", "sequence_parallel", "overlap")
_WORDS = ("recompute", "precision")
_FROM_ZERO = ("zero", "optimizer_shards")
_DEGREES = ("dp", "shards", "tp", "pp", "cp")
_LARGEST, _MOST_LAYERS, _MOST_IMBALANCE = 2**31, 10_000, 1000
_NO_WORDS = Command(argv=[])


def layout_of_command(spec: RunSpec, declared: CommandLayout) -> tuple[DecoderShape, Layout]:
    """Return the decoder and the layout that a run has by its sweep's declaration.

    ``ConfigError`` where a term has a wrong value, or where the degrees fit neither each other nor the run's devices.
    """
    values = command_values(spec, _NO_WORDS)
    terms: dict[str, Any] = {}
    for name, term in declared.terms.items():
        value = Expression(term, where=declared.where)(values) if isinstance(term, str) else term
        terms[name] = _checked_term(name, value, declared.where)
    degrees = {name: terms.get(name, 1) for name in _DEGREES}
    if prod(degrees.values()) != spec.devices:
        named = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "no degree above 1"
        raise ConfigError(
            f"layout: the degrees multiply to {prod(degrees.values())} ({named}), but the run has {spec.devices} "
            "devices",
            where=declared.where,
        )
    try:
        dimensions = {name: terms.pop(name) for name in SHAPE_TERMS if name in terms}
        shape = replace(named_shape(declared.model), **dimensions)
        fields = {LAYOUT_FIELDS.get(name, name): value for name, value in terms.items()}
        layout = Layout(gpus=spec.devices, software=declared.software, **fields)
        check_layout(shape, layout)
        if layout.pipeline > shape.layers:
            raise ConfigError(f"{layout.pipeline} stages for {shape.layers} layers")
    except ConfigError as error:
        raise ConfigError(f"layout: {error.message}", where=declared.where) from error
    except TypeError as error:
        # The record of a sweep may be another version's, or anybody's.
        raise ConfigError(f"layout: {error}", where=declared.where) from error
    return shape, layout


def _checked_term(name: str, value: Any, where: str) -> Any:
    if name in _WORDS:
        return value
    if name in _SWITCHES:
        if isinstance(value, bool):
            return value
        raise ConfigError(f"layout: {name} is {value!r:.40}, true or false is needed", where=where)
    if name == "expert_imbalance" and isinstance(value, int | float) and not isinstance(value, bool):
        if 1 <= value <= _MOST_IMBALANCE:
            return float(value)
        raise ConfigError(f"layout: {name} is {value}, 1 to {_MOST_IMBALANCE} can be priced", where=where)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ConfigError(f"layout: {name} is {value!r:.40}, a whole number is needed", where=where)
    least = 0 if name in _FROM_ZERO else 1
    most = _MOST_LAYERS if name == "layers" else _LARGEST - 1
    if not least <= value <= most:
        raise ConfigError(f"layout: {name} is {value}, {least} to {most} can be priced", where=where)
    return int(value)


def layout_refusal(command: Command | None) -> Callable[[RunSpec], str | None] | None:
    """Return the rule that refuses runs whose declared layout is impossible; ``None`` without a layout."""
    declared = command.layout if command is not None else None
    if declared is None:
        return None

    def refuse(spec: RunSpec) -> str | None:
        try:
            layout_of_command(spec, declared)
        except ConfigError as error:
            return f"{error.message} ({error.where})"
        return None

    return refuse


def recorded_layouts(tree: ClusterTree) -> dict[str, CommandLayout]:
    """Return the layouts that the sweeps of a tree declare, by the digest of their command; the newest sweep's."""
    records = []
    for path in tree.path("sweeps").glob("[!.]*.json"):
        try:
            records.append(read_sweep_record(tree, path.stem))
        except (HpcbenchError, ValueError, RecursionError):
            continue
    known = [record for record in records if record is not None and record.layout is not None]
    known.sort(key=lambda record: record.written_unix_s)
    return {record.command_digest: record.layout for record in known if record.layout is not None}


def anyones_layout(layout: Layout) -> Layout:
    """Return ``layout`` without its software: equal for the same degrees and batch."""
    return replace(layout, software=SOFTWARE[0], compiled=False)


def measured_layouts(tree: ClusterTree, sweep: str) -> dict[Layout, list[float]]:
    """Return the median step time (s) of each ok launch of a sweep, by ``anyones_layout``.

    ``ConfigError`` where the sweep has no layout or none of its runs has a step time.
    """
    record = read_sweep_record(tree, sweep)
    if record is None or record.layout is None:
        raise ConfigError(f"{sweep!r} is not a sweep with a [command.layout] in {tree.root}", where="--measured")
    times: dict[Layout, list[float]] = {}
    for run_id in record.run_ids:
        result = tree.read_result(run_id)
        if result is not None and result.status == STATUS_OK and result.metrics.step_time_s is not None:
            layout = anyones_layout(layout_of_command(result.spec, record.layout)[1])
            times.setdefault(layout, []).append(result.metrics.step_time_s.median)
    if not times:
        raise ConfigError(f"no run of sweep {sweep!r} has a step time yet", hint=f"hpcbench status {sweep}")
    return times
