"""Shapes, layouts and prices of decoder transformers on fitted machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcbench.errors import ConfigError
from hpcbench.predict.decoder.layout import Layout, stage_layers
from hpcbench.predict.decoder.machines import fitted_machine, fitted_machines, predict_step
from hpcbench.predict.decoder.memory import stage_memory_terms
from hpcbench.strategies.decoder_shapes import DecoderShape, named_shape

LAYOUT = Layout(gpus=64, sequence=4096, micro_batch=1, global_batch=256, replicas=8, zero=1, tensor=4, pipeline=2)


@pytest.mark.parametrize(
    ("key", "parameters"),
    [
        ("llama_1b", 1_235_814_400),
        ("llama_3b", 3_212_749_824),
        ("llama_8b", 8_030_261_248),
        ("llama_70b", 70_553_706_496),
        ("llama_405b", 405_853_388_800),
        ("llama2_7b", 6_738_415_616),
        ("llama2_13b", 13_015_864_320),
        ("llama2_70b", 68_976_648_192),
    ],
)
def test_parameter_counts_equal_the_published_ones(key: str, parameters: int) -> None:
    assert named_shape(key).parameters == parameters


def test_flops_per_token_follow_the_convention_of_torchtitan() -> None:
    shape = named_shape("llama_8b")
    assert shape.flops_per_token(8192) == 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 8192


def test_an_unknown_model_names_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match="llama_70b"):
        named_shape("llama_71b")


def test_an_impossible_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden 100 must be a multiple of heads 3"):
        DecoderShape("odd", layers=2, hidden=100, ffn=400, heads=3, kv_heads=1, vocabulary=1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replicas": 16}, "multiply to 128, but there are 64 GPUs"),
        ({"micro_batch": 3}, "global batch 256 is no multiple"),
        ({"zero": 3}, "ZeRO stage 3 cannot be priced"),
        ({"recompute": "half"}, "valid: none, selective, full"),
        ({"tensor": 0}, "at least 1 is required"),
    ],
)
def test_a_layout_that_cannot_be_priced_is_named(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LAYOUT, **change)  # type: ignore[arg-type]


def test_heads_that_cannot_be_divided_are_named() -> None:
    layout = replace(LAYOUT, tensor=64, replicas=1, pipeline=1)
    with pytest.raises(ConfigError, match="32 heads cannot be divided by tensor degree 64"):
        predict_step(named_shape("llama_8b"), layout, fitted_machine("h100-80gb-sxm"))


def test_an_unknown_device_names_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match="a100-40gb-sxm, a100-80gb-sxm, h100-80gb-sxm"):
        fitted_machine("tpu-v5e")


def test_layers_of_stages_add_up() -> None:
    for pipeline in (1, 2, 4, 8, 16):
        layout = replace(LAYOUT, tensor=1, replicas=64 // pipeline, pipeline=pipeline, global_batch=64)
        for key in ("playbook_1b", "playbook_8b", "playbook_70b"):
            assert sum(stage_layers(named_shape(key), layout)) == named_shape(key).layers


@pytest.mark.parametrize("machine", sorted(fitted_machines()))
def test_larger_models_and_batches_take_longer_and_more_memory(machine: str) -> None:
    small, large = (
        predict_step(named_shape(key), LAYOUT, fitted_machine(machine)) for key in ("playbook_1b", "playbook_8b")
    )
    assert large.step_time_s > small.step_time_s > 0
    assert large.peak_memory_gib > small.peak_memory_gib > 0
    assert small.step_time_low_s < small.step_time_s < small.step_time_high_s
    doubled = predict_step(named_shape("playbook_1b"), replace(LAYOUT, global_batch=512), fitted_machine(machine))
    assert 1.5 < doubled.step_time_s / small.step_time_s < 2.1


def test_the_first_stage_holds_the_most_micro_batches() -> None:
    terms = stage_memory_terms(named_shape("playbook_8b"), replace(LAYOUT, pipeline=4, replicas=4))
    assert terms[0].held_hidden > terms[1].held_hidden > terms[-1].held_hidden
    assert [stage.logits > 0 for stage in terms] == [False, False, False, True]
