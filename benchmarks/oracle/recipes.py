"""``python -m benchmarks.oracle.recipes``: published runs in 8 bit and with experts against prices without any of them.

``data/nvidia_recipes.csv`` has the runs of Megatron-Bridge's performance page (NVIDIA-NeMo/Megatron-Bridge, release
25.11, ``docs/performance-summary.md``) whose shape and layout it states; routing was balanced by force. Two kinds of
rows are left out: GPT-OSS, whose sliding windows are not priced, and a row whose columns are shifted. The constant
``HOST_OF_CAST_EXPERT`` was fitted to one row, which the means leave out. Nothing else was fitted to these runs.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec

from hpcbench.predict.decoder.layout import GpuNode, Layout, nominal_rates
from hpcbench.predict.decoder.machines import FittedMachine, fitted_machine, machine_without_runs
from hpcbench.predict.decoder.pricing import StepTerms, step_terms
from hpcbench.predict.decoder.work import step_work
from hpcbench.strategies.decoder_shapes import named_shape
from hpcbench.units import format_percent

RECIPES = Path(__file__).parent / "data" / "nvidia_recipes.csv"
LEARNED_FROM = ("b200", "qwen3_30b_a3b")
_BLACKWELL = GpuNode(
    name="b200", gpus=8, peak_flops=2.25e15, memory_bytes_s=8e12, memory_gib=167.6, multiprocessors=148,
    nvlink_bytes_s=900e9, nic_bytes_s=50e9, best_product=0.74, fp8_flops=4.5e15, fp4_flops=9e15,
)  # fmt: skip
# 72 devices of a rack share NVLink.
_RACK = replace(_BLACKWELL, name="gb200", gpus=72, peak_flops=2.5e15, fp8_flops=5e15, memory_gib=173.0)
DEVICES = {"b200": _BLACKWELL, "gb200": _RACK, "gb300": replace(_RACK, name="gb300", nic_bytes_s=100e9, memory_gib=260)}


class Recipe(NamedTuple):
    """A run, its terms by the oracle, and tokens a second and GPU."""

    system: str
    model: str
    layout: Layout
    terms: StepTerms
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def machine_of(system: str) -> FittedMachine:
    if system in DEVICES:
        return machine_without_runs(DEVICES[system])
    machine = fitted_machine("h100-80gb-sxm")
    return msgspec.structs.replace(machine, device=replace(machine.device, fp8_flops=1.979e15))


def layout_of(row: Mapping[str, str]) -> Layout:
    number = {name: int(row[name]) for name in ("gpus", "tp", "pp", "cp", "ep", "chunks", "sequence", "micro_batch")}
    data = number["gpus"] // number["tp"] // number["pp"] // number["cp"]
    is_sharded = row["fsdp"] == "1"
    return Layout(
        gpus=number["gpus"], sequence=number["sequence"], micro_batch=number["micro_batch"],
        global_batch=int(row["global_batch"]), replicas=1 if is_sharded else data, shards=data if is_sharded else 1,
        tensor=number["tp"], pipeline=number["pp"], context=number["cp"], chunks=number["chunks"],
        expert=number["ep"], zero=int(not is_sharded), precision=row["precision"],  # type: ignore[arg-type]
        software="megatron",
    )  # fmt: skip


def recipes() -> list[Recipe]:
    """Return the runs with their predictions."""
    found = []
    with RECIPES.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            machine, layout, shape = machine_of(row["system"]), layout_of(row), named_shape(row["model"])
            work = step_work(shape, layout, machine.device, nominal_rates(machine.device, layout.gpus))
            terms = step_terms(work, machine.figures_of(layout.software))
            tokens = layout.global_batch * layout.sequence / layout.gpus
            measured = float(row["tokens_per_s_per_gpu"])
            found.append(Recipe(row["system"], row["model"], layout, terms, tokens / terms.total_s, measured))
    return found


def mean_error(runs: Sequence[Recipe]) -> float:
    """Return the mean of the relative errors but for the row that was learned from."""
    return fmean(abs(run.error) for run in runs if (run.system, run.model) != LEARNED_FROM)


def tables(runs: Sequence[Recipe]) -> list[str]:
    """Return the errors as Markdown: by kind, then run by run with the parts of the predicted step."""
    kinds = {
        "Llama in 8 bit": [run for run in runs if run.layout.expert == 1],
        "experts in bf16": [run for run in runs if run.layout.expert > 1 and run.layout.precision == "bf16"],
        "experts in 8 bit": [run for run in runs if run.layout.expert > 1 and run.layout.precision != "bf16"],
    }
    lines = ["| runs | count | mean error | worst |", "|---|---|---|---|"]
    for kind, group in {**kinds, "all": list(runs)}.items():
        worst = max(group, key=lambda run: abs(run.error))
        lines.append(
            f"| {kind} | {len(group)} | {format_percent(mean_error(group), 1)} | "
            f"{format_percent(worst.error, 0, '+')} ({worst.model}, {worst.system}) |"
        )
    lines += ["", "| system | model | GPUs | precision | tp pp cp ep | measured | predicted | error | products and "
              "kernels | experts' messages | other messages | bubble |", "|---" * 12 + "|"]  # fmt: skip
    for run in runs:
        terms, degrees = run.terms, run.layout
        parts = (terms.own_s, terms.expert_traffic, terms.traffic_s - terms.expert_traffic, terms.bubble)
        shares = " | ".join(f"{part / terms.total_s:.0%}" for part in parts)
        lines.append(
            f"| {run.system} | {run.model} | {degrees.gpus} | {degrees.precision} | {degrees.tensor} "
            f"{degrees.pipeline} {degrees.context} {degrees.expert} | {run.measured:.0f} | {run.predicted:.0f} | "
            f"{run.error:+.0%} | {shares} |"
        )
    return lines


def main() -> int:
    print("\n".join(tables(recipes())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
