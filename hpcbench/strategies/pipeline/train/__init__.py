"""Pipeline parallelism: the class of each strategy."""

from __future__ import annotations

from hpcbench.strategies.pipeline.train.fairscale_pipe import FairscalePipeStrategy
from hpcbench.strategies.pipeline.train.pipedream import PipedreamStrategy
from hpcbench.strategies.pipeline.train.pipeline_strategy import PipelineStrategy

TRAININGS = {
    "model": PipelineStrategy,
    "gpipe": PipelineStrategy,
    "1f1b": PipelineStrategy,
    "interleaved_1f1b": PipelineStrategy,
    "zero_bubble": PipelineStrategy,
    "pipedream": PipedreamStrategy,
    "fairscale_pipe": FairscalePipeStrategy,
}
"""The training of each strategy."""
