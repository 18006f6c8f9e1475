"""The two answers about a run's memory, the oracle's formula and a dry run, agree for every strategy of the registry."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.results.probe_records import DryRunTask
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.layer_table import read_shipped_table
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.worker.dry_run.fake_rank import record_step
from hpcbench.worker.strategy import import_fairscale
from tests.conftest import absent
from tests.library_stand_ins import library_stand_ins

pytestmark = pytest.mark.slow

AGREEMENT = 0.1


class Family(NamedTuple):
    dataset: str
    batch_size: int


FAMILIES = {
    "resnet18": Family("cifar10", 64),
    "gpt": Family("tokens", 8),
    "llama": Family("tokens", 8),
    "cosmoflow": Family("cosmoflow", 4),
}
PRECISIONS = ("fp32", "bf16")

TRANSFORMERS, CONVOLUTIONAL = {"gpt", "llama"}, {"resnet18", "cosmoflow"}
REFUSED = {
    "filter": TRANSFORMERS, "channel": TRANSFORMERS, "spatial": TRANSFORMERS, "tensor": CONVOLUTIONAL,
}  # fmt: skip
"""Families that planning refuses for a strategy, in both precisions."""
REFUSED_PRECISIONS = {"fairscale_pipe": "bf16"}

WIDER = {
    # A residual's gradient is alive beside the branch's, and the table of layers has no row for it.
    ("model", "resnet18", "fp32", 0): 0.15,
    # The formula has receive buffers for the largest messages of both directions together.
    ("interleaved_1f1b", "resnet18", "bf16", 0): 0.15,
    # A dry run holds all devices of the process, whose peaks are not at one time; outputs are gathered for the loss.
    **{("fairscale_pipe", model, "fp32", 0): 0.2 for model in ("resnet18", "gpt", "llama", "cosmoflow")},
}
"""Ranks whose answers differ by more, with the reason."""


def run_of(key: str, model: str, precision: str) -> RunSpec | None:
    """The run on four devices, or on two where planning refuses four; ``None`` where it refuses both."""
    for devices in (4, 2):
        entry, family = STRATEGIES[key], FAMILIES[model]
        degrees: dict[str, Any] = {"dp_degree": 1, **({entry.own_degree: devices} if entry.own_degree else {})}
        if entry.own_degree == "pp_degree":
            degrees["micro_batches"] = 4
        ranks = devices if entry.own_degree and not entry.drives_several_devices else 1
        driven = devices if entry.drives_several_devices else 1
        given: dict[str, Any] = {
            "batch_size": family.batch_size,
            "precision": precision,
            "optimizer": "adam",
            **degrees,
        }
        spec = RunSpec(
            strategy=key, model=model, dataset=family.dataset, tasks_per_node=ranks, devices_per_task=driven, **given
        )
        values = {name: value for name, value in msgspec.to_builtins(spec).items() if name != "spec_version"}
        if not isinstance(resolve_point(values, PartitionLimits("memory")), InfeasiblePoint):
            return spec
    return None


def peaks(spec: RunSpec, rank: int) -> tuple[int, int]:
    """Return the peak bytes of a rank on GPUs by a dry run and by the oracle, of all devices that it drives."""
    table = read_shipped_table(spec.model, spec.dataset)
    assert table is not None
    parts = range(spec.devices_per_task) if spec.devices_per_task > 1 else [rank]
    oracle_bytes = sum(resolve_cost(spec.strategy).memory(spec, table, part).on("cuda").total_bytes for part in parts)
    with library_stand_ins(spec, torch.device("cpu", 0)):
        return record_step(DryRunTask(index=0, spec=spec, device="cuda"), rank).peak_bytes, oracle_bytes


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("key", STRATEGIES)
def test_a_dry_run_and_the_oracle_agree_on_memory(key: str, precision: str) -> None:
    if key.startswith("fairscale"):
        try:
            import_fairscale("nn.data_parallel")
        except WorkerError as error:
            absent("fairscale", str(error))
    ratios: dict[tuple[str, str, str, int], float] = {}
    refused = set()
    for model in FAMILIES:
        spec = run_of(key, model, precision)
        if spec is None:
            refused.add(model)
            continue
        for rank in sorted({0, spec.ranks - 1}):
            dry_run_bytes, oracle_bytes = peaks(spec, rank)
            ratios[key, model, precision, rank] = dry_run_bytes / oracle_bytes
    assert refused == (set(FAMILIES) if REFUSED_PRECISIONS.get(key) == precision else REFUSED.get(key, set()))
    far = {cell: ratio for cell, ratio in ratios.items() if abs(ratio - 1) > WIDER.get(cell, AGREEMENT)}
    assert not far
