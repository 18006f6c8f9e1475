"""fairscale's Pipe: one process, whose devices hold the stages of a GPipe. It passes nothing to other ranks."""

from __future__ import annotations

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.pipeline_run import PipelineRun
from hpcbench.oracle.step import StepTime
from hpcbench.oracle.steps.pipeline import step_of_pipeline
from hpcbench.oracle.strategies.pipeline import PipelineCost
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.traffic import Traffic


class FairscalePipeCost:
    """``oracle.cost.Cost`` of ``fairscale_pipe``."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Devices of one process copy from each other: no collectives."""
        return []

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """Of device number ``rank``, as of that rank of ``gpipe``; a cpu, being all of them, holds their sum.

        All micro-batches are one graph, in which autograd sums a tensor's gradients before it hands them out: the sum
        so far, what is added and the new sum.
        """
        gpipe = _as_gpipe(spec, spec.pp_degree)
        found, run = PipelineCost.memory(gpipe, table, rank), PipelineRun(gpipe, table, rank)
        if spec.micro_batches == 1:
            return found
        largest = max((size for chunk in run.chunks for size in run.own_tensors(chunk)), default=0)
        return msgspec.structs.replace(found, gradients_bytes=found.gradients_bytes + largest)

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: Clock) -> StepTime:
        """``gpipe`` on devices of one node; a cpu is one device."""
        stages = 1 if clock.machine.device == "cpu" else spec.pp_degree
        return step_of_pipeline(clock, PipelineRun(_as_gpipe(spec, stages), table, 0), "gpipe")


def _as_gpipe(spec: RunSpec, stages: int) -> RunSpec:
    """The same with a rank for each device."""
    return msgspec.structs.replace(spec, strategy="gpipe", pp_degree=stages, tasks_per_node=stages, devices_per_task=1)
