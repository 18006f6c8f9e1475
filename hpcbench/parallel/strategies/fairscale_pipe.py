"""fairscale's pipeline: one process that drives several devices."""

from __future__ import annotations

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.entry import Strategy
from hpcbench.parallel.strategies import pipeline

STRATEGIES = {
    "fairscale_pipe": Strategy(
        own_degree="pp_degree",
        runtime="hpcbench.worker.strategies.fairscale_pipe:FairscalePipe",
        description="pipeline of one process over several devices (fairscale's Pipe, torchgpipe)",
        options={
            "balance": pipeline.OPTIONS["balance"]._replace(
                description="what stages share evenly, by the table of layers", choices=pipeline.OF_THE_TABLE
            ),
            "cuts": pipeline.OPTIONS["cuts"],
            "recompute": pipeline.OPTIONS["recompute"],
        },
        cost="hpcbench.oracle.strategies.fairscale_pipe:FairscalePipeCost",
        limit="hpcbench.parallel.strategies.fairscale_pipe:excluded",
    ),
}


def excluded(spec: RunSpec) -> str | None:
    """Several processes, and what its threads do not take part in."""
    if spec.ranks > 1:
        return (
            f"fairscale_pipe is one process, nodes {spec.nodes} x tasks_per_node {spec.tasks_per_node} are "
            f"{spec.ranks}: set devices_per_task, or use gpipe"
        )
    if spec.precision in ("bf16", "fp16"):
        return f"fairscale_pipe computes in threads that autocast does not reach: {spec.precision}, use gpipe"
    if spec.compile or spec.activation_checkpointing:
        return "fairscale_pipe runs its stages in threads: no compile, and options.recompute for recomputation"
    if spec.model_options.get("tied") and spec.pp_degree > 1:
        return "fairscale_pipe cannot share tied weights between its stages: use gpipe"
    return pipeline.excluded(spec)
