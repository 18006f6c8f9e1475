"""Predictions for sites without published runs: the committed files, new devices, and the run to make next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.oracle import exam2
from benchmarks.oracle.unseen import predicted_s, regret, regret_of_measured
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.errors import ConfigError
from hpcbench.predict.decoder.layout import GpuNode, Layout, nominal_rates
from hpcbench.predict.decoder.layout_search import LayoutWish, rank_layouts
from hpcbench.predict.decoder.machines import LEARNED, fit_interval_s, fitted_machine
from hpcbench.predict.decoder.pricing import step_time
from hpcbench.predict.decoder.site import SITE_FACTORS, SiteRun, learn_site
from hpcbench.predict.decoder.work import step_work
from hpcbench.predict.fitted_decoders import PricedCommand, machine_of_profile, predict_command
from hpcbench.strategies.decoder_shapes import named_shape

SHAPE = named_shape("llama_8b")
H100 = fitted_machine("h100-80gb-sxm")
WISH = LayoutWish(gpus=16, sequence=4096, global_batch=64, software="megatron")


def test_the_committed_predictions_are_repeated() -> None:
    assert exam2.check() == []


def test_every_row_has_a_prediction_for_each_number_of_pilots() -> None:
    rows = {row["id"] for own in exam2.read_table(exam2.CONFIGS).values() for row in own}
    lines = [line.split(",") for line in exam2.PREDICTIONS.read_text(encoding="utf-8").splitlines()[1:]]
    for pilots in ("0", "5", "all"):
        assert sorted(line[1] for line in lines if line[0] == pilots) == sorted(rows)
    for _, _, step, low, high, memory in lines:
        assert 0 < float(low) < float(step) < float(high)
        assert 0 < float(memory) < 400


@pytest.mark.parametrize("cluster", ["b200-180gb-ib", "a100-80gb-pcie", "mi300x-192gb-ib", "vista", "lumi-g"])
def test_a_device_without_runs_has_its_own_peaks_and_mean_efficiencies(cluster: str) -> None:
    profile, _ = load_cluster(cluster)
    device = profile.devices[str(profile.node.device_type)]
    machine = machine_of_profile(profile, None, 8)
    assert machine.device.peak_flops == device.peak_flops_per_s["bf16"]
    assert machine.device.memory_bytes_s == device.memory_bandwidth_bytes_per_s
    first, second = (fitted_machine(name).figures["memory"] for name in LEARNED)
    assert machine.figures["memory"] == pytest.approx((first * second) ** 0.5)
    assert machine.figures_of("megatron").matmul <= machine.device.best_product
    layout = Layout(gpus=8, sequence=4096, micro_batch=1, global_batch=64, replicas=8, zero=1, software="megatron")
    work = step_work(SHAPE, layout, machine.device, nominal_rates(machine.device, layout.gpus))
    step_s = step_time(work, machine.figures_of("megatron")).total_s
    tokens = layout.global_batch * layout.sequence
    rate = tokens * SHAPE.flops_per_token(layout.sequence) / step_s / layout.gpus
    assert 0.15 < rate / machine.device.peak_flops < 0.85
    assert fit_interval_s(step_s, layout, machine)[1] / step_s > 1.3, "wider than for a device with runs"


def test_a_device_without_figures_is_refused_with_the_keys() -> None:
    with pytest.raises(ConfigError, match="devices.v100 has neither fitted nor peak_flops_per_s.bf16"):
        machine_of_profile(load_cluster("abci-v100")[0], None, 4)


def test_the_next_run_narrows_the_ranking_and_runs_at_the_site_move_it() -> None:
    blind = rank_layouts(SHAPE, H100, WISH)
    advice = blind.next_run
    assert advice is not None
    assert advice.layout in [row.layout for row in blind.layouts[:10]]
    assert 0 < advice.spread_then < advice.spread_now
    # Tensor groups are three times as slow here: layouts without them come first.
    slow = replace(H100.device, nvlink_bytes_s=H100.device.nvlink_bytes_s / 3)
    runs = [measured_with(slow, tensor) for tensor in (2, 4, 8)]
    site = learn_site(runs)
    assert dict(zip(SITE_FACTORS, site.logs, strict=True))["tensor parallel messages"] < -0.3
    known = rank_layouts(SHAPE, H100, replace(WISH, site=site))
    places = [{row.layout: place for place, row in enumerate(each.layouts)} for each in (blind, known)]
    wide = [layout for layout in places[0] if layout.tensor == 8]
    assert sum(places[1][layout] for layout in wide) > sum(places[0][layout] for layout in wide)


@pytest.mark.parametrize("place", [0, 9, 39])
def test_the_interval_of_a_layout_is_that_of_its_prediction(place: int) -> None:
    """``predict`` of the written sweep prints it: one layout has one interval, with and without runs of the site."""
    wish = replace(WISH, gpus=128, global_batch=1024)
    for runs in ([], [measured_with(H100.device, 2)]):
        site = learn_site(runs)
        row = rank_layouts(SHAPE, H100, replace(wish, site=site)).layouts[place]
        interval = predict_command(PricedCommand(SHAPE, row.layout, H100), site, "").interval
        assert (row.step_time_low_s, row.step_time_high_s) == pytest.approx((interval.low, interval.high))


def test_runs_in_turn_find_the_best_layout_where_the_prior_is_wrong() -> None:
    # Gradients of 16 replicas are slow there: a tensor group of 2 is the best, not none.
    slow = replace(H100.device, nic_bytes_s=H100.device.nic_bytes_s / 40)
    group = [measured_with(slow, tensor) for tensor in (1, 2, 4, 8)]
    prior = predicted_s(learn_site([]))
    assert min(group, key=prior) is group[0]
    loss = (group[0].measured_s or 0.0) / (group[1].measured_s or 1.0) - 1
    assert regret([group], prior) == pytest.approx(loss)
    assert regret_of_measured(group, 1) == pytest.approx(loss)
    assert loss > 0.04
    assert [regret_of_measured(group, count) for count in (2, 4, 9)] == [0.0, 0.0, 0.0]


def measured_with(device: GpuNode, tensor: int) -> SiteRun:
    """Return a run as it would be on ``device``, priced by the H100's own figures."""
    layout = Layout(
        gpus=16, sequence=4096, micro_batch=1, global_batch=64, replicas=16 // tensor, zero=1, tensor=tensor,
        software="megatron",
    )  # fmt: skip
    figures = H100.figures_of("megatron")
    work, truth = (step_work(SHAPE, layout, each, nominal_rates(each, 16)) for each in (H100.device, device))
    return SiteRun(f"tp{tensor}", work, figures, step_time(truth, figures).total_s)
