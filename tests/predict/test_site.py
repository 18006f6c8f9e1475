"""Factors of a site: nothing without runs, the right ones from runs, and what a run more would determine."""

from __future__ import annotations

from dataclasses import replace
from math import exp, sqrt

import pytest

from hpcbench.predict.decoder.layout import GpuNode, Layout, nominal_rates
from hpcbench.predict.decoder.machines import fitted_machine
from hpcbench.predict.decoder.site import (
    CONFIGURATION_SPREAD,
    PRIOR_LOGS,
    SITE_FACTORS,
    Site,
    SiteRun,
    gradient,
    learn_site,
    site_step,
    site_terms,
)
from hpcbench.predict.decoder.work import step_work
from hpcbench.strategies.decoder_shapes import named_shape

A100 = fitted_machine("a100-80gb-sxm")
SHAPE = named_shape("llama_8b")


def layout_of(tensor: int, pipeline: int = 1, micro_batch: int = 1, gpus: int = 32) -> Layout:
    replicas = gpus // tensor // pipeline
    return Layout(
        gpus=gpus, sequence=4096, micro_batch=micro_batch, global_batch=replicas * micro_batch * 8, replicas=replicas,
        zero=1, tensor=tensor, pipeline=pipeline, software="megatron", overlap=False,
    )  # fmt: skip


def run_of(layout: Layout, logs: tuple[float, ...] = PRIOR_LOGS, slower: float = 1.0) -> SiteRun:
    node = A100.device
    work, figures = step_work(SHAPE, layout, node, nominal_rates(node, layout.gpus)), A100.figures_of("megatron")
    key = f"tp{layout.tensor} pp{layout.pipeline} mb{layout.micro_batch} on {layout.gpus}"
    return SiteRun(key, work, figures, slower * site_step(work, figures, logs).total_s)


def logs_with(changes: dict[str, float]) -> tuple[float, ...]:
    assert set(changes) <= set(SITE_FACTORS)
    return tuple(changes.get(name, 0.0) for name in SITE_FACTORS)


LAYOUTS = [layout_of(1), layout_of(2), layout_of(4), layout_of(8), layout_of(2, 4), layout_of(4, 2, 2), layout_of(1, 8)]


def test_a_site_without_runs_changes_nothing() -> None:
    site, run = learn_site([]), run_of(LAYOUTS[2])
    assert site == Site()
    assert site_step(run.work, run.figures, site.logs).total_s == run.measured_s
    assert site.own_log(run.key) == (0.0, CONFIGURATION_SPREAD**2)


@pytest.mark.parametrize(
    "logs",
    [
        logs_with({"whole step": -0.2}),
        logs_with({"tensor parallel messages": -0.8}),
        logs_with({"products": -0.1, "data parallel rates": -0.7}),
        logs_with({"messages between stages": -1.0, "memory-bound kernels": 0.2}),
    ],
)
def test_runs_of_some_layouts_predict_the_others(logs: tuple[float, ...]) -> None:
    known, rest = LAYOUTS[:5], LAYOUTS[5:]
    site = learn_site([run_of(layout, logs) for layout in known])
    for layout in rest:
        before, truth = run_of(layout), run_of(layout, logs)
        assert truth.measured_s is not None
        assert before.measured_s is not None
        step_s = site_step(truth.work, truth.figures, site.logs).total_s
        assert abs(step_s / truth.measured_s - 1) < max(0.03, 0.35 * abs(before.measured_s / truth.measured_s - 1))


def test_the_terms_of_a_site_are_its_step() -> None:
    run, logs = run_of(LAYOUTS[4]), logs_with({"tensor parallel messages": -0.5, "whole step": 0.1})
    terms = site_terms(run.work, run.figures, logs)
    parts = terms.own_s + terms.traffic_s + terms.bubble + terms.straggling
    assert parts == pytest.approx(site_step(run.work, run.figures, logs).total_s)


def test_a_gradient_is_the_change_of_the_step() -> None:
    run = run_of(LAYOUTS[3])
    slopes = gradient(run.work, run.figures, PRIOR_LOGS)
    for place, slope in enumerate(slopes):
        moved = tuple(0.001 * (number == place) for number in range(len(SITE_FACTORS)))
        ratio = site_step(run.work, run.figures, moved).total_s / (run.measured_s or 0.0)
        assert ratio == pytest.approx(exp(0.001 * slope), rel=2e-5)
    assert slopes[-1] == -1.0
    assert max(slopes) <= 0.0, "a faster term makes no step slower"


def test_without_a_run_a_site_is_as_if_it_had_not_been_made() -> None:
    runs = [run_of(layout, logs_with({"tensor parallel messages": -0.3})) for layout in LAYOUTS]
    rest = [run for run in runs if run is not runs[3]]
    left, learned = learn_site(runs).without(runs[3].key), learn_site(rest)
    assert [run.key for run in left.runs] == [run.key for run in rest]
    for own, other in zip(left.logs, learned.logs, strict=True):
        assert own == pytest.approx(other, abs=0.02)
    assert left.without("no such run") == left


def test_further_runs_narrow_the_interval_and_a_run_alike_narrows_most() -> None:
    target, like, unlike = run_of(layout_of(8, micro_batch=2)), run_of(layout_of(8)), run_of(layout_of(1, 8))
    slopes = gradient(target.work, target.figures, PRIOR_LOGS)
    before = Site().variance(slopes)
    after = [Site().with_run(gradient(run.work, run.figures, PRIOR_LOGS)).variance(slopes) for run in (like, unlike)]
    assert after[0] < after[1] < before
    assert learn_site([like]).variance(slopes) == pytest.approx(after[0], rel=0.05)


def test_a_run_that_contradicts_the_others_is_named_and_does_not_lead() -> None:
    runs = [run_of(layout) for layout in LAYOUTS[:6]]
    wrong = run_of(layout_of(2, micro_batch=2), slower=2.0)
    site = learn_site([*runs, wrong])
    assert [run.key for run, _ in site.contradictions()] == [wrong.key]
    assert site.contradictions()[0][1] > 1.5
    for run in runs:
        assert site_step(run.work, run.figures, site.logs).total_s == pytest.approx(run.measured_s, rel=0.12)
    assert learn_site(runs).contradictions() == []


def test_the_own_run_of_a_configuration_counts_most() -> None:
    run = run_of(LAYOUTS[0])._replace(launches=4)
    odd = run._replace(measured_s=1.2 * (run.measured_s or 0.0))
    site = learn_site([odd])
    own_log, variance = site.own_log(odd.key)
    predicted_s = site_step(odd.work, odd.figures, site.logs).total_s * exp(own_log)
    assert predicted_s == pytest.approx(odd.measured_s, rel=0.01)
    assert sqrt(variance) < CONFIGURATION_SPREAD / 4


def test_measured_memory_moves_the_memory_of_other_runs() -> None:
    runs = [run._replace(measured_s=None, memory_ratio=1.5) for run in map(run_of, LAYOUTS[:4])]
    site = learn_site(runs)
    assert site.logs == PRIOR_LOGS
    assert 1.45 < site.memory_factor < 1.5
    assert 1.3 < learn_site(runs[:1]).memory_factor < site.memory_factor
    assert learn_site([run._replace(memory_ratio=None) for run in runs]).memory_factor == 1.0
    odd = run_of(LAYOUTS[4])._replace(memory_ratio=9.0)
    without_it = learn_site([*runs, odd]).without(odd.key)
    assert without_it.memory_factor == site.memory_factor, "a score leaves the memory of the run itself out, too"


def test_groups_without_links_of_their_own_share_the_rate_and_cross_sockets() -> None:
    node = replace(A100.device, is_shared=True)

    def tensor_s(device: GpuNode, tensor: int) -> float:
        return step_work(SHAPE, layout_of(tensor), device, nominal_rates(device, 32)).layer_tensor_s

    assert tensor_s(node, 4) == tensor_s(A100.device, 4), "a group inside a socket"
    assert tensor_s(node, 8) == pytest.approx(tensor_s(A100.device, 8) / 0.65), "a group of both sockets"
    shared, alone = (
        step_work(SHAPE, layout_of(2, gpus=8), device, nominal_rates(device, 8)).reduce_s
        for device in (node, A100.device)
    )
    assert shared == pytest.approx(alone * 2 / 0.65), "two groups of replicas at a time, each of both sockets"


def test_groups_that_share_the_optimizer_gather_inside_their_node() -> None:
    whole = layout_of(1, gpus=64)
    work = {
        shards: step_work(SHAPE, replace(whole, optimizer_shards=shards), A100.device, nominal_rates(A100.device, 64))
        for shards in (0, 8, 16)
    }
    assert [work[shards].gather_is_wide for shards in (0, 8, 16)] == [1.0, 0.0, 1.0]
    assert [work[shards].gather_nodes for shards in (0, 8, 16)] == [8.0, 1.0, 2.0]
    assert work[8].gather_s < work[16].gather_s < work[0].gather_s
    assert work[8].reduce_s > 1.5 * work[0].reduce_s, "gradients are summed over all replicas: two passes"
    assert work[8].optimizer_s == pytest.approx(8 * work[0].optimizer_s)
