"""``python -m tests.torch_versions.strategies``: one verified training of every strategy, and dry runs, as JSON.

A training runs on real gloo ranks and is compared with one device, as in ``tests/distributed/test_registry.py``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings

import torch

from hpcbench.results.probe_records import DryRunTask
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.worker.dry_run.__main__ import answer_task
from hpcbench.worker.strategy import resolve_runtime
from tests.distributed.cases import EXACT, Case, OfRank, check, check_rounding, run_parallel, run_reference
from tests.distributed.parity import parity_training
from tests.distributed.pool import Pool
from tests.parity_cases import parity_cases

RANKS = 2


def verify(key: str, pool: Pool) -> str:
    """Return ``ok``, or why the strategy does not train what one device does."""
    parity = next(case for case in parity_cases(key) if case.ranks <= RANKS)
    widest = resolve_runtime(key).widest
    case = parity_training(key, parity, precision=widest, steps=4, narrow=parity.model in ("vgg11", "resnet18"))

    def run(chosen: Case) -> list[OfRank]:
        return pool.run(chosen) if parity.ranks > 1 else [run_parallel(chosen, None)]

    try:
        if widest == "fp64":
            check(run(case), run_reference(case), EXACT)
        else:
            check_rounding(run, case)
    except Exception as error:  # noqa: BLE001 - whatever it is, the table names it
        return last_line(error)
    return "ok"


def dry_run(key: str) -> str:
    """Return ``ok``, or the outcome and the reason of the dry run on the devices of a cluster with GPUs."""
    parity = next(case for case in parity_cases(key) if case.ranks <= RANKS)
    spec = parity_training(key, parity, precision="fp32").spec
    answer = answer_task(DryRunTask(index=0, spec=spec, device="cuda"))
    return "ok" if answer.outcome == "ok" else f"{answer.outcome}: {answer.reason}"


def last_line(error: Exception) -> str:
    """Return the last line of an error that states something, from the rank's own traceback if there is one."""
    lines = [line.strip() for line in "".join(traceback.format_exception_only(error)).splitlines()]
    return next((line for line in reversed(lines) if line), type(error).__name__)


def main() -> int:
    """Print one object: the answers of ``verify`` and ``dry_run`` by strategy."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # gloo of some releases, and the profiler of builds for CUDA, print on standard output.
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    found: dict[str, dict[str, str]] = {"verify": {}, "dry_run": {}}
    pool = Pool(RANKS)
    for key in STRATEGIES:
        if key != "horovod":  # its library is built for one torch
            found["verify"][key] = verify(key, pool)
    pool.close()
    for key, entry in STRATEGIES.items():
        if entry.library_name in (None, "torch"):
            found["dry_run"][key] = dry_run(key)
    answers.write(json.dumps(found))
    answers.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
