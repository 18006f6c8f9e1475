"""Answers of `sbatch --test-only` to a profile's jobs: only refusals are problems of the profile."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.toml_tables import TomlSource
from hpcbench.site.profile_check import sbatch_test_problems
from hpcbench.site.slurm_facts import SiteFacts, parse_nodes, parse_partitions

TEXT = 'name = "c"\n[node]\ndevices = 4\n[request]\ngpus = "gres"\n[partitions.p]\nmin_nodes = 2\nmax_time_min = 9\n'


def found(text: str = TEXT) -> list[str]:
    profile = ClusterProfile.model_validate(tomli.loads(text))
    return [str(problem) for problem in sbatch_test_problems(profile, TomlSource(Path("c.toml"), text))]


@pytest.mark.parametrize(
    ("behaviour", "limit", "expected"),
    [
        ("ok", "9", []),
        ("refuse", "9", ["c.toml:6: sbatch refuses a job in p: Batch job submission failed: Invalid account or "
                         "account/partition combination specified"]),
        ("limit", "0", []), ("away", "9", []), ("unclear-lost", "9", []),
    ],
)  # fmt: skip
def test_only_refusals_of_sbatch_are_problems_of_the_profile(
    fake_slurm: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, limit: str, expected: list[str]
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", behaviour)
    monkeypatch.setenv("FAKE_LIMIT", limit)
    assert found() == expected
    assert [line.split()[0] for line in (fake_slurm / "calls").read_text().splitlines()] == ["--test-only"]


def test_the_job_is_the_smallest_that_the_partition_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\ncp "$2" {tmp_path}/asked\necho "sbatch: error: no" >&2\nexit 1\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert found() == ["c.toml:6: sbatch refuses a job in p: no"]
    lines = (tmp_path / "asked").read_text().splitlines()
    for line in ("--nodes=2", "--ntasks-per-node=4", "--gres=gpu:4", "--time=0-00:09:00", "--partition=p"):
        assert f"#SBATCH {line}" in lines


@pytest.mark.parametrize(
    "said", ["Requested nodes are busy", "Required node not available (DOWN, DRAINED or reserved)"]
)
def test_a_temporary_refusal_is_no_problem_of_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\necho "allocation failure: {said}" >&2\nexit 1\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert found() == []


@pytest.mark.parametrize(
    ("states", "refused"),
    [(["IDLE", "MIXED+PLANNED"], True), (["IDLE", "IDLE+DRAIN"], False), (["ALLOCATED", "IDLE+RESERVED"], False),
     (["DOWN*", "IDLE"], False), (["IDLE", "MIXED+MAINTENANCE+RESERVED"], False)],
)  # fmt: skip
def test_nodes_that_are_missing_today_are_no_problem_of_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list[str], refused: bool
) -> None:
    said = "sbatch: error: Requested node configuration is not available"
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    nodes = "".join(f"NodeName=n CPUTot=4 RealMemory=1 Gres=gpu:4 State={state} Partitions=p\n" for state in states)
    facts = SiteFacts("site", "24", parse_partitions("PartitionName=p TotalNodes=2\n", parse_nodes(nodes)))
    profile = ClusterProfile.model_validate(tomli.loads(TEXT))
    problems = list(sbatch_test_problems(profile, TomlSource(Path("c.toml"), TEXT), facts))
    assert bool(problems) == refused


def test_without_sbatch_no_problem_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found() == []
