"""Every synchronous pipeline computes what one process computes per micro-batch, on two and four ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases import EXACT, Case, case_id, check, check_training, make_case, run_reference
from tests.distributed.pool import Pool

pytestmark = pytest.mark.slow

SCHEDULES = ["model", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
PLAIN = {"batch_norm": False}
TIED = {"tied": True, "context": 8}


def pipeline_case(
    schedule: str, stages: int, model: str = "resnet18", dataset: str = "digits", replicas: int = 1, **more: Any
) -> Case:
    """Four micro-batches of two samples; the last batch of every third step has one sample fewer, so three.

    Whole networks pass their messages in ``test_traffic.py`` and ``test_pipeline_launches.py``.
    """
    given = {
        "strategy": schedule, "pp_degree": stages, "dp_degree": replicas, "micro_batches": 4, "batch_size": 8,
        "replicated": False, "steps": 3, "narrow": True,
    }  # fmt: skip
    return make_case(stages * replicas, model, dataset, **{**given, **more})


WIDE: dict[str, Any] = {"precision": "fp64"}
SMALL_GPT: dict[str, Any] = {"model": "gpt", "dataset": "tokens", "input_size": 4, **WIDE, "steps": 2}
TIES: dict[str, Any] = {**SMALL_GPT, "model_options": TIED, "optimizer": "adam", "batch_size": 4, "micro_batches": 2}
BLOCKS: dict[str, Any] = {**SMALL_GPT, "input_size": 8, "precision": "fp32", "options": {"balance": "blocks"}}
SHARED: dict[str, Any] = {**SMALL_GPT, "tp_degree": 2, "tasks_per_node": 4}
CASES = [
    # BatchNorm over two samples per micro-batch becomes chaotic within three steps.
    *(pipeline_case(schedule, 2, steps=2, **WIDE) for schedule in SCHEDULES),
    # Where the extents of images are 1 x 1 in the end, within one.
    *(pipeline_case(schedule, 4, "mobilenetv2", steps=1, **WIDE) for schedule in SCHEDULES),
    *(pipeline_case(schedule, 2, **BLOCKS) for schedule in SCHEDULES),
    # Both replicas make as many micro-batches, also of 8 and 7 samples.
    *(pipeline_case(schedule, 2, replicas=2, **WIDE) for schedule in ("1f1b", "zero_bubble")),
    # The first and the last stage hold a copy each; both must stay one weight.
    *(pipeline_case(schedule, 2, replicas=replicas, **TIES)
      for schedule, replicas in (("gpipe", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1))),
    # Running statistics count every micro-batch once.
    pipeline_case("zero_bubble", 2, steps=2, options={"recompute": "always"}, **WIDE),
    pipeline_case("gpipe", 4, "vgg11", steps=1, options={"recompute": "except_last"}, **WIDE),
    pipeline_case("interleaved_1f1b", 4, "vgg11", steps=1, options={"recompute": "always"}, **WIDE),
    # Micro-batches go round the replicas, three of them in the epoch's last step: none is lost, none counts twice.
    pipeline_case("gpipe", 3, steps=1, options={"stage_replicas": "2-1"}, **WIDE),
    pipeline_case("1f1b", 4, "vgg11", model_options=PLAIN, options={"stage_replicas": "2-1-1"}, **WIDE),
    pipeline_case("1f1b", 4, "vgg11", model_options=PLAIN, **WIDE,
                  options={"stage_replicas": "1-3", "recompute": "except_last"}),
    # Two stages of two ranks each: heads and features are split within a stage.
    pipeline_case("1f1b", 2, model_options={"context": 4}, **SHARED),
    pipeline_case("zero_bubble", 2, model_options=TIED, **SHARED),
    pipeline_case("1f1b", 2, micro_batches=1, steps=2, **WIDE),
    pipeline_case("interleaved_1f1b", 2, micro_batches=3, batch_size=9, steps=2, **WIDE),
    pipeline_case("zero_bubble", 2, activation_checkpointing=True, steps=2, **WIDE),
    pipeline_case("gpipe", 2, "mobilenetv2", channels_last=True, steps=1, **WIDE),
    pipeline_case("1f1b", 4, options={"cuts": "1,2,9"}, steps=2, **WIDE),
    # Messages between stages are bf16 too, as autocast's outputs within one process.
    pipeline_case("zero_bubble", 2, "vgg11", precision="bf16", steps=1, model_options=PLAIN),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_pipelines_equal_the_reference(pool: Pool, case: Case) -> None:
    check_training(pool.run, case)


@pytest.mark.parametrize(("replicas", "recompute"), [(1, "always"), (2, "never")])
def test_deferred_batch_norm_counts_whole_mini_batches(pool: Pool, replicas: int, recompute: str) -> None:
    options = {"batch_norm": "deferred", "recompute": recompute}
    case = pipeline_case("1f1b", 2, replicas=replicas, precision="fp64", steps=3, options=options)
    expected = run_reference(case)
    check(pool.run(case), expected, EXACT)
    per_micro_batch = run_reference(pipeline_case("1f1b", 2, replicas=replicas, precision="fp64", steps=3))
    name = "0.1.running_mean"
    assert (expected.state[name] - per_micro_batch.state[name]).abs().max() > 1e-3
