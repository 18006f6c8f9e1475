"""Recommendations: what is tried, what is refused and why, how two candidates are told apart, at any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec, strategy_label
from hpcbench.predict.candidate_points import (
    DeviceAllocation,
    leading_pipeline_points,
    non_pipeline_points,
    other_schedule_points,
)
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.machine import Machine, nominal_machine
from hpcbench.predict.peak_memory import MemoryBreakdown
from hpcbench.predict.prediction import (
    MemoryFit,
    NotPredicted,
    Prediction,
    PredictionBasis,
    PredictionInterval,
    format_need_and_limit,
)
from hpcbench.predict.recommend import (
    Recommendation,
    largest_batch_size,
    ratio_spread,
    recommend,
)
from hpcbench.predict.strategy_cost import find_cost
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.layer_table import LayerTable, read_shipped_table
from hpcbench.strategies.resolve import PartitionLimits

SELENE, _ = load_cluster("selene")
RESNET: dict[str, Any] = {"model": "resnet18", "dataset": "cifar10", "precision": "fp32"}
NOWHERE = PartitionLimits("nowhere")


def told(compute_s: float = 1.0, comm_s: float = 0.0, samples: int = 1, **more: Any) -> Prediction:
    step_time_s = compute_s + comm_s
    known: dict[str, Any] = {
        "step_time_s": step_time_s, "interval": PredictionInterval(low=step_time_s / 2, high=step_time_s * 2),
        "compute_s": compute_s, "comm_s": comm_s, "exposed_comm_s": comm_s, "bubble_fraction": 0.0, "straggler_s": 0.0,
        "samples_per_s": samples / step_time_s, "peak_memory_bytes": 1,
        "memory": MemoryBreakdown(parameters_bytes=1, gradients_bytes=0, optimizer_bytes=0, activations_bytes=0),
        "bound_by": "compute", "fits": True, "depth": "nominal", "source": "a test",
        "rests_on": PredictionBasis(kind="profile"),
    }  # fmt: skip
    return Prediction(**{**known, **more})


class Answers:
    """Prices by a function of the run, and memory: a byte for each sample of a micro-batch."""

    def __init__(self, price: Callable[[RunSpec], Prediction | NotPredicted], limit: int | None = None) -> None:
        self.price, self.limit, self.asked = price, limit, 0

    def predict(self, spec: RunSpec, *, quick: bool = False) -> Prediction | NotPredicted:
        self.asked += 1
        return self.price(spec)

    def memory_fit(self, spec: RunSpec) -> MemoryFit | NotPredicted:
        return MemoryFit(spec.batch_size // spec.micro_batches, self.limit)

    def machine(self, spec: RunSpec) -> Machine:
        return nominal_machine(SELENE, None, 8)


def by_samples(spec: RunSpec) -> Prediction:
    return told(1.0, samples=spec.global_batch_size)


def labels(found: Recommendation) -> list[str]:
    return [strategy_label(one.spec) for one in found.candidates]


def test_every_strategy_is_tried_somewhere() -> None:
    tried = {point["strategy"] for world in (DeviceAllocation(1, 1, {"batch_size": 8}), DeviceAllocation(2, 4, {"batch_size": 8}))
             for point in [*non_pipeline_points(RESNET, world), *leading_pipeline_points(RESNET, world)]}  # fmt: skip
    tried |= {point["strategy"] for point in other_schedule_points({})}
    priced = {key for key in STRATEGIES if find_cost(key) is not None}
    # It is one process over several devices, which no other strategy is.
    assert tried == priced - {"fairscale_pipe"}


def test_degrees_stay_inside_a_node_before_they_leave_it() -> None:
    points = list(non_pipeline_points(RESNET, DeviceAllocation(2, 4, {"batch_size": 8})))
    assert [one["tp_degree"] for one in points if one["strategy"] == "filter"] == [2, 4, 8]
    assert [one.get("options") for one in points if one["strategy"] == "fsdp"] == [None, {"shard_degree": 4}]
    lengths = {(one["pp_degree"], one["tp_degree"], one["dp_degree"])
               for one in leading_pipeline_points(RESNET, DeviceAllocation(2, 4, {"batch_size": 8}))}  # fmt: skip
    assert lengths == {(2, 1, 4), (2, 2, 2), (2, 4, 1), (4, 1, 2), (4, 2, 1), (8, 1, 1)}


def test_candidates_are_ranked_and_compared_by_their_ratio() -> None:
    times = {"ddp": told(1.0, 0.1, 16), "zero1": told(1.0, 0.2, 16), "fsdp": told(1.0, 9.0, 16)}
    answers = Answers(lambda spec: times.get(spec.strategy, NotPredicted("not asked about")))
    found = recommend(RESNET, DeviceAllocation(1, 2, {"batch_size": 8}), NOWHERE, answers)
    assert labels(found) == ["ddp", "zero1", "fsdp"]
    assert [one.is_told_apart for one in found.candidates] == [False, False, True]
    best, near, far = found.candidates
    assert (best.ratio, best.ratio_low, best.ratio_high) == (1.0, 1.0, 1.0)
    assert near.ratio == pytest.approx(1.2 / 1.1)
    assert near.ratio_low < 1 < near.ratio < near.ratio_high
    assert far.ratio == pytest.approx(10 / 1.1)


def test_a_shared_error_cancels_in_the_ratio_of_two_steps() -> None:
    machine = nominal_machine(SELENE, None, 8)
    own = 2**0.5 * 0.10
    assert ratio_spread(told(1.0, 1.0), told(3.0, 3.0), machine) == pytest.approx(own)
    apart = ratio_spread(told(1.0, 0.0), told(0.0, 1.0), machine)
    assert apart == pytest.approx((machine.compute.spread**2 + machine.comm.spread**2 + own**2) ** 0.5)


@pytest.mark.parametrize(("objective", "first"), [("samples_per_s", "many"), ("step_time_s", "short")])
def test_the_objective_determines_the_first_candidate(objective: str, first: str) -> None:
    times = {"ddp": told(2.0, samples=100), "fsdp": told(1.0, samples=10)}
    answers = Answers(lambda spec: times.get(spec.strategy, NotPredicted("not asked about")))
    found = recommend(RESNET, DeviceAllocation(1, 2, {"batch_size": 8}), NOWHERE, answers, objective)
    assert labels(found) == (["ddp", "fsdp"] if first == "many" else ["fsdp", "ddp"])


def test_micro_batches_shrink_until_a_candidate_fits_into_memory() -> None:
    found = recommend(RESNET, DeviceAllocation(1, 2, {"batch_size": 8}), NOWHERE, Answers(by_samples, limit=2))
    ddp = next(one for one in found.candidates if one.spec.strategy == "ddp")
    assert ddp.spec.micro_batches == 4
    assert {one.kind for one in found.refused} == {"limit"}


def test_an_excess_of_memory_is_refused_with_both_sizes() -> None:
    found = recommend(RESNET, DeviceAllocation(1, 2, {"batch_size": 8}), NOWHERE, Answers(by_samples, limit=0))
    assert found.candidates == []
    ddp = next(one for one in found.refused if one.strategy == "ddp")
    assert (ddp.kind, ddp.reason) == ("memory", "ddp: needs 1 B a rank at the least, there is 0 B")


@pytest.mark.parametrize(
    ("need_bytes", "limit_bytes", "texts"),
    [(3 * 2**30, 2**30, ("3.0 GiB", "1.0 GiB")), (1450 * 2**20, 1400 * 2**20, ("1450 MiB", "1400 MiB"))],
)
def test_need_and_limit_are_printed_with_differing_digits(
    need_bytes: int, limit_bytes: int, texts: tuple[str, str]
) -> None:
    assert format_need_and_limit(need_bytes, limit_bytes) == texts


def test_candidates_beyond_cluster_limits_are_refused_with_the_limit() -> None:
    found = recommend(
        RESNET, DeviceAllocation(4, 2, {"batch_size": 8}), PartitionLimits("small", max_nodes=2), Answers(by_samples)
    )
    assert found.candidates == []
    assert {one.reason for one in found.refused if one.strategy == "ddp"} == {"4 nodes, but small allows 2"}


@pytest.mark.parametrize("limit", [8, 9, 100, 1000])
def test_the_largest_fitting_batch_is_near_the_limit(limit: int) -> None:
    spec = RunSpec(**RESNET, strategy="ddp", batch_size=8, dp_degree=2, nodes=2)
    found = largest_batch_size(spec, Answers(by_samples, limit))
    assert found is not None
    # Halving stops where a step would change little.
    assert found <= limit <= found * 65 / 64 + 1
    in_parts = largest_batch_size(msgspec.structs.replace(spec, micro_batches=4), Answers(by_samples, limit))
    assert in_parts is not None
    assert in_parts % 4 == 0
    assert in_parts // 4 <= limit
    assert largest_batch_size(spec, Answers(by_samples)) is None
    assert largest_batch_size(spec, Answers(by_samples, 10**9)) == 25_000


def test_a_hundred_thousand_devices_take_few_evaluations() -> None:
    few, many = (
        recommend(
            {"model": "gpt_13b", "dataset": "tokens", "precision": "bf16"}, DeviceAllocation(nodes, 8, {"batch_size": 8}),
            NOWHERE, Forecast(SELENE),
        )
        for nodes in (2, 12_500)
    )  # fmt: skip
    assert 10 < many.priced < 100
    assert many.priced < 2 * few.priced
    assert labels(many)[0] == "fsdp"
    assert {one.kind for one in many.refused} == {"limit", "memory"}
    ddp = next(one for one in many.refused if one.strategy == "ddp")
    assert ddp.reason.endswith("a rank at the least, there is 73.9 GiB")


@pytest.mark.parametrize(("like", "dataset"), [("vgg11", "cifar10"), ("gpt", "tokens")])
def test_a_custom_model_is_recommended_by_its_layer_table(like: str, dataset: str) -> None:
    class Looked(Forecast):
        def table(self, spec: RunSpec) -> LayerTable | NotPredicted:
            return read_shipped_table(like, dataset) or NotPredicted("no table")

    base = {"model": "mine:net", "dataset": dataset, "precision": "fp32"}
    found = recommend(base, DeviceAllocation(2, 2, {"batch_size": 8}), NOWHERE, Looked(SELENE))
    assert not [one.reason for one in found.refused if "formulas fail" in one.reason]
    ran = {one.spec.strategy for one in found.candidates}
    assert {"ddp", "1f1b"} <= ran
    assert ({"filter", "spatial"} <= ran, "tensor" in ran) == (like == "vgg11", like == "gpt")


def test_the_memory_of_strategies_is_predicted_independently() -> None:
    forecast = Forecast(SELENE)
    of = {
        key: RunSpec(**RESNET, strategy=key, batch_size=8, nodes=2, dp_degree=2) for key in ("fsdp", "fairscale_sddp")
    }
    before = forecast.memory_fit(of["fsdp"])
    forecast.memory_fit(of["fairscale_sddp"])
    assert forecast.memory_fit(of["fsdp"]) == before
