"""One real rank among ranks that do not exist: the memory and the launches of a shard, on the device's own allocator.

torch's process group "fake" answers every call at once and moves nothing, so the numbers that a rank computes are
meaningless. Its tensors, streams and kernels are real: one device shows the peak of any rank of any world.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_day.shards import ShardFigures, shard_specs
from hpcbench.config.run_spec import RunSpec, run_label
from hpcbench.fileio import encode_indented_json, write_atomic
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.dry_run.fake_rank import fake_world, steps_until_steady
from hpcbench.worker.measure.clocks import synchronize
from hpcbench.worker.measure.step_profiler import run_profiled_steps
from hpcbench.worker.model_execution import wrap_blocks
from hpcbench.worker.models.build import build_model
from hpcbench.worker.shutdown import StopController
from hpcbench.worker.strategies.base import resolve_runtime


def step_shard(spec: RunSpec, rank: int, device: torch.device) -> ShardFigures:
    """Set up ``rank`` of ``spec``, train a few steps and return its figures."""
    began_s = time.monotonic()
    is_cuda = device.type == "cuda"
    figures = ShardFigures(spec=spec, rank=rank, seconds=0.0)
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
    return figures


def _answer_at_once(_state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    answer = torch.futures.Future()  # type: ignore[var-annotated]
    answer.set_result(bucket.buffer())
    return answer


def main(arguments: list[str] | None = None) -> int:
    """Step every shard and write the file after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_day.real_rank", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--size", choices=("full", "small"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    began_s, done = time.monotonic(), list[Any]()
    for spec, rank in shard_specs(options.size):
        if time.monotonic() - began_s > options.limit_s:
            break
        try:
            figures = step_shard(spec, rank, device)
        except Exception as error:  # noqa: BLE001 - the others still step
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
            figures = ShardFigures(spec=spec, rank=rank, seconds=0.0, error=text[:2000])
        done.append(figures)
        write_atomic(options.out, encode_indented_json(done))
        print(f"shard {figures.error or 'ok'} {figures.seconds:.1f} s: {run_label(spec)}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return int(any(figures.error for figures in done))


if __name__ == "__main__":
    raise SystemExit(main())
