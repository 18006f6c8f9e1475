"""Every synchronous pipeline computes what one process computes per micro-batch, on two and four ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases import EXACT, Case, check, check_rounding, make_case, run_reference
from tests.distributed.pool import Pool

pytestmark = pytest.mark.slow

SCHEDULES = ["model", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
SOAK = pytest.mark.soak
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


@pytest.mark.parametrize(("batch_size", "steps"), [(8, 2), (16, 3)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelines_of_two_stages_equal_the_reference(pool: Pool, schedule: str, batch_size: int, steps: int) -> None:
    """BatchNorm over two samples per micro-batch becomes chaotic within three steps, see below."""
    case = pipeline_case(schedule, 2, precision="fp64", batch_size=batch_size, steps=steps)
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelines_of_four_stages_equal_the_reference(pool: Pool, schedule: str) -> None:
    """One step: of two samples whose extents are 1 x 1 in the end BatchNorm makes chaos, and gpipe's backward passes
    add gradients up in another order."""
    case = pipeline_case(schedule, 4, "mobilenetv2", precision="fp64", steps=1)
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("model", 2),
        ("gpipe", 4),
        ("1f1b", 2),
        ("interleaved_1f1b", 2),
        ("zero_bubble", 4),
        *(
            pytest.param(schedule, stages, marks=SOAK)
            for schedule, stages in [
                ("model", 4), ("gpipe", 2), ("1f1b", 4), ("interleaved_1f1b", 4), ("zero_bubble", 2)
            ]
        ),
    ],
)  # fmt: skip
def test_pipelines_of_a_transformer_equal_the_reference(pool: Pool, schedule: str, stages: int) -> None:
    """As many blocks on each stage; ``test_tied_weights_on_two_stages_stay_equal`` cuts by a layer table, which every rank traces."""
    chunks = {"virtual_stages": 1} if (schedule, stages) == ("interleaved_1f1b", 4) else {}
    case = pipeline_case(
        schedule,
        stages,
        "gpt",
        "tokens",
        input_size=8,
        steps=2,
        model_options={"context": 8},
        options={"balance": "blocks", **chunks},
    )
    check_rounding(pool.run, case)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved_1f1b", marks=SOAK), "zero_bubble"])
def test_replicated_pipelines_equal_the_reference(pool: Pool, schedule: str) -> None:
    """Both replicas make as many micro-batches, also of 8 and 7 samples."""
    case = pipeline_case(schedule, 2, replicas=2, precision="fp64", steps=3)
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize(("schedule", "replicas"), [("gpipe", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1)])
def test_tied_weights_on_two_stages_stay_equal(pool: Pool, schedule: str, replicas: int) -> None:
    """The first and the last stage hold a copy each; both must stay one weight."""
    case = pipeline_case(
        schedule, 2, "gpt", "tokens", replicas, input_size=4, model_options=TIED, optimizer="adam", precision="fp64",
        batch_size=4, micro_batches=2, steps=2,
    )  # fmt: skip
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "except_last"), ("zero_bubble", "always")])
def test_recomputed_stages_equal_the_reference(pool: Pool, schedule: str, recompute: str) -> None:
    """Running statistics count every micro-batch once."""
    case = pipeline_case(schedule, 2, precision="fp64", steps=2, options={"recompute": recompute})
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize(("schedule", "recompute"), [("gpipe", "except_last"), ("interleaved_1f1b", "always")])
def test_recomputation_in_four_stages_equals_the_reference(pool: Pool, schedule: str, recompute: str) -> None:
    case = pipeline_case(schedule, 4, "vgg11", precision="fp64", steps=1, options={"recompute": recompute})
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize(
    ("schedule", "replicas", "more"),
    [
        ("gpipe", "2-1", {"model": "resnet18", "steps": 1}),
        ("1f1b", "2-1-1", {"model": "vgg11", "model_options": {"batch_norm": False}}),
        ("1f1b", "1-3", {"model": "vgg11", "model_options": {"batch_norm": False}, "recompute": "except_last"}),
    ],
)
def test_stages_with_uneven_replicas_equal_the_reference(
    pool: Pool, schedule: str, replicas: str, more: dict[str, Any]
) -> None:
    """Micro-batches go round the replicas, three of them in the epoch's last step: none is lost, none counts twice.
    Running statistics are those of a stage's first replica."""
    options = {"stage_replicas": replicas, **({"recompute": more.pop("recompute")} if "recompute" in more else {})}
    ranks = sum(int(one) for one in replicas.split("-"))
    case = pipeline_case(schedule, ranks, precision="fp64", options=options, **more)
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize(("schedule", "model_options"), [("1f1b", {}), ("zero_bubble", {"tied": True})])
def test_pipelines_of_tensor_parallel_stages_equal_the_reference(
    pool: Pool, schedule: str, model_options: dict[str, Any]
) -> None:
    """Two stages of two ranks each: heads and features are split within a stage."""
    case = pipeline_case(
        schedule, 2, "gpt", "tokens", input_size=4, precision="fp64", steps=2, tp_degree=2, tasks_per_node=4,
        model_options={"context": 4, **model_options},
    )  # fmt: skip
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("1f1b", {"micro_batches": 1}),
        ("interleaved_1f1b", {"micro_batches": 3, "batch_size": 9}),
        ("zero_bubble", {"activation_checkpointing": True}),
        ("gpipe", {"channels_last": True, "model": "mobilenetv2", "steps": 1}),
        ("1f1b", {"options": {"cuts": "1,2,9"}, "pp_degree": 4, "tasks": 4}),
        pytest.param("1f1b", {"options": {"balance": "memory"}}, marks=SOAK),
        pytest.param("1f1b", {"options": {"balance": "blocks"}}, marks=SOAK),
        pytest.param("1f1b", {"optimizer": "adamw", "weight_decay": 1e-3}, marks=SOAK),
    ],
)
def test_pipeline_options_change_no_number(pool: Pool, schedule: str, more: dict[str, Any]) -> None:
    stages = more.pop("tasks", 2)
    case = pipeline_case(schedule, stages, **{"precision": "fp64", "steps": 2, **more})
    check(pool.run(case), run_reference(case), EXACT)


@pytest.mark.parametrize(("replicas", "recompute"), [(1, "always"), (2, "never")])
def test_deferred_batch_norm_counts_whole_mini_batches(pool: Pool, replicas: int, recompute: str) -> None:
    options = {"batch_norm": "deferred", "recompute": recompute}
    case = pipeline_case("1f1b", 2, replicas=replicas, precision="fp64", steps=3, options=options)
    expected = run_reference(case)
    check(pool.run(case), expected, EXACT)
    per_micro_batch = run_reference(pipeline_case("1f1b", 2, replicas=replicas, precision="fp64", steps=3))
    name = "0.1.running_mean"
    assert (expected.state[name] - per_micro_batch.state[name]).abs().max() > 1e-3


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=SOAK), "zero_bubble"])
def test_pipelines_in_bf16_stay_within_rounding(pool: Pool, schedule: str) -> None:
    """Messages between stages are bf16 too, as autocast's outputs within one process."""
    case = pipeline_case(schedule, 2, "vgg11", precision="bf16", steps=1, model_options={"batch_norm": False})
    check_rounding(pool.run, case)


@SOAK
@pytest.mark.parametrize(
    ("model", "dataset"), [("mobilenetv2", "imagenet"), ("mobilenetv2", "highres"), ("resnet152", "imagenet")]
)
def test_pipelines_of_large_images_equal_the_reference(pool: Pool, model: str, dataset: str) -> None:
    """One step, of two micro-batches of two samples. In fp64, as all whole models with BatchNorm."""
    case = pipeline_case(
        "1f1b", 2, model, dataset, batch_size=4, micro_batches=2, steps=1, precision="fp64", narrow=False
    )
    check(pool.run(case), run_reference(case), EXACT)
