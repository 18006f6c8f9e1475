"""Tables of published training steps on GPUs: rows as shapes and layouts, or the reason why a row is left out."""

from __future__ import annotations

import csv
import gzip
import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.oracle.megatron_runs import published
from benchmarks.oracle.megatron_table import TOKENS, VOCABULARY
from hpcbench.config.command import Recompute, Software
from hpcbench.errors import HpcbenchError
from hpcbench.predict.decoder.layout import CollectiveRates, Layout
from hpcbench.strategies.decoder_shapes import DecoderShape, named_shape

DATA = Path(__file__).parent / "data"
FIT = DATA / "gpu_published_fit.csv.gz"
EXAM = DATA / "gpu_exam_configs.csv.gz"
FITS_FIT = DATA / "gpu_fits_fit.csv.gz"
FITS_EXAM = DATA / "gpu_fits_exam_configs.csv.gz"
MEASURED_RATES = re.compile(r"measured_bw_GBps AR/AG/RS=(\d+)/(\d+)/(\d+) ")
GIGA = 1e9
MODELS = {
    "nanotron-llama-1B": "playbook_1b",
    "nanotron-llama-3B": "playbook_3b",
    "nanotron-llama-8B": "playbook_8b",
    "nanotron-llama-70B": "playbook_70b",
    "nanotron-llama-80B": "playbook_80b",
    "llama3.1 8b": "llama_8b",
    "llama3.1 70b": "llama_70b",
    "llama3.1 405b": "llama_405b",
    "Llama 3 8B": "llama_8b",
    "Llama 3.1 8B": "llama_8b",
    "Llama 3 70B": "llama_70b",
    "Llama 3.1 70B": "llama_70b",
    "Llama3 70B": "llama_70b",
    "Llama 2 13B": "llama2_13b",
    "Llama 2 70B": "llama2_70b",
    "Llama2 7B": "llama2_7b",
    "Llama2 13B": "llama2_13b",
    "Llama2 34B": "llama2_34b",
    "Llama2 70B": "llama2_70b",
    "nemotron4 15b": "nemotron_15b",
    "nemotron4 340b": "nemotron_340b",
    "gpt3 175b": "gpt3_175b",
    **{f"MPT-{size}": f"mpt_{size}" for size in ("125m", "350m", "760m", "1b", "3b", "7b", "13b", "30b", "70b")},
}
DEVICES = {
    "H100 80GB SXM": "h100-80gb-sxm",
    "H100 80GB": "h100-80gb-sxm",
    "H100 96GB HBM2e 500W": "h100-96gb-500w",
    "A100 80GB": "a100-80gb-sxm",
    "A100 40GB": "a100-40gb-sxm",
}
SOFTWARE: dict[str, Software] = {
    "nanotron_playbook": "nanotron",
    "mosaicml": "fsdp",
    "dgxc_benchmarking": "megatron",
    "torchtitan": "torchtitan",
    "automodel": "torchtitan",
    "ibm_fsdp": "fsdp",
}
MAX_FLOPS_SHARE = 1.0
A100_PEAK_FLOPS = 312e12
MEGATRON_RECOMPUTE: tuple[Recompute, ...] = ("full", "selective")


@dataclass(frozen=True)
class PublishedRow:
    """One row that can be priced; results are None in a table without them."""

    id: str
    source: str
    device: str
    shape: DecoderShape
    layout: Layout
    rates: CollectiveRates | None
    step_time_s: float | None
    reserved_gib: float | None


@dataclass(frozen=True)
class LeftOut:
    """A row that cannot be used, with the reason."""

    id: str
    reason: str


def _whole(row: dict[str, str], column: str, default: int | None = None) -> int:
    text = row.get(column, "")
    if not text and default is not None:
        return default
    try:
        value = int(float(text))
    except ValueError:
        raise ValueError(f"{column} is {text!r}, a whole number is required") from None
    if value < 1 and column != "zero":
        raise ValueError(f"{column} is {value}, at least 1 is required")
    return value


def _positive(row: dict[str, str], column: str) -> float | None:
    text = row.get(column, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{column} is {text!r}, a number is required") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"{column} is {value}, above 0 is required")
    return value


def _shape(row: dict[str, str]) -> DecoderShape:
    name = row["model"].split("(")[0].strip()
    layers = None
    proxy = re.search(r" proxy L=(\d+)$", name)
    if proxy:
        name, layers = name[: proxy.start()], int(proxy.group(1))
    if name not in MODELS or row.get("ep", "1") not in {"", "1"}:
        raise ValueError(f"model {row['model']!r} has no shape here (experts, fine-tuning or unpublished dimensions)")
    shape = named_shape(MODELS[name], layers=layers)
    for column, value in (("layers", shape.layers), ("hidden", shape.hidden), ("vocab", shape.vocabulary)):
        if row.get(column) and int(row[column]) != value:
            raise ValueError(f"{column} is {row[column]}, the shape {shape.name} has {value}")
    return shape


def _recompute(text: str) -> Recompute:
    for mode in ("full", "selective"):
        if text.startswith(mode):
            return "full" if mode == "full" else "selective"
    return "none"


def _chunks(software: Software, notes: str, pipeline: int, layers: int) -> int:
    """Model chunks of a rank: those stated, else one layer a chunk, as NVIDIA's recipes with pipelines have."""
    stated = re.search(r"VP=(\d+)", notes)
    if stated:
        return int(stated.group(1))
    return max(1, layers // pipeline) if software == "megatron" and pipeline > 1 else 1


def _layout(row: dict[str, str], layers: int) -> Layout:
    notes = row.get("notes", "")
    software = SOFTWARE[row.get("source") or "nanotron_playbook"]
    gpus, tensor, pipeline, context = (_whole(row, name, 1) for name in ("gpus", "tp", "pp", "cp"))
    shards = _whole(row, "fsdp", 1)
    if software == "torchtitan" and shards == 1:
        shards = gpus // (tensor * pipeline * context)
    return Layout(
        gpus=gpus,
        sequence=_whole(row, "seq"),
        micro_batch=_whole(row, "micro_batch"),
        global_batch=_whole(row, "global_batch"),
        replicas=gpus // (shards * tensor * pipeline * context),
        shards=shards,
        zero=_whole(row, "zero", 0),
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        chunks=_chunks(software, notes, pipeline, layers),
        reshard_after_forward="SHARD_GRAD_OP" not in notes,
        recompute=_recompute(row.get("recompute", "none")),
        compiled=row.get("compile", "") == "yes",
        recompute_gathers="after_pp_fix=False" not in notes,
        software=software,
    )


def _check_result(row: dict[str, str], shape: DecoderShape, layout: Layout, step_s: float | None) -> None:
    """Refuse a time that no GPU can reach, or that differs from its tokens per second: a wrong unit."""
    if step_s is None:
        return
    tokens = layout.global_batch * layout.sequence / layout.gpus
    # The model convention counts attention without the causal mask's saving: 2.0e15 is twice an H100's peak.
    if tokens * shape.flops_per_token(layout.sequence) / step_s > 2.0e15:
        raise ValueError(f"step_time_s is {step_s:g}, which exceeds twice the peak of every GPU known here (unit?)")
    rate = _positive(row, "tokens_per_s_per_gpu")
    if rate is not None and not 0.5 < tokens / step_s / rate < 2.0:
        raise ValueError(f"step_time_s {step_s:g} and tokens_per_s_per_gpu {rate:g} differ by more than 2 (unit?)")


def _published(row: dict[str, str]) -> PublishedRow:
    if row["gpu"] not in DEVICES:
        raise ValueError(f"device {row['gpu']!r} has no fitted figures")
    shape = _shape(row)
    layout = _layout(row, shape.layers)
    step_s, memory = _positive(row, "step_time_s"), _positive(row, "peak_mem_gib")
    _check_result(row, shape, layout, step_s)
    if memory is not None and memory > 200:
        raise ValueError(f"peak_mem_gib is {memory:g}, more than any GPU here holds (unit?)")
    found = MEASURED_RATES.search(row.get("notes", ""))
    rates = None
    if found:
        reduce, gather, scatter = (float(text) * GIGA for text in found.groups())
        rates = CollectiveRates(all_reduce=reduce, all_gather=gather, reduce_scatter=scatter)
    return PublishedRow(
        id=row["id"],
        source=row.get("source") or "nanotron_playbook",
        device=DEVICES[row["gpu"]],
        shape=shape,
        layout=layout,
        rates=rates,
        step_time_s=step_s,
        reserved_gib=memory,
    )


def read_rows(path: Path) -> tuple[list[PublishedRow], list[LeftOut]]:
    """Return the rows that can be priced, and those left out with their reasons."""
    rows, left_out = [], []
    with gzip.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            try:
                rows.append(_published(row))
            except (ValueError, HpcbenchError) as error:
                left_out.append(LeftOut(row.get("id", "?"), " ".join(str(error).split())))
    return rows, left_out


def megatron_rows() -> list[PublishedRow]:
    """Return the iterations of ``megatron.toml``: GPTs on A100 by Megatron-LM of 2021 and 2022, with stored scores.

    Rows of 2021 recompute all; those of 2022 either all, or the inner part of attention with sequence parallelism.
    """
    rows = []
    for run in published():
        shape = DecoderShape(
            name=f"gpt_{run.name}", layers=run.layers, hidden=run.width, ffn=4 * run.width, heads=run.heads,
            kv_heads=run.heads, vocabulary=VOCABULARY, tied=True, gated=False, biases=True, norm_vectors=2,
            learned_positions=TOKENS,
        )  # fmt: skip
        for recompute in MEGATRON_RECOMPUTE:
            step_s = run.published_s(recompute, A100_PEAK_FLOPS)
            if step_s is None:
                continue
            layout = Layout(
                gpus=run.devices, sequence=TOKENS, micro_batch=run.micro_batch, global_batch=run.batch,
                replicas=run.dp, tensor=run.tp, pipeline=run.pp, chunks=run.interleaving, recompute=recompute,
                software="megatron_deepspeed", fused_attention=False, overlap=False,
                sequence_parallel=recompute == "selective",
            )  # fmt: skip
            name = f"{run.name}-{recompute}"
            rows.append(PublishedRow(name, "selene", "a100-80gb-sxm", shape, layout, None, step_s, None))
    return rows


def read_outcomes(path: Path) -> dict[str, bool]:
    """Return by id whether a run ended well (``ok``) rather than out of memory (``oom``)."""
    with gzip.open(path, "rt", newline="") as file:
        return {row["id"]: row["status"] == "ok" for row in csv.DictReader(file)}
