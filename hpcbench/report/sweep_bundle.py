"""Selection of a sweep's files for a bundle (record, results, attempts, submissions)."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

import hpcbench
from hpcbench.errors import HpcbenchError
from hpcbench.fileio import MAX_FILE_BYTES, make_folder, open_atomic, open_regular
from hpcbench.results.attempts import attempt_numbers
from hpcbench.results.bundle_archive import (
    BUNDLE_FORMAT_VERSION,
    BundledSweep,
    BundleHeader,
    BundleWriter,
)
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.submit.journal import journal_paths
from hpcbench.submit.scheduler_registry import job_log, scheduler_class
from hpcbench.submit.submission_record import Submission, SweepRecord, list_submissions, runs_of_submission

MAX_LOG_BYTES = 16 * 2**20
"""Maximum size of a log in a bundle; only the end of a longer one is bundled."""
_RANK_FILE = re.compile(r"rank-[0-9]+\.json")


@dataclass(frozen=True)
class BundleSummary:
    """Numbers of runs and files, and the reasons why files were left out."""

    runs: int
    files: int
    left_out: dict[str, str]


@dataclass(frozen=True)
class _BundledFile:
    """A file of the tree and the name that it gets in the bundle."""

    name: str
    path: Path
    owner: ClusterTree

    def open(self) -> IO[bytes]:
        """Open the file, a log at its end. Raises ``OSError`` or ``HpcbenchError`` if it cannot be bundled."""
        self.owner.path(*self.path.relative_to(self.owner.root).parts)
        file: IO[bytes] = open(open_regular(self.path), "rb")  # noqa: SIM115 - the caller closes it
        size = os.fstat(file.fileno()).st_size
        if self.path.suffix in (".log", ".out"):
            file.seek(max(0, size - MAX_LOG_BYTES))
        elif size > MAX_FILE_BYTES:
            file.close()
            raise OSError(f"it has {size} bytes, at most {MAX_FILE_BYTES} are bundled")
        return file

    def read(self) -> bytes:
        """The content."""
        with self.open() as file:
            return file.read(MAX_FILE_BYTES)


def write_bundle(
    tree: ResultsTree, sweeps: Sequence[tuple[str, SweepRecord]], out: Path, *, logs: bool
) -> BundleSummary:
    """Write ``sweeps`` (cluster and record of each) into the file ``out``."""
    by_name: dict[str, _BundledFile] = {}
    for cluster, record in sweeps:
        owner = tree.cluster(cluster)
        for path in _sweep_paths(owner, record, logs):
            name = f"{owner.root.name}/{path.relative_to(owner.root).as_posix()}"
            by_name[name] = _BundledFile(name, path, owner)
    left_out: dict[str, str] = {}
    files = [by_name[name] for name in sorted(by_name) if _is_readable(by_name[name], left_out)]
    bundled = [BundledSweep(sweep=record.sweep, cluster=name, run_ids=record.run_ids) for name, record in sweeps]
    header = BundleHeader(
        format_version=BUNDLE_FORMAT_VERSION, hpcbench=hpcbench.__version__, python=platform.python_version(),
        logs=logs, sweeps=bundled, left_out=left_out,
    )  # fmt: skip
    make_folder(out.parent)
    with open_atomic(out) as stream, BundleWriter(stream, header) as writer:
        for file in files:
            writer.add(file.name, file.read())
    runs = len({(cluster, run_id) for cluster, record in sweeps for run_id in record.run_ids})
    return BundleSummary(runs, len(files), left_out)


def _is_readable(file: _BundledFile, left_out: dict[str, str]) -> bool:
    try:
        file.open().close()
    except FileNotFoundError:
        return False
    except (OSError, HpcbenchError) as error:
        left_out[file.name] = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return False
    return True


def _sweep_paths(tree: ClusterTree, record: SweepRecord, logs: bool) -> Iterator[Path]:
    """Paths of a sweep's files, whether they exist or not."""
    yield tree.root / "sweeps" / f"{record.sweep}.json"
    for run_id in record.run_ids:
        folder = tree.root / "runs" / run_id[:2] / run_id
        yield folder / "result.json"
        yield from _attempt_files(tree, run_id, folder, logs)
    run_ids = set(record.run_ids)
    for folder, submission in list_submissions(tree):
        if submission.sweep == record.sweep or any(run_ids & set(array.run_ids) for array in submission.arrays):
            yield from _submission_files(folder, submission, run_ids if logs else set())


def _attempt_files(tree: ClusterTree, run_id: str, folder: Path, logs: bool) -> list[Path]:
    """Files of the attempt that counts: the result's, or the newest of a run without a result."""
    try:
        result = tree.read_result(run_id)
        tree.run_folder(run_id)
    except (msgspec.MsgspecError, HpcbenchError):
        result = None
    numbers = attempt_numbers(folder) if not folder.is_symlink() else []
    number = result.attempt if result is not None else max(numbers, default=0)
    if number not in numbers:
        return []
    attempt = folder / "attempts" / str(number)
    names = ["attempt.json", *sorted(name for name in os.listdir(attempt) if _RANK_FILE.fullmatch(name))]
    return [attempt / name for name in (*names, *(("out.log", "err.log") if logs else ()))]


def _submission_files(folder: Path, submission: Submission, logs_of: set[str]) -> Iterator[Path]:
    yield folder / "submission.json"
    if logs_of and (queue_log := scheduler_class(submission.scheduler, submission.cluster).queue_log):
        yield folder / queue_log
    yield from (folder / "stop.jsonl", folder / "dropped.json", *journal_paths(folder))
    for array in submission.arrays:
        yield folder / f"{array.number}.sh"
        yield folder / f"{array.number}.jsonl"
    logs = (job_log(run) for _, run in runs_of_submission(folder, submission, logs_of))
    yield from dict.fromkeys(log for log in logs if log is not None)
