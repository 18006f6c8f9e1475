"""fairscale's Pipe, one process that drives several devices: registry entry and limits."""

from __future__ import annotations

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.strategies import pipeline
from hpcbench.parallel.strategy_entry import ParityCase, PlotStyle, StrategyEntry


def fairscale_pipe_exclusion(spec: RunSpec) -> str | None:
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
    return pipeline.pipeline_exclusion(spec)


STRATEGIES = {
    "fairscale_pipe": StrategyEntry(
        own_degree="pp_degree",
        runtime="hpcbench.worker.strategies.pipeline.fairscale_pipe:FairscalePipeStrategy",
        description="pipeline of one process over several devices (fairscale's Pipe, torchgpipe)",
        options={
            "balance": pipeline.PIPELINE_OPTIONS["balance"]._replace(
                description="what stages share evenly, by the table of layers", choices=pipeline.TABLE_BALANCES
            ),
            "cuts": pipeline.PIPELINE_OPTIONS["cuts"],
            "recompute": pipeline.PIPELINE_OPTIONS["recompute"],
        },
        cost="hpcbench.oracle.strategies.pipeline:FairscalePipeCost",
        exclusion=fairscale_pipe_exclusion,
        table_exclusion=pipeline.pipeline_table_exclusion,
        schedule="gpipe",
        drives_several_devices=True,
        calibration=pipeline.PIPELINE_CALIBRATION._replace(one_process=True),
        plot_style=PlotStyle("sky", "circle", "dots"),
        parity_cases=(
            ParityCase("vgg11", "digits", {"batch_norm": False}, ranks=1, micro_batches=4, devices_per_task=2),
        ),
    ),
}
