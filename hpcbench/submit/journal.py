"""The journal of a submission: which jobs the scheduler has accepted, ``sent-<n>.jsonl``, one file per sending process.

A line is written before sbatch is called and another one after its answer. A later process therefore finds every job
that may be queued without a record; the unique job names identify them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from hpcbench.fileio import (
    MAX_GENERATED_FILE_BYTES,
    read_error,
    read_regular,
    share_with_group,
    write_atomic,
    write_error,
)
from hpcbench.results.decode import read_record


class JobBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Consecutive jobs of one array that one call of sbatch sends: ``count`` of them from number ``first``."""

    array: int
    first: int
    count: int
    name: str = ""
    """The name of the job at the scheduler: unique to this batch, unless the profile prescribes it."""
    command: str = ""
    """The script with its argument, as the scheduler shows it; empty where the name is unique."""
    group: int = 0
    is_array: bool = False
    user: str = ""
    """The account that called sbatch."""
    job_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9]+$")] | None = None
    job_cluster: str = ""
    """The scheduler's name of the cluster that the job is on, empty for the default one: numbers differ among
    clusters. Until sbatch has answered, the clusters that it was asked to choose from."""
    refused: bool = False
    """The scheduler refused it: its runs belong to no submission."""

    @property
    def is_sent(self) -> bool:
        return self.job_id is not None

    @property
    def is_unanswered(self) -> bool:
        """Whether sbatch was called and its answer is unknown."""
        return self.job_id is None and not self.refused

    def is_named(self, name: str, command: str) -> bool:
        """Whether a job with this name and command at the scheduler is of this batch."""
        return name == self.name and (not self.command or command.strip() == self.command)

    def overlaps(self, other: JobBatch) -> bool:
        """Whether both carry a job of one array."""
        is_apart = self.first + self.count <= other.first or other.first + other.count <= self.first
        return self.array == other.array and not is_apart

    def job_of(self, number: int) -> str:
        """The scheduler's id of job ``number`` of the array; the batch must have been accepted."""
        assert self.job_id is not None, self
        return f"{self.job_id}_{number - self.first}" if self.is_array else self.job_id


class _JournalLine(msgspec.Struct, omit_defaults=True):
    """One line of a journal."""

    chunk: JobBatch | None = None
    withdrawn: bool = False
    """The scheduler did not accept the batch; it may be sent again, whole or in parts."""
    doubtful: bool = False
    """It was withdrawn without an answer of sbatch."""
    waiting: str | None = None
    """The reason why the rest of the submission is not sent yet; empty once it is."""


class Journal(msgspec.Struct):
    """The contents of all journals of a submission."""

    batches: list[JobBatch]
    """The scheduler accepted them, refused them, or its answer is unknown."""
    waiting: str = ""
    """The reason why the jobs that are in no batch have not been sent."""
    dropped: Collection[str] = frozenset()
    """The runs that were cancelled: they are not begun any more."""
    doubtful: list[JobBatch] = msgspec.field(default_factory=list)
    """Batches that were withdrawn because the scheduler did not list their jobs after an sbatch without an answer."""

    def of(self, array: int) -> list[JobBatch]:
        """The batches of one array, by their first job."""
        return sorted((batch for batch in self.batches if batch.array == array), key=lambda batch: batch.first)

    def job_ids(self) -> list[str]:
        """The scheduler's ids of all accepted jobs, by array and number."""
        sent = sorted((batch for batch in self.batches if batch.is_sent), key=lambda batch: (batch.array, batch.first))
        return [batch.job_of(batch.first + number) for batch in sent for number in range(batch.count)]

    def unsent(self, array: int, jobs: int) -> list[tuple[int, int]]:
        """First number and count of each sequence of consecutive jobs that is in no batch."""
        free, start = [], 0
        for batch in self.of(array):
            if batch.first > start:
                free.append((start, batch.first - start))
            start = max(start, batch.first + batch.count)
        if start < jobs:
            free.append((start, jobs - start))
        return free


def read_journal(folder: Path) -> Journal:
    """All journals of a submission; truncated or broken lines are skipped.

    Raises ``StorageError`` if one of them cannot be read: its jobs would be submitted again.
    """
    decoder = msgspec.json.Decoder(_JournalLine)
    batches: dict[tuple[int, int], JobBatch] = {}
    doubtful: list[JobBatch] = []
    waiting = ""
    for path in journal_paths(folder):
        try:
            lines = read_regular(path, MAX_GENERATED_FILE_BYTES).splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise read_error(error, path) from error
        for text in lines:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                line = decoder.decode(text)
                if line.chunk is not None:
                    key = (line.chunk.array, line.chunk.first)
                    if line.withdrawn:
                        batches.pop(key, None)
                    else:
                        batches[key] = line.chunk
                    if line.doubtful:
                        doubtful.append(line.chunk)
                if line.waiting is not None:
                    waiting = line.waiting
    return Journal(list(batches.values()), waiting, read_dropped_runs(folder), doubtful)


def journal_paths(folder: Path) -> list[Path]:
    """The journals of a submission, in the order in which they were begun."""
    try:
        names = [entry.name for entry in os.scandir(folder) if re.fullmatch(r"sent-[0-9]+\.jsonl", entry.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise read_error(error, folder) from error
    return [folder / name for name in sorted(names, key=lambda name: (len(name), name))]


class JournalWriter:
    """Appends to a journal of its own, which it makes with the first line."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def record(self, batch: JobBatch, *, durable: bool = False) -> None:
        """Append the newest state of ``batch``; ``durable`` lines have reached the disk before this returns."""
        self._append(_JournalLine(chunk=batch), durable)

    def withdraw(self, batch: JobBatch, *, doubtful: bool = False) -> None:
        """Append that ``batch`` was not accepted; ``doubtful`` if sbatch itself did not answer."""
        self._append(_JournalLine(chunk=batch, withdrawn=True, doubtful=doubtful))

    def record_waiting(self, reason: str) -> None:
        """Append why the rest is not sent; an empty reason once it is."""
        self._append(_JournalLine(waiting=reason))

    def _append(self, line: _JournalLine, durable: bool = False) -> None:
        data = msgspec.json.encode(line) + b"\n"
        path = self._path or self._folder / f"sent-{len(journal_paths(self._folder)) + 1}.jsonl"
        try:
            with open(path, "ab" if self._path else "xb") as file:
                if self._path is None:
                    share_with_group(path)
                self._path = path
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise write_error(error, path) from error


def read_dropped_runs(folder: Path) -> set[str]:
    """The runs of a submission that were cancelled. Raises ``StorageError`` if the file cannot be read."""
    return set(read_record(folder / "dropped.json", list[str]) or ())


def drop_runs(folder: Path, run_ids: Iterable[str]) -> None:
    """Cancel runs of a submission: they are not sent, and not begun if they are queued already."""
    write_atomic(folder / "dropped.json", msgspec.json.encode(sorted({*read_dropped_runs(folder), *run_ids})) + b"\n")
