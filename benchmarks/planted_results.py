"""Results that nobody measured, with every figure that a plot can show: for tests, and for the pictures in docs/."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.results.schema import (
    FailureRecord,
    LossSummary,
    PipelinePrediction,
    PipelineTimeline,
    RankTimeline,
    RunMetrics,
    RunResult,
    StepTimeStatistics,
    TimelineSpan,
    result_document,
)
from hpcbench.strategies.pipeline.schedule_simulator import ScheduleTimeline, simulate_schedule
from hpcbench.strategies.pipeline.schedules import PipelineLayout, schedule_actions

REPEATS, STEPS = 3, 24
_SECONDS = {
    "single": (0.1, 0.0), "ddp": (0.1, 0.04), "fsdp": (0.12, 0.012), "gpipe": (0.13, 0.03), "1f1b": (0.125, 0.028),
}  # fmt: skip
"""A step on one device, and the share that each further one adds: ``ddp`` and ``fsdp`` cross at 8.5 devices."""
_PIPELINES = ("gpipe", "1f1b")
_UNITS = {"F": 1.0, "B": 2.0}
_GIB = 2**30


def results() -> Iterator[RunResult]:
    """Five strategies on 1 to 16 devices, three launches each, 32 samples per device; ``filter`` runs out of memory."""
    source = random.Random(20)
    for (strategy, devices), repeat in itertools.product(_points(), range(REPEATS)):
        yield _ended(_spec(strategy, devices, repeat), source)
    spec = _spec("filter", 2, 0)
    failure = FailureRecord(type="OutOfMemoryError", message="tried to allocate 9.00 GiB")
    yield RunResult(**_identity(spec), status="oom", spec=spec, error=failure)


def _points() -> list[tuple[str, int]]:
    return [
        ("single", 1), *(("ddp", 2**n) for n in range(5)), *(("fsdp", 2**n) for n in range(1, 5)),
        *((name, 2**n) for name in _PIPELINES for n in (1, 2, 3)),
    ]  # fmt: skip


def _spec(strategy: str, devices: int, repeat: int) -> RunSpec:
    given: dict[str, Any] = {"batch_size": 32, "dp_degree": devices}
    if strategy in _PIPELINES:
        given = {
            "batch_size": 32 * devices, "pp_degree": devices, "micro_batches": 4, "options": {"balance": "measured"},
        }  # fmt: skip
    if strategy == "filter":
        given = {"batch_size": 32, "tp_degree": devices}
    return RunSpec(
        model="resnet50", dataset="imagenet", strategy=strategy, nodes=max(1, devices // 4),
        tasks_per_node=min(4, devices), repeat=repeat, seed=repeat, steps=STEPS, **given,
    )  # fmt: skip


def _identity(spec: RunSpec) -> dict[str, Any]:
    return {
        "run_id": run_id(spec), "config_id": config_id(spec), "attempt": 1, "sweep": "made-up", "cluster": "made-up",
        "environment_digest": "701ea0e41526",
    }  # fmt: skip


def _ended(spec: RunSpec, source: random.Random) -> RunResult:
    """The first launch is as planted; the second is 2 % faster, the third 2 % slower."""
    base, more = _SECONDS[spec.strategy]
    step = base * (1 + more * (spec.devices - 1)) * (1.0, 0.98, 1.02)[spec.repeat]
    times = [step * source.lognormvariate(0, 0.015) for _ in range(STEPS)]
    piped = spec.strategy in _PIPELINES
    walked = simulate_schedule(
        schedule_actions(spec.strategy, PipelineLayout(spec.pp_degree), spec.micro_batches),
        PipelineLayout(spec.pp_degree),
        lambda action: _UNITS[action.kind],
    ) if piped else None  # fmt: skip
    memory = [_memory_bytes(spec, rank) for rank in range(spec.ranks)]
    compute = base * 0.85 * (1 - walked.bubble_fraction if walked else 1)
    exposed = 0.0 if spec.devices == 1 else max(step - compute - base * 0.08, 0.01 * step)
    return RunResult(
        **_identity(spec), status="ok", spec=spec, step_times_s=times,
        metrics=RunMetrics(
            step_time_s=StepTimeStatistics(
                median=step, mean=step, std=step * 0.015, p10=step * 0.98, p90=step * 1.02, min=step * 0.96,
                max=step * 1.05, ci95_low=step * 0.995, ci95_high=step * 1.005,
            ),
            samples_per_s=32 * spec.devices / step, timed_s=step * STEPS, compute_s=compute * (1.1 if piped else 1),
            exposed_comm_s=exposed or None,
            comm_s=exposed + 0.01 if exposed else None, bubble_fraction=walked.bubble_fraction if walked else None,
            mfu=0.45 * base / step, hfu=0.45 * base / step * (4 / 3 if spec.strategy == "fsdp" else 1),
            peak_memory_bytes=max(memory), loss=LossSummary(first=6.9, last=6.1),
            energy_j=(250 + 5 * spec.devices) * spec.devices * step * STEPS, energy_source="nobody",
        ),
        predicted=PipelinePrediction(
            step_time_s=step * (0.96 if spec.strategy == "1f1b" else 0.87), bubble_fraction=0.2
        )
        if piped else None,
        ranks=[
            {
                "rank": rank, "peak_memory_bytes": each,
                # Half of the ranks compute longer, the others shorter.
                "phases": {
                    "step_s": step, "compute_s": compute * (0.9 if rank % 2 else 1.1), "exposed_comm_s": exposed,
                    "comm_s": exposed + 0.01,
                },
            }
            for rank, each in enumerate(memory)
        ],
        timeline=_timeline(walked, step, source) if walked else None,
    )  # fmt: skip


def _memory_bytes(spec: RunSpec, rank: int) -> int:
    if spec.strategy == "fsdp":
        return round((8 + 12 / spec.devices) * _GIB)
    if spec.strategy in _PIPELINES:
        kept = spec.micro_batches if spec.strategy == "gpipe" else min(spec.pp_degree - rank, spec.micro_batches)
        return round((6 + 3.5 * kept) * _GIB)
    return 20 * _GIB


def _timeline(walked: ScheduleTimeline, step_s: float, source: random.Random) -> PipelineTimeline:
    """The plan, and a measured step whose actions begin as they were planned and end a little early."""
    unit = step_s / walked.end
    planned = [
        [TimelineSpan(*span.action, span.begin * unit, span.end * unit) for span in spans] for spans in walked.ranks
    ]
    measured = [
        [one._replace(end_s=one.begin_s + (one.end_s - one.begin_s) * source.uniform(0.8, 0.99)) for one in spans]
        for spans in planned
    ]
    busy = sum(one.end_s - one.begin_s for spans in measured for one in spans)
    end = max(spans[-1].end_s for spans in measured)
    return PipelineTimeline(
        bubble_fraction=1 - busy / (end * len(measured)), planned_bubble_fraction=walked.bubble_fraction,
        measured_s=end, planned_s=step_s,
        ranks=[
            RankTimeline(rank=rank, planned=plan, measured=real)
            for rank, (plan, real) in enumerate(zip(planned, measured, strict=True))
        ],
    )  # fmt: skip


def write_planted(tree: Path) -> None:
    """All of them below ``tree``, a cluster's folder."""
    for made in results():
        folder = tree / "runs" / made.run_id[:2] / made.run_id
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath("result.json").write_bytes(msgspec.json.encode(result_document(made)))
