"""The asynchronous pipeline: updates after every minibatch, with weights that are some updates old."""

from __future__ import annotations

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.entry import Option, Strategy
from hpcbench.parallel.strategies import pipeline
from hpcbench.parallel.versions import WEIGHT_VERSIONS, Delay

STRATEGIES = {
    "pipedream": Strategy(
        own_degree="pp_degree",
        runtime="hpcbench.worker.strategies.pipedream:Pipedream",
        description="asynchronous pipeline: an update per micro-batch, weights stashed (PipeDream)",
        options={
            "balance": pipeline.OPTIONS["balance"],
            "cuts": pipeline.OPTIONS["cuts"],
            "recompute": Option(
                str, "never", "activations are computed again in the backward pass", ("never", "always")
            ),
            "weight_versions": Option(
                str, "stash", "stash: one per minibatch under way; 2bw: two, and an update per step", WEIGHT_VERSIONS
            ),
            "vertical_sync": Option(bool, False, "all stages compute a minibatch with the first one's version"),
        },
        reference="pipedream",
        cost="hpcbench.oracle.strategies.pipedream:PipedreamCost",
        hybrid=("dp_degree",),
        limit="hpcbench.parallel.strategies.pipedream:excluded",
    ),
}


def delay_of(spec: RunSpec) -> Delay:
    """How old a run's weights are."""
    versions = spec.options.get("weight_versions", WEIGHT_VERSIONS[0])
    return Delay(spec.pp_degree, bool(spec.options.get("vertical_sync")), versions == "2bw")


def excluded(spec: RunSpec) -> str | None:
    """As for all pipelines; weights that stages share or a compiler has seen, and versions that make no sense."""
    if spec.compile:
        return "pipedream exchanges the weights of its stages, which a compiled graph has taken in: compile = false"
    if spec.model_options.get("tied") and spec.pp_degree > 1:
        return "pipedream with tied weights: two stages would have versions of their own of them; use 1f1b"
    if spec.options.get("vertical_sync") and spec.options.get("weight_versions") == "2bw":
        return "pipedream with weight_versions 2bw has the same version on all stages: vertical_sync adds nothing"
    return pipeline.excluded(spec)
