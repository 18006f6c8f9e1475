"""The steady step of PipeDream: what bounds a pipeline that is never emptied, with communication and without."""

from __future__ import annotations

from hpcbench.oracle.chunks import ChunkTimes
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.pipeline_run import PipelineRun
from hpcbench.oracle.step import StepTime
from hpcbench.oracle.steps.model_parallel import copied
from hpcbench.oracle.steps.pipeline import Pipeline, Spent, step_of
from hpcbench.parallel.schedule import BACKWARD, FORWARD
from hpcbench.parallel.steady import Stage, steady_step_s
from hpcbench.parallel.strategies.pipedream import delay_of


def step_of_pipedream(clock: Clock, plan: PipelineRun) -> StepTime:
    """``micro_batches`` minibatches, all taken to be as large as their mean; ``plan`` is of any rank."""
    spec, delay = plan.spec, delay_of(plan.spec)
    pipeline = Pipeline(ChunkTimes(plan, clock))
    count = spec.micro_batches
    stages = [_stage(pipeline, place, True) for place in range(spec.pp_degree)]
    alone = [_stage(pipeline, place, False) for place in range(spec.pp_degree)]
    updates = 1 if delay.double_buffered else count
    own_s = [count * (one.forward_s + one.backward_s) + updates * one.update_s for one in alone]
    place = max(range(len(alone)), key=own_s.__getitem__)
    reduced = pipeline.buckets(place, place)
    sends = [pipeline.times.sends(kind, place, spec.batch_size / count) for kind in (FORWARD, BACKWARD)]
    calls = [(call, count) for call in sends if call is not None] + [(call, updates) for call in reduced]
    spent = Spent(
        own_s[place],
        sum(times * call.seconds for call, times in calls),
        sum(times * call.latency_s for call, times in calls),
    )
    return step_of(clock, spent, steady_step_s(stages, delay, count), steady_step_s(alone, delay, count))


def _stage(pipeline: Pipeline, place: int, with_comm: bool) -> Stage:
    """What one stage does for a minibatch. Gradients are summed over replicas before an update, while it waits."""
    times, spec = pipeline.times, pipeline.plan.spec
    samples = spec.batch_size / spec.micro_batches
    busy = times.busy(place, samples, times.plan.is_recomputed(0, spec.micro_batches))
    update_s = times.update_s(place)
    if delay_of(spec).updates(place):
        # Older minibatches still need what the update is about to overwrite.
        update_s += sum(copied(times.clock, spec, size).seconds for size in times.plan.own_tensors(place))
    if not with_comm:
        return Stage(busy.forward_s, busy.backward_s, update_s)
    forward, backward = (times.sends(kind, place, samples) for kind in (FORWARD, BACKWARD))
    return Stage(
        times.beside_messages_s(FORWARD, place, samples, busy.forward_s),
        times.beside_messages_s(BACKWARD, place, samples, busy.backward_s),
        update_s + sum(call.seconds for call in pipeline.buckets(place, place)),
        0.0 if forward is None else forward.seconds,
        0.0 if backward is None else backward.seconds,
    )
