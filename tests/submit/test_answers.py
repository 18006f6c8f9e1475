"""The words are SLURM's own, from its sources and from issues in which users quote them."""

from __future__ import annotations

import pytest

from hpcbench.submit.answers import Answer, classify

POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", Answer.REFUSED),
        (f"sbatch: error: QOSMaxNodePerUserLimit\nsbatch: error: {POLICY}", Answer.REFUSED),
        (f"sbatch: error: QOSMaxWallDurationPerJobLimit\nsbatch: error: {POLICY}", Answer.REFUSED),
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: {POLICY}", Answer.LIMIT),
        (f"sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: {POLICY}", Answer.LIMIT),
        (f"sbatch: error: AssocGrpSubmitJobsLimit\nsbatch: error: {POLICY}", Answer.LIMIT),
        (f"sbatch: error: {POLICY}", Answer.LIMIT),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", Answer.AWAY),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", Answer.AWAY),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", Answer.UNCLEAR),
        ("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", Answer.UNCLEAR),
        ("sbatch did not answer within 60 s (timed out)", Answer.UNCLEAR),
    ],
)
def test_what_is_to_be_done_next(said: str, answer: Answer) -> None:
    assert classify(said) is answer
