"""Ranks of a host thread and a device each, as far as waiting goes: the rules of CUDA and NCCL that can make a hang.

* A host executes its program in order. It enqueues kernels on streams and goes on without waiting for them.
* The kernels of a stream run one after another. A kernel also waits for those that an event made it wait for.
* A computation ends by itself. A send, a receive or a collective runs until its counterparts run on the other ranks: NCCL
  matches the calls of a communicator in their order. That a short message may leave before its receiver is there is
  left out: a rank that waits for more can only hang more often.
* At a ``SyncPoint`` the host may have to wait until the device has done all that is queued: CUDA does so when it loads a
  kernel at its first launch, and when it frees memory.
* At an ``Enter`` the host waits until all members of a communicator have arrived: NCCL creates it with its first call.
* A device may have fewer hardware queues than streams. Then kernels of two streams run in the order of enqueuing.

A state is a tuple of numbers, so that states can be compared and kept in a set.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class SyncPoint(NamedTuple):
    """The host may have to wait for its device before it goes on, or has to where that ``is_certain``."""

    reason: str
    is_certain: bool = False


class Enter(NamedTuple):
    """The host waits until all members of a communicator are here."""

    communicator: Hashable
    members: tuple[int, ...]


class Part(NamedTuple):
    """A part of a kernel. Those of several ranks with one ``key`` end together; one without ends by itself."""

    label: str
    key: Hashable | None = None


@dataclass(frozen=True)
class Kernel:
    """Work that the host enqueues: its parts run together and may end one by one."""

    stream: Hashable
    parts: tuple[Part, ...]
    waits_for: tuple[int, ...] = ()
    """Numbers of the rank's earlier kernels, in the order of enqueuing, that an event makes this one wait for."""


Instruction = SyncPoint | Enter | Kernel
Program = list[Instruction]


class RankState(NamedTuple):
    """The host's next instruction, whether it waits for its device there, and the parts that are done as bits."""

    position: int
    is_syncing: bool
    done: int


State = tuple[RankState, ...]


@dataclass
class _RankTables:
    """What the transitions of a rank need at once."""

    queued: list[int] = field(default_factory=lambda: [0])
    """By position: the parts that are enqueued before it, as bits."""
    parts: list[Part] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    """By part: the parts that must be done before it runs, as bits."""
    enters: dict[Hashable, int] = field(default_factory=dict)
    """By communicator: the position of its first ``Enter``."""


class Machine:
    """The transitions of all ranks' programs.

    Args:
        programs: The program of every rank.
        hardware_queues: Queues of each device, on which streams are distributed in the order of their first kernel;
            none: a queue for each stream.
    """

    def __init__(self, programs: Sequence[Program], hardware_queues: int | None = None) -> None:
        self.programs = programs
        self._tables = [_rank_tables(program, hardware_queues) for program in programs]
        self._counterparts = self._match_parts()
        self.start: State = (RankState(0, False, 0),) * len(programs)

    def _match_parts(self) -> list[list[tuple[tuple[int, int], ...]]]:
        """By rank and part: rank and bit of all parts that end with it."""
        by_key: dict[Hashable, list[tuple[int, int]]] = {}
        for rank, tables in enumerate(self._tables):
            for number, part in enumerate(tables.parts):
                if part.key is not None:
                    by_key.setdefault(part.key, []).append((rank, number))
        alone = [key for key, parts in by_key.items() if len({rank for rank, _ in parts}) < 2]
        assert not alone, f"calls without a counterpart: {alone}"
        return [
            [((rank, number),) if part.key is None else tuple(by_key[part.key]) for number, part in enumerate(t.parts)]
            for rank, t in enumerate(self._tables)
        ]

    def instruction(self, state: State, rank: int) -> Instruction | None:
        """Return the next instruction of the host of ``rank``, ``None`` after its last one."""
        program, position = self.programs[rank], state[rank].position
        return program[position] if position < len(program) else None

    def pending(self, state: State, rank: int) -> list[int]:
        """Return the parts that are on the device of ``rank`` and not done."""
        rest = self._tables[rank].queued[state[rank].position] & ~state[rank].done
        return _bits(rest)

    def is_running(self, state: State, rank: int, number: int) -> bool:
        """Whether the part is enqueued, not done, and waits for nothing on its own device."""
        tables, done = self._tables[rank], state[rank].done
        return bool(
            tables.queued[state[rank].position] >> number & 1
            and not done >> number & 1
            and not tables.needs[number] & ~done
        )

    def is_at_choice(self, state: State, rank: int) -> bool:
        """Whether the host is at a ``SyncPoint`` at which waiting makes a difference now."""
        instruction = self.instruction(state, rank)
        is_open = isinstance(instruction, SyncPoint) and not instruction.is_certain and not state[rank].is_syncing
        return is_open and bool(self.pending(state, rank))

    def choose(self, state: State, rank: int, syncs: bool) -> State:
        """Let the host of ``rank``, at a choice, wait for its device or go on."""
        position, _, done = state[rank]
        return _replaced(state, rank, RankState(position if syncs else position + 1, syncs, done))

    def _can_go_on(self, state: State, rank: int) -> bool:
        """Whether the host takes its next step without a choice."""
        position, _, done = state[rank]
        program = self.programs[rank]
        if position == len(program):
            return False
        instruction = program[position]
        if isinstance(instruction, Kernel):
            return True
        if isinstance(instruction, SyncPoint):
            return not self._tables[rank].queued[position] & ~done
        enters = (self._tables[member].enters[instruction.communicator] for member in instruction.members)
        return all(state[member].position >= enter for member, enter in zip(instruction.members, enters, strict=True))

    def settle(self, state: State) -> State:
        """Take all transitions that are no choices until only choices are left.

        No transition ever disables one of these: hosts only add kernels behind the queued ones, kernels that run go on
        running, and whoever waits is waited for no longer. So any order of them leads to the same state.
        """
        while True:
            after = self.run_devices(self.run_hosts(state))
            if after == state:
                return state
            state = after

    def run_hosts(self, state: State) -> State:
        """Let the hosts go on as far as they can without a choice and without their devices."""
        progress = True
        while progress:
            progress = False
            for rank in range(len(state)):
                while self._can_go_on(state, rank):
                    position, _, done = state[rank]
                    state, progress = _replaced(state, rank, RankState(position + 1, False, done)), True
        return state

    def run_devices(self, state: State) -> State:
        """Let the devices do all that they can of what is queued."""
        progress = True
        while progress:
            progress = False
            for rank, tables in enumerate(self._tables):
                for number in self.pending(state, rank):
                    # A look at this rank first: most parts wait for an earlier one of their own device.
                    if tables.needs[number] & ~state[rank].done:
                        continue
                    counterparts = self._counterparts[rank][number]
                    if all(self.is_running(state, *each) for each in counterparts):
                        state, progress = _with_done(state, counterparts), True
        return state

    def is_finished(self, state: State) -> bool:
        """Whether every host and every device is done."""
        return all(
            self.instruction(state, rank) is None and not self.pending(state, rank) for rank in range(len(state))
        )


def _rank_tables(program: Program, hardware_queues: int | None) -> _RankTables:
    tables = _RankTables()
    kernels: list[int] = []
    """Every kernel's parts, as bits."""
    queue_of: dict[Hashable, int] = {}
    last_of_stream: dict[Hashable, int] = {}
    last_of_queue: dict[int, int] = {}
    for position, instruction in enumerate(program):
        bits = 0
        if isinstance(instruction, Enter):
            tables.enters.setdefault(instruction.communicator, position)
        elif isinstance(instruction, Kernel):
            stream = instruction.stream
            queue = queue_of.setdefault(stream, len(queue_of) % (hardware_queues or len(queue_of) + 1))
            needs = last_of_stream.get(stream, 0) | last_of_queue.get(queue, 0)
            for number in instruction.waits_for:
                needs |= kernels[number]
            for part in instruction.parts:
                bits |= 1 << len(tables.parts)
                tables.parts.append(part)
                tables.needs.append(needs)
            kernels.append(bits)
            last_of_stream[stream] = last_of_queue[queue] = bits
        tables.queued.append(tables.queued[-1] | bits)
    return tables


def _replaced(state: State, rank: int, rank_state: RankState) -> State:
    return (*state[:rank], rank_state, *state[rank + 1 :])


def _with_done(state: State, parts: Sequence[tuple[int, int]]) -> State:
    for rank, number in parts:
        position, is_syncing, done = state[rank]
        state = _replaced(state, rank, RankState(position, is_syncing, done | 1 << number))
    return state


def _bits(number: int) -> list[int]:
    bits = []
    while number:
        low = number & -number
        bits.append(low.bit_length() - 1)
        number ^= low
    return bits
