"""Pipelines, synchronous, asynchronous (PipeDream) and of one process (fairscale's Pipe): registry entries, limits, the
pipeline layout and the staleness of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from hpcbench.config.option import Option
from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.layer_table import LayerTable, read_shipped_table
from hpcbench.strategies.pipeline.schedules import PipelineLayout
from hpcbench.strategies.pipeline.stage_partition import parse_cuts
from hpcbench.strategies.pipeline.weight_versions import WEIGHT_VERSION_SCHEMES, Staleness
from hpcbench.strategies.strategy_entry import HybridAlias, Library, PipelineForm, StrategyEntry
from hpcbench.strategies.tensor import entry as tensor

RECOMPUTE_CHOICES = ("never", "except_last", "always")
TABLE_BALANCES = ("time", "memory", "parameters", "blocks")
BALANCES = (*TABLE_BALANCES, "measured")

PIPELINE_OPTIONS = {
    "balance": Option("time", "what stages share evenly, by the table of layers or by a measurement", BALANCES),
    "cuts": Option("", "first block of every stage but the first, such as 3,7: instead of balance"),
    "recompute": Option("never", "micro-batches whose activations are computed again backward", RECOMPUTE_CHOICES),
    "batch_norm": Option("micro_batch", "what BatchNorm's running statistics are of", ("micro_batch", "deferred")),
}
VIRTUAL_STAGES_OPTION = Option(2, "chunks that every rank holds")
STAGE_REPLICAS_OPTION = Option(
    "", "ranks of every stage, such as 2-1-1: their sum is pp_degree, micro-batches are assigned round-robin"
)


def pipeline_layout(spec: RunSpec) -> PipelineLayout:
    """The pipeline of one replica of the run."""
    has_virtual_stages = spec.strategy in STRATEGIES and "virtual_stages" in STRATEGIES[spec.strategy].options
    virtual = spec.options.get("virtual_stages", VIRTUAL_STAGES_OPTION.default) if has_virtual_stages else 1
    assert isinstance(virtual, int)
    replicas = parse_stage_replicas(str(spec.options.get("stage_replicas", "")))
    return PipelineLayout(len(replicas), 1, replicas) if replicas else PipelineLayout(spec.pp_degree, virtual)


def parse_stage_replicas(text: str) -> tuple[int, ...] | None:
    """Parse ``"2-1-1"`` as ``(2, 1, 1)``; ``None`` if it is no list of ranks per stage."""
    parts = [part.strip() for part in text.split("-")]
    return tuple(map(int, parts)) if all(part.isdecimal() and int(part) for part in parts) else None


def pipeline_exclusion(spec: RunSpec) -> str | None:
    """More chunks than blocks, cuts and replicas that are none, and fp16."""
    reason = _stage_replicas_exclusion(spec)
    if reason is not None:
        return reason
    layout = pipeline_layout(spec)
    if layout.virtual_stages < 1:
        return f"{spec.strategy} with virtual_stages {layout.virtual_stages}: 1 or more is right"
    if spec.tp_degree > 1 and (why := tensor.tensor_exclusion(spec)) is not None:
        return why
    if spec.precision == "fp16":
        return f"{spec.strategy} with fp16 would need a loss scale that all stages agree on: use bf16"
    table = read_shipped_table(spec.model, spec.dataset, spec.input_size, spec.model_options)
    return cuts_exclusion(spec, layout, table.blocks if table is not None else None)


def cuts_exclusion(spec: RunSpec, layout: PipelineLayout, blocks: int | None) -> str | None:
    """Return the reason why the model, of that many blocks if known, cannot be cut as the run asks for."""
    if blocks is not None and layout.chunks > blocks:
        pieces = f"{layout.stages} stages" + f" x {layout.virtual_stages} chunks" * (layout.virtual_stages > 1)
        return f"{spec.strategy} on {pieces}, but {spec.model} on {spec.dataset} has {blocks} blocks: each needs one"
    text = str(spec.options.get("cuts", ""))
    if not text:
        return None
    cuts = parse_cuts(text)
    if cuts is None:
        return f"options.cuts {text!r}: the first blocks of all stages but the first, ascending, such as 3,7"
    if len(cuts) != layout.chunks - 1:
        return f"options.cuts {text!r} makes {len(cuts) + 1} pieces, the run has {layout.chunks}"
    if blocks is not None and cuts and cuts[-1] >= blocks:
        return f"options.cuts {text!r}: {spec.model} on {spec.dataset} has {blocks} blocks, 0 to {blocks - 1}"
    return None


def _stage_replicas_exclusion(spec: RunSpec) -> str | None:
    """Return the reason why ``stage_replicas`` is invalid."""
    text = str(spec.options.get("stage_replicas", ""))
    if not text:
        return None
    replicas, named = parse_stage_replicas(text), f"options.stage_replicas {text!r}"
    if replicas is None:
        return f"{named}: the ranks of every stage, 1 or more, such as 2-1-1"
    if sum(replicas) != spec.pp_degree:
        return f"{named} is {sum(replicas)} ranks, pp_degree is {spec.pp_degree}: as many are right"
    if spec.dp_degree > 1:
        return f"{named} with dp_degree {spec.dp_degree}: stages have their own replicas, dp_degree 1 is right"
    if spec.micro_batches < max(replicas):
        return f"{named} with micro_batches {spec.micro_batches}: {max(replicas)} replicas need one each"
    if max(replicas) > 1 and shares_output_weights(spec):
        return f"{named}: stages with replicas cannot share tied weights"
    if spec.options.get("batch_norm") == "deferred":
        return f"{named} with batch_norm deferred: a replica sees a part of the mini-batch alone, use micro_batch"
    return None


def shares_output_weights(spec: RunSpec) -> bool:
    """Return whether the output layer of a shipped model uses the embedding's weights, by option or by default."""
    if (explicit := spec.model_options.get("tied")) is not None:
        return bool(explicit)
    table = read_shipped_table(spec.model, spec.dataset)
    return table is not None and any(row.kind == "Linear" and not row.parameters for row in table.layers[-2:])


def pipeline_table_exclusion(spec: RunSpec, table: LayerTable) -> str | None:
    """The reason why the model of ``table`` cannot be divided into the run's stages, or ``None``."""
    if spec.tp_degree > 1 and (reason := tensor.transformer_table_exclusion(spec, table)):
        return reason
    return cuts_exclusion(spec, pipeline_layout(spec), table.blocks)


def pipedream_staleness(spec: RunSpec) -> Staleness:
    """Return the staleness of a run's weights."""
    versions = spec.options.get("weight_versions", WEIGHT_VERSION_SCHEMES[0])
    return Staleness(spec.pp_degree, bool(spec.options.get("vertical_sync")), versions == "2bw")


def pipedream_exclusion(spec: RunSpec) -> str | None:
    """Check the limits of all pipelines, shared weights, and contradictory versions."""
    if spec.pp_degree > 1 and shares_output_weights(spec):
        return "pipedream with tied weights: two stages would have versions of their own of them; use 1f1b"
    if spec.options.get("vertical_sync") and spec.options.get("weight_versions") == "2bw":
        return "pipedream with weight_versions 2bw has the same version on all stages: vertical_sync adds nothing"
    return pipeline_exclusion(spec)


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
    if spec.pp_degree > 1 and shares_output_weights(spec):
        return "fairscale_pipe cannot share tied weights between its stages: use gpipe"
    return pipeline_exclusion(spec)


_any_pipeline_entry = partial(StrategyEntry, own_degree="pp_degree", table_exclusion=pipeline_table_exclusion)


def _pipeline_entry(
    schedule: str,
    description: str,
    options: Mapping[str, Option] = MappingProxyType({}),
    *,
    splits_backward: bool = False,
) -> StrategyEntry:
    return _any_pipeline_entry(
        description=description,
        options={**PIPELINE_OPTIONS, **options},
        hybrid=("dp_degree", "tp_degree"),
        exclusion=pipeline_exclusion,
        pipeline=PipelineForm(schedule, splits_backward, records_timeline=True),
    )


_STAGE_REPLICAS = {"stage_replicas": STAGE_REPLICAS_OPTION}

STRATEGIES = {
    "model": _pipeline_entry(
        "model",
        "layers split over ranks, one micro-batch at a time: what pipelines are measured against",
    ),
    "gpipe": _pipeline_entry(
        "gpipe",
        "pipeline: all micro-batches forward, then all backward (GPipe)",
        _STAGE_REPLICAS,
    ),
    "1f1b": _pipeline_entry(
        "1f1b",
        "pipeline: one micro-batch forward, one backward (PipeDream-Flush)",
        _STAGE_REPLICAS,
    )._replace(other_names=("pp", "pipeline"), represents="stages"),
    "interleaved_1f1b": _pipeline_entry(
        "interleaved_1f1b",
        "1f1b with several chunks of the model on every rank",
        {"virtual_stages": VIRTUAL_STAGES_OPTION},
    )._replace(represents="interleaved_stages"),
    "zero_bubble": _pipeline_entry(
        "zero_bubble",
        "1f1b whose gradients of weights fill the bubble (ZB-H1)",
        splits_backward=True,
    ),
    "pipedream": _any_pipeline_entry(
        description="asynchronous pipeline: an update per micro-batch, weights stashed (PipeDream)",
        represents="asynchronous_stages",
        options={
            "balance": PIPELINE_OPTIONS["balance"],
            "cuts": PIPELINE_OPTIONS["cuts"],
            "recompute": Option("never", "activations are computed again in the backward pass", ("never", "always")),
            "weight_versions": Option(
                "stash", "stash: one per minibatch in flight; 2bw: two, and an update per step", WEIGHT_VERSION_SCHEMES
            ),
            "vertical_sync": Option(False, "all stages compute a minibatch with the first one's version"),
        },
        hybrid=("dp_degree",),
        exclusion=pipedream_exclusion,
        pipeline=PipelineForm("pipedream", staleness=pipedream_staleness),
    ),
    "fairscale_pipe": _any_pipeline_entry(
        library=Library("fairscale", batch_factor=4, micro_batches=4, one_process=True),
        description="pipeline of one process over several devices (fairscale's Pipe, torchgpipe)",
        options={
            "balance": PIPELINE_OPTIONS["balance"]._replace(
                description="what stages share evenly, by the table of layers", choices=TABLE_BALANCES
            ),
            "cuts": PIPELINE_OPTIONS["cuts"],
            "recompute": PIPELINE_OPTIONS["recompute"],
        },
        exclusion=fairscale_pipe_exclusion,
        pipeline=PipelineForm("gpipe"),
        drives_several_devices=True,
    ),
}

ALIASES = {"data_pipeline": HybridAlias("1f1b"), "data_tensor_pipeline": HybridAlias("1f1b", needs_tp_degree=True)}
