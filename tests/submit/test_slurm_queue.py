"""The words are SLURM's own, from its sources and from issues in which users quote them."""

from __future__ import annotations

import pytest

from hpcbench.submit.slurm_queue import SbatchOutcome, classify_sbatch_error, nodes_in_service

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


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("", []),
        ("n1 idle\nn2 mixed\nn3 allocated\nn10 completing\nn1 idle\n", ["n1", "n2", "n3", "n10"]),
        ("n1 idle*\nn2 drained\nn3 draining\nn4 down\nn5 maint\nn6 reserved\nn7 planned", ["n7"]),
        ("n1 powered_down\nn2 idle~\nn3 unknown\nn4 inval\nn5 fail\n", ["n2"]),
        ("slurm_load_partitions: Unable to contact slurm controller", []),
    ],
)
def test_nodes_that_take_no_job_are_left_out(listed: str, names: list[str]) -> None:
    assert nodes_in_service(listed) == names
