"""Trees of results whose right findings are known."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import polars

from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.results.frame import collected_frame
from hpcbench.results.results_tree import ClusterTree, CollectedResult
from hpcbench.results.schema import FailureRecord, RunMetrics, RunResult, StepTimeStatistics

NOISE = (0.0, 0.004, -0.003, 0.002, -0.005)
"""What launches of one configuration differ by, as shares."""


COMMAND: dict[str, Any] = {"model": "", "dataset": "", "strategy": "command", "batch_size": 0, "command_digest": "d"}
"""Values of a command's run in place of a training's parameters."""


def launch(
    step_s: float | None,
    *,
    status: str = "ok",
    warnings: Sequence[str] = (),
    memory_bytes: int | None = None,
    error: FailureRecord | None = None,
    digest: str | None = "e1",
    cluster: str = "c",
    spread: float = 0.01,
    **changes: Any,
) -> RunResult:
    """A run with the step time given, and ``spread`` on both sides of it; batch 8 per replica, one device per node."""
    given: dict[str, Any] = {"model": "vgg11", "dataset": "mnist", "strategy": "ddp", "batch_size": 8, **changes}
    given.setdefault("dp_degree", given.get("nodes", 1))
    spec = RunSpec(**given)
    metrics = RunMetrics()
    if step_s is not None:
        low_s, high_s = step_s * (1 - spread), step_s * (1 + spread)
        step = StepTimeStatistics(
            median=step_s, mean=step_s, std=0, p10=low_s, p90=high_s, min=low_s, max=high_s, ci95_low=low_s,
            ci95_high=high_s,
        )  # fmt: skip
        rate = spec.global_batch_size / step_s
        metrics = RunMetrics(step_time_s=step, samples_per_s=rate, peak_memory_bytes=memory_bytes)
    return RunResult(
        run_id=run_id(spec), config_id=config_id(spec), attempt=1, sweep="planted", cluster=cluster, status=status,
        spec=spec, metrics=metrics, warnings=[*warnings], error=error, environment_digest=digest,
    )  # fmt: skip


def launches(step_s: float, count: int = 5, noise: Sequence[float] = NOISE, **changes: Any) -> list[RunResult]:
    """So many launches of one configuration, around ``step_s``."""
    return [launch(step_s * (1 + noise[number % len(noise)]), repeat=number, **changes) for number in range(count)]


def crossover() -> list[RunResult]:
    """``ddp`` is faster on 1 and 2 nodes, ``fsdp`` on 4 and 8; ddp's efficiency falls under 80 % at 4, fsdp's not."""
    found = [*launches(0.100, strategy="single")]
    for nodes, ddp_s, fsdp_s in ((2, 0.105, 0.118), (4, 0.140, 0.120), (8, 0.180, 0.122)):
        found += launches(ddp_s, nodes=nodes)
        found += launches(fsdp_s, nodes=nodes, strategy="fsdp")
    return found


def failure() -> list[RunResult]:
    """Results on 4 nodes: ``ddp`` runs out of memory, ``fsdp`` fits, ``gpipe`` hangs, ``zero1`` was killed."""
    lost = FailureRecord(type="PeerEnded", message="rank 3 ended without a word\nmore of it", hint="see its node's log")
    found = [*launches(0.1, strategy="single", memory_bytes=2**30)]
    found += [launch(None, status="oom", nodes=4, repeat=number) for number in range(2)]
    found += launches(0.15, nodes=4, strategy="fsdp", memory_bytes=3 * 2**30)
    found += [launch(None, status="failed", nodes=4, strategy="zero1", error=lost, repeat=n) for n in range(3)]
    late = FailureRecord(type="Timeout", message="not done after 30 min", hint="a longer time_limit_min")
    return [*found, launch(None, status="timeout", nodes=4, strategy="gpipe", pp_degree=4, dp_degree=1, error=late)]


def overlapping() -> list[RunResult]:
    """``ddp`` and ``fsdp`` on 4 nodes differ by 1 %, and launches by 8 %."""
    wide = (0.0, 0.04, -0.04, 0.03, -0.02)
    return [*launches(0.100, noise=wide, nodes=4), *launches(0.101, noise=wide, nodes=4, strategy="fsdp")]


def alike(source: random.Random, count: int, strategies: int, scales: int, slower: float = 0.0) -> list[RunResult]:
    """Strategies with 1 % of noise between launches; all but the first are slower by the share given."""
    return [
        launch(
            0.1 * source.lognormvariate(0, 0.01) * (1 + slower * (number > 0)), strategy=f"s{number}", nodes=2**scale,
            repeat=repeat,
        )
        for number in range(strategies)
        for scale in range(scales)
        for repeat in range(count)
    ]  # fmt: skip


def frame_of(results: Iterable[RunResult]) -> polars.DataFrame:
    """Return the results as a frame."""
    return collected_frame(CollectedResult(one.cluster, one.run_id, one) for one in results)


def write(results: Iterable[RunResult], root: Path) -> None:
    """Put them into a results tree."""
    for one in results:
        ClusterTree(root / one.cluster).write_result(one)
