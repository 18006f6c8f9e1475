from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcbench.worker.distributed.rank_environment import (
    RESTARTED_FOR_RUN,
    RankInfo,
    core_warnings,
    describe_visible_devices,
    missing_variables,
    torch_thread_count,
    user_environment,
    user_performance_environment,
)


@pytest.mark.parametrize(
    ("env", "cores", "cores_per_task", "local_world_size", "expected"),
    [
        ({"OMP_NUM_THREADS": "3"}, 8, None, 2, None),
        ({"MKL_NUM_THREADS": "3"}, 8, None, 2, None),
        ({"OMP_NUM_THREADS": ""}, 8, None, 2, 4),
        ({}, 2, None, 1, 2),
        ({}, 2, None, 2, 1),
        ({}, 2, None, 4, 1),
        ({}, 64, 16, 4, 16),
        # The launcher has bound this rank to its own cores.
        ({}, 16, 16, 4, 16),
        ({}, 8, 16, 4, 8),
        # Another run may be using the other core.
        ({}, 2, 1, 1, 1),
    ],
)
def test_the_thread_count_follows_variables_and_cores(
    env: dict[str, str], cores: int, cores_per_task: int | None, local_world_size: int, expected: int | None
) -> None:
    info = RankInfo(0, 0, local_world_size, local_world_size, 0, "srun", "x")
    assert torch_thread_count(env, cores, cores_per_task, info) == expected


def test_torchrun_binds_nothing_so_the_mask_is_shared() -> None:
    info = RankInfo(0, 0, 4, 4, 0, "torchrun", "x")
    assert torch_thread_count({}, 8, 16, info) == 2


def test_fewer_cores_than_promised_or_ranks_give_a_warning() -> None:
    assert core_warnings(8, 8, 1, 8) == core_warnings(8, None, 8, 8) == []
    assert core_warnings(4, 8, 1, 8) == ["a rank may use 4 of the 8 cores per task that the profile promises"]
    assert core_warnings(2, None, 4, 2) == ["oversubscribed: 4 ranks share the 2 cores of their host"]


def test_the_digest_contains_performance_variables_of_the_user() -> None:
    env = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "HOME": "/x", "CUDA_VISIBLE_DEVICES": "3", "GLOO_X": "1"}
    assert user_performance_environment(env, {"GLOO_X": "1"}) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}


def test_variables_of_rocm_are_in_the_digest_but_not_those_of_one_job() -> None:
    """The job scripts of LUMI-G and Frontier put the number of the job into MIOpen's folders."""
    env = {
        "HSA_ENABLE_SDMA": "0", "MIOPEN_FIND_MODE": "2", "ROCR_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "0",
        "MIOPEN_USER_DB_PATH": "/tmp/miopen-7", "MIOPEN_CUSTOM_CACHE_DIR": "/tmp/miopen-7",
    }  # fmt: skip
    assert user_performance_environment(env, {}) == {"HSA_ENABLE_SDMA": "0", "MIOPEN_FIND_MODE": "2"}


def test_variables_that_hide_devices_are_named() -> None:
    assert describe_visible_devices({"HOME": "/x"}) == "no variable hides one"
    env = {"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "2"}
    assert describe_visible_devices(env) == "ROCR_VISIBLE_DEVICES '2', HIP_VISIBLE_DEVICES ''"


def test_torchruns_thread_count_is_no_setting_of_the_user(tmp_path: Path) -> None:
    env = {"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}
    launcher = tmp_path / "environ"
    launcher.write_bytes(b"HOME=/x\0PATH=/bin\0")
    assert "OMP_NUM_THREADS" not in user_environment(env, launcher)
    assert "OMP_NUM_THREADS" in user_environment({**env, "OMP_NUM_THREADS": "4"}, launcher)
    assert "OMP_NUM_THREADS" in user_environment({"OMP_NUM_THREADS": "1"}, launcher)
    assert "OMP_NUM_THREADS" in user_environment(env, tmp_path / "absent")
    launcher.write_bytes(b"OMP_NUM_THREADS=1\0HOME=/x\0")
    assert "OMP_NUM_THREADS" in user_environment(env, launcher)


def test_peak_memory_is_this_processes_and_not_its_parents() -> None:
    """ru_maxrss of a child begins with what its parent held; a large launcher would be measured as the run."""
    ballast = b"x" * 300_000_000
    code = (
        "import resource; from hpcbench.worker.measure.host import peak_resident_bytes as peak\n"
        "print(peak(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    peak, maxrss = map(int, done.stdout.split())
    assert len(ballast) == 300_000_000
    assert peak < 100_000_000
    assert maxrss >= peak


def test_the_peak_of_memory_begins_anew() -> None:
    code = (
        "from hpcbench.worker.measure.host import read_peak_memory as peak\n"
        "ballast = b'x' * 200_000_000; del ballast\n"
        "before, _ = peak(None, restarts=True); print(before, peak(None)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before - after > 150_000_000


def test_missing_variables_cause_one_restart() -> None:
    assert missing_variables({"A": "1"}, {"A": "1"}, "run") == {}
    assert missing_variables({"A": "2"}, {"A": "1", "B": "x"}, "run") == {"A": "1", "B": "x"}
    assert missing_variables({"A": "2", RESTARTED_FOR_RUN: "run"}, {"A": "1"}, "run") == {}, "once is enough"
    assert missing_variables({"A": "2", RESTARTED_FOR_RUN: "another"}, {"A": "1"}, "run") == {"A": "1"}
