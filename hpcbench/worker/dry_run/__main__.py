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
from pathlib import Path

import msgspec
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from hpcbench.errors import WorkerError
from hpcbench.results.probe_records import DryRunAnswer, DryRunOutcome, DryRunTask, StepFigures
from hpcbench.worker.dry_run.fake_rank import NotFakeableError, dry_run_rank
from hpcbench.worker.dry_run.step_recorder import DataDependentBranch, RefusedOnDevice, is_of_python, site_of_line
from hpcbench.worker.failure import describe_error

_NOT_FAKEABLE = (
    NotFakeableError, DataDependentBranch, DataDependentOutputException, DynamicOutputShapeException,
    UnsupportedFakeTensorException, UnsupportedOperatorException,
)  # fmt: skip
_NOT_FAKEABLE_MESSAGE = re.compile("data is not allocated yet|meta tensor|FakeTensor|'Meta' backend")
_OWN_FAULTS = (AssertionError, AttributeError, ImportError, KeyError, NameError, TypeError)
"""Errors that no operator raises: where code of the dry run raises them, it or this torch is to blame, not the run."""


def answer_task(task: DryRunTask, before_rank: Callable[[], None] = lambda: None) -> DryRunAnswer:
    """Step the ranks of every kind of one run; an error becomes the answer's outcome.

    Args:
        task: The run.
        before_rank: Called before each rank.
    """
    began = time.perf_counter()
    outcome: DryRunOutcome = "ok"
    reason, figures = None, None
    try:
        ranks = []
        for rank in task.ranks or range(task.spec.ranks):
            before_rank()
            ranks.append(dry_run_rank(task, rank))
        figures = largest_figures(ranks)
    except Exception as error:  # noqa: BLE001 - whatever it is, a run would leave it as its result
        outcome, reason = describe_outcome(error)
        if task.device == "cuda":
            reason = reason.replace("cpu:0", "cuda:0").replace("FakeTensorDeviceMismatchError", "RuntimeError")
            reason = reason.replace(RefusedOnDevice.__name__, "TypeError")
    gc.collect()
    seconds = time.perf_counter() - began
    return DryRunAnswer(index=task.index, outcome=outcome, reason=reason, figures=figures, seconds=seconds)


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


def describe_outcome(error: Exception) -> tuple[DryRunOutcome, str]:
    """Return the outcome of a dry run that ``error`` ended, and the message that a run would leave."""
    chain, cause = [], error
    while cause is not None:
        chain.append(cause)
        cause = cause.__cause__  # type: ignore[assignment]
    if (site := own_site(chain[-1])) is not None:
        fault = f"{type(chain[-1]).__name__}: {chain[-1]} (at {site})"
        return "error", f"the dry run failed with torch {torch.__version__}; the run itself may be possible: {fault}"
    if any(isinstance(each, _NOT_FAKEABLE) or _NOT_FAKEABLE_MESSAGE.search(str(each)) for each in chain):
        message = " ".join(str(error).split("\n")[:1])
        return "not_fakeable", f"{type(error).__name__}: {message} (at {site_of(chain[-1])})"
    _, record = describe_error(error)
    message = record.message if isinstance(error, WorkerError) else f"{record.type}: {record.message}"
    return "unsupported", f"{message}\n  {record.hint}" if record.hint else message


def own_site(error: BaseException) -> str | None:
    """Return ``file:line`` of the dry run's own code if it raised ``error`` and no run would; else ``None``."""
    if not isinstance(error, _OWN_FAULTS) or isinstance(error, RefusedOnDevice):
        return None
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    # Python's own code, such as that of imports and patches, does what its caller asks for.
    file, line = next((place for place in reversed(frames) if not is_of_python(place[0])), ("", 0))
    is_own = Path(file).parent == Path(__file__).parent
    return f"hpcbench/worker/dry_run/{Path(file).name}:{line}" if is_own else None


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
