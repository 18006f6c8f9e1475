"""The words are SLURM's own, from its sources and from issues in which users quote them."""

from __future__ import annotations

import pytest

from hpcbench.submit.slurm_queue import SbatchOutcome, classify_sbatch_error

POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", SbatchOutcome.REFUSED),
        (f"sbatch: error: QOSMaxNodePerUserLimit\nsbatch: error: {POLICY}", SbatchOutcome.REFUSED),
        (f"sbatch: error: QOSMaxWallDurationPerJobLimit\nsbatch: error: {POLICY}", SbatchOutcome.REFUSED),
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: {POLICY}", SbatchOutcome.LIMIT),
        (f"sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: {POLICY}", SbatchOutcome.LIMIT),
        (f"sbatch: error: AssocGrpSubmitJobsLimit\nsbatch: error: {POLICY}", SbatchOutcome.LIMIT),
        (f"sbatch: error: {POLICY}", SbatchOutcome.LIMIT),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", SbatchOutcome.AWAY),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", SbatchOutcome.AWAY),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", SbatchOutcome.UNCLEAR),
        ("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", SbatchOutcome.UNCLEAR),
        ("sbatch did not answer within 60 s (timed out)", SbatchOutcome.UNCLEAR),
    ],
)
def test_sbatch_errors_are_classified_by_the_next_step(said: str, answer: SbatchOutcome) -> None:
    assert classify_sbatch_error(said) is answer
