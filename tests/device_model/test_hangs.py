"""Paired exchanges cannot hang a GPU: all interleavings of the shipped schedules, and planted errors that are found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.device_model.device import Enter, Kernel, Machine
from tests.device_model.programs import SHIPPED, pipeline_programs, pipeline_steps
from tests.device_model.search import (
    hangs_with_all_syncs,
    search_hang,
)

STAGES, MICRO_BATCHES = (2, 3, 4), range(1, 9)
WITH_TIES = tuple(schedule for schedule in SHIPPED if schedule != "pipedream")
"""Schedules that train models with weights of two stages."""
PIPELINES = [(schedule, stages) for schedule in SHIPPED for stages in STAGES]


@pytest.mark.parametrize(("schedule", "stages"), PIPELINES)
def test_paired_exchanges_never_hang(schedule: str, stages: int) -> None:
    """Neither where first kernels wait, nor where any kernel does, nor on a device that runs one at a time."""
    for micro_batches in MICRO_BATCHES:
        pipeline = pipeline_steps(schedule, stages, micro_batches)
        assert search_hang(Machine(pipeline_programs(*pipeline))).hang is None, f"{micro_batches} micro-batches"
        for queues in (None, 1):
            assert not hangs_with_all_syncs(Machine(pipeline_programs(*pipeline, every_action=True), queues))


@pytest.mark.parametrize("stages", STAGES[:2])
@pytest.mark.parametrize("schedule", SHIPPED)
@pytest.mark.parametrize("opens_reducers", [True, False])
def test_paired_pipelines_with_replicas_never_hang(schedule: str, stages: int, opens_reducers: bool) -> None:
    """Both pipelines sum their gradients, those of a rank's second chunk while messages are in flight."""
    pipeline = pipeline_steps(schedule, stages, 4)
    more: dict[str, Any] = {
        "replicas": 2,
        "opens_reducers": opens_reducers,
        "sums_before_updates": schedule == "pipedream",
    }
    assert search_hang(Machine(pipeline_programs(*pipeline, **more))).hang is None
    assert not hangs_with_all_syncs(Machine(pipeline_programs(*pipeline, every_action=True, **more), hardware_queues=1))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stages", STAGES[:2])
@pytest.mark.parametrize("schedule", WITH_TIES)
def test_tied_weights(schedule: str, stages: int, replicas: int) -> None:
    """The first and the last rank exchange the gradients of a weight that both hold, on a communicator of their own."""
    pipeline, tied_ranks = pipeline_steps(schedule, stages, 4), (0, stages - 1)
    machine = Machine(pipeline_programs(*pipeline, replicas=replicas, tied_ranks=tied_ranks))
    assert search_hang(machine).hang is None
    every = pipeline_programs(*pipeline, every_action=True, replicas=replicas, tied_ranks=tied_ranks)
    assert not hangs_with_all_syncs(Machine(every, hardware_queues=1))


def test_a_planted_receive_ahead_is_found() -> None:
    programs = pipeline_programs(*pipeline_steps("1f1b", 2, 3))
    first = next(index for index, entry in enumerate(programs[0]) if _computes(entry))
    receive = next(index for index, entry in enumerate(programs[0]) if _receives(entry))
    entry = programs[0].pop(receive)
    assert isinstance(entry, Kernel)
    # Before the first point at which the host may wait, of which the first computation has one.
    programs[0].insert(first - 1, Kernel(entry.stream, entry.parts))
    assert search_hang(Machine(programs)).hang is not None


def test_links_opened_in_another_order_are_found() -> None:
    """Three ranks in a ring: if one of them opens its links the other way round, each waits for the next."""
    programs = pipeline_programs(*pipeline_steps("interleaved_1f1b", 3, 3))
    assert [entry.members for entry in programs[1] if isinstance(entry, Enter)] == [(0, 1), (1, 2)]
    opening = [Kernel(one.stream, one.parts) if isinstance(one, Kernel) else one for one in programs[1][:6]]
    programs[1][:6] = [*opening[3:], *opening[:3]]
    assert search_hang(Machine(programs)).hang is not None


def _computes(entry: object) -> bool:
    return isinstance(entry, Kernel) and entry.stream == "compute"


def _receives(entry: object) -> bool:
    return _is_labelled(entry, "receives")


def _is_labelled(entry: object, beginning: str) -> bool:
    return isinstance(entry, Kernel) and entry.parts[0].label.startswith(beginning)
