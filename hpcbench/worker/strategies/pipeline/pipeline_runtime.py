"""The runtime that executes the actions of a schedule on one rank of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hpcbench.errors import WorkerError
from hpcbench.parallel.pipeline.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    UPDATE,
    Action,
    PipelineLayout,
    PipelineMessage,
    message_after,
    received_messages,
)
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.measure.clocks import PhaseMarker, no_marker
from hpcbench.worker.model_execution import MixedPrecision, summed_loss
from hpcbench.worker.strategies.pipeline.action_timeline import ActionRecorder, PendingActions
from hpcbench.worker.strategies.pipeline.chunk import ActivationMetaCache, ModelChunk, TensorMeta, backward_from
from hpcbench.worker.strategies.pipeline.p2p import P2PTimeout, P2PTransport

_NOT_RECORDED = nullcontext()


class PipelineBatch(NamedTuple):
    """The samples of one step: the first chunk reads inputs, the last one targets."""

    inputs: Sequence[Tensor]
    """Per micro-batch, [samples, *shape]; empty on ranks that do not read them."""
    targets: Sequence[Tensor]
    sizes: Sequence[int]
    """Samples of each micro-batch."""
    global_count: int
    """Samples of all micro-batches of all replicas: what losses are divided by."""


@dataclass
class ActionHooks:
    """What a strategy does around actions; each gets the chunk and the micro-batch."""

    before: Callable[[Action], None] = lambda _: None
    after: Callable[[Action], None] = lambda _: None


@dataclass
class PipelineRuntime:
    """One rank of one pipeline.

    A step is ``begin``, ``execute`` for its actions, and ``end``.
    """

    layout: PipelineLayout
    rank: int
    chunks: Mapping[int, ModelChunk]
    mail: P2PTransport
    boundaries: ActivationMetaCache
    arithmetic: MixedPrecision
    recompute: str = "never"
    wait_s: float = 300.0
    phases: PhaseMarker = no_marker
    reducers: Mapping[int, GradientReducer] = field(default_factory=dict)
    """Of each chunk's gradients; they send with the chunk's last backward pass of a step."""
    hooks: ActionHooks = field(default_factory=ActionHooks)
    recorder: ActionRecorder | None = None
    doing: tuple[str, Action | None] = ("before its first action", None)
    """What this rank is at, see ``state``."""
    made: int = 0
    """Actions of all steps so far; on cuda those that were asked for."""

    def __post_init__(self) -> None:
        self._asked = PendingActions(self.boundaries.device)
        self._is_under_way = False

    def begin(self, ranks: list[list[Action]], batch: PipelineBatch) -> None:
        """Get ready for the actions of all ranks in this step: receives are posted from here on."""
        self._own, self._batch = ranks[self.rank], batch
        self._is_under_way = True
        self._asked.forget_done()
        self._local: dict[Action, tuple[Tensor, ...]] = {}
        self._loss: Tensor | None = None
        self._last = {
            action.chunk: place
            for place, action in enumerate(self._own)
            if action.kind in (BACKWARD, BACKWARD_WEIGHT, BACKWARD_INPUT)
        }
        self.mail.expect(received_messages(ranks, self.layout, self.rank), self._shapes)

    def execute(self) -> None:
        """All actions in order."""
        for place, action in enumerate(self._own):
            self.hooks.before(action)
            _ACTION_METHODS[action.kind](self, action)
            self.made += 1
            self._asked.add(action)
            if self._last.get(action.chunk) == place:
                reducer = self.reducers.get(action.chunk)
                if reducer is not None:
                    reducer.send_rest()
            self.hooks.after(action)
        self.doing = ("done with all of its actions, waiting for its last messages to be taken", None)

    def end(self) -> Tensor:
        """Wait for what was sent; returns the loss of the micro-batches, summed, zero where others compute it."""
        try:
            self.mail.finish()
        except RuntimeError as error:
            raise self._stuck("its last messages to be taken", error) from error
        self.doing = ("between steps", None)
        self._is_under_way = False
        return torch.zeros((), device=self.boundaries.device) if self._loss is None else self._loss

    def _forward(self, action: Action) -> None:
        chunk, one = action.chunk, action.micro_batch
        entry = None if chunk == 0 else self.boundaries.after(chunk - 1, self._batch.sizes[one])
        inputs = (self._batch.inputs[one],) if chunk == 0 else self._taken(Action(FORWARD, chunk - 1, one), action)
        is_last = chunk == self.layout.chunks - 1
        with self._doing(action), self.phases("forward"):
            outputs = self.chunks[chunk].forward(
                one,
                inputs,
                entry,
                self._recomputes(one),
                self.arithmetic.autocast(),
                partial(self._loss_of, one) if is_last else None,
            )
        if is_last:
            kept = outputs[0].detach() * self._loss_weight(one)
            self._loss = kept if self._loss is None else self._loss + kept
        else:
            self._pass_on(action, tuple(tensor.detach() for tensor in outputs))

    def _backward(self, action: Action) -> None:
        kind, chunk, one = action
        is_last = chunk == self.layout.chunks - 1
        grads = () if is_last else self._taken(Action(kind, chunk + 1, one), action)

        def run(outputs: tuple[Tensor, ...]) -> None:
            if is_last:
                self.arithmetic.backward(outputs[0])
            else:
                backward_from(outputs, grads)

        reducer = self.reducers.get(chunk)
        if reducer is not None:
            reducer.is_paused = self._own[self._last[chunk]] != action
        with self._doing(action), self.phases("backward"):
            of_inputs = self.chunks[chunk].backward(one, run)
        if chunk > 0:
            self._pass_on(action, of_inputs)

    def _weights(self, action: Action) -> None:
        with self._doing(action), self.phases("backward"):
            self.chunks[action.chunk].finish_weights(action.micro_batch)

    def _nothing(self, action: Action) -> None:
        """The strategy's hooks see to it."""

    def _loss_of(self, micro_batch: int, output: Tensor) -> Tensor:
        return summed_loss(output, self._batch.targets[micro_batch]) / self._batch.global_count

    def _loss_weight(self, _micro_batch: int) -> float:
        """What the loss of a micro-batch counts in the step's."""
        return 1.0

    def _recomputes(self, micro_batch: int) -> bool:
        """Of the last micro-batch the backward pass follows at once (gpipe), or soon."""
        is_last = micro_batch == len(self._batch.sizes) - 1
        return self.recompute == "always" or (self.recompute == "except_last" and not is_last)

    def _doing(self, action: Action) -> AbstractContextManager[None]:
        self.doing = ("at", action)
        return _NOT_RECORDED if self.recorder is None else self.recorder.of(action)

    def _pass_on(self, action: Action, tensors: tuple[Tensor, ...]) -> None:
        message = message_after(action, self.layout)
        if message is None:
            self._local[action] = tensors
        else:
            self.mail.send(message, tensors)

    def _taken(self, source: Action, action: Action) -> tuple[Tensor, ...]:
        """What ``action`` needs of ``source``."""
        message = message_after(source, self.layout)
        if message is None:
            return self._local.pop(source)
        self.doing = ("waiting for what it needs before", action)
        try:
            return self.mail.take(message)
        except RuntimeError as error:
            raise self._stuck(f"the result of {source} from rank {message.source}", error) from error

    def _shapes(self, message: PipelineMessage) -> Sequence[TensorMeta]:
        kind, chunk, one = message.action
        boundary = self.boundaries.after(chunk if kind == FORWARD else chunk - 1, self._batch.sizes[one])
        if message.is_forward:
            return boundary.shapes
        return [boundary.shapes[place] for place in boundary.with_gradient]

    def progress(self) -> int | None:
        """Grows while this rank, or its device, gets on; ``None`` where nothing is under way."""
        left = self._asked.forget_done()
        return self.made - left if left or self._is_under_way else None

    def state(self) -> str:
        """For a person: where this rank stands."""
        what, action = self.doing
        where = f"stage {self.layout.stage_of(self.rank)} of {self.layout.stages}"
        device = f"; its device is not done with {self._asked.first()}" if self._asked.forget_done() else ""
        return f"{where}: {what}{'' if action is None else f' {action}'}{device}"

    def _stuck(self, what: str, error: RuntimeError) -> RuntimeError | WorkerError:
        """A wait that ran into its limit is told as what it is; anything else (another rank is gone) as it came."""
        if not isinstance(error, P2PTimeout):
            return error
        return WorkerError(
            f"the pipeline is stuck: rank {self.rank} of it waited {self.wait_s:g} s for {what} ({self.state()})",
            hint="the state of every rank is in the result's ranks",
        )


_ACTION_METHODS: dict[str, Callable[[PipelineRuntime, Action], None]] = {
    FORWARD: PipelineRuntime._forward,
    BACKWARD: PipelineRuntime._backward,
    BACKWARD_INPUT: PipelineRuntime._backward,
    BACKWARD_WEIGHT: PipelineRuntime._weights,
    UPDATE: PipelineRuntime._nothing,
}
