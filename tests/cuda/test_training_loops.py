"""The loops that the first GPU day compares step on a fake GPU, and none of them waits for it."""

from __future__ import annotations

import copy

import torch

from benchmarks.gpu_day.loops import loop_specs
from benchmarks.gpu_day.training_loops import TrainingStep, make_library_model, plain_step, timm_step
from hpcbench.worker.strategy import DataParallelStrategy
from tests.cuda.fake_gpu import rank_on_gpu
from tests.cuda.gpu_recorder import GpuRecorder
from tests.cuda.stub import WAITS, count_calls


def check_steps(step: TrainingStep, recorder: GpuRecorder) -> None:
    """Train three steps, of which the last one must not wait for the device."""
    for number in range(3):
        recorder.begin_step()
        before = count_calls(WAITS)
        step(number)
        assert count_calls(WAITS) == before
    assert (list(recorder.host_sync_sites), list(recorder.stray)) == ([], [])
    assert recorder.product_types == {torch.bfloat16}
    assert recorder.operators > 0


def test_loops_train_without_a_wait_of_the_host() -> None:
    spec = next(loop_specs("full"))
    assert (spec.model, spec.precision) == ("resnet50", "bf16")
    with rank_on_gpu(spec, 0) as (strategy, feed, recorder):
        assert isinstance(strategy, DataParallelStrategy)
        device = recorder.device
        batches = [feed.batch(step, 0) for step in range(2)]
        check_steps(lambda number: strategy.step(feed, number), recorder)
        # A copy of fake tensors has a mode of its own, unless the mode counts as copied already.
        module = copy.deepcopy(strategy.module, {id(recorder.fake_mode): recorder.fake_mode})
        check_steps(plain_step(module, spec, device, batches), recorder)
        # torch cannot move fake parameters: they are made on the device. There ``Module.to`` is the dry run's.
        with device:
            library_model = make_library_model(spec, device)
        assert library_model is not None
        model, library = library_model
        assert library.startswith(("torchvision", "timm"))
        assert {parameter.device for parameter in model.parameters()} == {device}
        check_steps(timm_step(model, spec, device, batches), recorder)
