"""The search over layouts of a decoder: what it examines, how it ranks, and what it leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcbench.errors import ConfigError
from hpcbench.predict.decoder.allocated import GIB, SAFE_SHARE, allocated_memory, occupied_bytes
from hpcbench.predict.decoder.layout import Layout, nominal_rates
from hpcbench.predict.decoder.layout_search import LayoutRanking, LayoutWish, layout_degrees, rank_layouts, software_of
from hpcbench.predict.decoder.machines import fitted_machine
from hpcbench.predict.decoder.pricing import step_time
from hpcbench.predict.decoder.work import step_work
from hpcbench.strategies.decoder_shapes import named_shape

H100 = fitted_machine("h100-80gb-sxm")


def ranking(model: str = "llama_70b", gpus: int = 64, **more: Any) -> LayoutRanking:
    wish = LayoutWish(gpus=gpus, **({"sequence": 8192, "global_batch": 2 * gpus} | more))
    return rank_layouts(named_shape(model), H100, wish)


def test_layouts_are_ranked_by_their_predicted_time() -> None:
    found = ranking().layouts
    times = [one.step_time_s for one in found]
    assert times == sorted(times)
    assert found[0].ratio == 1.0
    assert not found[0].is_told_apart
    assert all(one.ratio_low <= one.ratio <= one.ratio_high for one in found)
    assert all(one.step_time_low_s < one.step_time_s < one.step_time_high_s for one in found)


def test_an_exhaustive_search_finds_nothing_faster() -> None:
    """Recomputation and larger micro-batches of split sequences, which the search leaves out, included."""
    shape, found = named_shape("llama_8b"), ranking("llama_8b", 8)
    best = found.layouts[0].step_time_s
    priced = 0
    for degrees in layout_degrees(shape, 8, 8192, 8):
        data = degrees["replicas"] * degrees["shards"]
        for micro_batch in (1, 2, 4, 8, 16):
            if 16 % (data * micro_batch) or (degrees["chunks"] > 1 and 16 // data // micro_batch % degrees["pipeline"]):
                continue
            for recompute in ("none", "selective", "full"):
                layout = Layout(
                    gpus=8, sequence=8192, micro_batch=micro_batch, global_batch=16, recompute=recompute,
                    **degrees,  # type: ignore[arg-type]
                )  # fmt: skip
                layout = replace(layout, software=software_of(shape, layout))
                if layout.software == "megatron" and layout.replicas * layout.context > 1 and not layout.zero:
                    continue  # Megatron shares the optimizer in any case: the layout is that with ZeRO 1.
                allocated = max(rank.total for rank in allocated_memory(shape, layout))
                if occupied_bytes(allocated, layout) <= SAFE_SHARE * H100.device.memory_gib * GIB:
                    work = step_work(shape, layout, H100.device, nominal_rates(H100.device, 8))
                    step_s = step_time(work, H100.figures_of(layout.software)).total_s
                    priced += 1
                    assert step_s >= best * (1 - 1e-9), layout
    assert priced > found.priced > 100


@pytest.mark.parametrize("gpus", [8, 8192])
def test_the_layout_search_covers_8_to_8192_gpus(gpus: int) -> None:
    found = ranking("llama_8b", gpus)
    assert found.examined < 12_000, "of so many the time stays below three seconds"
    assert found.layouts[0].layout.gpus == gpus


@pytest.mark.parametrize(("gpus", "measured_s"), [(512, 14.67), (1024, 14.65)])
def test_the_recipe_of_nvidia_is_among_the_best(gpus: int, measured_s: float) -> None:
    """Llama 3.1 70B: tensor 4, pipeline 4 in 5 chunks, context 2."""
    found = ranking(gpus=gpus)
    (recipe,) = [
        one for one in (*found.layouts, *found.tight)
        if one.layout.recompute == "none" and (one.layout.tensor, one.layout.pipeline, one.layout.chunks, one.layout.context) == (4, 4, 5, 2)
        and one.layout.micro_batch == 1 and one.layout.shards == 1 and one.layout.zero == 1
    ]  # fmt: skip
    assert not recipe.is_told_apart
    assert recipe.step_time_low_s < measured_s < recipe.step_time_high_s
    assert recipe.peak_memory_gib < SAFE_SHARE * H100.device.memory_gib


def test_too_large_a_model_leaves_the_reason() -> None:
    found = ranking("llama_405b", 8)
    assert found.layouts == []
    assert found.priced == 0
    assert found.tight == []
    assert set(found.refused) <= {
        "it does not fit in memory", "interleaving needs a multiple of the stages in micro-batches",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (LayoutWish(gpus=0, sequence=8192, global_batch=8), "0 GPUs"),
        (LayoutWish(gpus=8, sequence=8192), "one of global batch and batch of a replica"),
        (LayoutWish(gpus=8, sequence=8192, global_batch=8, replica_batch=1), "one of global batch"),
    ],
)
def test_an_impossible_request_is_named(wish: LayoutWish, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rank_layouts(named_shape("llama_8b"), H100, wish)
