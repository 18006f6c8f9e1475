"""Passes of a pipeline's micro-batches that are not stepped again: what the first one of a kind did is repeated.

A chunk's forward passes are equal if they take as many samples and keep, or recompute, their activations; its backward
passes if, besides, both or neither are the first ones of a step, which create the gradients. The first pass of each
kind is stepped, and its effect is kept: bytes at its peak and at its end, operators, collectives, waits of the host.
For the others the tensors between chunks are made, and the rest of the effect is added to the record. Schedule,
messages, updates and the backward passes that send gradients are always those of the run.

Synchronous schedules that cut a shipped model equally pass through equal chunks: they share their records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hpcbench.parallel.catalog import get_model
from hpcbench.parallel.pipeline.schedules import FORWARD, UPDATE
from hpcbench.parallel.traffic import Traffic
from hpcbench.worker.dry_run.step_recorder import Peak, StepRecorder
from hpcbench.worker.strategies.pipeline.chunk import ModelChunk, _MicroBatchState
from hpcbench.worker.strategies.pipeline.strategy import PipelineStrategy

ResultT = TypeVar("ResultT")
LayerBytes = Mapping[str, int]
"""Bytes by the layer that they belong to."""


class PassEffect(NamedTuple):
    """Additions of a pass to the record."""

    held: LayerBytes
    """Bytes by layer at the end of the pass less those at its beginning; negative if it freed more than it kept."""
    peak: Peak
    """Largest moment of the pass, less the bytes at its beginning."""
    operators: int
    calls: tuple[Traffic, ...]
    host_syncs: int
    host_sync_sites: dict[str, None]


class TensorForm(NamedTuple):
    """Enough of a tensor to make another one of as many bytes."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    layer: str
    """The layer that its storage belongs to."""

    @classmethod
    def of(cls, tensor: Tensor, recorder: StepRecorder) -> TensorForm:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, recorder.layer_of(tensor))

    def empty(self, recorder: StepRecorder) -> Tensor:
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=recorder.device)
        recorder.assign_layer(tensor, self.layer)
        return tensor


class ForwardRecord(NamedTuple):
    """A forward pass: its effect and the tensors of its output, or its loss."""

    effect: PassEffect
    outputs: tuple[TensorForm, ...]


class BackwardRecord(NamedTuple):
    """A backward pass: its effect, the gradients that it sends, and the parameters that got their first gradient."""

    effect: PassEffect
    gradients: tuple[TensorForm, ...]
    parameters: tuple[tuple[int, str], ...]
    """Their indices, and the layers that the gradients belong to."""
    remaining: LayerBytes
    """Bytes that remain alive beside gradients: 0 for a module that keeps nothing."""


ForwardKind = tuple[int, bool]
"""Samples, and whether activations are recomputed."""
BackwardKind = tuple[ForwardKind, bool]
"""The forward pass, and whether gradients are created."""


class ChunkRecords(NamedTuple):
    """The passes of a chunk that were stepped."""

    forwards: dict[ForwardKind, ForwardRecord]
    backwards: dict[BackwardKind, BackwardRecord]


_shared_records: dict[Any, ChunkRecords] = {}
"""Records of all dry runs of this process, by ``_shared_key``."""
_PARAMETERS_OF_PASSES = (
    "model", "dataset", "input_size", "model_options", "precision", "compile", "activation_checkpointing",
    "channels_last", "data",
)  # fmt: skip
_SPLIT_DEGREES = ("tp_degree", "sp_degree")


def _shared_key(strategy: PipelineStrategy, number: int, device: torch.device) -> Any:
    """Return a key that is equal for chunks whose passes are; ``None`` if no other run has such a chunk."""
    spec, blocks = strategy.spec, strategy.blocks[number]
    is_split = any(getattr(spec, degree) > 1 for degree in _SPLIT_DEGREES)
    if type(strategy) is not PipelineStrategy or is_split or strategy._ties or get_model(spec.model).own:
        return None
    is_last, is_reduced = number == strategy.layout.chunks - 1, number in strategy.runtime.reducers
    values = (str(getattr(spec, name)) for name in _PARAMETERS_OF_PASSES)
    return str(device), blocks.start, blocks.stop, is_last, is_reduced, *values


class _InFlight(NamedTuple):
    """A micro-batch between its passes."""

    kind: BackwardKind
    is_stepped: bool
    hidden: LayerBytes
    """Activations that the forward pass kept, beside its output; of a repeated one they exist in the record only."""


class RepeatedPasses:
    """Replaces the passes of a pipeline's chunks; chunks that defer the gradients of weights are left as they are."""

    def __init__(self, strategy: PipelineStrategy, recorder: StepRecorder) -> None:
        self._runtime = runtime = strategy.runtime
        self._recorder = recorder
        self._records: dict[int, ChunkRecords] = {}
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        for number, chunk in runtime.chunks.items():
            if chunk._queue is None:
                key = _shared_key(strategy, number, recorder.device)
                self._records[number] = (
                    _shared_records.setdefault(key, ChunkRecords({}, {})) if key else ChunkRecords({}, {})
                )
                chunk.forward = partial(self._forward, number)  # type: ignore[method-assign]
                chunk.backward = partial(self._backward, number)  # type: ignore[method-assign]

    def _forward(
        self, number: int, micro_batch: int, inputs: tuple[Tensor, ...], input_meta: Any, recompute: bool, context: Any,
        loss: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        chunk = self._runtime.chunks[number]
        records = self._records[number]
        kind: ForwardKind = (len(inputs[0]), recompute)
        creates, sends = self._backward_role(number, micro_batch)
        backward_kind: BackwardKind = (kind, creates)
        record = records.forwards.get(kind)
        is_stepped = record is None or sends or backward_kind not in records.backwards
        if is_stepped:
            before = dict(self._recorder.storages)
            outputs, effect = self._measure(
                lambda: ModelChunk.forward(chunk, micro_batch, inputs, input_meta, recompute, context, loss)
            )
            forms = tuple(TensorForm.of(tensor, self._recorder) for tensor in outputs)
            records.forwards[kind] = ForwardRecord(effect, forms)
            hidden = _difference(effect.held, self._new_bytes(outputs, before))
        else:
            assert record is not None, "a forward pass that is repeated before it was stepped"
            with self._repeated(record.effect):
                outputs = tuple(form.empty(self._recorder) for form in record.outputs)
                chunk._in_flight[micro_batch] = _MicroBatchState(inputs, outputs)
                hidden = _difference(record.effect.held, self._added_bytes)
                self._recorder.add_bytes(hidden)
        self._in_flight[number, micro_batch] = _InFlight(backward_kind, is_stepped, hidden)
        return outputs

    def _backward(self, number: int, micro_batch: int, run: Callable[[tuple[Tensor, ...]], None]) -> tuple[Tensor, ...]:
        chunk = self._runtime.chunks[number]
        kind, is_stepped, hidden = self._in_flight.pop((number, micro_batch))
        if is_stepped and self._backward_role(number, micro_batch)[1]:
            # What it sends is no other pass's.
            return ModelChunk.backward(chunk, micro_batch, run)
        parameters = list(chunk.module.parameters())
        if not is_stepped:
            record = self._records[number].backwards[kind]
            with self._repeated(record.effect):
                del chunk._in_flight[micro_batch]
                for index, layer in record.parameters:
                    if parameters[index].grad is None:
                        gradient = parameters[index].grad = torch.empty_like(parameters[index])
                        self._recorder.assign_layer(gradient, layer)
                gradients = tuple(form.empty(self._recorder) for form in record.gradients)
                self._recorder.add_bytes(_difference(record.remaining, hidden))
            return gradients
        without = [index for index, parameter in enumerate(parameters) if parameter.grad is None]
        state, before = chunk._in_flight[micro_batch], dict(self._recorder.storages)
        held = self._entries((*state.inputs, *state.outputs))
        del state
        gradients, effect = self._measure(lambda: ModelChunk.backward(chunk, micro_batch, run))
        owned = {index: grad for index in without if (grad := parameters[index].grad) is not None}
        freed = _bytes_of_new(held, self._recorder.storages)
        kept = _difference(effect.held, self._new_bytes((*gradients, *owned.values()), before))
        self._records[number].backwards[kind] = BackwardRecord(
            effect,
            tuple(TensorForm.of(tensor, self._recorder) for tensor in gradients),
            tuple((index, self._recorder.layer_of(gradient)) for index, gradient in owned.items()),
            _sum(kept, freed, hidden),
        )
        return gradients

    def _backward_role(self, number: int, micro_batch: int) -> tuple[bool, bool]:
        """Return whether the backward pass of ``micro_batch`` creates gradients, and whether it sends them."""
        runtime = self._runtime
        passes = [each for each in runtime._actions if each.kind not in (FORWARD, UPDATE) and each.chunk == number]
        # With an update per minibatch each one has leaves, and gradients, of its own.
        creates = any(action.kind == UPDATE for action in runtime._actions) or passes[0].micro_batch == micro_batch
        return creates, number in runtime.reducers and passes[-1].micro_batch == micro_batch

    def _measure(self, call: Callable[[], ResultT]) -> tuple[ResultT, PassEffect]:
        recorder = self._recorder
        operators, calls, syncs = recorder.operators, len(recorder.calls), recorder.host_syncs
        outer, before, sites = recorder.peak, recorder.moment(""), recorder.host_sync_sites
        recorder.peak, recorder.host_sync_sites = before, {}
        result = call()
        peak = recorder.peak
        effect = PassEffect(
            held=_difference(recorder.held, before.held),
            peak=Peak(peak.live_bytes - before.live_bytes, _difference(peak.held, before.held), peak.running),
            operators=recorder.operators - operators,
            calls=tuple(recorder.calls[calls:]),
            host_syncs=recorder.host_syncs - syncs,
            host_sync_sites=recorder.host_sync_sites,
        )
        recorder.host_sync_sites = sites | effect.host_sync_sites
        if outer.live_bytes > peak.live_bytes:
            recorder.peak = outer
        return result, effect

    @contextmanager
    def _repeated(self, effect: PassEffect) -> Iterator[None]:
        """Add ``effect`` to the record, except for the live bytes, which the body changes."""
        recorder = self._recorder
        outer, before = recorder.peak, recorder.moment("")
        self._held_before = before.held
        yield
        recorder.peak = outer
        peak_bytes = before.live_bytes + effect.peak.live_bytes
        if peak_bytes >= outer.live_bytes:
            recorder.peak = Peak(peak_bytes, _sum(before.held, effect.peak.held), effect.peak.running)
        recorder.operators += effect.operators
        recorder.calls += effect.calls
        recorder.host_syncs += effect.host_syncs
        recorder.host_sync_sites |= effect.host_sync_sites

    @property
    def _added_bytes(self) -> LayerBytes:
        return _difference(self._recorder.held, self._held_before)

    def _entries(self, tensors: Iterable[Tensor]) -> dict[int, Any]:
        """Return the recorder's entries of the tensors' storages."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        return {key: self._recorder.storages[key] for key in keys if key in self._recorder.storages}

    def _new_bytes(self, tensors: Iterable[Tensor], before: dict[int, Any]) -> LayerBytes:
        """Return the bytes of the tensors' storages that are not among those of ``before``."""
        return _bytes_of_new(self._entries(tensors), before)


def _bytes_of_new(entries: Mapping[int, Any], others: Mapping[int, Any]) -> LayerBytes:
    """Return the bytes of the recorder's ``entries`` that are not among ``others``."""
    held: Counter[str] = Counter()
    for key, (reference, size, layer) in entries.items():
        if others.get(key, (None,))[0] is not reference:
            held[layer] += size
    return held


def _sum(*parts: LayerBytes) -> LayerBytes:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return total


def _difference(held: LayerBytes, less: LayerBytes) -> LayerBytes:
    difference = Counter(held)
    difference.subtract(less)
    return {layer: size for layer, size in difference.items() if size}


class SteadyWindow:
    """Two steps, one of a micro-batch more than the other, from which a step with ``further`` ones more follows.

    Each further one adds as much as the last one; their peaks are equal.
    """

    def __init__(self, further: int) -> None:
        self._further = further
        self._steps: list[tuple[int, int, Counter[Traffic]]] = []

    def add_step(self, recorder: StepRecorder) -> None:
        """Keep the counts of a step."""
        self._steps.append((recorder.operators, recorder.host_syncs, Counter(recorder.calls)))

    def extrapolate(self, recorder: StepRecorder) -> None:
        """Let the counts of ``recorder``, those of the longer step, be those of the whole step."""
        shorter, longer = self._steps[-2:]
        recorder.operators += self._further * (longer[0] - shorter[0])
        recorder.host_syncs += self._further * (longer[1] - shorter[1])
        recorder.calls += self._further * list((longer[2] - shorter[2]).elements())
