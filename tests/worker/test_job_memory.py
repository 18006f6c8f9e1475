from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcbench.worker.measure.host import describe_job_memory, describe_own_job_memory, memory_limit_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("env", "limit_bytes", "machine_bytes", "words"),
    [
        (
            {"SLURM_MEM_PER_NODE": "2048"},
            3 * GIB,
            8 * GIB,
            "asked for 2.0 GiB a node; the limit of its memory group is 3.0 GiB; the machine has 8.0 GiB",
        ),
        ({"SLURM_MEM_PER_CPU": "1024"}, None, None, "asked for 1.0 GiB a core"),
        ({"SLURM_MEM_PER_NODE": "0"}, None, 8 * GIB, "asked for all memory of the node; the machine has 8.0 GiB"),
        ({"SLURM_MEM_PER_NODE": "lots"}, None, None, ""),
    ],
)
def test_memory_of_a_job_names_request_and_limit(
    env: dict[str, str], limit_bytes: int | None, machine_bytes: int | None, words: str
) -> None:
    assert describe_job_memory(env, limit_bytes, machine_bytes) == words


def test_the_memory_of_this_machine_is_described() -> None:
    assert re.search(r"the machine has \d+", describe_own_job_memory())


@pytest.mark.parametrize(
    ("line", "files", "limit"),
    [
        ("4:memory:/a/b", {"memory/a/memory.limit_in_bytes": "1000", "memory/a/b/memory.limit_in_bytes": "9223372036854771712"}, 1000),
        ("0::/a/b", {"a/memory.max": "2000", "a/b/memory.max": "max"}, 2000),
        ("0::/a/b", {"a/b/memory.max": "max"}, None),
        ("4:cpu:/a", {}, None),
    ],
)  # fmt: skip
def test_the_smallest_limit_counts(tmp_path: Path, line: str, files: dict[str, str], limit: int | None) -> None:
    groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": line + "\n", **groups}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit_bytes(tmp_path) == limit
