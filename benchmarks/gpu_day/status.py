"""Which CUDA paths were executed: the table of ``cuda-paths.md``, from the rows below and the days' results.

A row states how a part was executed without a GPU. Its condition names the runs that execute it on one; as soon as a
committed day has such runs, the row shows how they ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_day.loops import LoopFigures
from benchmarks.gpu_day.outputs import DayFiles, committed_days
from benchmarks.gpu_day.shards import ShardFigures
from hpcbench.results.schema import STATUS_OK, RunResult
from hpcbench.strategies.catalog import STRATEGIES, get_strategy

PAGE = Path(__file__).with_name("cuda-paths.md")
_BEGIN, _END = "<!-- rows: python -m benchmarks.gpu_day status -->\n", "<!-- end of rows -->\n"

Condition = Callable[[RunResult], bool]


class StatusRow(NamedTuple):
    """A part that differs on ``cuda``."""

    part: str
    executed_with: str
    """Without a GPU."""
    only_read: str
    never_executed: str
    """What no run of the day executes, or a sentence on what the day will."""
    shown_by: Condition | None
    """The runs that execute the part on a GPU; ``None``: no run of the day does."""
    by: Callable[[DayFiles], Sequence[LoopFigures | ShardFigures]] | None = None
    """The figures of a script of the day that execute it instead of runs."""


def _is_shared(result: RunResult) -> bool:
    return result.untimed is not None


def _strategy_rows() -> Iterator[StatusRow]:
    for key, entry in STRATEGIES.items():
        if entry.own_degree is None:
            how = "CPU; fake tensors"
        elif key == "horovod":
            how = "CPU over gloo and MPI"
        else:
            how = "CPU, each rank; fake tensors, with copies and waits of the host counted"
        yield StatusRow(
            f"verified training by `{key}`", how, "", "kernels; times with several ranks, and NCCL",
            lambda result, key=key: result.spec.strategy == key and result.spec.verify,  # type: ignore[misc]
        )  # fmt: skip


ROWS: list[StatusRow] = [
    *_strategy_rows(),
    StatusRow(
        "a process group of NCCL, with one rank", "substitute", "the rendezvous and the watchdog", "NCCL",
        lambda result: result.sweep == "gpu-day-launcher",
    ),
    StatusRow(
        "NCCL between ranks, its order of a pipeline's messages",
        "model, all interleavings up to 4 stages and 8 micro-batches; CPU, with the order that cuda uses",
        "that a rendezvous is the worst case of NCCL's buffers", "NCCL", None,
    ),
    StatusRow(
        "messages of pipelines and halos of `spatial` in cuda's order", "CPU; staged in host memory on CPU ranks",
        "sends and receives of a layer are one `batch_isend_irecv`", "two communicators at work on one device",
        lambda result: _is_shared(result)
        and (get_strategy(result.spec.strategy).pipeline.schedule is not None or result.spec.strategy == "spatial"),
    ),
    StatusRow(
        "hybrids on four ranks", "CPU on four ranks; a mesh of 16 ranks (torch's fake process group)", "",
        "communicators over NCCL", lambda result: _is_shared(result) and result.spec.ranks == 4,
    ),
    StatusRow(
        "memory of shards on the device's allocator", "fake tensors: the peak at set-up and in a step", "",
        "the allocator's reserve and fragmentation", None, by=lambda day: day.shards,
    ),
    StatusRow(
        "`CUDA_DEVICE_MAX_CONNECTIONS`, `CUDA_MODULE_LOADING` of pipelines", "that the job script sets them",
        "CUDA's guide: hardware queues, lazy loading", "their effect", None,
    ),
    StatusRow(
        "fused optimizers, `cudnn.benchmark`", "that they are chosen", "torch's manual", "their kernels",
        lambda result: result.sweep in ("gpu-day-singles", "gpu-day-kernels") and result.spec.cudnn_benchmark,
    ),
    *(
        StatusRow(
            f"`{precision}`", "CPU, each strategy that offers it; fake tensors: types of products, fp32 master weights",
            "", "kernels", lambda result, precision=precision: result.spec.precision == precision  # type: ignore[misc]
            and result.spec.verify,
        )
        for precision in ("tf32", "bf16", "fp16", "bf16_params")
    ),
    StatusRow(
        "`compile`", "CPU, each strategy that offers it", "", "triton's kernels", lambda result: result.spec.compile
    ),
    StatusRow(
        "samples of the host, copied each step", "CPU; with a stub of CUDA: batches are pinned, and no copy waits", "",
        "the rate of the copies, and whether they overlap with kernels", lambda result: result.spec.data == "host",
    ),
    StatusRow(
        "several devices in one process (`fairscale_pipe`)", "CPU; fake tensors, where one device stands for all", "",
        "copies between devices", lambda result: result.spec.devices_per_task > 1,
    ),
    StatusRow(
        "streams of fairscale (`fairscale_fsdp`, `fairscale_pipe`)",
        "fake tensors: they are created and waited for", "", "overlap; whether memory is used again too early",
        lambda result: result.spec.strategy in ("fairscale_fsdp", "fairscale_pipe"),
    ),
    StatusRow(
        "clock of events, phases by the profiler, waits of the host", "tables of recorded events; a stub of CUDA", "",
        "CUPTI's events, a device's clock", lambda result: result.sweep == "gpu-day-singles",
    ),
    StatusRow(
        "energy, throttling, clocks by NVML", "substitute for `pynvml`",
        "the counter is in mJ since the driver was loaded, from Volta on; GPUs update it every 20 to 100 ms "
        "([PETSc](https://petsc.org/main/manualpages/Log/PetscLogGpuEnergyMeter), Zeus), and A100 and H100 sample "
        "their power during a quarter of the time ([arXiv:2312.02741](https://arxiv.org/abs/2312.02741)): runs whose "
        "timed steps are shorter than 2 s get a [warning](../../docs/measurement.md#warnings)", "a device's counters",
        lambda result: result.metrics.energy_j is not None,
    ),
    StatusRow(
        "MIG", "substitute: counters of the whole GPU are not used for an instance",
        "CUDA names an instance by `MIG-<uuid>` and shows a process one instance; NCCL before 2.30 refuses two "
        "ranks on one GPU, instances of it included ([issue 418](https://github.com/NVIDIA/nccl/issues/418))",
        "an instance",
        None,
    ),
    StatusRow(
        "Horovod over NCCL", "the build's variables",
        "Horovod 0.28.1's cmake files: toolkit, shared NCCL, architectures of the first `nvcc`",
        "the build with `nvcc`, Horovod's NCCL operations", None,
    ),
    StatusRow(
        "`probe_blocks`", "CPU", "", "times of blocks", lambda result: result.spec.strategy == "probe_blocks"
    ),
    StatusRow(
        "hpcbench's training loop beside others", "CPU; a stub of CUDA", "", "times of loops", None,
        by=lambda day: day.loops,
    ),
    StatusRow(
        "`probe_messages`", "CPU", "", "times of NCCL; the largest message", None
    ),
]  # fmt: skip


def status_lines(days: Sequence[DayFiles]) -> list[str]:
    """Return the table, in Markdown: what ``days`` executed, and for the rest how it was executed without a GPU."""
    parts: dict[tuple[str, str, str], list[str]] = {}
    for row in ROWS:
        executed = [text for day in days if (text := executed_on(row, day)) is not None]
        state = "; ".join(executed) or f"never executed: {row.never_executed}"
        parts.setdefault((row.executed_with, row.only_read, state), []).append(row.part)
    lines = ["| part | without a GPU | only read | on a GPU |", "|---|---|---|---|"]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in parts.items()]
    return lines


def executed_on(row: StatusRow, day: DayFiles) -> str | None:
    """Return how the runs of ``day`` that execute ``row`` ended; ``None`` if there are none, or not on a GPU."""
    if not day.on_gpu:
        return None
    if row.by is not None:
        ended = [figures.error is None for figures in row.by(day)]
    else:
        shown_by = row.shown_by or (lambda _result: False)
        ended = [_ended_well(result) for result in day.results if _has_stepped(result) and shown_by(result)]
    if not ended:
        return None
    count = f"{len(ended)} run{'s' * (len(ended) > 1)}"
    outcome = f"{count} right" if all(ended) else f"{sum(ended)} of {count} right"
    return f"executed on {day.device}, {day.name[:10]}: {outcome}"


def _has_stepped(result: RunResult) -> bool:
    """Whether the run got as far as the device: a missing package ends one before."""
    return any(str(rank.get("device", "")).startswith("cuda") for rank in result.ranks)


def _ended_well(result: RunResult) -> bool:
    return result.status == STATUS_OK and (result.verification is None or result.verification.passed)


def write_page() -> None:
    """Write the rows into the page."""
    PAGE.write_text(page_text(PAGE.read_text(), committed_days()))


def page_text(page: str, days: Sequence[DayFiles]) -> str:
    """Return ``page`` with the rows of ``days`` between its marks."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    assert rest, f"{PAGE} has no line {_BEGIN!r}"
    ran = ", ".join(f"{day.device} on {day.name[:10]}" for day in days)
    summary = f"Days on GPUs: {ran}." if days else "Nothing ran on a GPU so far."
    return "\n".join([before + _BEGIN, summary, "", *status_lines(days), "", _END + after])
