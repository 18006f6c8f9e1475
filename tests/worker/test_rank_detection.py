from __future__ import annotations

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.worker.distributed.rank_environment import RankInfo, check_world_size, detect_rank
from tests.worker.helpers import make_spec

STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}  # fmt: skip
TORCHRUN = {"TORCHELASTIC_RUN_ID": "abc", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2",
            "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}  # fmt: skip

# environment -> rank, local_rank, world_size, local_world_size, node_rank, launcher
TABLE = [
    ({}, (0, 0, 1, 1, 0, "lone")),
    ({"SLURM_JOB_ID": "77"}, (0, 0, 1, 1, 0, "lone")),
    # The batch script: SLURM_PROCID stands there without a step.
    ({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 0, 1, 1, 0, "lone")),
    ({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_STEP_ID": "batch"}, (0, 0, 1, 1, 0, "lone")),
    ({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_STEP_ID": ""}, (0, 0, 1, 1, 0, "lone")),
    ({**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}, (0, 0, 4, 2, 0, "srun")),
    ({**STEP, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}, (3, 1, 4, 2, 1, "srun")),
    # A step narrower than its job.
    (
        {**STEP, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1",
         "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"},
        (2, 0, 3, 1, 1, "srun"),
    ),
    ({**TORCHRUN, "RANK": "1", "LOCAL_RANK": "1"}, (1, 1, 2, 2, 0, "torchrun")),
    # One torchrun over two nodes.
    (
        {**TORCHRUN, "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "RANK": "3", "LOCAL_RANK": "1"},
        (3, 1, 4, 2, 1, "torchrun"),
    ),
    # One torchrun a node under srun, each believing that it is alone.
    (
        {**TORCHRUN, **STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
         "SLURM_NODEID": "1", "RANK": "1", "LOCAL_RANK": "1"},
        (3, 1, 4, 2, 1, "torchrun"),
    ),
    # The same on a single node.
    (
        {**TORCHRUN, **STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0",
         "RANK": "1", "LOCAL_RANK": "1"},
        (1, 1, 2, 2, 0, "torchrun"),
    ),
    # torchrun within the batch script, without srun.
    (
        {**TORCHRUN, "SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "2", "RANK": "0",
         "LOCAL_RANK": "0"},
        (0, 0, 2, 2, 0, "torchrun"),
    ),
    (
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
         "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prte-1"},
        (3, 1, 4, 2, 1, "mpirun"),
    ),
    # mpirun within the batch script: its own environment says step-less SLURM.
    (
        {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
         "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        (1, 1, 2, 2, 0, "mpirun"),
    ),
    # mpirun starts its daemons through srun, whose step their ranks inherit.
    (
        {**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_RANK": "2",
         "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        (2, 0, 4, 2, 1, "mpirun"),
    ),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 1, 2, 2, 0, "pmi")),
    (
        {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
        (5, 1, 8, 4, 1, "pmi"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("env", "expected"), TABLE)
def test_rank_from_the_environment(env: dict[str, str], expected: tuple[int | str, ...]) -> None:
    info = detect_rank(env, 100, 99)
    found = (info.rank, info.local_rank, info.world_size, info.local_world_size, info.node_rank, info.launcher)
    assert found == expected


def test_ranks_of_one_launch_share_its_id_and_others_do_not() -> None:
    def launch(env: dict[str, str], pid: int = 100, parent: int = 99) -> str:
        return detect_rank(env, pid, parent).launch

    first = {**STEP, "SLURM_PROCID": "0"}
    assert launch(first) == launch({**first, "SLURM_PROCID": "1"}, pid=101)
    assert launch(first) != launch({**first, "SLURM_STEP_ID": "1"})
    assert launch(first) != launch({**first, "SLURM_RESTART_COUNT": "1"})
    run = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}
    assert launch(run) == launch({**run, "RANK": "1", "LOCAL_RANK": "1"}, pid=101)
    assert launch(run) != launch(run, parent=98), "the next torchrun has the same default id"
    assert launch(run) != launch({**run, "MASTER_PORT": "29501"})
    assert launch({}) != launch({}, pid=101)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(WorkerError, match="SLURM_PROCID is 'x'"):
        detect_rank({**STEP, "SLURM_PROCID": "x"}, 1, 1)
    with pytest.raises(WorkerError, match="LOCAL_RANK is not set"):
        detect_rank({**TORCHRUN, "RANK": "0"}, 1, 1)


def test_a_world_of_another_size_is_refused_with_both_numbers() -> None:
    spec: RunSpec = make_spec(strategy="ddp", nodes=2, tasks_per_node=2, dp_degree=4)
    check_world_size(RankInfo(0, 0, 4, 2, 0, "srun", "x"), spec)
    with pytest.raises(WorkerError, match=r"wants 4 ranks \(nodes 2 x tasks_per_node 2\).* started 1"):
        check_world_size(RankInfo(0, 0, 1, 1, 0, "lone", "x"), spec)
