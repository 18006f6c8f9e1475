from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point

BASE = {"model": "resnet18", "dataset": "digits", "batch_size": 16}
FREE = PartitionLimits("test")


def spec(**point: Any) -> RunSpec:
    resolved = resolve_point({**BASE, **point}, FREE)
    assert isinstance(resolved, RunSpec), resolved
    return resolved


def reason(limits: PartitionLimits = FREE, **point: Any) -> str:
    resolved = resolve_point({**BASE, **point}, limits)
    assert isinstance(resolved, InfeasiblePoint), resolved
    return resolved.reason


def test_own_degree_takes_what_the_world_leaves() -> None:
    assert spec(strategy="ddp", nodes=2, tasks_per_node=3).dp_degree == 6
    assert spec(strategy="ddp", nodes=2, dp_degree=2).dp_degree == 2
    assert spec(strategy="single").devices == 1


def test_degrees_that_contradict_the_devices_are_dropped_with_both_numbers() -> None:
    assert reason(strategy="single", nodes=2) == "nodes 2 = 2 devices, but single runs on 1"
    assert reason(strategy="ddp", nodes=2, dp_degree=4) == "nodes 2 = 2 devices, but dp_degree 4 is not as many"
    assert reason(strategy="ddp", nodes=4, dp_degree=3).endswith("dp_degree 3 is not as many and does not divide them")
    said = "nodes 4 = 4 devices, but tp_degree 2 is not as many: dp_degree 2 as well is right"
    assert reason(strategy="filter", model="vgg11", nodes=4, tp_degree=2) == said
    assert reason(strategy="ddp", tp_degree=2) == "ddp has no tp_degree: 2 given, 1 is right"


def test_several_devices_of_a_task_need_a_strategy_that_drives_them() -> None:
    wanted = "ddp computes on one device per task, devices_per_task is 2: set tasks_per_node instead"
    assert reason(strategy="ddp", devices_per_task=2) == wanted
    assert spec(strategy="fairscale_pipe", model="vgg11", devices_per_task=2).pp_degree == 2


def test_infeasible_batches_and_input_sizes_have_a_reason() -> None:
    assert "cannot be cut into 3" in reason(strategy="single", micro_batches=3)
    assert "real data of 8: input_size 16" in reason(strategy="single", input_size=16)
    assert "more than the 1500 samples" in reason(strategy="single", batch_size=2000)
    assert "needs an input of" in reason(strategy="single", dataset="cifar10", input_size=1)


def test_digits_are_real_and_resident_whatever_they_are_called() -> None:
    assert spec(strategy="single", data="real") == spec(strategy="single", data="device") == spec(strategy="single")
    for data in ("host", "files"):
        assert f"it lies on the device: data = '{data}'" in reason(strategy="single", data=data)


def test_real_files_exist_and_have_a_size() -> None:
    assert "highres has no files of its own" in reason(strategy="single", dataset="highres", data="real")
    text = "mnist is real data of 28: input_size 32 cannot change it"
    assert reason(strategy="single", dataset="mnist", data="real", input_size=32) == text
    assert spec(strategy="single", dataset="mnist", data="files", input_size=32).data == "files"
    assert spec(strategy="single", dataset="imagenet", data="real", input_size=64).input_size == 64


def test_a_target_needs_samples_that_are_held_out() -> None:
    assert spec(strategy="single", target_accuracy=0.9).target_accuracy == 0.9
    assert reason(strategy="single", dataset="mnist", target_accuracy=0.9) == (
        "target_accuracy needs samples that are held out; mnist is synthetic where data is 'device'"
    )


@pytest.mark.parametrize(
    ("limits", "point", "text"),
    [
        (PartitionLimits("gpu", max_nodes=2), {"nodes": 4}, "4 nodes, but gpu allows 2"),
        (PartitionLimits("gpu", devices_per_node=4), {"tasks_per_node": 8}, "8 devices per node, but gpu allows 4"),
        (
            PartitionLimits("gpu", cores_per_node=8, cpus_per_task=4),
            {"tasks_per_node": 4},
            "16 cores per node, but gpu allows 8",
        ),
        (
            PartitionLimits("gpu", max_time_min=30),
            {"time_limit_min": 60.0},
            "60 minutes of time limit, but gpu allows 30",
        ),
    ],
)
def test_a_point_beyond_partition_limits_has_a_reason(
    limits: PartitionLimits, point: dict[str, Any], text: str
) -> None:
    assert reason(limits, strategy="ddp", **point) == text


def test_options_of_another_strategy_and_defaults_do_not_count() -> None:
    options = {"bucket_cap_mb": 1}
    assert spec(strategy="single", options=options).options == {}
    assert spec(strategy="ddp", options=options).options == {"bucket_cap_mb": 1.0}
    assert spec(strategy="ddp", options={"bucket_cap_mb": 25}).options == {}


def test_a_global_batch_is_shared_by_the_replicas() -> None:
    point = {key: value for key, value in BASE.items() if key != "batch_size"}
    resolved = resolve_point({**point, "strategy": "ddp", "nodes": 4, "global_batch_size": 64}, FREE)
    assert isinstance(resolved, RunSpec)
    assert (resolved.batch_size, resolved.global_batch_size) == (16, 64)
    dropped = resolve_point({**point, "strategy": "ddp", "nodes": 3, "global_batch_size": 64}, FREE)
    assert isinstance(dropped, InfeasiblePoint)
    assert dropped.reason == "global_batch_size 64 cannot be shared evenly by 3 replicas: 63 can"


@pytest.mark.parametrize(
    ("point", "text"),
    [
        ({"strategy": "ddp", "micro_batches": 2, "options": {"static_graph": True}}, "cannot accumulate gradients"),
        ({"strategy": "fsdp", "options": {"shard_degree": 3}}, "4 replicas cannot be shared evenly by groups of as"),
        ({"strategy": "fsdp", "precision": "fp16"}, "a loss scale that all shards agree on"),
        ({"strategy": "fairscale_sddp", "options": {"reduce_fp16": True}}, "reduce_buffer_mb 32, 0 is right"),
        ({"strategy": "fairscale_fsdp", "precision": "fp64"}, "takes fp32 parameters"),
        ({"strategy": "fairscale_fsdp", "activation_checkpointing": True}, "cannot compute a sharded block again"),
        ({"strategy": "fairscale_fsdp", "compile": True}, "torch.compile cannot trace"),
        ({"strategy": "zero1", "precision": "bf16_params"}, "no fp32 master weights of bf16 parameters"),
        ({"strategy": "horovod", "precision": "bf16_params"}, "Horovod's optimizer reduces the gradients"),
        ({"strategy": "spatial", "precision": "bf16_params"}, "its split layers take fp32 weights"),
        (
            {"strategy": "ddp", "precision": "bf16_params", "options": {"compression": "powersgd"}},
            "gradients of bf16_params are bf16 already, none is right",
        ),
        (
            {"strategy": "fsdp", "precision": "bf16_params", "options": {"mixed_precision": True}},
            "gathered in bf16 with either",
        ),
    ],
)
def test_an_infeasible_point_names_the_limit_of_its_strategy(point: dict[str, Any], text: str) -> None:
    assert text in reason(tasks_per_node=4, **point)


def test_valid_options_of_a_strategy_are_kept() -> None:
    assert spec(strategy="fsdp", tasks_per_node=4, options={"shard_degree": 2}).options == {"shard_degree": 2}
    options = {"reduce_fp16": True, "reduce_buffer_mb": 0.0}
    assert spec(strategy="fairscale_sddp", tasks_per_node=4, options=options).options == options
