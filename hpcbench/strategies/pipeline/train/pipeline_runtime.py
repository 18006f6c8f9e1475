"""The runtime that executes the actions of a schedule on one rank of a pipeline.

Every rank has a fixed list of actions per step (``strategies.pipeline.schedules``): F forward, B backward, and for zero
bubble B (inputs) and W (weights). 1f1b with 2 stages and 3 micro-batches::

    stage 0   F0  F1  ..  B0  F2  B1  ..  B2 | update
    stage 1   ..  F0  B0  F1  B1  F2  B2  .. | update

An action with a result for another rank sends it and continues; an action that needs one waits for its message::

    F on stage 0 --- activations ---> F on stage 1 --+
                                                     | loss
    B on stage 0 <--- gradients ----- B on stage 1 <-+

A step is ``begin``, ``execute`` (all actions in order, with the exchanges of messages at fixed places between them) and
``end`` (sends are complete).

When a step of an asynchronous pipeline ends, a stage is one forward pass ahead of the next one. Its output is received
before the step ends, so that nothing is in flight between steps and other collectives are possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hpcbench.errors import WorkerError
from hpcbench.strategies.pipeline import schedules
from hpcbench.strategies.pipeline.exchange_order import Exchange
from hpcbench.strategies.pipeline.train.action_timeline import STUCK_HINT, ActionRecorder, PendingActions
from hpcbench.strategies.pipeline.train.chunk import ActivationMetaCache, ModelChunk, TensorMeta, backward_from
from hpcbench.strategies.pipeline.train.p2p import MessageTransport, P2PTimeout
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.measure.clocks import PhaseMarker, no_marker
from hpcbench.worker.model_execution import MixedPrecision, summed_loss

_NOT_RECORDED = nullcontext()


class PipelineBatch(NamedTuple):
    """The samples of one step: the first chunk reads inputs, the last one targets."""

    inputs: Mapping[int, Tensor]
    """Inputs by micro-batch, [samples, *sample shape]; empty on ranks without the first chunk."""
    targets: Mapping[int, Tensor]
    """Targets by micro-batch; empty on ranks without the last chunk."""
    sizes: Mapping[int, int]
    """Samples of each micro-batch."""
    divisors: Mapping[int, int]
    """Samples of all replicas in the update that a micro-batch's gradient contributes to, by micro-batch."""
    loss_weights: Mapping[int, float]
    """Factor of a micro-batch's loss in the step's loss, by micro-batch."""


@dataclass
class ActionHooks:
    """Functions of a strategy that run before and after every action."""

    before: Callable[[schedules.Action], None] = lambda _: None
    after: Callable[[schedules.Action], None] = lambda _: None


@dataclass
class PipelineRuntime:
    """One rank of one pipeline.

    Example::

        runtime.begin(schedule_actions("1f1b", layout, micro_batches), batch)
        runtime.execute()
        loss = runtime.end()
    """

    layout: schedules.PipelineLayout
    rank: int
    chunks: Mapping[int, ModelChunk]
    """This rank's chunks by number."""
    transport: MessageTransport
    boundaries: ActivationMetaCache
    arithmetic: MixedPrecision
    recompute: str = "never"
    wait_s: float = 300.0
    phases: PhaseMarker = no_marker
    reducers: Mapping[int, GradientReducer] = field(default_factory=dict)
    """The reducer of each chunk's gradients; it sends with the chunk's last backward pass of a step."""
    hooks: ActionHooks = field(default_factory=ActionHooks)
    recorder: ActionRecorder | None = None
    current: tuple[str, schedules.Action | None] = ("before its first action", None)
    """The current activity and action, for ``progress_report``."""
    actions_done: int = 0
    """Actions of all steps so far; on cuda those that were enqueued."""

    def __post_init__(self) -> None:
        self._pending = PendingActions(self.boundaries.device)
        self._is_in_step = False
        self._local: dict[schedules.Action, tuple[Tensor, ...]] = {}
        """Results of this rank for itself, and messages that were received before the step that needs them."""

    def begin(self, ranks: list[list[schedules.Action]], batch: PipelineBatch) -> None:
        """Start a step.

        Args:
            ranks: The actions of every rank of the pipeline.
            batch: This replica's samples.
        """
        self._actions, self._batch = ranks[self.rank], batch
        self._is_in_step = True
        self._pending.remove_finished()
        self._loss: Tensor | None = None
        self._last_backward = {
            action.chunk: index
            for index, action in enumerate(self._actions)
            if action.kind not in (schedules.FORWARD, schedules.UPDATE)
        }
        messages = schedules.received_messages(ranks, self.layout, self.rank)
        forwarded = {action.micro_batch for action in self._actions if action.kind == schedules.FORWARD}
        self._sent_ahead = [
            message for message in messages if message.is_forward and message.action.micro_batch not in forwarded
        ]
        self._program = self.transport.begin_step(ranks, self.layout, self.rank, self._message_shapes)

    def execute(self) -> None:
        """Run all actions in order.

        Raises:
            WorkerError: A message did not arrive in time.
        """
        index = -1
        for action in self._program:
            if isinstance(action, Exchange):
                self.transport.exchange(action)
                continue
            index += 1
            self.hooks.before(action)
            if action.kind == schedules.FORWARD:
                self._forward(action)
            elif action.kind in (schedules.BACKWARD, schedules.BACKWARD_INPUT):
                self._backward(action)
            elif action.kind == schedules.BACKWARD_WEIGHT:
                with self._running(action), self.phases("backward"):
                    self.chunks[action.chunk].finish_weights(action.micro_batch)
            self.actions_done += 1
            self._pending.add(action)
            if self._last_backward.get(action.chunk) == index and action.chunk in self.reducers:
                self.reducers[action.chunk].send_rest()
            self.hooks.after(action)
        self.current = ("done with all of its actions, waiting for its last messages to be taken", None)

    def end(self) -> Tensor:
        """Wait until everything was sent; return the sum of the micro-batches' losses, a scalar on the device.

        It is 0 on a rank without the last chunk.

        Raises:
            WorkerError: The last messages were not received in time.
        """
        for message in self._sent_ahead:
            self._local[message.action] = self._receive(message)
        try:
            self.transport.wait_for_sends()
        except RuntimeError as error:
            raise self._wait_error("its last messages to be taken", error) from error
        self.current = ("between steps", None)
        self._is_in_step = False
        return torch.zeros((), device=self.boundaries.device) if self._loss is None else self._loss

    def _forward(self, action: schedules.Action) -> None:
        _, chunk, micro_batch = action
        inputs: tuple[Tensor, ...]
        if chunk == 0:
            input_meta, inputs = None, (self._batch.inputs[micro_batch],)
        else:
            input_meta = self.boundaries.outputs_of(chunk - 1, self._batch.sizes[micro_batch])
            inputs = self._receive_or_local(schedules.Action(schedules.FORWARD, chunk - 1, micro_batch), action)
        is_last = chunk == self.layout.chunks - 1

        def loss(output: Tensor) -> Tensor:
            return summed_loss(output, self._batch.targets[micro_batch]) / self._batch.divisors[micro_batch]

        # The backward pass of the last micro-batch follows its forward pass at once (gpipe) or soon.
        is_early = micro_batch != len(self._batch.sizes) - 1
        recomputes = self.recompute == "always" or (self.recompute == "except_last" and is_early)
        with self._running(action), self.phases("forward"):
            outputs = self.chunks[chunk].forward(
                micro_batch, inputs, input_meta, recomputes, self.arithmetic.autocast(), loss if is_last else None
            )
        if is_last:
            share = outputs[0].detach() * self._batch.loss_weights[micro_batch]
            self._loss = share if self._loss is None else self._loss + share
        else:
            self._send_or_keep(action, tuple(tensor.detach() for tensor in outputs))

    def _backward(self, action: schedules.Action) -> None:
        kind, chunk, micro_batch = action
        is_last = chunk == self.layout.chunks - 1
        grads = () if is_last else self._receive_or_local(schedules.Action(kind, chunk + 1, micro_batch), action)

        def run(outputs: tuple[Tensor, ...]) -> None:
            if is_last:
                self.arithmetic.backward(outputs[0])
            else:
                backward_from(outputs, grads)

        if chunk in self.reducers:
            self.reducers[chunk].is_paused = self._actions[self._last_backward[chunk]] != action
        with self._running(action), self.phases("backward"):
            input_grads = self.chunks[chunk].backward(micro_batch, run)
        if chunk > 0:
            self._send_or_keep(action, input_grads)

    def _running(self, action: schedules.Action) -> AbstractContextManager[None]:
        self.current = ("at", action)
        return _NOT_RECORDED if self.recorder is None else self.recorder.of(action)

    def _send_or_keep(self, action: schedules.Action, tensors: tuple[Tensor, ...]) -> None:
        """Send the result of ``action`` to the rank that needs it, or keep it if that is this rank."""
        message = schedules.message_after(action, self.layout)
        if message is None:
            self._local[action] = tensors
        else:
            self.transport.send(message, tensors)

    def _receive_or_local(self, source: schedules.Action, action: schedules.Action) -> tuple[Tensor, ...]:
        """Return the result of ``source``, which ``action`` needs."""
        if source in self._local:
            return self._local.pop(source)
        message = schedules.message_after(source, self.layout)
        assert message is not None, f"{source} comes after {action}"
        self.current = ("waiting for what it needs before", action)
        return self._receive(message)

    def _receive(self, message: schedules.PipelineMessage) -> tuple[Tensor, ...]:
        try:
            return self.transport.receive(message)
        except RuntimeError as error:
            raise self._wait_error(f"the result of {message.action} from rank {message.source}", error) from error

    def _message_shapes(self, message: schedules.PipelineMessage) -> Sequence[TensorMeta]:
        kind, chunk, micro_batch = message.action
        outputs = self.boundaries.outputs_of(
            chunk if kind == schedules.FORWARD else chunk - 1, self._batch.sizes[micro_batch]
        )
        if message.is_forward:
            return outputs.shapes
        return [outputs.shapes[index] for index in outputs.differentiable]

    def progress(self) -> int | None:
        """Return a count that grows while this rank or its device makes progress; ``None`` between steps."""
        unfinished = self._pending.remove_finished()
        return self.actions_done - unfinished if unfinished or self._is_in_step else None

    def progress_report(self) -> str:
        """Return one sentence on this rank's position in the schedule."""
        activity, action = self.current
        stage = f"stage {self.layout.stage_of(self.rank)} of {self.layout.stages}"
        device = f"; its device is not done with {self._pending.first()}" if self._pending.remove_finished() else ""
        return f"{stage}: {activity}{'' if action is None else f' {action}'}{device}"

    def _wait_error(self, awaited: str, error: RuntimeError) -> RuntimeError | WorkerError:
        """Describe a wait that timed out; any other error (another rank has ended) is returned unchanged."""
        if not isinstance(error, P2PTimeout):
            return error
        return WorkerError(
            f"the pipeline is stuck: rank {self.rank} of it waited {self.wait_s:g} s for {awaited} "
            f"({self.progress_report()})",
            hint=STUCK_HINT,
        )
