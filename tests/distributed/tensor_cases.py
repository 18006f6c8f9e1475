"""Cases of the tests of tensor parallelism: whole runs on a small vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from hpcbench.worker.verification.reference import TrainingRecord
from hpcbench.workloads.datasets import DATASETS
from tests.distributed.cases import Case, OfRank, check_rounding, make_case, run_parallel, run_reference
from tests.distributed.narrow import WORDS
from tests.distributed.pool import Pool

VOCABULARY = WORDS


@contextlib.contextmanager
def small_vocabulary(words: int = VOCABULARY) -> Iterator[None]:
    """Let ``tokens`` have as few words."""
    whole = DATASETS["tokens"]
    DATASETS["tokens"] = whole._replace(outputs=words)
    try:
        yield
    finally:
        DATASETS["tokens"] = whole


def tensor_case(ranks: int, model: str = "gpt", **more: Any) -> Case:
    """Return a case on ``ranks``, of which dp_degree are replicas."""
    replicas = more.get("dp_degree", 1)
    given: dict[str, Any] = {"strategy": "tensor", "tp_degree": ranks // replicas, "dp_degree": replicas}
    if model == "gpt":
        given |= {"input_size": 7, "model_options": {"context": 9}}
    elif model == "llama":
        given |= {"input_size": 7, "model_options": {"vocabulary": VOCABULARY}}
    return make_case(
        ranks, model, "tokens" if model in ("gpt", "llama") else "digits",
        **{**given, "replicated": False, "batch_size": 4, "steps": 3, **more},
    )  # fmt: skip


def _run(case: Case, group: dist.ProcessGroup) -> OfRank:
    with small_vocabulary():
        return run_parallel(case, group)


def both(pool: Pool, case: Case) -> tuple[list[OfRank], TrainingRecord]:
    """Return the training by the ranks, and its reference by one process."""
    with small_vocabulary():
        return pool.call(case.spec.ranks, _run, case), run_reference(case)


def check_small(pool: Pool, case: Case) -> None:
    """``check_rounding`` with the small vocabulary."""
    with small_vocabulary():
        check_rounding(lambda one: pool.call(one.spec.ranks, _run, one), case)
