"""Where each run was submitted last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from hpcbench.fileio import tail
from hpcbench.results.store import ClusterTree
from hpcbench.submit.journal import Chunk, Journal, dropped_runs, read_journal
from hpcbench.submit.submission_record import Array, Submission, job_log, submissions_of


class Ticket(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run's place in its newest submission."""

    folder: Path
    record: Submission
    array: Array
    index: int
    """Line of the task file."""
    job_id: str | None = None
    """The scheduler's, once it has taken the job."""
    job_name: str = ""
    is_dropped: bool = False
    """It was struck from the submission."""
    is_open: bool = False
    """sbatch was called and its answer is not known."""
    waiting: str = ""
    """Why the submission's rest is not sent."""

    @property
    def number(self) -> int:
        """The job of the array that carries the run."""
        return self.index // self.array.pack

    def job_log(self) -> Path | None:
        """What the job's script said itself."""
        return job_log(self.folder, self.record, self.array.number, self.job_id) if self.job_id else None

    def last_words(self) -> str:
        """The last line that the job's script, or the queue before it, said; to be put behind a reason."""
        log = self.job_log()
        if log is None and self.record.scheduler == "local":
            log = self.folder / "queue.log"
        lines = tail(log).strip().splitlines() if log else []
        return f": {lines[-1].strip()}" if lines else ""


class Place(msgspec.Struct, frozen=True, gc=False):
    """A submission that some runs were submitted with last."""

    folder: Path
    record: Submission
    journal: Journal
    run_ids: set[str]


def find_places(tree: ClusterTree, wanted: Iterable[str]) -> list[Place]:
    """The submissions that ``wanted`` runs were submitted with last, the newest first, and no older ones than it takes.

    Runs that a scheduler refused belong to no submission.
    """
    left = set(wanted)
    places: list[Place] = []
    for folder, record in reversed(submissions_of(tree)) if left else ():
        found = {run_id for array in record.arrays for run_id in left.intersection(array.run_ids)}
        if not found:
            continue
        journal = read_journal(folder)
        found -= _refused(record, journal)
        places.append(Place(folder, record, journal, found))
        left -= found
        if not left:
            break
    return places


def _refused(record: Submission, journal: Journal) -> set[str]:
    refused: set[str] = set()
    for chunk in journal.chunks:
        if chunk.refused:
            array = record.arrays[chunk.array]
            refused.update(array.run_ids[chunk.first * array.pack : (chunk.first + chunk.count) * array.pack])
    return refused


def find_tickets(tree: ClusterTree, wanted: Iterable[str]) -> dict[str, Ticket]:
    """Per run its newest submission; runs that a scheduler refused there belong to none."""
    return {run_id: ticket for place in find_places(tree, wanted) for run_id, ticket in tickets_of(place)}


def tickets_of(place: Place) -> Iterator[tuple[str, Ticket]]:
    """The tickets of the runs that were submitted last with one submission."""
    folder, record, journal, wanted = place.folder, place.record, place.journal, place.run_ids
    dropped = dropped_runs(folder)
    for array in record.arrays:
        chunks = _by_job(journal, array)
        for index, run_id in enumerate(array.run_ids):
            if run_id not in wanted:
                continue
            job = index // array.pack
            chunk = chunks[job]
            is_sent = chunk is not None and chunk.job_id is not None
            yield (
                run_id,
                Ticket(
                    folder=folder,
                    record=record,
                    array=array,
                    index=index,
                    job_id=chunk.job_of(job) if chunk is not None and is_sent else None,
                    job_name=chunk.name if chunk is not None else "",
                    is_dropped=run_id in dropped,
                    is_open=chunk is not None and not is_sent,
                    waiting=journal.waiting,
                ),
            )


def _by_job(journal: Journal, array: Array) -> list[Chunk | None]:
    """Per job of an array the chunk that it was sent with."""
    found: list[Chunk | None] = [None] * array.jobs
    for chunk in journal.of(array.number):
        last = min(chunk.first + chunk.count, array.jobs)
        found[chunk.first : last] = [chunk] * (last - chunk.first)
    return found
