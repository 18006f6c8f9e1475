"""What a rank does between meeting the others and leaving its part of the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hpcbench.parallel.catalog import resolve_runtime
from hpcbench.paths import expanded
from hpcbench.worker import device as devices
from hpcbench.worker.allocator import keep_freed_memory
from hpcbench.worker.blocks import arranged
from hpcbench.worker.closing import Closing
from hpcbench.worker.data.feed import Feed, Source, make_feed
from hpcbench.worker.environ import given_environment
from hpcbench.worker.evaluate import make_evaluate
from hpcbench.worker.loop import Progress, run_loop
from hpcbench.worker.memory import peak
from hpcbench.worker.models.build import build_model
from hpcbench.worker.pipeline.measure import run_timeline, watch_pipeline
from hpcbench.worker.profiling import run_profiled
from hpcbench.worker.provenance import collect, environment_digest
from hpcbench.worker.recording import run_recorded
from hpcbench.worker.rehearsal.install import rehearse
from hpcbench.worker.sample_flops import flops_per_sample
from hpcbench.worker.stop import PeerEnded, Stop
from hpcbench.worker.strategies.base import Measures, Place, Strategy
from hpcbench.worker.verify import Given, verify
from hpcbench.worker.watch import Watch
from hpcbench.worker.world import any_rank, barrier, enter_world


def measure(closing: Closing) -> None:
    """Train as the run says; ``closing`` is given what was found as soon as it is."""
    header, spec, info = closing.header, closing.task.spec, closing.info
    closing.warnings += devices.settle_threads(closing.given_env | spec.env, header, info)
    device = closing.device = devices.choose(header.device, info)
    if device.type == "cpu":
        keep_freed_memory(closing.given_env | spec.env)
    place = enter_world(closing, device)
    _describe(closing, device)
    closing.stop.check()
    runtime: type[Strategy] = resolve_runtime(spec.strategy)
    strategy = runtime()
    source = Source(expanded(header.data_folder) if header.data_folder else None, devices.loader_threads(header, info))
    feed = make_feed(spec, device, source)
    closing.provenance["data"] = feed.described()
    try:
        strategy.setup(arranged(build_model(spec, header.model_folder), spec), spec, place)
        rehearse(closing, strategy, device)
        closing.replica = strategy.replica
        closing.state = getattr(strategy, "state", None)
        closing.predicted = getattr(strategy, "predicted", None)
        with watch_pipeline(strategy, place, closing.abandon):
            _time(closing, strategy, feed, place)
    finally:
        feed.close()
    if spec.verify:
        # The measured model must be gone before two others are there.
        closing.state = None
        del strategy, feed
        given = Given(source, header.model_folder)
        closing.verification = verify(spec, place, given, closing.stop, closing.link, header.wait_s)
        closing.owes = False
    runtime.close()


def _describe(closing: Closing, device: torch.device) -> None:
    header, spec = closing.header, closing.task.spec
    closing.provenance = collect(header, spec, closing.info, device)
    given = given_environment(closing.given_env, spec.env)
    digest = environment_digest(closing.provenance, header, given)
    if digest is not None:
        closing.provenance["environment_digest"] = digest


def _check(stop: Stop, agree: Callable[[bool], bool]) -> None:
    """Raise on all ranks where one was told to stop."""
    if agree(stop.due()):
        stop.check()
        raise PeerEnded("another rank was told to stop")


def _time(closing: Closing, strategy: Strategy, feed: Feed, place: Place) -> None:
    """Timed steps first; whatever else is to be known comes after them."""
    spec, info, stop, device = closing.task.spec, closing.info, closing.stop, place.device
    closing.progress = progress = Progress(spec, device)
    closing.owes = closing.owes or isinstance(strategy, Measures)
    watch = closing.watch = Watch(device, info)
    if watch.energy_absent is not None:
        closing.provenance["energy_absent"] = watch.energy_absent

    def edge() -> None:
        # All ranks look at their counters while none has begun, so that looking is in nobody's first step.
        barrier(place)
        watch.begin()
        barrier(place)

    agree = partial(any_rank, place)
    evaluate = None if spec.rehearse else make_evaluate(strategy, feed, spec, progress, info.rank, agree)
    run_loop(strategy, feed, spec, progress, stop, edge, evaluate, watch.end)
    arithmetic = getattr(strategy, "arithmetic", None)
    closing.warnings += [*progress.notes(), *(arithmetic.notes() if arithmetic is not None else [])]
    closing.peak = peak(device)
    profiled = run_profiled(strategy, feed, spec, device, stop, agree, len(progress.losses))
    closing.phases = profiled.phases
    closing.warnings += profiled.warnings
    recorded = run_recorded(strategy, feed, spec, device, stop, agree, len(progress.losses) + spec.profile_steps)
    closing.traffic = recorded.calls
    closing.warnings += recorded.warnings
    closing.timeline = run_timeline(
        strategy, feed, spec, place, stop, agree, len(progress.losses) + spec.profile_steps + 2
    )
    if isinstance(strategy, Measures):
        closing.probe = strategy.measure(feed, partial(_check, stop, agree))
        closing.owes = False
    if info.rank == 0:
        closing.flops_per_sample = flops_per_sample(spec, closing.header.model_folder, closing.warnings)
