"""Conventions of training programs that change the work of a step: splits, precisions of messages, kept copies."""

from __future__ import annotations

from dataclasses import dataclass

from hpcbench.config.command import Software


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """The conventions of one program.

    ``tensor_passes``: passes around the ring of tensor parallelism for one layer, forward and backward; an all_reduce
    has two. ``splits_products``: a product begins with the rank's own rows while others arrive. ``balances_products``:
    stages are balanced by multiplications, else by layers. ``gradient_bytes``: those of one gradient that replicas sum.
    ``splits_optimizer``: the optimizer is sharded over replicas without being asked. ``holds_host``: pipelines with
    tensor parallelism on a slow network hold the host up. ``sends_whole``: stages send the whole hidden state from
    every rank of a tensor group. ``weight_bytes``, ``kept_gradient_bytes`` and ``optimizer_bytes`` are held for each
    parameter; the last one is what ZeRO 1 shares.
    """

    tensor_passes: float = 8.0
    splits_products: bool = False
    balances_products: bool = False
    gradient_bytes: int = 4
    splits_optimizer: bool = False
    holds_host: bool = False
    sends_whole: bool = False
    weight_bytes: int = 2
    kept_gradient_bytes: int = 4
    optimizer_bytes: int = 12


LOOPS: dict[Software, TrainingLoop] = {
    # Sequence parallelism gathers its input again in the backward pass; gradients are kept in bf16 and summed in fp32.
    "nanotron": TrainingLoop(
        tensor_passes=10.0, splits_products=True, balances_products=True, holds_host=True, kept_gradient_bytes=6
    ),
    "megatron": TrainingLoop(splits_optimizer=True),
    # The parameters themselves are in fp32, and gathered in bf16.
    "fsdp": TrainingLoop(weight_bytes=4, optimizer_bytes=8),
    "torchtitan": TrainingLoop(weight_bytes=4, optimizer_bytes=8),
    "megatron_deepspeed": TrainingLoop(gradient_bytes=2, sends_whole=True, kept_gradient_bytes=2),
    # A program of which no run was published: the usual conventions.
    "other": TrainingLoop(gradient_bytes=2, kept_gradient_bytes=2),
}
