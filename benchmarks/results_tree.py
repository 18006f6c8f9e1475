"""A tree of results that nobody measured: files as the worker writes them, of about 1.5 KB."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.results.schema import LossSummary, RunMetrics, RunResult, StepTimeStatistics, result_document

STRATEGIES = ("ddp", "fsdp", "zero1", "gpipe", "1f1b")
REPEATS = 5


def specs(first: int = 0) -> Iterator[RunSpec]:
    """Runs without end, no two alike: strategies x nodes x batches x repeats, and ever new learning rates."""
    for number in itertools.count(first):
        for strategy, nodes, batch_size, repeat in itertools.product(
            STRATEGIES, (1, 2, 4, 8), (8, 16, 32, 64, 128), range(REPEATS)
        ):
            yield RunSpec(
                model="resnet50", dataset="imagenet", strategy=strategy, nodes=nodes, tasks_per_node=4,
                batch_size=batch_size, dp_degree=4 * nodes, learning_rate=0.01 * (number + 1),
                repeat=repeat, seed=repeat, steps=50, options={"bucket_mb": 25},
            )  # fmt: skip


def result(spec: RunSpec, source: random.Random) -> RunResult:
    """A result with figures drawn from ``source``; one in fifty ran out of memory."""
    ident = run_id(spec)
    median = 0.001 * spec.batch_size * (1 + 0.05 * spec.nodes) * source.lognormvariate(0, 0.02)
    failed = source.random() < 0.02
    return RunResult(
        run_id=ident, config_id=config_id(spec), attempt=1, sweep="made-up", cluster="made-up",
        status="oom" if failed else "ok", spec=spec,
        metrics=RunMetrics() if failed else RunMetrics(
            step_time_s=StepTimeStatistics(
                median=median, mean=median * 1.01, std=median * 0.02, p10=median * 0.97, p90=median * 1.04,
                min=median * 0.95, max=median * 1.2, ci95_low=median * 0.99, ci95_high=median * 1.01,
            ),
            samples_per_s=spec.global_batch_size / median, epoch_time_s=1.2e6 * median / spec.global_batch_size,
            compute_s=median * 0.8, comm_s=median * 0.3, exposed_comm_s=median * 0.15, peak_memory_bytes=2**33,
            time_to_first_step_s=12.5, loss=LossSummary(first=6.9, last=6.1),
        ),
        ranks=[{"rank": 0, "local_rank": 0, "node_rank": 0, "host": "n0001", "device": "cuda:0", "steps_done": 4}],
        step_times_s=[median * source.lognormvariate(0, 0.02) for _ in range(4)],
        provenance={"hpcbench": "0.1.0", "torch": "2.13.0", "hosts": ["n0001"], "environment_key": "5717"},
        environment_digest="701ea0e41526",
    )  # fmt: skip


def write_results(tree: Path, count: int, first: int = 0, seed: int = 0) -> None:
    """``count`` results below ``tree``, without the flush to the device that a worker waits for."""
    source = random.Random(seed)
    for spec in itertools.islice(specs(first), count):
        made = result(spec, source)
        folder = tree / "runs" / made.run_id[:2] / made.run_id
        folder.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(result_document(made)), indent=1) + b"\n"
        folder.joinpath("result.json").write_bytes(text)
        # As a worker does after the rename.
        folder.parent.touch()
