"""One real rank among ranks that do not exist: the memory and the launches of a shard, on the device's own allocator.

torch's process group "fake" answers every call at once and moves nothing, so the numbers that a rank computes are
meaningless. Its tensors, streams and kernels are real: one device shows the peak of any rank of any world.
"""

from __future__ import annotations

import gc
import time

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_day.device_cases import measure_cases
from benchmarks.gpu_day.shards import ShardFigures, shard_specs
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.dry_run.fake_rank import fake_world, steps_until_steady
from hpcbench.worker.measure.clocks import synchronize
from hpcbench.worker.measure.step_profiler import run_profiled_steps
from hpcbench.worker.model_execution import wrap_blocks
from hpcbench.worker.models.build import build_model
from hpcbench.worker.shutdown import StopController
from hpcbench.worker.strategy import resolve_runtime


def step_shard(figures: ShardFigures, device: torch.device) -> None:
    """Set up the rank of a shard, train a few steps and fill in its figures."""
    began_s = time.monotonic()
    is_cuda, spec, rank = device.type == "cuda", figures.spec, figures.rank
    with fake_world(spec, rank, device) as context, torch.random.fork_rng(devices=[]):
        # Weights are drawn on the device, where that takes no time.
        with device:
            model = build_model(spec).to("cpu")
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        strategy = resolve_runtime(spec.strategy)()
        strategy.setup(wrap_blocks(model, spec), spec, context)
        runner = getattr(strategy, "runner", None)
        if isinstance(runner, DistributedDataParallel):
            # torch's reducer needs an answer that the group "fake" does not give.
            runner.register_comm_hook(None, _answer_at_once)
        del model
        feed = make_feed(spec, device)
        feed.prepare(strategy.replica)
        if is_cuda:
            figures.setup_peak_bytes = torch.cuda.max_memory_allocated(device)
        steps = steps_until_steady(spec)
        strategy.announce(range(steps + 2))
        for step in range(steps + 1):
            if is_cuda and step == 1:
                torch.cuda.reset_peak_memory_stats(device)
            strategy.step(feed, step)
        synchronize(device)
        if is_cuda:
            figures.peak_bytes = torch.cuda.max_memory_allocated(device)
            figures.reserved_bytes = torch.cuda.max_memory_reserved(device)
        profiled_spec, warnings = msgspec.structs.replace(spec, profile_steps=1), list[str]()
        profiled = run_profiled_steps(
            strategy, feed, profiled_spec, device, StopController(), lambda flag: flag, steps + 1, warnings
        )
        if profiled.host_syncs is not None:
            figures.launches, figures.host_syncs = profiled.host_syncs.launches, profiled.host_syncs.per_step
    figures.seconds = time.monotonic() - began_s


def _answer_at_once(_state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    answer = torch.futures.Future()  # type: ignore[var-annotated]
    answer.set_result(bucket.buffer())
    return answer


def main(arguments: list[str] | None = None) -> int:
    """Step every shard and write the file after each."""
    return measure_cases(
        "real_rank", arguments,
        lambda size: (ShardFigures(spec=spec, rank=rank, seconds=0.0) for spec, rank in shard_specs(size)),
        lambda figures, device, _size: step_shard(figures, device),
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
