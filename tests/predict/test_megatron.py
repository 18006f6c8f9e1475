"""The oracle beside Megatron-LM's published times and memory: ``benchmarks/oracle/megatron.toml``."""

from __future__ import annotations

import pytest

from benchmarks.oracle.megatron import amounts, left, summary, times
from benchmarks.oracle.megatron_runs import machine, measured_all_reduces, plan_of, product_efficiency, published
from benchmarks.oracle.megatron_table import Gpt, kept_in_block, table_of
from hpcbench.predict.cost_model import CostModel
from hpcbench.predict.kernel_prices import BACKWARD, FORWARD, Kernel, wave_efficiency
from hpcbench.predict.placement import place_group
from hpcbench.strategies.layer_table import read_shipped_table

GPT_175B = Gpt(layers=96, width=12288, heads=96)


@pytest.mark.parametrize(("source", "count", "mean", "worst"), [
    ("korthikanti", 8, 0.036, 0.087),
    ("korthikanti, abstract", 2, 0.040, 0.074),
    ("narayanan", 10, 0.054, 0.084),
])  # fmt: skip
def test_predicted_times_are_near_megatrons_published_times(source: str, count: int, mean: float, worst: float) -> None:
    runs = [run for run in published() if run.source == source]
    errors = [row.error for row in times(runs)]
    assert len(errors) == count
    found = summary(errors)
    assert found[0] <= mean
    assert found[1] <= worst


def test_predicted_memory_is_near_megatrons_published_memory() -> None:
    """Activations are the papers' own formulas to the last digit; states differ by the embedding."""
    bounds = {
        "states of the first stage": 0.111,
        "states of a middle stage": 0.020,
        "activations": 1e-6,
        "activations left": 0.012,
    }
    found = list(amounts())
    assert {one.kind for one in found} == set(bounds)
    assert [one for one in found if abs(one.error) > bounds[one.kind]] == []


@pytest.mark.parametrize("gpt", [GPT_175B, Gpt(48, 6144, 64), Gpt(105, 20480, 128)])
def test_activations_of_a_block_are_korthikantis(gpt: Gpt) -> None:
    """Korthikanti et al. 2022, equations 1, 2 and 4 and table 2, per sample on 8 ranks."""
    rows, ranks = kept_in_block(gpt).values(), 8
    split, whole = sum(row.split for row in rows), sum(row.whole for row in rows)
    scores = 5 * gpt.heads * gpt.tokens * gpt.tokens
    assert split + whole == 34 * gpt.numbers + scores
    assert split == 24 * gpt.numbers + scores
    assert whole == 10 * gpt.numbers
    alone = 10 + (24 + scores / gpt.numbers) / ranks
    assert left(gpt, ranks, "both") == pytest.approx(34 / ranks / alone)
    assert left(gpt, ranks, "core") == pytest.approx((10 + 24 / ranks) / alone)


def test_layers_are_those_of_our_own_models() -> None:
    """A shipped table of the same width, at its own length: parameters and products of every block."""
    ours = read_shipped_table("gpt_13b", "tokens")
    assert ours is not None
    [length] = ours.layers[0].input_shape
    found = table_of(Gpt(layers=40, width=5120, heads=40, tokens=length))
    assert found.blocks == ours.blocks
    for block in (1, 20, 40):
        mine, theirs = ([row for row in table.layers if row.block == block] for table in (found, ours))
        for column in ("parameters", "forward_flops", "backward_flops"):
            assert sum(getattr(row, column) for row in mine) == sum(getattr(row, column) for row in theirs)
    names = {one.name: one.shape for one in ours.parameter_tensors if one.name.partition(".")[0] in ("1", "20", "40")}
    assert names == {one.name: one.shape for one in found.parameter_tensors if one.name in names}


def test_selective_recomputation_repeats_what_lies_between_the_linear_layers() -> None:
    plain, selective = (table_of(GPT_175B._replace(layers=1, selective=one)) for one in (False, True))
    more = {
        after.name: (after.backward_flops - before.backward_flops, before.forward_flops)
        for before, after in zip(plain.layers, selective.layers, strict=True)
        if after != before
    }
    inner = ("scores", "softmax", "dropout", "context")
    assert more == {f"1.attention.{one}": (more[f"1.attention.{one}"][1],) * 2 for one in inner}


def test_flops_are_counted_as_published() -> None:
    """Megatron-LM's README gives 56.3 % of the peak for the model's FLOPs of the trillion's 71.49 s."""
    run = next(run for run in published() if run.source == "korthikanti" and run.name == "1T")
    seconds = run.published_s("selective", 312e12)
    assert seconds == 71.49
    assert run.model_flops() / (seconds * run.devices * 312e12) == pytest.approx(0.563, abs=5e-4)


def test_the_profile_has_what_measured_products_reach() -> None:
    compute = machine().compute
    measured = product_efficiency(compute.peak_flops_per_s["bf16"], compute.processors)
    assert compute.processors == 108
    assert compute.flops_efficiency == round(measured, 3) == 0.778


def test_an_all_reduce_takes_what_one_did_on_such_a_node() -> None:
    """Bandwidth and latency come from elsewhere; these measurements are not used."""
    run = next(run for run in published() if run.name == "175B")
    clock = CostModel(machine(), plan_of(run, "full").spec)
    for size, seconds in measured_all_reduces():
        assert clock.collective("all_reduce", size, place_group(clock.spec, "tp")).seconds == pytest.approx(
            seconds, rel=0.03
        )


def product(rows: int, columns: int, inner: int, direction: str, kind: str = "Linear") -> Kernel:
    return Kernel(
        kind=kind, direction=direction, precision="bf16", flops=2.0 * rows * columns * inner, moved_bytes=0.0,
        weight_bytes=4.0 * columns * inner, input_bytes=2.0 * rows * inner, output_bytes=2.0 * rows * columns,
    )  # fmt: skip


@pytest.mark.parametrize(("kernel", "share"), [
    # 27 x 128 tiles are 32 waves of 108.
    (product(6912, 16384, 2048, FORWARD), 1.0),
    # 8 x 36 tiles are 2 2/3 waves.
    (product(2048, 4608, 12288, FORWARD), (8 / 3) / 3),
    # Less than a wave is cut into smaller tiles.
    (product(256, 128, 4096, FORWARD), 1.0),
    # 2048 x 12288 numbers of the input are 7 1/9 waves, 4608 x 12288 of the weights exactly 16.
    (product(2048, 4608, 12288, BACKWARD), 2 / (8 / (64 / 9) + 1)),
    (product(2048, 4608, 12288, FORWARD, kind="LayerNorm"), 1.0),
])  # fmt: skip
def test_wave_efficiency_is_one_for_whole_waves(kernel: Kernel, share: float) -> None:
    assert wave_efficiency(kernel, 108) == pytest.approx(share)
    assert wave_efficiency(kernel, 0) == 1.0
