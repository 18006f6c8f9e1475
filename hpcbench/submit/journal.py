"""The journal of a submission: which jobs the scheduler has accepted, ``sent-<n>.jsonl``, one file per sending process.

A line is written before sbatch is called and another one after its answer. A later process therefore finds every job
that may be queued without a record; the unique job names identify them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from hpcbench.fileio import MAX_GENERATED_FILE_BYTES, read_regular, write_atomic, write_error
from hpcbench.results.decode import decode_record


class JobBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Consecutive jobs of one array that one call of sbatch sends: ``count`` of them from number ``first``."""

    array: int
    first: int
    count: int
    name: str = ""
    """The name of the job at the scheduler: unique to this chunk."""
    lane: int = 0
    is_array: bool = False
    tried_unix_s: float = 0.0
    job_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9]+$")] | None = None
    refused: bool = False
    """The scheduler will not have it: its runs belong to no submission."""

    @property
    def is_sent(self) -> bool:
        """Whether the scheduler has taken it."""
        return self.job_id is not None

    @property
    def is_open(self) -> bool:
        """Whether sbatch was called and its answer is unknown."""
        return self.job_id is None and not self.refused

    def job_of(self, number: int) -> str:
        """The scheduler's id of job ``number`` of the array; the chunk must have been sent."""
        assert self.job_id is not None, self
        return f"{self.job_id}_{number - self.first}" if self.is_array else self.job_id


class _JournalLine(msgspec.Struct, omit_defaults=True):
    """One line of a journal."""

    chunk: JobBatch | None = None
    withdrawn: bool = False
    """The scheduler did not take the chunk and it may be sent again, whole or in parts."""
    waiting: str | None = None
    """Why the rest is not sent yet; empty once it is."""


class Journal(msgspec.Struct):
    """What the journals of a submission say together."""

    chunks: list[JobBatch]
    """The scheduler took them, refused them, or has not been heard to answer."""
    waiting: str = ""
    """Why what is in no chunk has not been sent."""

    def of(self, array: int) -> list[JobBatch]:
        """The chunks of one array, by their first job."""
        return sorted((chunk for chunk in self.chunks if chunk.array == array), key=lambda chunk: chunk.first)

    def job_ids(self) -> list[str]:
        """The scheduler's ids of all jobs that it has taken, by array and number."""
        chunks = sorted((chunk for chunk in self.chunks if chunk.is_sent), key=lambda chunk: (chunk.array, chunk.first))
        return [chunk.job_of(chunk.first + number) for chunk in chunks for number in range(chunk.count)]

    def unsent(self, array: int, jobs: int) -> list[tuple[int, int]]:
        """First number and count of every run of jobs that is in no chunk."""
        free, start = [], 0
        for chunk in self.of(array):
            if chunk.first > start:
                free.append((start, chunk.first - start))
            start = max(start, chunk.first + chunk.count)
        if start < jobs:
            free.append((start, jobs - start))
        return free


def read_journal(folder: Path) -> Journal:
    """All journals of a submission; lines that are cut short or broken are passed over."""
    decoder = msgspec.json.Decoder(_JournalLine)
    chunks: dict[tuple[int, int], JobBatch] = {}
    waiting = ""
    for path in journal_paths(folder):
        with contextlib.suppress(OSError):
            for text in read_regular(path, MAX_GENERATED_FILE_BYTES).splitlines():
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    line = decoder.decode(text)
                    if line.chunk is not None:
                        place = (line.chunk.array, line.chunk.first)
                        if line.withdrawn:
                            chunks.pop(place, None)
                        else:
                            chunks[place] = line.chunk
                    if line.waiting is not None:
                        waiting = line.waiting
    return Journal(list(chunks.values()), waiting)


def journal_paths(folder: Path) -> list[Path]:
    """The journals of a submission, in the order in which they were begun."""
    return sorted(folder.glob("sent-*.jsonl"), key=lambda path: (len(path.name), path.name))


class JournalWriter:
    """Appends to a journal of its own, which it makes with the first line."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def note(self, chunk: JobBatch, *, durable: bool = False) -> None:
        """The newest word about ``chunk``; ``durable`` lines have reached the disk before this returns."""
        self._append(_JournalLine(chunk=chunk), durable)

    def withdraw(self, chunk: JobBatch) -> None:
        """Forget ``chunk``: it was not taken."""
        self._append(_JournalLine(chunk=chunk, withdrawn=True))

    def wait(self, reason: str) -> None:
        """Say why the rest is not sent; an empty reason once it is."""
        self._append(_JournalLine(waiting=reason))

    def _append(self, line: _JournalLine, durable: bool = False) -> None:
        data = msgspec.json.encode(line) + b"\n"
        path = self._path or self._new_path()
        try:
            with open(path, "ab" if self._path else "xb") as file:
                self._path = path
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise write_error(error, path) from error

    def _new_path(self) -> Path:
        return self._folder / f"sent-{len(journal_paths(self._folder)) + 1}.jsonl"


def mark_attempted(chunk: JobBatch) -> JobBatch:
    """``chunk`` as it is noted before sbatch is called."""
    return msgspec.structs.replace(chunk, tried_unix_s=time.time())


def read_dropped_runs(folder: Path) -> set[str]:
    """The runs that were struck from a submission before they began."""
    try:
        return set(decode_record(read_regular(folder / "dropped.json"), list[str]))
    except (OSError, msgspec.MsgspecError):
        return set()


def drop_runs(folder: Path, run_ids: Iterable[str]) -> None:
    """Strike runs from a submission: they are not sent, and not begun where they are queued already."""
    write_atomic(folder / "dropped.json", msgspec.json.encode(sorted({*read_dropped_runs(folder), *run_ids})) + b"\n")
