"""Peaks of live bytes: dry runs against the oracle, from one rank to 1,024, as one table.

``python -m tests.distributed.peaks`` prints it, for docs/decisions/0018-dry-runs-on-fake-cpu-tensors.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.results.probe_records import DryRunTask
from hpcbench.strategies.layer_table import read_shipped_table
from hpcbench.worker.dry_run.fake_rank import record_step
from tests.library_stand_ins import library_stand_ins


class PeakCase(NamedTuple):
    """A rank of a run on GPUs."""

    spec: RunSpec
    rank: int

    @property
    def label(self) -> str:
        """The run's strategy, model and numbers of ranks."""
        spec = self.spec
        degrees = [
            f"{name} {degree}"
            for name in ("dp", "tp", "pp", "sp")
            if (degree := getattr(spec, f"{name}_degree")) > 1 and degree != spec.ranks
        ]
        shape = f" ({', '.join(degrees)})" if degrees else ""
        return f"`{spec.strategy}` on {spec.ranks:,}{shape}, {spec.model}, rank {self.rank}"


class Peaks(NamedTuple):
    """Live bytes of a rank at their peak."""

    dry_run_bytes: int
    oracle_bytes: int
    layer: str
    """The module that holds the most bytes at the dry run's."""


def _case(strategy: str, model: str, rank: int, ranks: int = 1, **more: Any) -> PeakCase:
    """Return rank ``rank`` of a run with Adam; replicas fill what the other degrees leave of ``ranks``."""
    dataset = {"cosmoflow": "cosmoflow", "resnet18": "cifar10", "vit": "cifar10"}.get(model, "tokens")
    others = more.get("tp_degree", 1) * more.get("pp_degree", 1) * more.get("sp_degree", 1)
    spec = RunSpec(
        strategy=strategy, model=model, dataset=dataset, nodes=max(1, ranks // 8), tasks_per_node=min(8, ranks),
        dp_degree=ranks // others, **{"optimizer": "adam", "batch_size": 8, **more},
    )  # fmt: skip
    return PeakCase(spec, rank)


_FOUR: dict[str, Any] = {"pp_degree": 4, "micro_batches": 4}
_RECOMPUTED = {"activation_checkpointing": True}
CASES = [
    _case("single", "cosmoflow", 0, batch_size=4),
    _case("single", "gpt", 0, precision="bf16_params"),
    _case("ddp", "resnet18", 1023, 1024, batch_size=64),
    _case("zero1", "vit", 5, 256, batch_size=64),
    _case("horovod", "resnet18", 63, 64, batch_size=64),
    _case("fairscale_oss", "vit", 9, 64, batch_size=64),
    _case("fsdp", "vit", 511, 512, batch_size=64),
    _case("fsdp", "gpt_17b", 0, 32, batch_size=1, precision="bf16_params", **_RECOMPUTED),
    _case("fairscale_fsdp", "resnet18", 7, 8, micro_batches=2),
    _case("filter", "cosmoflow", 3, 64, tp_degree=4),
    _case("channel", "resnet18", 100, 128, batch_size=64, tp_degree=2, options={"form": "gathered"}),
    _case("spatial", "cosmoflow", 0, 32, sp_degree=4),
    _case("tensor", "gpt_1_3b", 1, 256, tp_degree=8, batch_size=2),
    _case("model", "cosmoflow", 3, 4, pp_degree=4),
    _case("gpipe", "resnet18", 0, 128, **_FOUR),
    _case("1f1b", "resnet18", 1023, 1024, **_FOUR),
    _case("1f1b", "gpt_13b", 21, 64, tp_degree=4, pp_degree=4, batch_size=8, micro_batches=8, precision="bf16_params"),
    _case("interleaved_1f1b", "cosmoflow", 7, 8, pp_degree=2, micro_batches=4),
    _case("zero_bubble", "vit", 63, 64, **_FOUR),
    _case("pipedream", "cosmoflow", 0, 8, **_FOUR),
    _case("single", "resnet18", 0, batch_size=64, precision="bf16"),
    _case("single", "vit", 0, batch_size=64, precision="fp16"),
    _case("single", "llama_1b", 0, batch_size=1, input_size=8192, precision="bf16"),
    _case("single", "llama_1b", 0, batch_size=1, input_size=8192, precision="bf16", **_RECOMPUTED),
    _case("fsdp", "gpt_350m", 3, 4, precision="bf16"),
    _case("spatial", "resnet18", 0, 4, sp_degree=4, batch_size=64, precision="bf16"),
    _case("tensor", "gpt_350m", 0, 4, tp_degree=4, precision="bf16"),
    _case("1f1b", "gpt_350m", 0, 4, precision="bf16", **_FOUR),
]


def peaks_of(case: PeakCase) -> Peaks:
    """Return both peaks; the dry run holds one rank."""
    spec, rank = case
    table = read_shipped_table(spec.model, spec.dataset)
    assert table is not None, f"{spec.model} on {spec.dataset} has no shipped table"
    with library_stand_ins(spec, torch.device("cpu", 0)):
        recorder = record_step(DryRunTask(index=0, spec=spec, device="cuda"), rank)
    oracle_bytes = resolve_cost(spec.strategy).memory(spec, table, rank).on("cuda").total_bytes
    return Peaks(recorder.peak_bytes, oracle_bytes, recorder.peak_layer)


def main() -> None:
    """Print the table."""
    print("| run | dry run | oracle | dry run/oracle | layer at the peak |")
    print("|---|---|---|---|---|")
    for case in CASES:
        dry_run_bytes, oracle_bytes, layer = peaks_of(case)
        sizes = f"{dry_run_bytes / 1e6:,.1f} MB | {oracle_bytes / 1e6:,.1f} MB | {dry_run_bytes / oracle_bytes:.3f}"
        print(f"| {case.label} | {sizes} | `{layer}` |", flush=True)


if __name__ == "__main__":
    main()
