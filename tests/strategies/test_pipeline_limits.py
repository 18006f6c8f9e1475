"""Infeasible pipelines have a reason with both numbers."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.pipeline.entry import parse_stage_replicas, pipeline_layout
from hpcbench.strategies.pipeline.schedules import PipelineLayout
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point

BASE = {"model": "resnet18", "dataset": "digits", "batch_size": 16, "micro_batches": 4, "tasks_per_node": 4}


def resolved(**point: Any) -> RunSpec | InfeasiblePoint:
    return resolve_point({**BASE, **point}, PartitionLimits("test"))


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        ({"strategy": "1f1b", "tasks_per_node": 99}, "1f1b on 99 stages, but resnet18 on digits has"),
        ({"strategy": "interleaved_1f1b", "options": {"virtual_stages": 5}}, "interleaved_1f1b on 4 stages x 5 chunks"),
        ({"strategy": "interleaved_1f1b", "options": {"virtual_stages": 0}}, "virtual_stages 0: 1 or more is right"),
        ({"strategy": "gpipe", "precision": "fp16"}, "gpipe with fp16 would need a loss scale"),
        ({"strategy": "gpipe", "options": {"cuts": "3,7"}}, "options.cuts '3,7' makes 3 pieces, the run has 4"),
        ({"strategy": "gpipe", "options": {"cuts": "3,2,7"}}, "options.cuts '3,2,7': the first blocks of all stages"),
        ({"strategy": "gpipe", "options": {"cuts": "3,7,99"}}, "options.cuts '3,7,99': resnet18 on digits has"),
        ({"strategy": "gpipe", "options": {"stage_replicas": "2-1"}}, "'2-1' is 3 ranks, pp_degree is 4"),
        ({"strategy": "gpipe", "options": {"stage_replicas": "4-0"}}, "'4-0': the ranks of every stage, 1 or more"),
        ({"strategy": "1f1b", "options": {"stage_replicas": "1-3"}, "micro_batches": 2}, "3 replicas need one each"),
        (
            {"strategy": "1f1b", "options": {"stage_replicas": "1-3", "batch_norm": "deferred"}},
            "with batch_norm deferred",
        ),
        (
            {"strategy": "1f1b", "options": {"stage_replicas": "1-1"}, "dp_degree": 2},
            "with dp_degree 2: stages have their own replicas",
        ),
        (
            {"strategy": "1f1b", "options": {"stage_replicas": "2-2"}, "model": "gpt", "dataset": "tokens",
             "model_options": {"tied": True}},
            "stages with replicas cannot share tied weights",
        ),
    ],
)  # fmt: skip
def test_infeasible_pipelines_have_a_reason_with_both_numbers(point: dict[str, Any], reason: str) -> None:
    found = resolved(**point)
    assert isinstance(found, InfeasiblePoint), found
    assert reason in found.reason


def test_the_layout_follows_the_option_stage_replicas() -> None:
    for options, layout in [
        ({}, PipelineLayout(4)),
        ({"stage_replicas": "2-1-1"}, PipelineLayout(3, 1, (2, 1, 1))),
        ({"stage_replicas": "1-3"}, PipelineLayout(2, 1, (1, 3))),
    ]:
        spec = resolved(strategy="1f1b", options=options)
        assert isinstance(spec, RunSpec), spec
        assert (pipeline_layout(spec), pipeline_layout(spec).ranks) == (layout, 4)
    assert [parse_stage_replicas(text) for text in ("2 - 1", "2--1", "a-1", "")] == [(2, 1), None, None, None]


def test_tensor_parallel_stages_need_a_transformer_and_a_dividing_degree() -> None:
    gpt = {"model": "gpt", "dataset": "tokens", "strategy": "data_tensor_pipeline", "nodes": 2}
    spec = resolved(**gpt, tp_degree=2)
    assert isinstance(spec, RunSpec), spec
    assert (spec.strategy, spec.dp_degree, spec.pp_degree, spec.tp_degree) == ("1f1b", 2, 2, 2)
    for point, reason in [
        (gpt, "data_tensor_pipeline shares layers, too: set tp_degree to 2 or more"),
        ({**gpt, "strategy": "1f1b", "model": "resnet18", "dataset": "digits", "tp_degree": 2}, "resnet18 has none"),
        ({**gpt, "strategy": "gpipe", "tp_degree": 8}, "gpt by its 4 heads: tp_degree 8"),
    ]:
        found = resolved(**point)
        assert isinstance(found, InfeasiblePoint), found
        assert reason in found.reason


def test_data_pipeline_is_1f1b_with_replicas_per_node() -> None:
    spec = resolved(strategy="data_pipeline", nodes=2)
    assert isinstance(spec, RunSpec), spec
    assert (spec.strategy, spec.dp_degree, spec.pp_degree) == ("1f1b", 2, 4)
