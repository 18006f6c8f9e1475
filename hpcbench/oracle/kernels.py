"""What a rank computes, at the shapes that it really runs: one kernel a row of the table and pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.live import input_bytes
from hpcbench.oracle.tensors import FP32_BYTES, FP64_BYTES, HALF_BYTES
from hpcbench.parallel.kernel import BACKWARD, FORWARD, UPDATE, Kernel
from hpcbench.parallel.layers import Layer, LayerTable
from hpcbench.parallel.memo import of_run, once_per

__all__ = ["BACKWARD", "FORWARD", "UPDATE", "Kernel", "Pass", "Share", "row_pass", "update_kernels", "whole_passes"]

_UPDATE_TENSORS = {"sgd": 3, "adam": 7, "adamw": 7}
"""Tensors of a parameter's size that an update reads and writes: of plain SGD the weight, its gradient, the weight."""
_MOMENTUM_TENSORS = 2


class Share(NamedTuple):
    """A rank's part of a row: 1 where it has all of it."""

    flops: float = 1.0
    inputs: float = 1.0
    outputs: float = 1.0
    weights: float = 1.0


WHOLE = Share()


class Pass(NamedTuple):
    """Both passes of a row. ``backward`` is ``None`` where nothing flows back."""

    forward: Kernel
    backward: Kernel


def number_bytes(spec: RunSpec) -> int:
    """Of an activation."""
    return {"fp64": FP64_BYTES, "bf16": HALF_BYTES, "fp16": HALF_BYTES}.get(spec.precision, FP32_BYTES)


def row_pass(spec: RunSpec, layer: Layer, samples: float, share: Share = WHOLE) -> Pass:
    """Forward and backward kernel of ``samples`` samples through a rank's ``share`` of ``layer``."""
    wide = number_bytes(spec) / FP32_BYTES
    inputs = input_bytes(layer) * samples * wide * share.inputs
    outputs = layer.output_bytes * samples * wide * share.outputs
    whole = input_bytes(layer) + layer.output_bytes
    moved_share = (inputs + outputs) / whole if whole else samples * wide
    weights = layer.parameters * FP32_BYTES * share.weights
    kernels = [
        Kernel(
            kind=layer.kind,
            direction=direction,
            precision=spec.precision,
            flops=flops * samples * share.flops,
            moved_bytes=moved * moved_share,
            weight_bytes=weights,
            input_bytes=inputs,
            output_bytes=outputs,
        )
        for direction, flops, moved in (
            (FORWARD, layer.forward_flops, layer.forward_moved_bytes),
            (BACKWARD, layer.backward_flops, layer.backward_moved_bytes),
        )
    ]
    return Pass(*kernels)


@once_per(64)
def first_alike(table: LayerTable) -> list[int]:
    """Of every row the first one that computes the same: a transformer's blocks are alike."""
    seen: dict[tuple[object, ...], int] = {}
    return [seen.setdefault(_computed(layer), number) for number, layer in enumerate(table.layers)]


def _computed(layer: Layer) -> tuple[object, ...]:
    """What a row's kernels depend on, and the name that it has within its block, by which some are split."""
    return (
        layer.kind, layer.name.partition(".")[2], tuple(layer.input_shape), layer.output_bytes, layer.parameters,
        layer.forward_flops, layer.backward_flops, layer.forward_moved_bytes, layer.backward_moved_bytes,
    )  # fmt: skip


@of_run("batch_size", "micro_batches", "precision")
def whole_passes(spec: RunSpec, table: LayerTable) -> list[Pass]:
    """Of a rank that has all of every layer, for one micro-batch."""
    samples = spec.batch_size / spec.micro_batches
    return [row_pass(spec, layer, samples) for layer in table.layers]


def update_kernels(spec: RunSpec, parameter_bytes: Iterable[float]) -> Iterator[Kernel]:
    """One for every tensor that the rank updates, of so many bytes."""
    tensors = _UPDATE_TENSORS[spec.optimizer]
    if spec.optimizer == "sgd" and spec.momentum:
        tensors += _MOMENTUM_TENSORS
    for size in parameter_bytes:
        if size:
            yield Kernel(
                kind=spec.optimizer,
                direction=UPDATE,
                precision=spec.precision,
                flops=0.0,
                moved_bytes=tensors * size,
                weight_bytes=size,
                input_bytes=0.0,
                output_bytes=0.0,
            )
