"""Shapes, layouts and prices of decoder transformers on fitted machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcbench.errors import ConfigError
from hpcbench.predict.decoder.layout import Layout, check_layout
from hpcbench.predict.decoder.machines import fitted_machine
from hpcbench.strategies.decoder_shapes import DecoderShape, named_shape

LAYOUT = Layout(gpus=64, sequence=4096, micro_batch=1, global_batch=256, replicas=8, zero=1, tensor=4, pipeline=2)


@pytest.mark.parametrize(
    ("key", "parameters"),
    [
        # Those of Llama 3 are compared with models that are built: tests/worker/test_models.py.
        ("llama_3b", 3_212_749_824),
        ("llama2_7b", 6_738_415_616),
        ("llama2_13b", 13_015_864_320),
        ("llama2_70b", 68_976_648_192),
    ],
)
def test_parameter_counts_equal_the_published_ones(key: str, parameters: int) -> None:
    assert named_shape(key).parameters == parameters


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
        ({"micro_batch": 3}, "global batch 256 is not a multiple"),
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
        check_layout(named_shape("llama_8b"), layout)


def test_an_unknown_device_names_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match="a100-40gb-sxm, a100-80gb-sxm, h100-80gb-sxm"):
        fitted_machine("tpu-v5e")
