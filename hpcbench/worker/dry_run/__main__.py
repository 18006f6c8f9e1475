"""``python -m hpcbench.worker.dry_run``: runs of a plan on fake tensors.

Reads a list of ``DryRunTask`` as JSON from standard input and prints each ``DryRunAnswer`` as soon as it is known.
"""

from __future__ import annotations

import faulthandler
import gc
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.catalog import get_strategy
from hpcbench.parallel.mesh import RankMesh
from hpcbench.results.probe_records import DryRunAnswer, DryRunTask, StepFigures
from hpcbench.worker.dry_run.fake_rank import NotFakeableError, dry_run_rank
from hpcbench.worker.dry_run.step_recorder import DataDependentBranch, site_of_line
from hpcbench.worker.failure import describe_error

Outcome = Literal["ok", "unsupported", "not_fakeable"]

_NOT_FAKEABLE = (
    NotFakeableError, DataDependentBranch, DataDependentOutputException, DynamicOutputShapeException,
    UnsupportedFakeTensorException, UnsupportedOperatorException,
)  # fmt: skip
_NOT_FAKEABLE_MESSAGE = re.compile("data is not allocated yet|meta tensor|FakeTensor|'Meta' backend")


def answer_task(task: DryRunTask, before_rank: Callable[[], None] = lambda: None) -> DryRunAnswer:
    """Step the ranks of every kind of one run; an error becomes the answer's outcome.

    Args:
        task: The run.
        before_rank: Called before each rank.
    """
    began = time.perf_counter()
    outcome: Outcome = "ok"
    reason, figures = None, None
    try:
        ranks = []
        for rank in ranks_of_every_kind(task.spec):
            before_rank()
            ranks.append(dry_run_rank(task, rank))
        figures = largest_figures(ranks)
    except Exception as error:  # noqa: BLE001 - whatever it is, a run would leave it as its result
        outcome, reason = describe_outcome(error)
        if task.device == "cuda":
            reason = reason.replace("cpu:0", "cuda:0").replace("FakeTensorDeviceMismatchError", "RuntimeError")
    gc.collect()
    seconds = time.perf_counter() - began
    return DryRunAnswer(index=task.index, outcome=outcome, reason=reason, figures=figures, seconds=seconds)


def ranks_of_every_kind(spec: RunSpec) -> list[int]:
    """Return the first and the last rank, and one rank of each kind that lies between them.

    Replicas that share nothing are of one kind. Other ranks differ by their place along the axes that split the model:
    the first, the second and the last stage of a pipeline, and the first, an inner and the last part of split maps.
    """
    mesh = RankMesh.of(spec)
    if mesh.size != spec.ranks:
        # One process drives several devices.
        return list(range(spec.ranks))
    if get_strategy(spec.strategy).alike_replicas and spec.dp_degree == spec.ranks:
        return [0]
    ranks = {0, spec.ranks - 1}
    for axis in ("pp", "sp"):
        degree = getattr(mesh, axis)
        ranks |= {mesh.rank(RankMesh(0, 0, 0, 0)._replace(**{axis: place})) for place in (1, degree - 1) if degree > 2}
    return sorted(ranks)


def largest_figures(ranks: list[StepFigures]) -> StepFigures:
    """Return the largest value of each figure, and every site of a wait."""
    heaviest = max(ranks, key=lambda figures: figures.peak_memory_bytes)
    return StepFigures(
        peak_memory_bytes=heaviest.peak_memory_bytes,
        peak_layer=heaviest.peak_layer,
        running_layer=heaviest.running_layer,
        operators=max(figures.operators for figures in ranks),
        collectives=max(figures.collectives for figures in ranks),
        host_syncs=max(figures.host_syncs for figures in ranks),
        host_sync_sites=list(dict.fromkeys(site for figures in ranks for site in figures.host_sync_sites)),
        modelled=sorted({name for figures in ranks for name in figures.modelled}),
    )


def describe_outcome(error: Exception) -> tuple[Outcome, str]:
    """Return the outcome of a dry run that ``error`` ended, and the message that a run would leave."""
    chain, cause = [], error
    while cause is not None:
        chain.append(cause)
        cause = cause.__cause__  # type: ignore[assignment]
    if any(isinstance(each, _NOT_FAKEABLE) or _NOT_FAKEABLE_MESSAGE.search(str(each)) for each in chain):
        message = " ".join(str(error).split("\n")[:1])
        return "not_fakeable", f"{type(error).__name__}: {message} (at {site_of(chain[-1])})"
    _, record = describe_error(error)
    message = record.message if isinstance(error, WorkerError) else f"{record.type}: {record.message}"
    return "unsupported", f"{message}\n  {record.hint}" if record.hint else message


def site_of(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame of ``error`` that is neither torch's nor the dry run's."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return next((site for frame, line in reversed(frames) if (site := site_of_line(frame, line))), "unknown")


def main() -> int:
    """Answer the tasks on standard input."""
    # What a user's model prints must not lie between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Modules and their functions live as long as the process: looking for garbage among them takes longer than a step.
    gc.freeze()
    tasks = msgspec.json.decode(sys.stdin.buffer.read(), type=list[DryRunTask])
    for task in tasks:
        # It prints the stack and ends the process, whatever the process waits for.
        answer = answer_task(task, partial(faulthandler.dump_traceback_later, task.limit_s, exit=True))
        faulthandler.cancel_dump_traceback_later()
        answers.write(msgspec.json.encode(answer).decode() + "\n")
        answers.flush()
        # Neither what this task has imported, nor what the next ones share with it, is garbage.
        gc.freeze()
    return 0


if __name__ == "__main__":
    sys.exit(main())
