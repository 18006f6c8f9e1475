"""Memory counted by tensors: published formulas, published peaks, and the rules of layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.oracle import exam2
from benchmarks.oracle.gpu_tables import megatron_rows
from benchmarks.oracle.megatron_runs import held
from hpcbench.config.command import Recompute
from hpcbench.predict.decoder.allocated import allocated_memory, in_flight
from hpcbench.predict.decoder.layout import Layout
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.prediction import NotPredicted
from hpcbench.strategies.decoder_shapes import named_shape

GIB = 2.0**30
SHAPE = named_shape("llama_8b")
ONE = Layout(gpus=1, sequence=4096, micro_batch=1, global_batch=8, software="megatron")


@pytest.mark.parametrize("name", ["22B", "175B", "530B", "1T"])
def test_activations_are_those_of_the_published_formula(name: str) -> None:
    """Korthikanti et al. 2022, figure 1: all activations with tensor parallelism; and with both of its reductions."""
    (row,) = (row for row in megatron_rows() if row.id == f"{name}-selective")
    whole = replace(row.layout, recompute="none", sequence_parallel=False)
    modes: tuple[tuple[Layout, Recompute], ...] = ((whole, "none"), (row.layout, "selective"))
    for layout, published in modes:
        kept = allocated_memory(row.shape, layout)[0]
        last_norm = 0.0
        if layout.pipeline == 1:
            tokens = layout.sequence * layout.micro_batch / (layout.tensor if layout.sequence_parallel else 1)
            last_norm = 2 * tokens * row.shape.hidden * 2
        assert (kept.activations - last_norm) / GIB == pytest.approx(held()[name].activations_gib[published], rel=2e-3)


def test_states_are_those_of_mixed_precision() -> None:
    """Narayanan et al. 2021: 18 bytes a parameter with fp32 gradients and Adam; the optimizer is shared by replicas."""
    alone = allocated_memory(SHAPE, ONE)[0]
    assert alone.weights + alone.gradients + alone.optimizer == 18 * SHAPE.parameters - 18 * SHAPE.hidden
    (shared,) = allocated_memory(SHAPE, replace(ONE, gpus=8, replicas=8, global_batch=64))
    assert shared.optimizer == alone.optimizer / 8
    assert (shared.weights, shared.gradients) == (alone.weights, alone.gradients)
    (grouped,) = allocated_memory(SHAPE, replace(ONE, gpus=8, replicas=8, global_batch=64, optimizer_shards=2))
    assert grouped.optimizer == alone.optimizer / 2
    (context,) = allocated_memory(SHAPE, replace(ONE, gpus=4, context=4))
    assert context.optimizer == alone.optimizer / 4
    assert context.activations == alone.activations / 4


def test_shards_hold_their_part_and_gather_a_layer() -> None:
    whole = Layout(gpus=1, sequence=4096, micro_batch=1, global_batch=1, software="fsdp")
    (alone,), (shared,) = allocated_memory(SHAPE, whole), allocated_memory(
        SHAPE, replace(whole, gpus=8, shards=8, global_batch=8)
    )  # fmt: skip
    assert shared.weights == alone.weights / 8
    assert shared.optimizer == alone.optimizer / 8
    assert shared.working - alone.working == 3 * 2 * SHAPE.layer_parameters


def test_full_recomputation_keeps_inputs_and_one_layer() -> None:
    (kept,), (again,) = (allocated_memory(SHAPE, replace(ONE, recompute=mode)) for mode in ("none", "full"))
    last_norm = 2 * ONE.sequence * SHAPE.hidden * 2
    assert again.activations - last_norm == SHAPE.layers * ONE.sequence * SHAPE.hidden * 2
    assert again.working < kept.activations / SHAPE.layers + kept.working + 1
    assert again.total < kept.total


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches", "expected"),
    [
        (4, 1, 8, [4, 3, 2, 1]),
        (4, 1, 2, [2, 2, 2, 1]),
        # 11 of 2 chunks are warm on the first rank, 5 on the last.
        (4, 2, 8, [5.5, 4.5, 3.5, 2.5]),
        (4, 2, 2, [2, 2, 2, 2]),
    ],
)
def test_micro_batches_in_flight(stages: int, chunks: int, micro_batches: int, expected: list[float]) -> None:
    layout = replace(ONE, gpus=stages, pipeline=stages, chunks=chunks, global_batch=micro_batches)
    assert [in_flight(layout, stage) for stage in range(stages)] == expected


@pytest.mark.parametrize(("source", "mean", "worst"), [("simumax_a100", 0.01, 0.02), ("simumax_b200", 0.035, 0.065)])
def test_published_peaks_of_tensors(source: str, mean: float, worst: float) -> None:
    """``max_memory_allocated`` of Megatron-LM on one node: all pilots of the two sources that state it."""
    published = {row["id"]: float(row["peak_mem_gib"]) for row in exam2.read_table(exam2.PILOTS)[source]}
    (site,) = (site for name, site in exam2.load_sites() if name == source)
    forecast, errors = Forecast(site.profile, command=site.sweep.command), []
    for row_id, gib in published.items():
        priced = forecast.price_command(site.runs[row_id])
        assert not isinstance(priced, NotPredicted)
        errors.append(abs(priced.memory.total / GIB / gib - 1))
    assert sum(errors) / len(errors) <= mean
    assert max(errors) <= worst
