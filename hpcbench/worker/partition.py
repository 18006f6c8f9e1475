"""``python -m hpcbench.worker.partition``: the stages that PipeDream's partitioner chooses for a model.

The model's blocks are measured on this device, with a cache; ``--workers`` lists the levels of the machine from the
innermost outwards, such as "4 x 25 GB/s, 2 x 3 GB/s": nodes of 4 devices, 2 of them. The output holds the plan with
replicated stages, the one without, and the options that give a run this layout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import inf

import msgspec
import torch

from hpcbench.errors import ConfigError, HpcbenchError
from hpcbench.parallel.pipeline.stage_balance import BlockProfile, BlockProfileRequest
from hpcbench.parallel.pipeline.stage_partition import InterconnectLevel, PartitionStage, partition_pipeline
from hpcbench.units import format_bytes, format_seconds, parse_quantity
from hpcbench.worker.block_times import profile_blocks


class PartitionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan of stages and replicas: an entry of ``--json``."""

    replicated: bool
    """Whether stages may be replicated."""
    step_s: float = 0.0
    """Seconds of a micro-batch in the steady state: the time of the slowest stage or link."""
    speed_up: float = 0.0
    """Time of a micro-batch on one worker, divided by ``step_s``."""
    cuts: str = ""
    stage_replicas: str = ""
    stages: list[dict[str, float]] = []
    error: str = ""
    """The reason why there is no plan; empty if there is one."""


def parse_levels(text: str) -> list[InterconnectLevel]:
    """``"4 x 25 GB/s, 2 x 3 GB/s"``, from the innermost level outwards. ``ConfigError`` where it is none.

    >>> parse_levels("4 x 25 GB/s")
    [InterconnectLevel(groups=4, bandwidth_bytes_per_s=25000000000.0)]
    """
    levels = []
    for part in text.split(","):
        count, separator, bandwidth = part.partition("x")
        if not separator or not count.strip().isdecimal() or not int(count):
            raise ConfigError(f"{part.strip()!r} is no level: '4 x 25 GB/s' is", where="--workers")
        levels.append(InterconnectLevel(int(count), _parse_positive(bandwidth.strip(), "rate", "--workers")))
    return levels


def _parse_positive(text: str, kind: str, where: str) -> float:
    try:
        value = parse_quantity(text, kind)
    except ValueError as error:
        raise ConfigError(str(error), where=where) from error
    if value <= 0:
        raise ConfigError(f"{text.strip()!r} is nothing", where=where)
    return value


def make_partition_plan(
    profile: BlockProfile, levels: Sequence[InterconnectLevel], memory_bytes: float, optimizer_states: int,
    replicated: bool,
) -> PartitionPlan:  # fmt: skip
    """The best plan, or why there is none."""
    chain = profile.chain()
    try:
        partition = partition_pipeline(chain, levels, memory_bytes, replicated, optimizer_states)
    except ConfigError as error:
        return PartitionPlan(replicated=replicated, error=error.message)
    return PartitionPlan(
        replicated=replicated,
        step_s=partition.bottleneck_s,
        speed_up=sum(block.compute_s for block in chain) / partition.bottleneck_s if partition.bottleneck_s else inf,
        cuts=",".join(map(str, partition.cuts)),
        stage_replicas="-".join(str(stage.replicas) for stage in partition.stages),
        stages=[_stage_row(profile, stage) for stage in partition.stages],
    )


def _stage_row(profile: BlockProfile, stage: PartitionStage) -> dict[str, float]:
    blocks = profile.blocks[stage.first : stage.last]
    return {
        **stage._asdict(),
        "compute_s": sum(block.forward_s + block.backward_s for block in blocks),
        "parameter_bytes": sum(block.parameter_bytes for block in blocks),
        "output_bytes": blocks[-1].output_bytes,
    }


def render_plans(profile: BlockProfile, plans: Sequence[PartitionPlan]) -> list[str]:
    """Return the plans as text."""
    request = profile.request
    alone = sum(block.forward_s + block.backward_s for block in profile.blocks)
    lines = [
        f"{request.model} on {request.dataset}, micro-batches of {request.micro_batch_size}, {request.precision} on "
        f"{profile.device_name}: {len(profile.blocks)} blocks, {format_seconds(alone)} per micro-batch on one worker"
    ]
    for plan in plans:
        lines += ["", "stages may be replicated" if plan.replicated else "one worker per stage"]
        if plan.error:
            lines.append(f"  {plan.error}")
            continue
        lines.append(f"  {format_seconds(plan.step_s)} per micro-batch, {plan.speed_up:.2f} times one worker")
        lines.append("  stage  blocks   replicas  in flight  compute  weights   hands on   held by each")
        for number, stage in enumerate(plan.stages):
            blocks = f"{stage['first']:.0f}-{stage['last'] - 1:.0f}"
            lines.append(
                f"  {number:<6} {blocks:<8} {stage['replicas']:<9.0f} {stage['versions']:<10.0f} "
                f"{format_seconds(stage['compute_s']):<8} {format_bytes(stage['parameter_bytes']):<9} "
                f"{format_bytes(stage['output_bytes']):<10} {format_bytes(stage['held_bytes'])}"
            )
        lines.append(f"  {_sweep_options(plan)}")
    return lines


def _sweep_options(plan: PartitionPlan) -> str:
    """Return the options of a sweep."""
    widths = {stage["replicas"] for stage in plan.stages}
    if len(plan.stages) == 1:
        return f'strategy = "ddp", dp_degree = {plan.stages[0]["replicas"]:.0f}'
    degree = f'strategy = "pipedream", pp_degree = {len(plan.stages)}'
    cuts = f'options.cuts = "{plan.cuts}"'
    if len(widths) == 1:
        replicas = f", dp_degree = {widths.pop():.0f}" if widths != {1} else ""
        return f"{degree}{replicas}, {cuts}"
    ranks = sum(int(stage["replicas"]) for stage in plan.stages)
    return f'strategy = "1f1b", pp_degree = {ranks}, {cuts}, options.stage_replicas = "{plan.stage_replicas}"'


def main(arguments: list[str] | None = None) -> int:
    """Measure, plan, print; returns the exit code."""
    args = _argument_parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        if args.micro_batch_size < 1 or args.optimizer_states < 0:
            raise ConfigError("--micro-batch-size is 1 or more, --optimizer-states 0 or more")
        levels = parse_levels(args.workers)
        memory_bytes = _parse_positive(args.memory, "size", "--memory") if args.memory else inf
        fields = {name: value for name, value in vars(args).items() if name in BlockProfileRequest.__struct_fields__}
        request = BlockProfileRequest(**{**fields, "model_options": msgspec.json.decode(args.model_options)})
        profile = profile_blocks(request, args.refresh)
    except msgspec.MsgspecError as error:
        print(f"hpcbench: --model-options {args.model_options!r}: no JSON: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except HpcbenchError as error:
        print(f"hpcbench: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    # In tensors as large as the parameters: master weights and their states are fp32, twice as large as bf16.
    has_masters = args.precision == "bf16_params"
    states = 2 * (1 + args.optimizer_states) if has_masters else args.optimizer_states
    plans = [make_partition_plan(profile, levels, memory_bytes, states, replicated) for replicated in (True, False)]
    text = msgspec.json.encode({"plans": plans}).decode() if args.json else "\n".join(render_plans(profile, plans))
    print(text)  # noqa: T201
    return 2 if all(plan.error for plan in plans) else 0


def _argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpcbench.worker.partition",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--micro-batch-size", type=int, required=True, metavar="N", help="samples of one micro-batch")
    parser.add_argument("--workers", required=True, help='levels, the innermost first: "4 x 25 GB/s, 2 x 3 GB/s"')
    parser.add_argument("--memory", help='of each worker, such as "16 GiB"')
    parser.add_argument(
        "--optimizer-states", type=int, default=1, metavar="N", help="tensors per parameter: 1 for momentum, 2 for Adam"
    )
    parser.add_argument("--input-size", type=int, metavar="N")
    parser.add_argument("--model-options", default="{}", metavar="JSON")
    parser.add_argument("--model-folder", metavar="DIR", help="where a model of your own is")
    parser.add_argument(
        "--precision", default="fp32", choices=("fp64", "fp32", "tf32", "bf16", "bf16_params"),
        help="of the blocks; bf16_params: bf16 parameters, as of a run with fp32 master weights (default: fp32)",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--refresh", action="store_true", help="measure anew, whatever the cache holds")
    parser.add_argument("--json", action="store_true", help="the plans as one JSON document")
    return parser


if __name__ == "__main__":
    sys.exit(main())
