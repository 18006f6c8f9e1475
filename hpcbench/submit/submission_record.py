"""The records ``submission.json`` (one submission) and ``sweeps/<name>.json`` (the runs of a sweep), and the newest
submission of each run.

This module imports neither templates nor profiles, so that commands that only read start quickly."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from hpcbench.config.command import CommandLayout
from hpcbench.config.run_spec import RunSpec, RunTask
from hpcbench.errors import ConfigError, StorageError, did_you_mean
from hpcbench.fileio import MAX_GENERATED_FILE_BYTES, read_error, read_regular, write_atomic
from hpcbench.identity import account_name, owner_name
from hpcbench.results.attempts import Attempt, AttemptStart, attempt_numbers
from hpcbench.results.decode import decode_record, read_record, why_no_record
from hpcbench.results.results_tree import RUN_ID_PATTERN, ClusterTree, ResultsTree
from hpcbench.submit.journal import JobBatch, read_journal


class SweepRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``sweeps/<name>.json``: the runs of the sweep when it was submitted last."""

    sweep: str
    cluster: str
    description: str
    run_ids: list[str]
    dropped: int
    written_unix_s: float
    profile_file: str | None = None
    """The cluster's profile, if it is not found by its name."""
    sweep_file: str | None = None
    """The file of the sweep; ``None`` for a run from the command line."""
    command_digest: str = ""
    layout: CommandLayout | None = None
    """The layout that the sweep declares for its command; predictions for its results need it."""

    @property
    def profile(self) -> str:
        """Name or path of the cluster's profile."""
        return self.profile_file if self.profile_file and Path(self.profile_file).is_file() else self.cluster


def read_sweep_record(tree: ClusterTree, name: str) -> SweepRecord | None:
    """The record of a sweep that was submitted or run here; ``None`` if there is none."""
    return read_record(tree.sweep_path(name), SweepRecord)


_CACHED_RECORDS = 1000


class JobArray(msgspec.Struct, kw_only=True):
    """Runs that share a script: the lines of ``<number>.jsonl``. Job ``k`` has ``pack`` of them, from ``k * pack``."""

    number: int
    run_ids: list[str]
    pack: int = 1
    ranks: int
    nodes: int
    partition: str | None = None
    max_running_jobs: int | None = None
    """The limit of its partition."""
    job_limit_s: float

    @property
    def jobs(self) -> int:
        return -(-len(self.run_ids) // self.pack)

    def runs_of(self, job: int, count: int = 1) -> list[str]:
        """The runs of ``count`` jobs, from ``job`` on."""
        return self.run_ids[job * self.pack : (job + count) * self.pack]


class Submission(msgspec.Struct, kw_only=True):
    """``submission.json``: the jobs of a submission. Written once; the journal records which of them were accepted."""

    submission: str
    token: str
    """Part of every job's name: a job is found by its name, and never taken for one of another results tree."""
    sweep: str
    cluster: str
    scheduler: str
    created_unix_s: float
    """Read from the clock of the submitter, for people: submissions are ordered by their numbers."""
    max_running_jobs: int | None = None
    """The limit of the submission, in all partitions together."""
    order_seed: int | None = None
    """The seed of the order of its runs; ``None`` if they are in the order of the sweep."""
    arrays: list[JobArray]

    def batch_name(self, array: int, first: int, count: int) -> str:
        """The scheduler's name of the jobs ``first`` to ``first + count - 1`` of an array."""
        return f"hpcbench-{self.submission}-{self.token}-{array}.{first}-{first + count - 1}"


_FOLDER_PATTERN = re.compile(r".+-([0-9]{4,18})")
_COUNT_FILE = "submission-count.json"


def submission_number(folder: Path) -> int:
    """The number of a submission in its tree; a later submission has a larger one, whatever the clocks show."""
    match = _FOLDER_PATTERN.fullmatch(folder.name)
    return int(match[1]) if match else 0


def next_submission_folder(tree: ClusterTree, sweep: str) -> Path:
    """``submissions/<sweep>-<number>``, with a number that no submission of the tree ever had."""
    counted = read_record(tree.path(_COUNT_FILE), int) or 0
    # What lies there and is no submission has its number all the same.
    number = 1 + max([counted, *(submission_number(Path(entry.path)) for entry in _submission_entries(tree))])
    return tree.submissions / f"{sweep}-{number:04d}"


def count_submission(tree: ClusterTree, folder: Path) -> None:
    """Note that the number of ``folder`` is taken, in case the folder is removed."""
    write_atomic(tree.path(_COUNT_FILE), msgspec.json.encode(submission_number(folder)) + b"\n")


def submission_token(folder: Path) -> str:
    """Part of the names of a submission's jobs; it differs among results trees."""
    text = f"{folder.absolute()}\0{account_name()}"
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=4).hexdigest()


def _submission_entries(tree: ClusterTree) -> list[os.DirEntry[str]]:
    """The entries of ``submissions``. Raises ``StorageError`` if it may not be read."""
    try:
        return list(os.scandir(tree.submissions))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise read_error(error, tree.submissions) from error


def read_submission(folder: Path) -> Submission | None:
    """The record of a submission; ``None`` if there is none. It is cached: callers must not change it.

    Raises ``StorageError`` if it cannot be read, or is something else: its runs may be queued.
    """
    path = f"{folder}/submission.json"
    try:
        state = os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise read_error(error, Path(path)) from error
    record = _read_submission_cached(path, state.st_mtime_ns, state.st_size, state.st_ino)
    if record is None:
        hint = f"its jobs may be queued or running; once none is, remove the folder {folder}"
        raise StorageError(f"{path} is no record of a submission: {why_no_record(path, Submission)}", hint=hint)
    return record


@functools.lru_cache(maxsize=_CACHED_RECORDS)
def _read_submission_cached(path: str, *_state: int) -> Submission | None:
    return read_record(path, Submission)


def read_run_specs(folder: Path, record: Submission) -> dict[str, RunSpec]:
    """The specifications of a submission's runs, from its task files; absent or broken files are skipped."""
    specs: dict[str, RunSpec] = {}
    for array in record.arrays:
        try:
            lines = read_regular(folder / f"{array.number}.jsonl", MAX_GENERATED_FILE_BYTES).splitlines()[1:]
            specs |= {task.run_id: task.spec for task in (decode_record(line, RunTask) for line in lines)}
        except (OSError, msgspec.MsgspecError):
            continue
    return specs


def list_submissions(tree: ClusterTree) -> list[tuple[Path, Submission]]:
    """The submissions in a tree, oldest first.

    Raises ``StorageError`` if one of them cannot be read: its runs would count as never submitted.
    """
    folders = [Path(entry.path) for entry in _submission_entries(tree) if entry.is_dir(follow_symlinks=False)]
    folders.sort(key=lambda folder: (submission_number(folder), folder.name))
    records = ((folder, read_submission(folder)) for folder in folders)
    return [(folder, record) for folder, record in records if record is not None]


class SubmittedRun(msgspec.Struct, frozen=True, gc=False):
    """A run in its newest submission."""

    folder: Path
    """The submission's."""
    record: Submission
    array: JobArray
    index: int
    """Line of the task file."""
    batch: JobBatch | None = None
    """The call that its job was sent with; ``None`` if it was not sent yet."""
    is_dropped: bool = False
    """It was removed from the submission."""
    waiting: str = ""
    """The reason why the rest of the submission is not submitted."""

    @property
    def number(self) -> int:
        """The job of the array that carries the run."""
        return self.index // self.array.pack

    @property
    def job_id(self) -> str | None:
        """The scheduler's id of the job; ``None`` until it has accepted the job."""
        return self.batch.job_of(self.number) if self.batch is not None and self.batch.is_sent else None

    @property
    def submitted_by(self) -> str | None:
        """The account that sent its job, else the owner of the submission's folder; ``None`` if both are unknown."""
        if self.batch is not None and self.batch.user:
            return self.batch.user
        return folder_owner(self.folder)

    def started_attempt(self, tree: ClusterTree) -> tuple[Attempt, AttemptStart] | None:
        """Return the newest attempt of the run that a job of this submission began, and its start marker.

        Raises:
            StorageError: a part of the attempt's path is a link, or may not be read.
        """
        return started_attempt(tree, self.array.run_ids[self.index], self.record.submission)


def folder_owner(folder: Path) -> str | None:
    """The account that owns ``folder``; ``None`` if there is no such folder."""
    try:
        return owner_name(folder.stat().st_uid)
    except OSError:
        return None


def started_attempt(tree: ClusterTree, run_id: str, submission: str) -> tuple[Attempt, AttemptStart] | None:
    """Return the newest attempt of a run that a job of ``submission`` began, and its start marker.

    Raises:
        StorageError: a part of the attempt's path is a link, or may not be read.
    """
    folder = tree.run_folder(run_id)
    for number in reversed(attempt_numbers(folder)):
        attempt = Attempt(folder, number)
        if (start := attempt.read_start()) and start.belongs_to(submission):
            return attempt, start
    return None


def runs_of_submission(folder: Path, record: Submission, wanted: Collection[str]) -> Iterator[tuple[str, SubmittedRun]]:
    """Yield the ``wanted`` runs that a submission has and the scheduler did not refuse."""
    journal = read_journal(folder)
    for array in record.arrays:
        batches: list[JobBatch | None] = [None] * array.jobs
        for sent in journal.of(array.number):
            end = min(sent.first + sent.count, array.jobs)
            batches[sent.first : end] = [sent] * (end - sent.first)
        for index, run_id in enumerate(array.run_ids):
            batch = batches[index // array.pack]
            if run_id in wanted and not (batch and batch.refused):
                is_dropped = run_id in journal.dropped
                yield run_id, SubmittedRun(folder, record, array, index, batch, is_dropped, journal.waiting)


def find_submitted_runs(tree: ClusterTree, wanted: Iterable[str]) -> dict[str, SubmittedRun]:
    """Each of the ``wanted`` runs in its newest submission.

    Runs that were never submitted, or that the scheduler refused, are absent.
    """
    missing, runs = set(wanted), dict[str, SubmittedRun]()
    for folder, record in reversed(list_submissions(tree)) if missing else ():
        if not all(missing.isdisjoint(array.run_ids) for array in record.arrays):
            found = dict(runs_of_submission(folder, record, missing))
            runs |= found
            missing.difference_update(found)
        if not missing:
            break
    return runs


def select_sweeps(tree: ResultsTree, names: Sequence[str], cluster: str | None) -> list[tuple[str, SweepRecord]]:
    """Return cluster and record of each sweep in ``names`` (names or files), or of all sweeps without any.

    Raises ``ConfigError`` with the nearest name if a sweep or ``cluster`` has nothing in the tree.
    """
    clusters = tree.clusters()
    if cluster is not None and cluster not in clusters:
        raise ConfigError(f"no results of cluster {cluster!r} in {tree.root}", hint=did_you_mean(cluster, clusters))
    records: dict[str, list[tuple[str, SweepRecord]]] = {}
    broken: dict[str, StorageError] = {}
    for cluster_name in [cluster] if cluster else clusters:
        cluster_tree = tree.cluster(cluster_name)
        for path in sorted(cluster_tree.path("sweeps").glob("[!.]*.json")):
            try:
                record = _read_record(cluster_tree, path)
            except StorageError as error:
                broken[path.stem] = error
            else:
                records.setdefault(path.stem, []).append((cluster_name, record))
    wanted = [sweep_name(name) for name in names] or sorted(records)
    for name, problem in broken.items():
        if name in wanted or (not names and problem.errno):
            raise problem
    for name in wanted:
        if name not in records:
            hint = did_you_mean(name, records) if records else "submit or run a sweep first"
            of_file = {Path(one.sweep_file or "").stem: one.sweep for entry in records.values() for _, one in entry}
            if name in of_file:
                hint = f"the file {name}.toml is the sweep {of_file[name]!r}"
            raise ConfigError(f"sweep {name!r} has nothing in {tree.root}", hint=hint)
    return [entry for name in wanted for entry in records[name]]


def _read_record(tree: ClusterTree, path: Path) -> SweepRecord:
    """Return the record in ``path``. Raises ``StorageError`` if it cannot be read, or is something else."""
    try:
        record = read_sweep_record(tree, path.stem)
    except (ValueError, RecursionError):
        record = None
    if record is None:
        reason = why_no_record(path, SweepRecord)
    elif record.sweep != path.stem:
        reason = f"it is about the sweep {record.sweep!r:.80}"
    elif wrong := [run_id for run_id in record.run_ids if not RUN_ID_PATTERN.fullmatch(run_id)]:
        reason = f"{wrong[0]!r:.80} is not a run_id"
    else:
        return record
    hint = "submit the sweep again to write it anew"
    raise StorageError(f"{path} is no record of a sweep: {reason}", hint=hint)


def sweep_name(source: str) -> str:
    """Return the name of a sweep, which is a name or a TOML file."""
    if not source.endswith(".toml"):
        return source
    from hpcbench.config.sweep_loader import load_sweep

    return load_sweep(Path(source)).name
