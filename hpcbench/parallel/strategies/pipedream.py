"""The asynchronous pipeline with stale weights (PipeDream): registry entry, limits, and the staleness of a run."""

from __future__ import annotations

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.pipeline.weight_versions import WEIGHT_VERSION_SCHEMES, Staleness
from hpcbench.parallel.strategies import pipeline
from hpcbench.parallel.strategy_entry import Option, PlotStyle, StrategyEntry


def pipedream_staleness(spec: RunSpec) -> Staleness:
    """How old a run's weights are."""
    versions = spec.options.get("weight_versions", WEIGHT_VERSION_SCHEMES[0])
    return Staleness(spec.pp_degree, bool(spec.options.get("vertical_sync")), versions == "2bw")


def pipedream_exclusion(spec: RunSpec) -> str | None:
    """As for all pipelines; weights that stages share or a compiler has seen, and versions that make no sense."""
    if spec.compile:
        return "pipedream exchanges the weights of its stages, which a compiled graph has taken in: compile = false"
    if spec.model_options.get("tied") and spec.pp_degree > 1:
        return "pipedream with tied weights: two stages would have versions of their own of them; use 1f1b"
    if spec.options.get("vertical_sync") and spec.options.get("weight_versions") == "2bw":
        return "pipedream with weight_versions 2bw has the same version on all stages: vertical_sync adds nothing"
    return pipeline.pipeline_exclusion(spec)


STRATEGIES = {
    "pipedream": StrategyEntry(
        own_degree="pp_degree",
        runtime="hpcbench.worker.strategies.pipeline.pipedream:PipedreamStrategy",
        description="asynchronous pipeline: an update per micro-batch, weights stashed (PipeDream)",
        options={
            "balance": pipeline.PIPELINE_OPTIONS["balance"],
            "cuts": pipeline.PIPELINE_OPTIONS["cuts"],
            "recompute": Option(
                str, "never", "activations are computed again in the backward pass", ("never", "always")
            ),
            "weight_versions": Option(
                str,
                "stash",
                "stash: one per minibatch under way; 2bw: two, and an update per step",
                WEIGHT_VERSION_SCHEMES,
            ),
            "vertical_sync": Option(bool, False, "all stages compute a minibatch with the first one's version"),
        },
        reference="pipedream",
        cost="hpcbench.oracle.strategies.pipedream:PipedreamCost",
        hybrid=("dp_degree",),
        exclusion=pipedream_exclusion,
        table_exclusion=pipeline.pipeline_table_exclusion,
        schedule="pipedream",
        staleness=pipedream_staleness,
        calibration=pipeline.PIPELINE_CALIBRATION,
        plot_style=PlotStyle("blue", "star", "dots"),
    ),
}
