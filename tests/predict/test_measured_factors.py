"""Factors learned from measured configurations: shrinkage by hand, what is held out, intervals, what they rest on."""

from __future__ import annotations

from math import exp, sqrt
from typing import Any

import pytest
from msgspec.structs import replace

from hpcbench.config.run_spec import RunSpec, config_id
from hpcbench.predict.measured_factors import (
    CELL_SPREAD,
    MACHINE_SPREAD,
    MODEL_SPREAD,
    PRIOR_SPREAD,
    STRATEGY_SPREAD,
    MeasuredFactors,
    MeasuredRatio,
    counted_phrase,
    strategy_key,
)
from hpcbench.predict.prediction import PredictionInterval, correct_prediction
from tests.predict.test_recommend import told


def spec_of(strategy: str = "ddp", model: str = "resnet18", nodes: int = 2, **more: Any) -> RunSpec:
    degrees = {"dp_degree": nodes} if strategy in ("ddp", "fsdp") else {"tp_degree": nodes}
    return RunSpec(model=model, dataset="cifar10", strategy=strategy, batch_size=8, nodes=nodes, **{**degrees, **more})


def ratio_of(spec: RunSpec, factor: float, launches: int = 2) -> MeasuredRatio:
    return MeasuredRatio(config_id(spec), spec, (factor,) * launches, factor, 1.0)


def learned(ratios: list[MeasuredRatio], spec: RunSpec, *, held_out: bool = False) -> Any:
    return MeasuredFactors(ratios).learned(spec, config_id(spec), held_out=held_out)


def test_several_measurements_equal_the_whole_normal_posterior() -> None:
    """The equations over cells equal the conditional normal distribution of all configurations, computed densely."""
    numpy = pytest.importorskip("numpy")
    specs = [spec_of(strategy, model, nodes) for strategy in ("ddp", "filter") for model in ("resnet18", "vgg11")
             for nodes in (2, 4)][:-1]  # fmt: skip
    ratios = [ratio_of(spec, 1 + 0.1 * place, 1 + place % 2) for place, spec in enumerate(specs)]
    target = spec_of("filter", "vgg11", nodes=4)
    factors = MeasuredFactors(ratios)
    found = factors.learned(target, config_id(target))
    assert found is not None
    everything = [*specs, target]

    def prior(left: RunSpec, right: RunSpec) -> float:
        same_model, same_strategy = left.model == right.model, strategy_key(left) == strategy_key(right)
        cell = CELL_SPREAD**2 * (same_model and same_strategy)
        return MACHINE_SPREAD**2 + MODEL_SPREAD**2 * same_model + STRATEGY_SPREAD**2 * same_strategy + cell

    kernel = numpy.array([[prior(left, right) for right in everything] for left in everything])
    launch = 10 * 0.05**2 / (10 + sum(len(ratio.launches_s) - 1 for ratio in ratios))
    own = found.spread**2 - launch
    noise = numpy.diag([own + launch / len(ratio.launches_s) for ratio in ratios])
    gain = numpy.linalg.solve(kernel[:-1, :-1] + noise, kernel[:-1, -1])
    assert found.log_factor == pytest.approx(float(gain @ [ratio.log_ratio for ratio in ratios]))
    rest = kernel[-1, -1] - float(gain @ kernel[:-1, -1])
    assert found.undetermined == pytest.approx(rest / PRIOR_SPREAD**2)


def test_intervals_narrow_with_measurements_and_widen_with_scatter() -> None:
    specs = [spec_of(nodes=nodes) for nodes in (2, 4, 8, 16, 32)]
    target = spec_of(nodes=64)
    found = [learned([ratio_of(spec, 1.5) for spec in specs[:count]], target) for count in (1, 2, 5)]
    assert [*sorted((one.undetermined for one in found), reverse=True)] == [one.undetermined for one in found]
    assert [*sorted(one.factor for one in found)] == [one.factor for one in found]
    assert 1 < found[-1].factor < 1.5
    scattered = learned([ratio_of(spec, 1.5 * (1, 2)[place % 2]) for place, spec in enumerate(specs)], target)
    assert scattered.spread > 2 * found[-1].spread


def test_a_configurations_own_results_are_held_out() -> None:
    ratios = [ratio_of(spec_of(nodes=2), 3.0), ratio_of(spec_of(nodes=4), 1.0), ratio_of(spec_of(nodes=8), 1.0)]
    held_out = learned(ratios, spec_of(nodes=2), held_out=True)
    assert held_out == learned(ratios[1:], spec_of(nodes=2))
    assert held_out.factor == pytest.approx(1.0)
    assert learned(ratios, spec_of(nodes=2)).factor > 1.3
    assert learned(ratios[:1], spec_of(nodes=2), held_out=True) is None
    assert learned([], spec_of()) is None


def test_neighbours_are_named_the_nearest_first() -> None:
    near = [spec_of(nodes=4), spec_of(model="vgg11"), spec_of("filter"), spec_of("filter", "vgg11")]
    found = learned([ratio_of(spec, 1.0) for spec in [*reversed(near), spec_of()]], spec_of())
    kinds = ["itself", "model and strategy", "strategy", "model", "cluster"]
    assert [(one.config_id, one.like) for one in found.neighbours] == [
        *zip(map(config_id, [spec_of(), *near]), kinds, strict=True)
    ]
    assert found.counts == dict.fromkeys(kinds, 1)
    assert counted_phrase(found.counts) == "itself"
    assert counted_phrase({"strategy": 3, "cluster": 9}) == "3 of strategy"
    # Groups with replicas, and a single rank, are not like the whole.
    keys = {strategy_key(spec) for spec in (spec_of("filter"), spec_of("filter", dp_degree=2, nodes=4, tp_degree=2))}
    assert len(keys) == 2


def test_a_prediction_is_moved_as_a_whole() -> None:
    prediction = told(1.5, 0.5, 16, interval=PredictionInterval(low=1.0, high=8.0))
    factor = learned([ratio_of(spec_of(nodes=nodes), 1.5) for nodes in (2, 4, 8)], spec_of(nodes=16))
    moved = correct_prediction(prediction, factor)
    times = (moved.step_time_s, moved.compute_s, moved.comm_s, moved.exposed_comm_s, 1 / moved.samples_per_s)
    assert times == pytest.approx([factor.factor * value for value in (2.0, 1.5, 0.5, 0.5, 1 / 8)])
    spread = sqrt(factor.undetermined * PRIOR_SPREAD**2 + factor.spread**2)
    assert moved.interval.high == pytest.approx(moved.step_time_s * exp(1.645 * spread))
    assert moved.interval.high / moved.step_time_s < prediction.interval.high / prediction.step_time_s
    assert (moved.rests_on.kind, moved.rests_on.counts) == ("measured neighbours", {"model and strategy": 3})
    # An interval that was narrow is not widened, unless the configurations themselves scatter more.
    between = (factor.spread + spread) / 2
    narrow = PredictionInterval(low=2.0 * exp(-1.645 * between), high=2.0 * exp(1.645 * 0.01))
    kept = correct_prediction(replace(prediction, interval=narrow), factor).interval
    assert kept.low == pytest.approx(moved.step_time_s * exp(-1.645 * between))
    assert kept.high == pytest.approx(moved.step_time_s * exp(1.645 * factor.spread))
