"""Horovod's buffers on two ranks, by its own timeline, against those of its stand-in on fake tensors and of the oracle."""

from __future__ import annotations

import json
import os
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcbench.strategies.data.buckets import simulate_fusion
from hpcbench.strategies.gradient_buckets import MIB
from hpcbench.strategies.horovod.train import HorovodStrategy, load_horovod
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.model_execution import summed_loss
from tests.conftest import require_horovod
from tests.distributed.cases import CPU, Case, build, run_parallel
from tests.distributed.pool import Pool
from tests.distributed.test_horovod import horovod_case
from tests.library_stand_ins import ModelledHorovod

pytestmark = [pytest.mark.slow, pytest.mark.strategy("horovod")]

RANKS, STEPS = 2, 2
CYCLE_MS = 4000.0
"""Longer than a step. A step begins with a cycle, as it waits for the last one's: its gradients are all ready in the next."""
ONE_BUFFER_MB, SOME_BUFFERS_MB, NO_FUSION_MB = 128.0, 0.25, 0.0

Buffers = list[list[str]]
"""The names of the parameters in each buffer, in the order of the calls."""


def fusion_case(threshold_mb: float) -> Case:
    options = {"cycle_time_ms": CYCLE_MS, "fusion_threshold_mb": threshold_mb}
    return horovod_case(RANKS, "resnet18", "digits", steps=STEPS, options=options)


def train_with_timeline(case: Case, file: str, group: dist.ProcessGroup | None) -> None:
    """Train on a rank; Horovod's first rank writes ``file``, which is complete when it has ended."""
    os.environ["HOROVOD_TIMELINE"] = file
    run_parallel(case, group)
    # A shutdown drops the events that the timeline's thread has not written yet.
    load_horovod().stop_timeline()
    HorovodStrategy.close()


def real_buffers(case: Case, file: Path) -> Buffers:
    """Return the buffers of all steps, on ranks of their own."""
    pool = Pool(RANKS)
    try:
        pool.call(RANKS, train_with_timeline, case, str(file))
    finally:
        pool.close()
    return timeline_buffers(file.read_text())


def timeline_buffers(text: str) -> Buffers:
    """Return the tensors whose reductions begin together in Horovod's timeline, before any of them ends."""
    # Horovod leaves the list open.
    events: list[dict[str, Any]] = json.loads(text.rstrip().removesuffix("]").rstrip().rstrip(",") + "]")
    names = {event["pid"]: event["args"].get("name", "") for event in events if event.get("name") == "process_name"}
    buffers: Buffers = []
    running: set[int] = set()
    is_beginning = False
    for event in events:
        if event.get("name") == "GLOO_ALLREDUCE" and event["ph"] == "B":
            if not is_beginning:
                buffers.append([])
            is_beginning = True
            running.add(event["pid"])
            buffers[-1].append(names[event["pid"]].removeprefix("DistributedOptimizer.").removeprefix("allreduce."))
        elif event["ph"] == "E" and event["pid"] in running:
            running.remove(event["pid"])
            is_beginning = False
    return buffers


def modelled_buffers(case: Case) -> Buffers:
    """Return the buffers of one step of the stand-in."""
    model, feed = build(case), make_feed(case.spec, CPU)
    ready: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))  # type: ignore[no-untyped-call]
    library = ModelledHorovod(int(float(case.spec.options["fusion_threshold_mb"]) * MIB))
    optimizer = library.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), named_parameters=model.named_parameters(), compression=None,
        backward_passes_per_step=1, op=library.Average,
    )  # fmt: skip
    inputs, targets = feed.batch(0, 0)
    reduced: list[int] = []

    def note(tensor: Tensor) -> None:
        reduced.append(tensor.numel())

    with mock.patch.object(dist, "all_reduce", note):
        summed_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    counts = element_counts(case)
    assert sum(reduced) == sum(counts.values())
    buffers: Buffers = []
    left = iter(ready)
    for size in reduced:
        buffers.append([])
        while sum(counts[name] for name in buffers[-1]) < size:
            buffers[-1].append(next(left))
    return buffers


def predicted_buffers(case: Case, ready: list[str]) -> Buffers:
    """Return the buffers that the oracle fills of gradients that are all ready."""
    counts = element_counts(case)
    threshold = int(float(case.spec.options["fusion_threshold_mb"]) * MIB)
    sizes = [4 * counts[name] for name in ready]
    order = range(len(ready))
    buckets = simulate_fusion(order, [0.0] * len(ready), sizes, CYCLE_MS / 1e3, threshold, lambda _: 0.0)
    return [[ready[place] for place in bucket] for bucket in buckets]


def element_counts(case: Case) -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in build(case).named_parameters()}


@pytest.mark.parametrize("threshold_mb", [ONE_BUFFER_MB, SOME_BUFFERS_MB, NO_FUSION_MB])
def test_buffers_of_gradients_that_are_all_ready(threshold_mb: float, tmp_path: Path) -> None:
    require_horovod()
    case = fusion_case(threshold_mb)
    real, modelled = real_buffers(case, tmp_path / "timeline.json"), modelled_buffers(case)
    ready = list(chain.from_iterable(modelled))
    assert list(chain.from_iterable(real)) == ready * STEPS
    assert real == predicted_buffers(case, ready) * STEPS
    assert real == modelled * STEPS
