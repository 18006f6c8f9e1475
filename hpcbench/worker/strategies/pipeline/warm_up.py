"""Work before the first step of a pipeline on cuda: each chunk runs once, and communicators are created.

CUDA loads a kernel at its first launch and may then wait for the whole device; NCCL creates a communicator with its
first call, in which each member waits for the others. Neither should happen while messages are awaited, or be timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.layers import zero_batch
from hpcbench.worker.model_execution import MixedPrecision, summed_loss
from hpcbench.worker.strategies.pipeline.chunk import ActivationMetaCache, ModelChunk, backward_from, in_run_format
from hpcbench.worker.strategies.pipeline.stage_module import TiedParameter

_MICRO_BATCH = -1
"""A number that no micro-batch of a step has."""


def run_chunks_once(
    chunks: Mapping[int, ModelChunk],
    boundaries: ActivationMetaCache,
    spec: RunSpec,
    arithmetic: MixedPrecision,
    reducers: Iterable[GradientReducer],
    recompute: bool,
) -> None:
    """Run a forward and a backward pass of every chunk on zeros, without a trace in weights, buffers or random numbers.

    Ranks that share layers (tensor parallelism) call it together.

    Args:
        chunks: This rank's chunks by number.
        boundaries: The shapes between chunks.
        spec: The run; the largest micro-batch of its steps is computed.
        arithmetic: The run's autocast.
        reducers: Of the chunks' gradients; they send nothing.
        recompute: Whether activations are computed again in the backward pass.

    Raises:
        WorkerError: ``unsupported`` if the model cannot run with micro-batches of that size.
    """
    device = boundaries.device
    samples = -(-spec.batch_size // spec.micro_batches)
    modules = nn.ModuleList([chunk.module for chunk in chunks.values()])

    def run_once(number: int, chunk: ModelChunk) -> None:
        is_last = number == boundaries.chunks - 1
        inputs, targets = (tensor.to(device) for tensor in zero_batch(spec, samples))
        input_meta = None if number == 0 else boundaries.outputs_of(number - 1, samples)
        tensors: tuple[Tensor, ...] = (in_run_format(inputs, spec),)
        if input_meta is not None:
            tensors = tuple(shape.empty(device).zero_() for shape in input_meta.shapes)
        output_meta = boundaries.outputs_of(number, samples)

        def loss(output: Tensor) -> Tensor:
            return summed_loss(output, targets) / samples

        def run_backward(outputs: tuple[Tensor, ...]) -> None:
            if is_last:
                arithmetic.backward(outputs[0])
            else:
                shapes = [output_meta.shapes[index] for index in output_meta.differentiable]
                backward_from(outputs, tuple(shape.empty(device).zero_() for shape in shapes))

        chunk.forward(_MICRO_BATCH, tensors, input_meta, recompute, arithmetic.autocast(), loss if is_last else None)
        chunk.backward(_MICRO_BATCH, run_backward)
        if chunk.splits_backward:
            chunk.finish_weights(_MICRO_BATCH)

    with torch.random.fork_rng([device.index] if device.type == "cuda" else []), _without_trace(modules, reducers):
        for number, chunk in chunks.items():
            run_once(number, chunk)
    modules.zero_grad()


@contextmanager
def _without_trace(modules: nn.Module, reducers: Iterable[GradientReducer]) -> Iterator[None]:
    """Restore buffers at the end, and let ``reducers`` send nothing."""
    saved = [(buffer, buffer.clone()) for buffer in modules.buffers()]
    paused = [(reducer, reducer.is_paused) for reducer in reducers]
    for reducer, _ in paused:
        reducer.is_paused = True
    yield
    for reducer, was_paused in paused:
        reducer.is_paused = was_paused
    for buffer, value in saved:
        buffer.copy_(value)


def open_communicators(
    reduced: Sequence[RankGroup], ties: Sequence[TiedParameter], group: RankGroup, device: torch.device
) -> None:
    """Let every communicator of a step that is no link carry one number, in one order on all ranks.

    Args:
        reduced: This rank's groups that sum gradients.
        ties: The weights of which several ranks of the pipeline hold a copy.
        group: The pipeline's ranks.
        device: This rank's device.
    """
    number = torch.zeros(1, device=device)
    for members in dict.fromkeys(reduced):
        dist.all_reduce(number, group=members.members())
    pairs = {(ranks[0], other) for ranks, _ in ties for other in ranks[1:]}
    for source, target in sorted({*pairs, *((target, source) for source, target in pairs)}):
        if group.place == source:
            dist.send(number, group=group.members(), group_dst=target)
        elif group.place == target:
            dist.recv(number, group=group.members(), group_src=source)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
