"""The oracle beside Megatron-LM's published times and memory: ``benchmarks/oracle/megatron.toml``."""

from __future__ import annotations

import pytest

from benchmarks.oracle.megatron import amounts, left, summary, times
from benchmarks.oracle.megatron_runs import published
from benchmarks.oracle.megatron_table import Gpt, kept_in_block, table_of
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
