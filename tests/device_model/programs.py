"""The programs of pipeline ranks for the device model.

The order of actions and exchanges is the package's own (``schedules``, ``exchange_order``). ``pipeline_programs``
follows ``PipelineRuntime`` with its transport; ``tests/worker/test_pipeline_transports.py`` compares the calls that
these make with the kernels here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from hpcbench.strategies.pipeline.exchange_order import Exchange, exchange_order, pipeline_links
from hpcbench.strategies.pipeline.schedules import (
    BACKWARD_WEIGHT,
    FORWARD,
    UPDATE,
    Action,
    PipelineLayout,
    PipelineMessage,
    message_after,
    received_messages,
    schedule_actions,
)
from hpcbench.strategies.pipeline.weight_versions import Staleness, stage_step_actions
from tests.device_model.device import Enter, Kernel, Part, Program, SyncPoint

SHIPPED = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "pipedream")

StepActions = list[list[Action]]
"""The actions of every rank in one step."""


def pipeline_steps(schedule: str, stages: int, micro_batches: int) -> tuple[PipelineLayout, list[StepActions]]:
    """Return a pipeline and its steps: one, and of ``pipedream``, whose steps overlap, the first two."""
    if schedule == "pipedream":
        layout = PipelineLayout(stages)
        staleness, count = Staleness(stages), micro_batches
        steps = []
        for step in range(2):
            ranks = [stage_step_actions(layout, staleness, rank, count, count, step == 0) for rank in range(stages)]
            steps.append([[one._replace(micro_batch=one.micro_batch + step * count) for one in rank] for rank in ranks])
        return layout, steps
    layout = PipelineLayout(stages, 2 if schedule == "interleaved_1f1b" else 1)
    ranks = schedule_actions(schedule, layout, micro_batches)
    return layout, [[[*actions, Action(UPDATE, layout.stage_of(rank), 0)] for rank, actions in enumerate(ranks)]]


def pipeline_programs(
    layout: PipelineLayout,
    steps: Sequence[StepActions],
    every_action: bool = False,
    replicas: int = 1,
    opens_reducers: bool = True,
    sums_before_updates: bool = False,
    tied_ranks: tuple[int, ...] = (),
) -> list[Program]:
    """The order of ``MessageTransport``, after it has opened the links.

    Args:
        layout: The pipeline.
        steps: The actions of every rank in each step.
        every_action: Whether any action's first kernel may wait for the device, not only the first of its kind.
        replicas: Number of pipelines, which sum up each chunk's gradients after its last backward pass.
        opens_reducers: Whether the communicators of these sums are created before the first step.
        sums_before_updates: Whether gradients are summed up before every update instead, as ``pipedream`` does.
        tied_ranks: Ranks of the pipeline that hold a copy of one weight, whose gradients the first of them sums up.
    """
    hosts = [_Host(rank, every_action) for rank in range(replicas * layout.ranks)]
    programs = [exchange_order(ranks, layout) for ranks in steps]
    for host in hosts:
        replica, place = divmod(host.rank, layout.ranks)
        members = tuple(range(place, replicas * layout.ranks, layout.ranks))
        host.first_rank = replica * layout.ranks
        sums = _GradientSums(host, replica, members, tied_ranks, sums_before_updates)
        sums.open(opens_reducers)
        for link in pipeline_links(steps[0], layout):
            if place in link:
                host.open_link((replica, link), tuple(host.first_rank + rank for rank in link))
        host.program.append(SyncPoint("the end of setup", is_certain=True))
        for ranks, program in zip(steps, programs, strict=True):
            last_backward = {action.chunk: action for action in ranks[place] if action.kind not in (FORWARD, UPDATE)}
            for entry in program[place]:
                if isinstance(entry, Exchange):
                    host.transfer((replica, entry.link), entry.messages)
                    continue
                needed = host.needed_message(entry, layout)
                if needed is not None:
                    host.wait_for(needed)
                if entry.kind == UPDATE:
                    sums.before_update(entry)
                host.compute(entry)
                if last_backward.get(entry.chunk) == entry:
                    sums.after_last_backward(entry)
            for message in host.ahead(received_messages(ranks, layout, place), ranks):
                host.wait_for(message)
            host.wait_for_sends()
    _check_matching(hosts)
    return [host.program for host in hosts]


class _GradientSums(NamedTuple):
    """The sums of one rank's gradients with those of other replicas, and of a tied weight with those of other stages."""

    host: _Host
    replica: int
    members: tuple[int, ...]
    """The rank of every replica that holds the same chunks."""
    tied_ranks: tuple[int, ...]
    are_before_updates: bool

    def open(self, opens_reducers: bool) -> None:
        """The calls of ``open_communicators``."""
        if opens_reducers:
            self._sum("one number")
            self.host.wait_for_sums()
        for source, target in sorted([*self._to_first(), *self._from_first()]):
            self.host.pass_on(self.replica, source, target, "one number")

    def after_last_backward(self, action: Action) -> None:
        """The chunk's gradients are sent; nothing waits for them yet."""
        if not self.are_before_updates:
            self._sum(f"gradients of chunk {action.chunk}")

    def before_update(self, action: Action) -> None:
        """The computing stream waits for all sums."""
        if self.are_before_updates:
            self._sum(f"gradients of micro-batch {action.micro_batch}")
        elif self.tied_ranks:
            self.host.wait_for_sends()
            for source, target in [*self._to_first(), *self._from_first()]:
                self.host.pass_on(self.replica, source, target, "a tied gradient")
            if self.host.rank - self.host.first_rank in self.tied_ranks:
                self._sum("tied gradients")
        self.host.wait_for_sums()

    def _sum(self, label: str) -> None:
        if len(self.members) > 1:
            self.host.reduce(("replicas", self.members), self.members, label)

    def _to_first(self) -> list[tuple[int, int]]:
        return [(other, self.tied_ranks[0]) for other in self.tied_ranks[1:]]

    def _from_first(self) -> list[tuple[int, int]]:
        return [(target, source) for source, target in self._to_first()]


class _Host:
    """Writes the program of one rank; the computing stream is the one on which PyTorch's calls leave events."""

    def __init__(self, rank: int, every_action: bool) -> None:
        self.rank = rank
        self.first_rank = 0
        """The first rank of this rank's pipeline."""
        self.program: Program = []
        self.kernel_of: dict[PipelineMessage, int] = {}
        """The kernel that receives a message."""
        self.labels: dict[Hashable, str] = {}
        """The payload of every call with a counterpart, to compare both sides."""
        self._every_action = every_action
        self._kernels = 0
        self._waits: set[int] = set()
        """Kernels that the computing stream waits for."""
        self._sends: list[int] = []
        self._sums: list[int] = []
        self._taken: set[PipelineMessage] = set()
        self._calls: dict[Hashable, int] = {}
        self._loaded: set[tuple[str, int]] = set()
        self._entered: set[Hashable] = set()

    def compute(self, action: Action) -> None:
        kernels = action.kind, action.chunk
        if self._every_action or kernels not in self._loaded:
            self.program.append(SyncPoint(f"the first kernel of {short(action)}"))
        self._loaded.add(kernels)
        number = self._launch("compute", (Part(f"computes {short(action)}"),))
        self._waits = {number}

    def transfer(self, communicator: Hashable, messages: Iterable[PipelineMessage]) -> None:
        parts = []
        for message in messages:
            is_send = message.source == self.rank - self.first_rank
            verb, other = ("sends", "to") if is_send else ("receives", "from")
            rank = self.first_rank + (message.target if is_send else message.source)
            key = self._key(communicator, message.source, short(message.action))
            parts.append(Part(f"{verb} {short(message.action)} {other} rank {rank}", key))
            if is_send:
                self._sends.append(self._kernels)
            else:
                self.kernel_of[message] = self._kernels
        self._launch(communicator, tuple(parts))

    def wait_for(self, message: PipelineMessage) -> None:
        self._waits.add(self.kernel_of[message])
        self._taken.add(message)

    def needed_message(self, action: Action, layout: PipelineLayout) -> PipelineMessage | None:
        """Return the message that ``action`` needs, unless it was taken before."""
        if action.kind in (BACKWARD_WEIGHT, UPDATE):
            return None
        chunk = action.chunk + (-1 if action.kind == FORWARD else 1)
        message = message_after(action._replace(chunk=chunk), layout) if 0 <= chunk < layout.chunks else None
        return None if message in self._taken else message

    def ahead(self, messages: Iterable[PipelineMessage], ranks: StepActions) -> list[PipelineMessage]:
        """Return the messages of this step that a later one needs."""
        forwarded = {action.micro_batch for action in ranks[self.rank - self.first_rank] if action.kind == FORWARD}
        return [one for one in messages if one.is_forward and one.action.micro_batch not in forwarded]

    def wait_for_sends(self) -> None:
        """The computing stream waits for all sends."""
        self._waits.update(self._sends)
        self._sends.clear()

    def enter(self, communicator: Hashable, members: tuple[int, ...]) -> None:
        if communicator not in self._entered:
            self._entered.add(communicator)
            self.program += [SyncPoint(f"the creation of {communicator}"), Enter(communicator, members)]

    def open_link(self, communicator: Hashable, link: tuple[int, ...]) -> None:
        """Exchange a number in both directions."""
        self.enter(communicator, link)
        parts = [Part(f"opens {link}", self._key(communicator, source - self.first_rank, "")) for source in link]
        self._waits.add(self._launch(communicator, tuple(parts)))

    def reduce(self, communicator: Hashable, members: tuple[int, ...], label: str) -> None:
        self.enter(communicator, members)
        part = Part(f"sums {label}", self._key(communicator, None, label))
        self._sums.append(self._launch(communicator, (part,)))

    def wait_for_sums(self) -> None:
        """The computing stream waits for all sums."""
        self._waits.update(self._sums)
        self._sums.clear()

    def pass_on(self, replica: int, source: int, target: int, label: str) -> None:
        """Send or receive on the communicator of two ranks in the pipeline's group; the computing stream waits."""
        place = self.rank - self.first_rank
        if place not in (source, target):
            return
        pair = (min(source, target), max(source, target))
        communicator = ("tied", replica, pair)
        self.enter(communicator, tuple(self.first_rank + rank for rank in pair))
        verb = "sends" if place == source else "receives"
        part = Part(f"{verb} {label} of the ranks {pair}", self._key(communicator, source, label))
        self._waits.add(self._launch(communicator, (part,)))

    def _key(self, communicator: Hashable, source: int | None, label: str) -> Hashable:
        """The next call of ``communicator`` from ``source``: NCCL matches by order."""
        direction = communicator, source
        number = self._calls[direction] = self._calls.get(direction, -1) + 1
        self.labels[direction, number] = label
        return direction, number

    def _launch(self, stream: Hashable, parts: tuple[Part, ...]) -> int:
        self.program.append(Kernel(stream, parts, tuple(sorted(self._waits))))
        self._kernels += 1
        return self._kernels - 1


def _check_matching(hosts: Iterable[_Host]) -> None:
    """``AssertionError`` if a rank would receive another message than the one that it awaits."""
    labels: dict[Hashable, str] = {}
    for host in hosts:
        for key, label in host.labels.items():
            assert labels.setdefault(key, label) == label, f"{key}: {label}, not {labels[key]}"


def short(action: Action) -> str:
    """Return ``F3`` for the forward pass of micro-batch 3; with the chunk where that is not the rank."""
    return f"{action.kind}{action.micro_batch}@{action.chunk}"
