"""The runtime calls its transport in the order of the device model's programs: what is proved there is what runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_structure

from hpcbench.strategies.pipeline.exchange_order import Exchange, pipeline_links
from hpcbench.strategies.pipeline.schedules import Action, PipelineLayout, PipelineMessage
from hpcbench.strategies.pipeline.train.chunk import ActivationMeta, TensorMeta
from hpcbench.strategies.pipeline.train.p2p import MessageTransport
from hpcbench.strategies.pipeline.train.pipeline_runtime import ActionHooks, PipelineBatch, PipelineRuntime
from hpcbench.worker.distributed import point_to_point
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.model_execution import MixedPrecision
from tests.device_model.device import Kernel, Program
from tests.device_model.programs import (
    SHIPPED,
    StepActions,
    pipeline_programs,
    pipeline_steps,
    short,
)

CPU = torch.device("cpu")
NUMBER = ActivationMeta((TensorMeta((1,), torch.float32, torch.contiguous_format),), tree_structure(0))

Call = tuple[str, ...]
"""The labels of a kernel's parts; of a computation also those of the receives that it is the first to wait for."""


class Recorder:
    """The calls of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[Call] = []
        self.waited: list[str] = []

    def compute(self, action: Action) -> None:
        self.calls.append((f"computes {short(action)}", *sorted(self.waited)))
        self.waited.clear()

    def label(self, message: PipelineMessage) -> str:
        if message.source == self.rank:
            return f"sends {short(message.action)} to rank {message.target}"
        return f"receives {short(message.action)} from rank {message.source}"


class Work(NamedTuple):
    """A transfer that is never complete, so that the runtime waits for it."""

    recorder: Recorder
    label: str

    def wait(self, _limit: Any = None) -> None:
        if self.label.startswith("receives"):
            self.recorder.waited.append(self.label)

    def is_completed(self) -> bool:
        return False


class RecordingTransport(MessageTransport):
    """Records the messages of every exchange."""

    def __init__(self, recorder: Recorder, links: Sequence[tuple[int, int]]) -> None:
        super().__init__(dict.fromkeys(links, RankGroup((0, 1), 0, mock.Mock())), CPU, 1.0)
        self.recorder = recorder

    def exchange(self, exchange: Exchange) -> None:
        labels = [self.recorder.label(message) for message in exchange.messages]
        for message, label in zip(exchange.messages, labels, strict=True):
            assert (message in self._outgoing) == label.startswith("sends")
        self.recorder.calls.append(tuple(labels))
        sends, receives = ([Work(self.recorder, one) for one in labels if one.startswith(verb)] for verb in ("s", "r"))
        with mock.patch.object(point_to_point, "exchange", return_value=(sends, receives)):
            super().exchange(exchange)


class Chunk:
    """A chunk that only records."""

    def __init__(self, number: int, recorder: Recorder) -> None:
        self._number, self._recorder = number, recorder

    def forward(self, micro_batch: int, *_: Any) -> tuple[Tensor, ...]:
        self._recorder.compute(Action("F", self._number, micro_batch))
        return (torch.zeros(1),)

    def backward(self, micro_batch: int, _run: Any) -> tuple[Tensor, ...]:
        self._recorder.compute(Action("B", self._number, micro_batch))
        return (torch.zeros(1),)

    def finish_weights(self, micro_batch: int) -> None:
        self._recorder.compute(Action("W", self._number, micro_batch))


class Boundaries:
    """Every chunk's output is one number."""

    device = CPU

    @staticmethod
    def outputs_of(_chunk: int, _samples: int) -> ActivationMeta:
        return NUMBER


def runtime_calls(layout: PipelineLayout, steps: list[StepActions], rank: int) -> list[Call]:
    """Execute ``steps`` on one rank whose messages never arrive, and return its calls."""
    recorder = Recorder(rank)
    transport = RecordingTransport(recorder, pipeline_links(steps[0], layout))
    chunks: Any = {number: Chunk(number, recorder) for number in layout.chunks_of(rank)}
    hooks = ActionHooks(after=lambda action: recorder.compute(action) if action.kind == "U" else None)
    runtime = PipelineRuntime(
        layout, rank, chunks, transport, Boundaries(), MixedPrecision("fp32", CPU), hooks=hooks  # type: ignore[arg-type]
    )  # fmt: skip
    for ranks in steps:
        numbers = range(1 + max(action.micro_batch for actions in ranks for action in actions))
        tensors = dict.fromkeys(numbers, torch.zeros(1))
        ones, sizes = dict.fromkeys(numbers, 1.0), dict.fromkeys(numbers, 1)
        runtime.begin(ranks, PipelineBatch(tensors, tensors, sizes, sizes, ones))
        runtime.execute()
        runtime.end()
    return recorder.calls


def program_calls(program: Program) -> list[Call]:
    """Return the kernels of a program in the form of ``runtime_calls``, without those of setup."""
    kernels = [entry for entry in program if isinstance(entry, Kernel)]
    calls: list[Call] = []
    waited: set[int] = set()
    for kernel in kernels:
        labels = [part.label for part in kernel.parts]
        if kernel.stream == "compute":
            fresh = [number for number in kernel.waits_for if number not in waited]
            waited.update(fresh)
            receives = [part.label for number in fresh for part in kernels[number].parts]
            labels += sorted(label for label in receives if label.startswith("receives"))
        if not labels[0].startswith("opens"):
            calls.append(tuple(labels))
    return calls


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", SHIPPED)
def test_the_runtime_follows_the_model(schedule: str, stages: int) -> None:
    for micro_batches in (1, 2, 5, 8):
        layout, steps = pipeline_steps(schedule, stages, micro_batches)
        for rank, program in enumerate(pipeline_programs(layout, steps)):
            assert as_whole(runtime_calls(layout, steps, rank)) == as_whole(program_calls(program))


def as_whole(calls: list[Call]) -> list[Call]:
    """The runtime calls the first half of a split backward pass ``B``."""
    return [tuple(label.replace("computes I", "computes B") for label in call) for call in calls]
