"""The order of actions and exchanges of pipeline ranks: literal tables, and one sequence behind all programs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcbench.strategies.pipeline.exchange_order import Exchange, RankProgram, exchange_order, pipeline_links
from hpcbench.strategies.pipeline.schedules import Action, PipelineLayout, message_after, schedule_actions
from hpcbench.strategies.pipeline.weight_versions import Staleness, stage_step_actions


def drawn(schedule: str, layout: PipelineLayout, micro_batches: int) -> list[str]:
    """A row per rank: ``F0`` computes, ``>F0`` sends and ``<F0`` receives it; with virtual stages ``F0`` of chunk 0."""
    return draw(exchange_order(schedule_actions(schedule, layout, micro_batches), layout), layout)


def draw(programs: list[RankProgram], layout: PipelineLayout) -> list[str]:
    def name(action: Action) -> str:
        return f"{action.kind}{action.micro_batch}" + (f".{action.chunk}" if layout.virtual_stages > 1 else "")

    def text(rank: int, entry: Action | Exchange) -> str:
        if isinstance(entry, Action):
            return name(entry)
        return "".join(("><"[message.target == rank]) + name(message.action) for message in entry.messages)

    return [" ".join(text(rank, entry) for entry in program) for rank, program in enumerate(programs)]


def test_the_exchange_order_of_gpipe_is_literal() -> None:
    assert drawn("gpipe", PipelineLayout(3), 3) == [
        "F0 >F0 F1 >F1 F2 >F2 <B2 B2 <B1 B1 <B0 B0",
        "<F0 F0 <F1 >F0 F1 <F2 >F1 F2 >F2 <B2 B2 >B2 <B1 B1 >B1 <B0 B0 >B0",
        "<F0 F0 <F1 F1 <F2 F2 B2 >B2 B1 >B1 B0 >B0",
    ]


def test_the_exchange_order_of_1f1b_is_literal() -> None:
    assert drawn("1f1b", PipelineLayout(2), 3) == [
        "F0 >F0 F1 >F1 <B0 B0 F2 <B1>F2 B1 <B2 B2",
        "<F0 F0 <F1 B0 >B0 F1 B1 >B1<F2 F2 B2 >B2",
    ]


def test_the_exchange_order_of_interleaved_1f1b_is_literal() -> None:
    assert drawn("interleaved_1f1b", PipelineLayout(2, 2), 2) == [
        "F0.0 >F0.0 F1.0 >F1.0<F0.1 F0.2 <F1.1>F0.2 F1.2 >F1.2 <B0.3 B0.2 >B0.2<B1.3 B1.2 >B1.2<B0.1 B0.0 <B1.1 B1.0",
        "<F0.0 F0.1 <F1.0>F0.1 F1.1 >F1.1<F0.2 F0.3 <F1.2 B0.3 >B0.3 F1.3 B1.3 <B0.2>B1.3 B0.1 <B1.2>B0.1 B1.1 >B1.1",
    ]


def test_the_exchange_order_of_zero_bubble_is_literal() -> None:
    assert drawn("zero_bubble", PipelineLayout(2), 3) == [
        "F0 >F0 F1 >F1 <I0 I0 W0 <I1 F2 >F2 I1 W1 <I2 I2 W2",
        "<F0 F0 <F1 I0 >I0 F1 I1 >I1 W0 <F2 F2 I2 >I2 W1 W2",
    ]


def test_the_exchange_order_of_pipedream_steps_is_literal() -> None:
    """In a later step rank 0 is one forward pass ahead: the last step has brought its result to rank 1."""
    layout, staleness = PipelineLayout(2), Staleness(2)
    first, second = (
        [stage_step_actions(layout, staleness, rank, 2, 2, is_first) for rank in range(2)] for is_first in (True, False)
    )
    assert draw(exchange_order(first, layout), layout) == [
        "F0 >F0 F1 >F1 <B0 B0 U0 F2 <B1>F2 B1 U1",
        "<F0 F0 <F1 B0 >B0 U0 F1 B1 >B1<F2 U1",
    ]
    assert draw(exchange_order(second, layout), layout) == [
        "F1 >F1 <B0 B0 U0 F2 <B1>F2 B1 U1",
        "F0 <F1 B0 >B0 U0 F1 B1 >B1<F2 U1",
    ]


def test_all_ranks_open_links_in_one_order() -> None:
    layout = PipelineLayout(4, 2)
    assert pipeline_links(schedule_actions("interleaved_1f1b", layout, 4), layout) == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert pipeline_links(schedule_actions("1f1b", PipelineLayout(3), 4), PipelineLayout(3)) == [(0, 1), (1, 2)]


def check_one_sequence(ranks: list[list[Action]], layout: PipelineLayout) -> None:
    """Ranks that finish every entry before the next one get to their ends, and have what each action needs."""
    programs = exchange_order(ranks, layout)
    assert [[entry for entry in program if isinstance(entry, Action)] for program in programs] == ranks
    computed = {action for actions in ranks for action in actions}
    done: list[set[Action]] = [set() for _ in ranks]
    positions = [0] * len(ranks)
    progress = True
    while progress:
        progress = False
        heads = [p[at] if at < len(p) else None for p, at in zip(programs, positions, strict=True)]
        for rank, entry in enumerate(heads):
            if isinstance(entry, Action):
                needed = entry._replace(chunk=entry.chunk + (-1 if entry.kind == "F" else 1))
                if entry.kind not in ("W", "U") and needed in computed:
                    assert needed in done[rank], f"{entry} before {needed} has arrived"
                done[rank].add(entry)
            elif entry is None or entry.link[0] != rank or heads[entry.link[1]] != entry:
                continue
            else:
                assert len({message.source for message in entry.messages}) == len(entry.messages)
                for message in entry.messages:
                    assert message.action in done[message.source], f"{message} is sent before it is computed"
                    done[message.target].add(message.action)
                positions[entry.link[1]] += 1
            positions[rank] += 1
            progress = True
    assert positions == list(map(len, programs)), "ranks wait for each other"
    exchanged = [
        message
        for program in programs
        for entry in program
        if isinstance(entry, Exchange)
        for message in entry.messages
    ]
    after_actions = (message_after(action, layout) for action in computed)
    expected = [message for message in after_actions if message is not None]
    assert sorted(exchanged) == sorted(expected * 2)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["model", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 12),
)
def test_one_sequence_orders_all_programs_of_a_schedule(
    schedule: str, stages: int, virtual_stages: int, micro_batches: int
) -> None:
    layout = PipelineLayout(stages, virtual_stages if schedule == "interleaved_1f1b" else 1)
    check_one_sequence(schedule_actions(schedule, layout, micro_batches), layout)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("replicas", [(2, 1), (2, 1, 1), (1, 3, 2)])
def test_one_sequence_orders_stages_with_replicas(schedule: str, replicas: tuple[int, ...]) -> None:
    layout = PipelineLayout(len(replicas), 1, replicas)
    for micro_batches in range(max(replicas), 9):
        check_one_sequence(schedule_actions(schedule, layout, micro_batches), layout)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 8), st.booleans(), st.booleans())
def test_one_sequence_orders_every_step_of_pipedream(
    stages: int, count: int, next_count: int, double_buffered: bool, is_first: bool
) -> None:
    layout, staleness = PipelineLayout(stages), Staleness(stages, double_buffered=double_buffered)
    ranks = [stage_step_actions(layout, staleness, rank, count, next_count, is_first) for rank in range(stages)]
    check_one_sequence(ranks, layout)
