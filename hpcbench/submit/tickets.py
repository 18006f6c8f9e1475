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


def find_tickets(tree: ClusterTree, wanted: Iterable[str]) -> dict[str, Ticket]:
    """Per run its newest submission; runs that a scheduler refused there belong to none.

    The newest submissions are looked at first, and no older ones than it takes.
    """
    left = set(wanted)
    tickets: dict[str, Ticket] = {}
    for folder, record in reversed(submissions_of(tree)) if left else ():
        found = dict(tickets_of(folder, record, left))
        tickets |= found
        left -= found.keys()
        if not left:
            break
    return tickets


def tickets_of(folder: Path, record: Submission, wanted: set[str]) -> Iterator[tuple[str, Ticket]]:
    """The tickets of those of ``wanted`` that are in one submission."""
    arrays = [array for array in record.arrays if not wanted.isdisjoint(array.run_ids)]
    if not arrays:
        return
    journal, dropped = read_journal(folder), dropped_runs(folder)
    for array in arrays:
        chunks = _by_job(journal, array)
        for index, run_id in enumerate(array.run_ids):
            if run_id not in wanted:
                continue
            job = index // array.pack
            chunk = chunks[job]
            if chunk is not None and chunk.refused:
                continue
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
