"""Task files, trees and attempts for the tests of the worker."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpcbench.config.run_spec import RunSpec, RunTask, TaskFileHeader, config_id, encode_task_file, run_id
from hpcbench.results.attempts import Attempt, begin_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import FailureRecord, RankResult
from hpcbench.strategies.decoder_shapes import named_shapes
from hpcbench.workloads.models import MODELS

DECODERS = [name for name in named_shapes() if name in MODELS]
"""The others are priced alone: mixtures of experts, and Llama 2, which has fewer words than the data set."""


def make_spec(**values: Any) -> RunSpec:
    """A run of two warm-up and four timed steps on digits, none profiled, unless ``values`` say otherwise."""
    given: dict[str, Any] = {"model": "resnet18", "dataset": "digits", "strategy": "single", "batch_size": 8,
                             "warmup_steps": 2, "steps": 4, "profile_steps": 0}  # fmt: skip
    return RunSpec(**{**given, **values})


def make_task(spec: RunSpec, time_limit_s: float = 600.0) -> RunTask:
    return RunTask(run_id=run_id(spec), config_id=config_id(spec), sweep="tests", spec=spec, time_limit_s=time_limit_s)


def make_header(folder: Path, **values: Any) -> TaskFileHeader:
    given: dict[str, Any] = {"cluster": "here", "device": "cpu", "tree": str(folder / "results" / "here"),
                             "submission": "s1", "wait_s": 30.0}  # fmt: skip
    return TaskFileHeader(**{**given, **values})


def write_tasks(folder: Path, *specs: RunSpec, time_limit_s: float = 600.0, **header: Any) -> Path:
    """A task file of ``specs`` in ``folder``."""
    path = folder / "tasks.jsonl"
    path.write_bytes(encode_task_file(make_header(folder, **header), [make_task(spec, time_limit_s) for spec in specs]))
    return path


def tree_of(folder: Path) -> ClusterTree:
    return ClusterTree(folder / "results" / "here")


def start_attempt(folder: Path, spec: RunSpec, **start: Any) -> Attempt:
    given: dict[str, Any] = {"launch": "l1", "host": "h", "started_unix_s": time.time(),
                             "deadline_unix_s": time.time() + 600}  # fmt: skip
    return begin_attempt(tree_of(folder).run_folder(run_id(spec)), **{**given, **start})


def make_rank(rank: int = 0, **values: Any) -> RankResult:
    given: dict[str, Any] = {"rank": rank, "local_rank": rank, "node_rank": 0, "replica": rank, "host": f"n{rank}",
                             "pid": 100 + rank, "device": "cpu"}  # fmt: skip
    return RankResult(**{**given, **values})


def failure(kind: str = "ValueError", message: str = "no such thing") -> FailureRecord:
    return FailureRecord(type=kind, message=message, traceback_tail="Traceback ...")
