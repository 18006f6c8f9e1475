"""Python starts with this file if its folder is on PYTHONPATH: a wrong clock, and mistakes that tests must find.

CHAOS_CLOCK_SKEW_S is added to the clock of the process. CHAOS_FILE_DELAY_S is the longest time that a folder takes to be
made or renamed. CHAOS_PLANTS lists mistakes, each of which takes one guard away:

    settle      an sbatch without an answer counts as not accepted 30 s after the call, whatever squeue does
    begin       an attempt begins whatever other attempts do
    marker      two processes may begin the same attempt
    order       submissions are ordered by the clocks of their submitters
    accounts    any account may find that another one's sbatch was not accepted
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from unittest import mock


def _plant_into_submit(names: set[str]) -> None:
    from hpcbench.submit import sbatch, submission_record
    from hpcbench.submit.slurm_queue import find_jobs

    def settle(self, batch, end_s, notify):  # type: ignore[no-untyped-def]
        give_up_s = time.monotonic() + sbatch.SBATCH_SETTLE_S - 20
        while True:
            lookup = find_jobs(batch, self._profile)
            if lookup.jobs or time.monotonic() > give_up_s:
                return next(iter(lookup.jobs), None)
            time.sleep(1)

    def recover(self, batch, notify):  # type: ignore[no-untyped-def]
        job = self._settle(batch, time.monotonic() + 60, notify)
        if job is None:
            self.writer.withdraw(batch, doubtful=True)
        else:
            self._accept(batch, job)

    by_number = submission_record.list_submissions
    if "settle" in names:
        mock.patch.object(sbatch.JobSubmitter, "_settle", settle).start()
        mock.patch.object(sbatch.JobSubmitter, "cancel_surplus", return_value=None).start()
    if "order" in names:
        submission_record.list_submissions = lambda tree: sorted(by_number(tree), key=lambda one: one[1].created_unix_s)
    if "accounts" in names:
        mock.patch.object(sbatch.JobSubmitter, "recover", recover).start()


def _plant_into_begin(names: set[str]) -> None:
    from hpcbench.results import attempts
    from hpcbench.worker import other_attempts

    def claim(folder, marker):  # type: ignore[no-untyped-def]
        folder.mkdir(exist_ok=True)
        (folder / "attempt.json").write_bytes(marker)
        return True

    if "begin" in names:
        mock.patch.object(other_attempts.OtherAttempts, "check", return_value=None).start()
    if "marker" in names:
        attempts._claim_folder = claim


def _delayed(call: Callable[..., None]) -> Callable[..., None]:
    def delayed(*args: object, **kwargs: object) -> None:
        time.sleep(random.uniform(0, _delay_s))
        call(*args, **kwargs)

    return delayed


_skew_s = float(os.environ.get("CHAOS_CLOCK_SKEW_S", "0"))
if _skew_s:
    _real = time.time
    time.time = lambda: _real() + _skew_s
_delay_s = float(os.environ.get("CHAOS_FILE_DELAY_S", "0"))
if _delay_s:
    os.mkdir, os.rename = _delayed(os.mkdir), _delayed(os.rename)
_names = set(os.environ.get("CHAOS_PLANTS", "").split(","))
if _names & {"settle", "order", "accounts"} and "hpcbench.worker" not in sys.orig_argv:
    _plant_into_submit(_names)
if _names & {"begin", "marker"} and "hpcbench.worker" in sys.orig_argv:
    _plant_into_begin(_names)
