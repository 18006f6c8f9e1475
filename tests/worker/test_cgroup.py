from __future__ import annotations

from pathlib import Path

import pytest

from hpcbench.worker.measure.host import oom_kills

V1 = "4:memory:/slurm/job_7/step_0\n3:cpuset:/\n1:cpu,cpuacct:/\n0::/\n"
V2 = "0::/slurm/job_7/step_0\n"


def put(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    return folder


def proc(tmp_path: Path, text: str) -> Path:
    """Return the root of a file system where this process is in the groups of ``text``."""
    put(tmp_path / "proc/self", "cgroup", text)
    return tmp_path


def test_v1_sums_this_group_and_its_parents(tmp_path: Path, mount: Path) -> None:
    memory = mount / "memory"
    put(memory / "slurm/job_7/step_0", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    put(memory / "slurm/job_7", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    put(memory, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert oom_kills(proc(tmp_path, V1)) == 7


def test_v2_reads_memory_events(tmp_path: Path, mount: Path) -> None:
    put(mount / "slurm/job_7/step_0", "memory.events", "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n")
    put(mount / "slurm/job_7", "memory.events", "oom 3\noom_kill 2\n")
    assert oom_kills(proc(tmp_path, V2)) == 4


def test_the_count_rises_where_the_limit_is_the_nodes(tmp_path: Path, mount: Path) -> None:
    """The test box limits the node's group, a parent of the job's."""
    put(mount / "memory/hpcbench-slurmbox/n1", "memory.oom_control", "oom_kill 0\n")
    root = proc(tmp_path, "4:memory:/hpcbench-slurmbox/n1/job\n")
    before = oom_kills(root)
    put(mount / "memory/hpcbench-slurmbox/n1", "memory.oom_control", "oom_kill 1\n")
    after = oom_kills(root)
    assert (before, after) == (0, 1)


def test_an_unreadable_count_is_none_and_not_zero(tmp_path: Path, mount: Path) -> None:
    assert oom_kills(tmp_path / "absent") is None
    assert oom_kills(proc(tmp_path, V1)) is None
    assert oom_kills(proc(tmp_path, "nonsense\n")) is None
    put(mount / "memory", "memory.oom_control", "oom_kill many\n")
    assert oom_kills(proc(tmp_path, V1)) is None


def test_a_kernel_without_the_count_and_an_unreadable_parent_are_passed_over(tmp_path: Path, mount: Path) -> None:
    put(mount / "memory/slurm/job_7/step_0", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n")
    put(mount / "memory/slurm", "memory.oom_control", "oom_kill 3\n")
    assert oom_kills(proc(tmp_path, V1)) == 3


def test_a_path_outside_of_the_container_is_still_read_from_its_top(tmp_path: Path, mount: Path) -> None:
    put(mount, "memory.events", "oom_kill 5\n")
    assert oom_kills(proc(tmp_path, "0::/../../elsewhere\n")) == 5
