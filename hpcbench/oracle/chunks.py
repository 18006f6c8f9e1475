"""What the actions of a pipeline's schedule take on a machine, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hpcbench.oracle.clock import Clock
from hpcbench.oracle.kernels import WHOLE, Pass, Share, first_alike, row_pass, update_kernels
from hpcbench.oracle.pipeline_run import PipelineRun
from hpcbench.oracle.placement import group_of, is_within_node, pair_of
from hpcbench.oracle.steps.tensor import share_of
from hpcbench.oracle.streams import Call
from hpcbench.parallel.course import Prices
from hpcbench.parallel.layers import Layer
from hpcbench.parallel.schedule import BACKWARD, FORWARD, INPUT, UPDATE, WEIGHT, Action, message_after

_SPLIT = ("Linear", "Conv1d", "Conv2d", "Conv3d")
"""Kinds of layers whose gradients of weights are put off where backward passes come in halves."""


class Busy(NamedTuple):
    """What a rank computes in one micro-batch's passes through a chunk, in seconds, and what it waits for in them."""

    forward_s: float
    backward_s: float
    """With the forward pass before it where that is done again."""
    weights_s: float
    """Of ``backward_s``, the gradients of weights that can be put off."""
    shared_forward: Sequence[Call]
    """Calls among ranks that share its layers."""
    shared_backward: Sequence[Call]

    @property
    def shared(self) -> list[Call]:
        """In both passes."""
        return [*self.shared_forward, *self.shared_backward]


class ChunkTimes:
    """Of all chunks of one pipeline. Remembers what it was asked."""

    def __init__(self, plan: PipelineRun, clock: Clock) -> None:
        self.plan, self.clock = plan, clock
        self.splits = plan.spec.strategy == "zero_bubble"
        self.busy = lru_cache(maxsize=None)(self._busy)
        self.passes = lru_cache(maxsize=None)(self._passes)
        self._pass = lru_cache(maxsize=None)(self._row_pass)
        self.sends = lru_cache(maxsize=None)(self._sends)
        self.update_s = lru_cache(maxsize=None)(self._update_s)
        self._alike = first_alike(plan.table)
        self._tensor = group_of(plan.spec, "tp")

    def _busy(self, chunk: int, samples: float, again: bool) -> Busy:
        forward = backward = weights = 0.0
        for row, one in zip(self.plan.rows[chunk], self.passes(chunk, samples), strict=True):
            spent = self.clock.kernel_s(one.backward)
            forward += self.clock.kernel_s(one.forward)
            backward += spent
            weights += spent * weights_part(self.plan.table.layers[row])
        shared = [
            [call for one in self.plan.shared(chunk, samples, repeats) for call in self.clock.calls(one, self._tensor)]
            for repeats in (False, again)
        ]
        return Busy(forward, backward + (forward if again else 0.0), weights, *shared)

    def _passes(self, chunk: int, samples: float) -> list[Pass]:
        """Of the chunk's rows."""
        return [self._pass(self._alike[row], samples) for row in self.plan.rows[chunk]]

    def _row_pass(self, row: int, samples: float) -> Pass:
        layer = self.plan.table.layers[row]
        return row_pass(self.plan.spec, layer, samples, self._share(layer))

    def _share(self, layer: Layer) -> Share:
        """Of ranks that share a stage's transformer blocks the one with most heads and features."""
        if self.plan.split is None:
            return WHOLE
        return share_of(self.plan.split, layer)

    def _sends(self, kind: str, chunk: int, samples: float) -> Call | None:
        """The message after an action for so many samples.

        Replicas of a stage are taken to lie as far from the next stage's as their first ones do.
        """
        message = message_after(Action(kind, chunk, 0), self.plan.layout)
        if message is None:
            return None
        is_far = not is_within_node(self.plan.spec, "pp", message.source, message.target)
        boundary = chunk if kind == FORWARD else chunk - 1
        group = pair_of(self.plan.spec, "pp", is_far)
        return self.clock.call("send", samples * self.plan.boundary_bytes(boundary), group, "send")

    def _update_s(self, place: int) -> float:
        """The optimizer's pass over what the rank at ``place`` of the pipeline holds."""
        sizes = [size for chunk in self.plan.layout.chunks_of(place) for size in self.plan.own_tensors(chunk)]
        sizes += [tie.bytes for tie in self.plan.ties if place in tie.places]
        return sum(self.clock.kernel_s(kernel) for kernel in update_kernels(self.plan.spec, sizes))

    def kinds(self, count: int) -> list[tuple[float, bool]]:
        """Of each of ``count`` micro-batches: its samples, and whether it is computed again.

        Another number than the run's is of a schedule that stands for a longer one: all micro-batches are the mean one.
        """
        mean = self.plan.spec.batch_size / self.plan.spec.micro_batches
        is_own = count == self.plan.spec.micro_batches
        sizes: Sequence[float] = self.plan.sizes if is_own else [mean] * count
        return [(size, self.plan.is_recomputed(number, count)) for number, size in enumerate(sizes)]

    def prices(self, count: int, with_comm: bool = True) -> Prices:
        """Durations and transfers of a schedule of ``count`` micro-batches; of another than the run's see ``kinds``."""
        kinds = self.kinds(count)
        distinct = list(dict.fromkeys(kinds))
        of = [distinct.index(kind) for kind in kinds]
        chunks = range(self.plan.layout.chunks)
        durations = [[self._durations(chunk, *kind, with_comm) for kind in distinct] for chunk in chunks]
        if not with_comm:
            return Prices(lambda action: durations[action.chunk][of[action.micro_batch]][action.kind], lambda _: 0.0)
        transfers = [[self._transfers(chunk, samples) for samples, _ in distinct] for chunk in chunks]
        return Prices(
            lambda action: durations[action.chunk][of[action.micro_batch]][action.kind],
            lambda action: transfers[action.chunk][of[action.micro_batch]][action.kind],
        )

    def _transfers(self, chunk: int, samples: float) -> dict[str, float]:
        calls = {kind: self.sends(kind, chunk, samples) for kind in (FORWARD, BACKWARD, INPUT)}
        return {kind: 0.0 if call is None else call.seconds for kind, call in calls.items()}

    def _durations(self, chunk: int, samples: float, again: bool, with_comm: bool) -> dict[str, float]:
        busy = self.busy(chunk, samples, again)
        computed = {
            FORWARD: busy.forward_s,
            BACKWARD: busy.backward_s,
            INPUT: busy.backward_s - busy.weights_s,
            WEIGHT: busy.weights_s,
            UPDATE: 0.0,
        }
        if not with_comm:
            return computed
        shared = dict.fromkeys((BACKWARD, INPUT), busy.shared_backward) | {FORWARD: busy.shared_forward}
        return {
            kind: self.beside_messages_s(kind, chunk, samples, seconds)
            + sum(call.seconds for call in shared.get(kind, ()))
            for kind, seconds in computed.items()
        }

    def beside_messages_s(self, kind: str, chunk: int, samples: float, computed_s: float) -> float:
        """What is computed in ``computed_s``, with messages under way meanwhile: those that it waited for and sends."""
        slowdown = self.clock.machine.comm.overlap_slowdown
        if slowdown <= 1.0 or kind in (WEIGHT, UPDATE):
            return computed_s
        before = chunk - 1 if kind == FORWARD else chunk + 1
        received = self.sends(kind, before, samples) if 0 <= before < self.plan.layout.chunks else None
        calls = (received, self.sends(kind, chunk, samples))
        under_way_s = sum(call.seconds for call in calls if call is not None)
        return computed_s + min((1.0 - 1.0 / slowdown) * under_way_s, (slowdown - 1.0) * computed_s)


def weights_part(layer: Layer) -> float:
    """Of a layer's backward pass, the share that is the gradients of its weights: it has the forward pass's products,
    and so has the gradient of the input, where that is asked for."""
    if layer.kind not in _SPLIT or not layer.backward_flops:
        return 0.0
    return min(layer.forward_flops / layer.backward_flops, 1.0)
