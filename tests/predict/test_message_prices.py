"""Messages take what was measured; other sizes and groups follow the formulas with the measured links."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis.strategies import floats, tuples

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.collective_formulas import GroupLinks, HockneyLink, collective_s
from hpcbench.predict.message_prices import (
    CommParameters,
    MeasuredMessage,
    MeasuredOverlap,
    MessagePrices,
    slowdowns,
    workload_key,
)
from hpcbench.strategies.traffic import MessageShape

PROFILE_LINKS = (HockneyLink(5e-6, 1e-10), HockneyLink(2e-5, 1e-9))
TRUE = HockneyLink(3e-4, 3e-9)
SIZES = [1024 * 4**power for power in range(8)]


def comm(messages: list[MeasuredMessage], **more: Any) -> CommParameters:
    intra, inter = more.pop("links", PROFILE_LINKS)
    return CommParameters(intra_node=intra, inter_node=inter, trees=False, messages=messages,
                          measured_links=PROFILE_LINKS, **more)  # fmt: skip


def shape(size: int, operation: str = "all_reduce", ranks: int = 2, rivals: int = 1) -> MessageShape:
    return MessageShape(operation, ranks, 1, rivals, size)


def true_s(of: MessageShape) -> float:
    links = TRUE._replace(beta_s_per_byte=TRUE.beta_s_per_byte * of.rivals)
    return collective_s(of.operation, GroupLinks(of.ranks, of.ranks, links, links, trees=False), of.payload_bytes)


def measured(of: MessageShape, factor: float = 1.0) -> MeasuredMessage:
    return MeasuredMessage(shape=of, tasks_per_node=of.rivals, seconds=factor * true_s(of))


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send"])
def test_the_links_follow_from_the_smallest_and_the_largest_message(operation: str) -> None:
    prices = MessagePrices(comm([measured(shape(size, operation)) for size in SIZES]))
    for size in (SIZES[0], 5000, SIZES[-1]):
        assert [*prices.price(shape(size, operation), 1)] == [
            pytest.approx(true_s(shape(size, operation)), rel=1e-6), pytest.approx(true_s(shape(1, operation)), rel=1e-3),
            True,
        ]  # fmt: skip
    # More ranks, and larger messages: by the formula with these links.
    other = shape(4 * SIZES[-1], operation, ranks=2 if operation == "send" else 8)
    assert [*prices.price(other, 1)] == [
        pytest.approx(true_s(other), rel=1e-6), pytest.approx(true_s(other._replace(payload_bytes=0)), rel=1e-6), False
    ]  # fmt: skip


def test_what_the_formula_misses_between_two_sizes_is_interpolated() -> None:
    factors = [1.0, 1.0, 1.5, 2.0, 2.0, 1.5, 1.0, 1.0]
    known = comm([measured(shape(size), factor) for size, factor in zip(SIZES, factors, strict=True)])
    prices = MessagePrices(known)
    for size, factor in zip(SIZES, factors, strict=True):
        assert prices.price(shape(size), 1).seconds == pytest.approx(factor * true_s(shape(size)), rel=1e-6)
    between = prices.price(shape(2 * SIZES[2]), 1).seconds / true_s(shape(2 * SIZES[2]))
    assert between == pytest.approx((1.5 * 2.0) ** 0.5, rel=1e-6)
    assert 0.1 < MessagePrices(known).interpolation_error() < 0.5
    assert MessagePrices(comm([measured(shape(size)) for size in SIZES])).interpolation_error() < 1e-6


def test_groups_that_send_at_the_same_time_take_what_the_most_similar_did() -> None:
    alone = [measured(shape(size)) for size in SIZES]
    fair = MessagePrices(comm(alone))
    large = shape(SIZES[-1], rivals=2)
    assert fair.price(large, 2).seconds == pytest.approx(true_s(large), rel=0.01)
    together = MessagePrices(comm([*alone, *(measured(shape(size, rivals=4), 0.5) for size in SIZES)]))
    assert together.price(shape(SIZES[-1], rivals=4), 4).seconds == pytest.approx(
        0.5 * true_s(shape(SIZES[-1], rivals=4))
    )
    assert together.price(shape(SIZES[-1], rivals=3), 4).seconds < fair.price(shape(SIZES[-1], rivals=3), 4).seconds


def test_an_operation_that_was_not_measured_is_as_all_reduce_and_a_link_as_the_profile() -> None:
    prices = MessagePrices(comm([measured(shape(size)) for size in SIZES]))
    assert [*prices.price(shape(SIZES[3], "all_gather"), 1)] == [
        pytest.approx(true_s(shape(SIZES[3], "all_gather")), rel=1e-6), pytest.approx(TRUE.latency_s), False
    ]  # fmt: skip
    inside = MessageShape("all_reduce", 2, 2, 1, SIZES[3])
    links = PROFILE_LINKS[0]
    nominal_s = collective_s("all_reduce", GroupLinks(2, 1, links, links, trees=False), SIZES[3])
    assert [*prices.price(inside, 2)] == [pytest.approx(nominal_s), pytest.approx(2 * links.latency_s), False]


def test_times_per_byte_go_with_the_profiles_link_and_latencies_stay() -> None:
    messages = [measured(shape(size)) for size in SIZES]
    faster = comm(messages, links=(PROFILE_LINKS[0], HockneyLink(1e-6, 1e-10)))
    (then, then_latency_s, _), (now, now_latency_s, is_measured) = (
        MessagePrices(one).price(shape(SIZES[-1]), 1) for one in (comm(messages), faster)
    )
    assert now - now_latency_s == pytest.approx((then - then_latency_s) / 10, rel=1e-6)
    assert now_latency_s == pytest.approx(then_latency_s)
    assert not is_measured


def spec(**more: Any) -> RunSpec:
    fields: dict[str, Any] = {"model": "vit", "dataset": "cifar10", "strategy": "ddp", "batch_size": 8}
    return RunSpec(**(fields | more))


def overlap(slowdown: float, of: RunSpec, **more: Any) -> MeasuredOverlap:
    fields: dict[str, Any] = {"workload": workload_key(of), "samples": of.batch_size, "nodes": of.nodes, "comm_slowdown": 3.0,
              "tasks_per_node": of.tasks_per_node, "operation": "all_reduce", "slowdown": slowdown} | more  # fmt: skip
    return MeasuredOverlap(**fields)


def test_a_run_overlaps_as_the_most_similar_pass_did() -> None:
    runs = [spec(nodes=2), spec(nodes=8), spec(nodes=2, model="vgg11"), spec(tasks_per_node=2)]
    known = comm([], overlaps=[overlap(1.1 + number / 10, run) for number, run in enumerate(runs)])
    for number, run in enumerate(runs):
        assert [*slowdowns(known, run, "all_reduce")] == [pytest.approx(1.1 + number / 10), 3.0, True]
    # The nearest number of nodes; another operation and another model are not their own.
    assert [*slowdowns(known, spec(nodes=3), "all_reduce")] == [pytest.approx(1.1), 3.0, True]
    assert [*slowdowns(known, spec(nodes=2), "all_gather")] == [pytest.approx(1.1), 3.0, False]
    assert slowdowns(known, spec(nodes=2, model="resnet18"), "all_reduce").is_measured is False
    assert slowdowns(comm([]), spec(nodes=2), "all_reduce") == (1.0, 1.0, False)


@given(found=tuples(floats(1.0, 10.0), floats(1.0, 20.0)), rates=tuples(floats(0.01, 100.0), floats(0.01, 100.0)))
def test_a_faster_link_takes_no_longer_and_computation_is_no_faster_beside_it(
    found: tuple[float, float], rates: tuple[float, float]
) -> None:
    run = spec(nodes=2)
    known = comm([], overlaps=[overlap(found[0], run, comm_slowdown=found[1])])

    def at(rate: float) -> Any:
        link = PROFILE_LINKS[1]._replace(beta_s_per_byte=PROFILE_LINKS[1].beta_s_per_byte / rate)
        return slowdowns(msgspec.structs.replace(known, inter_node=link), run, "all_reduce")

    low, high = sorted(rates)
    slow, fast = at(low), at(high)
    almost = 1 + 1e-9
    assert min(slow.computation, slow.collective) * almost >= 1.0
    assert fast.computation * almost >= slow.computation
    assert fast.collective / high <= slow.collective / low * almost
    assert [*at(1.0)] == [pytest.approx(found[0]), pytest.approx(found[1]), True]
