"""The records ``submission.json`` (one submission) and ``sweeps/<name>.json`` (the runs of a sweep), and how they are
read.

This module imports neither templates nor profiles, so that commands that only read start quickly."""

from __future__ import annotations

import functools
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hpcbench.fileio import MAX_GENERATED_FILE_BYTES, make_folder, read_regular, write_atomic
from hpcbench.results.decode import decode_record
from hpcbench.results.results_tree import ClusterTree

if TYPE_CHECKING:
    from hpcbench.config.run_spec import RunSpec
    from hpcbench.submit.plan import SweepPlan


class SweepRecord(msgspec.Struct, kw_only=True):
    """The runs that the sweep meant when it was submitted last."""

    sweep: str
    cluster: str
    description: str
    run_ids: list[str]
    dropped: int
    written_unix_s: float


def write_sweep_record(plan: SweepPlan, tree: ClusterTree) -> None:
    """Record which runs the sweep means now."""
    record = SweepRecord(
        sweep=plan.sweep.name,
        cluster=plan.profile.name,
        description=plan.sweep.description,
        run_ids=list(plan.runs),
        dropped=len(plan.dropped),
        written_unix_s=time.time(),
    )
    path = tree.sweep_path(plan.sweep.name)
    make_folder(path.parent)
    write_atomic(path, msgspec.json.encode(record) + b"\n")


def read_sweep_record(tree: ClusterTree, name: str) -> SweepRecord | None:
    """The record of a sweep that was submitted or run here; ``None`` where there is none."""
    try:
        return decode_record(read_regular(tree.sweep_path(name)), SweepRecord)
    except (OSError, msgspec.MsgspecError):
        return None


_CACHED_RECORDS = 1000


class JobArray(msgspec.Struct, kw_only=True):
    """Runs that share a script: the lines of ``<number>.jsonl``. Job ``k`` has ``pack`` of them, from ``k * pack``."""

    number: int
    run_ids: list[str]
    pack: int = 1
    ranks: int
    nodes: int
    partition: str | None = None
    cores_per_run: int
    job_limit_s: float

    @property
    def jobs(self) -> int:
        """How many jobs carry the runs."""
        return -(-len(self.run_ids) // self.pack)

    def runs_of(self, job: int) -> list[str]:
        """The runs of one job."""
        return self.run_ids[job * self.pack : (job + 1) * self.pack]


class Submission(msgspec.Struct, kw_only=True):
    """``submission.json``: what is to be submitted. Written once; the journal says how far it has come."""

    submission: str
    token: str
    """Part of every job's name, so that a job is found again by it and never taken for another tree's."""
    sweep: str
    cluster: str
    scheduler: str
    created_unix_s: float
    max_running_jobs: int | None = None
    arrays: list[JobArray]

    def chunk_name(self, array: int, first: int, count: int) -> str:
        """The name of the jobs ``first`` to ``first + count - 1`` of an array at the scheduler."""
        return f"hpcbench-{self.submission}-{self.token}-{array}.{first}-{first + count - 1}"


def next_submission_folder(tree: ClusterTree, sweep: str) -> Path:
    """``submissions/<sweep>-<number>``, the first number that is free."""
    pattern = re.compile(re.escape(sweep) + r"-(\d+)")
    numbers = [0]
    if tree.submissions.is_dir():
        matches = (pattern.fullmatch(entry.name) for entry in tree.submissions.iterdir())
        numbers += [int(match[1]) for match in matches if match]
    return tree.submissions / f"{sweep}-{max(numbers) + 1:04d}"


def read_submission(folder: Path) -> Submission | None:
    """The record of a submission; ``None`` where it is absent or broken. Not to be changed: it may be given again."""
    path = f"{folder}/submission.json"
    try:
        state = os.lstat(path)
    except OSError:
        return None
    return _read_submission_cached(path, state.st_mtime_ns, state.st_size, state.st_ino)


@functools.lru_cache(maxsize=_CACHED_RECORDS)
def _read_submission_cached(path: str, *_state: int) -> Submission | None:
    """As ``read_submission``; a file in the same state, which is written once, is not read again by a watcher."""
    try:
        return decode_record(read_regular(path), Submission)
    except (OSError, msgspec.MsgspecError):
        return None


def read_run_specs(folder: Path, record: Submission) -> dict[str, RunSpec]:
    """The specifications of a submission's runs, from its task files; files that are gone or broken are passed over."""
    from hpcbench.config.run_spec import RunTask

    found: dict[str, RunSpec] = {}
    for array in record.arrays:
        try:
            lines = read_regular(folder / f"{array.number}.jsonl", MAX_GENERATED_FILE_BYTES).splitlines()[1:]
            found |= {task.run_id: task.spec for task in (decode_record(line, RunTask) for line in lines)}
        except (OSError, msgspec.MsgspecError):
            continue
    return found


NO_ARRAY_TASK = "4294967294"
"""What SLURM writes for %a in the log's name of a job that is no array."""


def job_log_path(folder: Path, record: Submission, number: int, job_id: str) -> Path:
    """What the script of a job said itself; the ranks' words are in the attempt's folder."""
    if record.scheduler == "local":
        return folder / "jobs" / f"{job_id}_0_log.out"
    job, _, task = job_id.partition("_")
    return folder / f"{number}.{job}.{task or NO_ARRAY_TASK}.log"


def list_submissions(tree: ClusterTree, sweep: str | None = None) -> list[tuple[Path, Submission]]:
    """The submissions in a tree, oldest first, of one sweep or of all."""
    if not tree.submissions.is_dir():
        return []
    found = []
    for folder in sorted(tree.submissions.iterdir()):
        record = read_submission(folder) if folder.is_dir() and not folder.is_symlink() else None
        if record is not None and sweep in (None, record.sweep):
            found.append((folder, record))
    return sorted(found, key=lambda entry: entry[1].created_unix_s)
