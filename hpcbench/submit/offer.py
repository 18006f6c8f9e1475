"""One call of sbatch that is neither lost nor made twice: noted before, noted after, looked for by name in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from hpcbench.config.cluster import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.results.attempts import latest_attempt
from hpcbench.results.store import ClusterTree
from hpcbench.submit import scheduler
from hpcbench.submit.answers import Answer
from hpcbench.submit.executor import SbatchError, ScriptExecutor
from hpcbench.submit.journal import Chunk, Writer, trying
from hpcbench.submit.lock import Lock
from hpcbench.submit.submission_record import Submission

SETTLE_S = 30.0
"""How long after it was begun an sbatch whose answer nobody heard may still turn out to have sent its job."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0

Tell = Callable[[str], None]


class Desk:
    """Where the chunks of one submission are offered to the scheduler, by the holder of the submission's lock."""

    def __init__(
        self, folder: Path, record: Submission, profile: ClusterProfile, tree: ClusterTree, lock: Lock
    ) -> None:
        self.writer = Writer(folder)
        self._folder, self._record, self._profile, self._tree, self._lock = folder, record, profile, tree, lock
        self._executor = ScriptExecutor(folder, scheduler.slurm_environment(profile))

    def offer(self, chunk: Chunk, options: list[str], patience_s: float, tell: Tell) -> str:
        """The number under which the scheduler has taken ``chunk``.

        A scheduler that is away or does not answer is asked again for ``patience_s``, with growing pauses.
        Raises ``SbatchError``; after an ``UNCLEAR`` answer the chunk stays open in the journal, after any other it is
        withdrawn.
        """
        pause_s, give_up = _FIRST_PAUSE_S, time.monotonic() + patience_s
        script = self._folder / f"{chunk.array}.sh"
        while True:
            self._lock.renew()
            chunk = trying(chunk)
            self.writer.note(chunk, durable=True)
            try:
                job_id: str | None = self._executor.submit_script(script, options, chunk.first)
            except SbatchError as error:
                patient = error.answer in (Answer.AWAY, Answer.UNCLEAR) and time.monotonic() + pause_s <= give_up
                if error.answer is not Answer.UNCLEAR:
                    self.writer.withdraw(chunk)
                if not patient:
                    raise
                tell(f"{error.message.splitlines()[-1]}: asking again")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                job_id = self._settled(chunk, give_up, error) if error.answer is Answer.UNCLEAR else None
            if job_id is not None:
                self.writer.note(msgspec.structs.replace(chunk, job_id=job_id))
                return job_id

    def ask(self, question: Callable[[], int], tell: Tell) -> int:
        """The answer to ``question``, which is put to the scheduler again while it is away, as long as an sbatch is."""
        pause_s, give_up = _FIRST_PAUSE_S, time.monotonic() + self._profile.scheduler.retry_s
        while True:
            self._lock.renew()
            try:
                return question()
            except SubmitError as error:
                if time.monotonic() + pause_s > give_up:
                    raise
                tell(f"{error.message.splitlines()[-1]}: asking again")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _settled(self, chunk: Chunk, give_up: float, error: SbatchError) -> str | None:
        """The job that an sbatch without an answer may have sent; ``None`` once it is sure that there is none."""
        while True:
            self._lock.renew()
            try:
                job_id = scheduler.job_named(chunk.name, self._profile)
                if job_id is not None or time.time() >= chunk.tried_unix_s + SETTLE_S:
                    return job_id
            except SubmitError:
                pass  # Who cannot ask does not know: nothing is sent again.
            if time.monotonic() > give_up:
                raise error
            time.sleep(_FIRST_PAUSE_S)

    def recover(self, chunk: Chunk, tell: Tell) -> None:
        """Find out what became of a chunk whose sender did not live to note the answer.

        Raises ``SubmitError`` where the scheduler cannot be asked.
        """
        job_id = self._found(chunk)
        rest_s = chunk.tried_unix_s + SETTLE_S - time.time()
        if job_id is None and rest_s > 0:
            tell(f"an earlier submit ended while it was sending: looking {rest_s:.0f} s longer whether its job appears")
            time.sleep(rest_s)
            job_id = self._found(chunk)
        if job_id is None:
            self.writer.withdraw(chunk)
        else:
            self.writer.note(msgspec.structs.replace(chunk, job_id=job_id))

    def _found(self, chunk: Chunk) -> str | None:
        return scheduler.job_named(chunk.name, self._profile) or self._job_that_ran(chunk)

    def _job_that_ran(self, chunk: Chunk) -> str | None:
        """The number of a job that squeue has forgotten, from the start markers of its runs."""
        array = self._record.arrays[chunk.array]
        for run_id in array.run_ids[chunk.first * array.pack : (chunk.first + chunk.count) * array.pack]:
            attempt = latest_attempt(self._tree.run_folder(run_id))
            marker = attempt.start_marker() if attempt else None
            if marker is not None and marker.job_id and marker.is_of(self._folder.name):
                return marker.job_id.partition("_")[0]
        return None
