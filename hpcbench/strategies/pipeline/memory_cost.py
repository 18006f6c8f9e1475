"""The peak memory of one rank of a pipeline, by a walk through its actions.

Every backward pass is walked row by row, as ``peak_memory`` walks that of a whole model. The activations of the
micro-batches whose backward pass is still to come are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from hpcbench.predict.peak_memory import MemoryBreakdown, filled_bucket_bytes
from hpcbench.predict.tensor_sizes import (
    FP32_BYTES,
    held_sample_bytes,
    input_bytes,
    one_buffer_bytes,
    optimizer_tensors,
    row_number_bytes,
    update_temporary_bytes,
)
from hpcbench.strategies.gradient_buckets import fill_buckets, first_use_rows, sum_bytes_at
from hpcbench.strategies.pipeline.rank_cost import BUCKET_CAP_BYTES, PipelineRank
from hpcbench.strategies.pipeline.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, UPDATE, Action
from hpcbench.workloads.datasets import is_resident


class _Moment(NamedTuple):
    """Bytes that are alive beside what a rank always keeps."""

    activations: int = 0
    gradients: int = 0
    temporaries: int = 0
    """Bytes of the temporary tensors of the update."""
    communication: int = 0
    processor: int = 0
    """Further bytes of a CPU, see ``MemoryBreakdown``."""

    @property
    def device_bytes(self) -> int:
        return sum(self) - self.processor


def _largest(moments: Iterable[_Moment]) -> _Moment:
    """Return the moment with the most bytes on a device; a CPU's peak may be at another one."""
    every = list(moments)
    largest = max(every, key=lambda moment: moment.device_bytes, default=_Moment())
    return largest._replace(processor=max(map(sum, every), default=0) - largest.device_bytes)


def stage_memory(pipeline: PipelineRank, actions: Sequence[Action], summed_bytes: int = 0) -> MemoryBreakdown:
    """Return the memory of a rank at its peak.

    Args:
        actions: of one steady step, or of several with updates among them.
        summed_bytes: of sums of gradients that are kept beside those of the running micro-batch.
    """
    spec, owned = pipeline.spec, _owned_bytes(pipeline)
    moment = _largest(_StageWalk(pipeline).moments(actions))
    buffers = sum(one_buffer_bytes(spec, buffer) for chunk in pipeline.chunks for buffer in pipeline.buffers(chunk))
    return MemoryBreakdown(
        parameters_bytes=sum(owned),
        gradients_bytes=moment.gradients + summed_bytes,
        optimizer_bytes=optimizer_tensors(spec).states * sum(owned) + moment.temporaries,
        activations_bytes=moment.activations,
        buffers_bytes=buffers,
        communication_bytes=pipeline.receive_buffer_bytes() + moment.communication,
        samples_bytes=held_sample_bytes(spec, pipeline.table) if _holds_samples(pipeline) else 0,
        processor_bytes=moment.processor,
    )


def _owned_bytes(pipeline: PipelineRank) -> list[int]:
    """Return the bytes of every tensor that the rank updates."""
    untied = [size for chunk in pipeline.chunks for size in pipeline.parameter_bytes(chunk)]
    return [*untied, *pipeline.tied_bytes(pipeline.index)]


def _holds_samples(pipeline: PipelineRank) -> bool:
    """Return whether samples are on the rank's device: those of the host are copied for the first and last chunk."""
    spec = pipeline.spec
    is_copied = spec.data != "device" and not is_resident(spec.dataset, spec.data)
    return not is_copied or bool({0, pipeline.layout.chunks - 1}.intersection(pipeline.chunks))


class _StageWalk:
    def __init__(self, pipeline: PipelineRank) -> None:
        self.pipeline = pipeline
        self.owned = _owned_bytes(pipeline)
        self.chunk_bytes = {chunk: sum(pipeline.parameter_bytes(chunk)) for chunk in pipeline.chunks}
        # What else is alive is equal at all moments of a pass, so its largest one is the same each time.
        self.largest_moment = lru_cache(maxsize=None)(lambda *passed: _largest(self._backward_moments(*passed)))
        self.deferred_bytes = lru_cache(maxsize=None)(self._deferred_bytes)

    def moments(self, actions: Sequence[Action]) -> Iterator[_Moment]:
        """Yield the moments at which most may be alive."""
        pipeline, tied = self.pipeline, sum(self.pipeline.tied_bytes(self.pipeline.index))
        is_split = any(action.kind == BACKWARD_WEIGHT for action in actions)
        updates = any(action.kind == UPDATE for action in actions)
        last = {action.chunk: number for number, action in enumerate(actions) if action.kind == BACKWARD}
        alive, summed, gradients = 0, dict.fromkeys(pipeline.chunks, 0), tied
        for place, (kind, chunk, number) in enumerate(actions):
            if kind == UPDATE:
                yield self._update(alive)
                summed, gradients = dict.fromkeys(summed, 0), tied
                continue
            micro_batch = number % len(pipeline.micro_batch_sizes)
            kept_bytes = pipeline.kept_bytes(chunk, micro_batch)
            samples = pipeline.micro_batch_sizes[micro_batch]
            deferred = self.deferred_bytes(chunk, samples) if is_split else 0
            if kind == FORWARD:
                alive += kept_bytes
                yield _Moment(alive, gradients)
                continue
            if kind == BACKWARD_INPUT:
                alive -= kept_bytes
                moment = self.largest_moment(chunk, samples, False, False, True)
                yield moment._replace(activations=alive + moment.activations, gradients=gradients)
                alive += deferred
                continue
            if kind == BACKWARD_WEIGHT:
                added = max(pipeline.parameter_bytes(chunk), default=0) if summed[chunk] else self.chunk_bytes[chunk]
                yield _Moment(alive, gradients + added)
                alive -= deferred
            else:
                alive -= kept_bytes
                sends = pipeline.replicas > 1 and (updates or last[chunk] == place)
                others = gradients - summed[chunk]
                moment = self.largest_moment(chunk, samples, bool(summed[chunk]), sends, False)
                yield moment._replace(activations=alive + moment.activations, gradients=others + moment.gradients)
            gradients += self.chunk_bytes[chunk] - summed[chunk]
            summed[chunk] = self.chunk_bytes[chunk]
        if is_split and pipeline.replicas > 1:
            # Buckets are filled once all weights' gradients are there.
            yield _Moment(gradients=sum(self.owned), communication=max(map(self._largest_bucket, pipeline.chunks)))
        if not updates:
            yield self._update(alive)

    def _update(self, alive: int) -> _Moment:
        kept, temporaries = update_temporary_bytes(self.pipeline.spec, self.owned)
        return _Moment(alive, sum(self.owned), kept, 0, temporaries)

    def _deferred_bytes(self, chunk: int, samples: int) -> int:
        """Return the bytes that weights' gradients wait for after a split backward pass."""
        return sum(self._deferred_row_bytes(row, samples) for row in self.pipeline.rows[chunk])

    def _deferred_row_bytes(self, row: int, samples: int) -> int:
        """Return the bytes of the input and of the gradient of the output of a row whose weight waits.

        Linear layers may share an input, which is then kept by the first one.
        """
        pipeline, layer = self.pipeline, self.pipeline.table.layers[row]
        if layer.kind != "Linear" and not layer.kind.startswith("Conv"):
            return 0
        inputs, outputs = layer.activation_bytes if layer.kind == "Linear" else input_bytes(layer), layer.output_bytes
        number_bytes = row_number_bytes(pipeline.spec, layer)
        if (view := pipeline.tensor_rank) is not None:
            fractions, number_bytes = view.fractions(layer), view.sent_bytes
            inputs = inputs * fractions.saved.part // fractions.saved.total
            outputs = outputs * fractions.outputs.part // fractions.outputs.total
        return samples * (inputs + outputs) * number_bytes // FP32_BYTES

    def _backward_moments(self, chunk: int, samples: int, adds: bool, sends: bool, is_split: bool) -> list[_Moment]:
        """Return the moments of one backward pass: the micro-batch's remaining activations and the chunk's gradients.

        Args:
            samples: of the micro-batch.
            adds: whether gradients are added to those of earlier micro-batches.
            sends: whether the gradients are copied into buckets.
            is_split: whether the gradients of weights are left for later.
        """
        pipeline, table = self.pipeline, self.pipeline.table
        sizes, first_uses = self._table_sizes(chunk), first_use_rows(table)
        created = [0] * len(table.layers)
        for place in pipeline.parameter_places[chunk]:
            created[first_uses[place]] += sizes[place]
        filled = filled_bucket_bytes(table, sizes, self._buckets(chunk)) if sends else [0] * len(table.layers)
        boundary_kept, gradients = pipeline.boundary_kept_bytes(chunk, samples), self.chunk_bytes[chunk] if adds else 0
        moments, saved, deferred = [], pipeline.activation_bytes(chunk, samples), 0
        # The gradient of the output has been received, and is counted there.
        received = 0 if chunk == pipeline.layout.chunks - 1 else samples * pipeline.boundary_bytes(chunk)
        for row in reversed(pipeline.rows[chunk]):
            cost = pipeline.row_costs[row]
            deferred += self._deferred_row_bytes(row, samples) if is_split else 0
            gradients += 0 if adds or is_split else created[row]
            working, on_device = (
                max(size * samples // pipeline.row_samples - received, 0)
                for size in (cost.working_bytes, cost.working_bytes - cost.library_bytes)
            )
            added = created[row] if adds else 0
            activations = boundary_kept + saved + deferred + on_device
            moments.append(_Moment(activations, gradients + added, 0, filled[row], working - on_device))
            received = 0
            saved -= cost.saved_bytes * samples // pipeline.row_samples
        return moments

    def _table_sizes(self, chunk: int) -> list[int]:
        """Return the bytes of every tensor of the table, 0 for those of other chunks."""
        sizes = [0] * len(self.pipeline.table.parameter_tensors)
        for place, size in zip(
            self.pipeline.parameter_places[chunk], self.pipeline.parameter_bytes(chunk), strict=True
        ):
            sizes[place] = size
        return sizes

    def _buckets(self, chunk: int) -> list[list[int]]:
        places, sizes = self.pipeline.parameter_places[chunk], self.pipeline.parameter_bytes(chunk)
        return [[places[number] for number in bucket] for bucket in fill_buckets(sizes, BUCKET_CAP_BYTES)]

    def _largest_bucket(self, chunk: int) -> int:
        sizes = self._table_sizes(chunk)
        return max((sum_bytes_at(sizes, bucket) for bucket in self._buckets(chunk)), default=0)
