"""Behaviour of private names of torch on which hpcbench rests.

``make test`` runs them with torch's build for CPUs, ``make test-cuda`` with a newer one for CUDA.
"""

from __future__ import annotations

import importlib
import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from hpcbench.worker.distributed.process_groups import RankContext, clear_group_cache, make_group_of_ranks


def test_torchs_process_group_name_takes_two_arguments() -> None:
    names = list(inspect.signature(distributed_c10d._process_group_name).parameters)
    assert names == ["ranks", "use_hashed_name"]


def test_a_group_made_by_members_is_named_after_ranks() -> None:
    """Ranks that are in different numbers of other groups must not wait for each other under different names."""
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=1, world_size=4)
    try:
        context = RankContext(1, 4, torch.device("cpu"))
        groups = [make_group_of_ranks(ranks, context, "test") for ranks in ((0, 1), (1, 3))]
        assert [group.members().group_name for group in groups] == ["test(0,1)", "test(1,3)"]
    finally:
        clear_group_cache()
        dist.destroy_process_group()


def test_the_profiler_s_raw_events_have_what_phases_are_made_of() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        nn.Linear(2, 2)(torch.ones(1, 2))
    event = profiled.profiler.kineto_results.events()[0]
    for name in (
        "name", "start_ns", "duration_ns", "device_type", "correlation_id", "linked_correlation_id", "is_async",
        "is_user_annotation",
    ):  # fmt: skip
        assert callable(getattr(event, name)), name


def test_torchs_grad_scaler_reads_overflows_in_maybe_opt_step() -> None:
    assert "found_inf_per_device" in inspect.getsource(torch.amp.GradScaler._maybe_opt_step)
