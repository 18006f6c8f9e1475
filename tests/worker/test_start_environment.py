"""The environment in which a worker starts, and its report about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcbench.config.run_spec import run_id
from hpcbench.errors import WorkerError
from hpcbench.worker.distributed import world
from hpcbench.worker.distributed.process_groups import HashStore, RankContext
from hpcbench.worker.distributed.rank_environment import RankInfo
from hpcbench.worker.distributed.world import choose_device
from hpcbench.worker.measure.environment_record import collect_provenance, environment_digest
from tests.worker.helpers import make_header, make_spec, tree_of, write_tasks

LOGIN_NODE = ["click", "pydantic", "submitit", "jinja2", "polars", "rich", "tomli", "tomlkit", "altair"]

BLOCKER = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked!r} else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from hpcbench.worker.__main__ import main
"""


def run_blocked(blocked: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    """A worker's verb in an interpreter that has not got ``blocked``."""
    code = BLOCKER.format(blocked=set(blocked)) + f"sys.exit(main({list(words)!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


def test_a_run_needs_no_package_of_the_login_node(tmp_path: Path) -> None:
    spec = make_spec(steps=1, warmup_steps=0)
    given = ["--tasks", str(write_tasks(tmp_path, spec)), "--index", "0"]
    began = run_blocked(LOGIN_NODE, "begin", *given)
    assert began.returncode == 0, began.stderr
    ran = run_blocked(LOGIN_NODE, *given, "--attempt", "1")
    assert ran.returncode == 0, ran.stderr
    ended = run_blocked(LOGIN_NODE, "end", *given, "--attempt", "1", "--exit-code", "0")
    assert ended.returncode == 0, ended.stderr
    result = tree_of(tmp_path).read_result(run_id(spec))
    assert result is not None
    assert result.status == "ok"


@pytest.mark.parametrize(
    ("blocked", "values", "hint"),
    [
        ("torch", {}, "pip install torch"),
        ("sklearn", {}, "pip install scikit-learn"),
        ("torchvision", {"dataset": "imagenet", "input_size": 64}, "pip install torchvision"),
    ],
)
def test_a_missing_package_is_unsupported_with_the_command_that_installs_it(
    tmp_path: Path, blocked: str, values: dict[str, Any], hint: str
) -> None:
    spec = make_spec(steps=1, **values)
    ran = run_blocked([blocked], "--tasks", str(write_tasks(tmp_path, spec)), "--index", "0")
    assert ran.returncode == 1
    result = tree_of(tmp_path).read_result(run_id(spec))
    assert result is not None
    assert result.status == "unsupported", ran.stderr
    assert result.error is not None
    assert hint in (result.error.hint or "")


@pytest.mark.slow
def test_synthetic_small_models_need_neither(tmp_path: Path) -> None:
    spec = make_spec(dataset="mnist", steps=1, warmup_steps=0)
    ran = run_blocked(["sklearn", "torchvision"], "--tasks", str(write_tasks(tmp_path, spec)), "--index", "0")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("blocked", "ready"), [([], True), (["fairscale", "sklearn"], True), (["torch"], False)])
def test_doctor_never_fails_for_what_is_missing(blocked: list[str], ready: bool) -> None:
    done = run_blocked(blocked, "doctor", "--json")
    report = json.loads(done.stdout)
    assert report["ready"] is ready
    assert done.returncode == (0 if ready else 1)
    for name in blocked:
        assert report["modules"][name]["works"] is False
        assert report["modules"][name]["hint"].startswith("python -m pip install")
    assert ("torch" in report) is ready


def test_an_unknown_verb_is_refused() -> None:
    done = run_blocked([], "beginn")
    assert done.returncode == 2
    assert "unknown verb 'beginn'" in done.stderr


# Provenance


def provenance(tmp_path: Path) -> dict[str, Any]:
    info = RankInfo(0, 0, 1, 1, 0, "lone", "x")
    return collect_provenance(make_header(tmp_path), make_spec(), info, torch.device("cpu"))


OF_THE_JOB = {
    "host": "other",
    "job": {"job_id": "9"},
    "executable": "/elsewhere/python",
    "kernel": "0.1",
    "threads": 64,
    "hpcbench_commit": "abc",
    "gpus": [{"uuid": "GPU-1", "pci": "0000:3b:00.0"}],
    "memory_bytes": 1,
    "interfaces": [{"name": "ib7"}],
    "cgroup": {"cpu_quota_cores": 0.5},
}
OF_THE_MACHINE = {
    "hugepages": {"reserved": 9, "transparent": "sometimes"},
    "cpu": {"smt": "off"},
    "gpu": {"ecc": "off"},
    "driver": "1",
    "infiniband": ["mlx5_0/1 InfiniBand, 100 Gb/sec, ACTIVE"],
    "torch_build": {"cpu_capability": "AVX2"},
    "container_kind": "spacecraft",
    "torch": "1.0",
    "cpu_model": "another",
    "gpu_model": "another",
    "device": "cuda",
    "packages": {"numpy": "1"},
}


def test_the_digest_moves_with_what_changes_a_measurement(tmp_path: Path) -> None:
    found, header = provenance(tmp_path), make_header(tmp_path)
    before = environment_digest(found, header, {})
    for name, value in (OF_THE_JOB | OF_THE_MACHINE).items():
        after = environment_digest({**found, name: value}, header, {})
        assert (before != after) is (name in OF_THE_MACHINE), name


def test_the_digest_moves_with_variables_and_profile(tmp_path: Path) -> None:
    found = provenance(tmp_path)
    digests = {
        environment_digest(found, make_header(tmp_path), {}),
        environment_digest(found, make_header(tmp_path), {"NCCL_ALGO": "ring"}),
        environment_digest(found, make_header(tmp_path, cores_per_task=2), {}),
        environment_digest(found, make_header(tmp_path, interface="ib0"), {}),
    }
    assert len(digests) == 4


# Devices


def test_ranks_that_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "device_uuid", lambda device: "GPU-1")
    store = HashStore()
    places = [RankContext(rank, 2, torch.device("cpu")) for rank in (1, 0)]
    world._refuse_shared_devices(store, places[0], 5.0)
    with pytest.raises(WorkerError, match="ranks share a GPU: 0, 1"):
        world._refuse_shared_devices(store, places[1], 5.0)


def test_a_cuda_profile_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WorkerError, match="sees no GPU"):
        choose_device("cuda", RankInfo(0, 0, 1, 1, 0, "lone", "x"))


def device_of(monkeypatch: pytest.MonkeyPatch, seen: int, rank: int, ranks: int, per_device: int = 1) -> torch.device:
    """The device of a rank on a host that sees so many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return choose_device("cuda", RankInfo(rank, rank, ranks, ranks, 0, "srun", "x"), ranks_per_device=per_device)


@pytest.mark.parametrize(
    ("seen", "rank", "ranks", "per_device", "index"),
    [
        (4, 3, 4, 1, 3),
        (1, 3, 4, 1, 0),
        (8, 1, 2, 1, 1),
        (1, 0, 1, 1, 0),
        # Ranks that share devices take them in turn.
        (1, 3, 4, 4, 0),
        (2, 1, 4, 4, 1),
        (2, 3, 4, 4, 1),
        (4, 3, 4, 4, 3),
    ],
)
def test_a_rank_takes_the_gpu_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, seen: int, rank: int, ranks: int, per_device: int, index: int
) -> None:
    assert device_of(monkeypatch, seen, rank, ranks, per_device) == torch.device("cuda", index)


def test_fewer_gpus_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerError, match="4 ranks on .* see 2 GPUs"):
        device_of(monkeypatch, seen=2, rank=0, ranks=4)
    with pytest.raises(WorkerError, match="4 ranks on .* see 1 GPUs") as refused:
        device_of(monkeypatch, seen=1, rank=0, ranks=4, per_device=2)
    assert "ranks per GPU: 2" in str(refused.value)


@pytest.mark.parametrize(("version", "shares"), [((2, 28, 9), False), ((2, 30, 7), True), ((3, 0, 0), True)])
def test_nccl_is_asked_to_take_ranks_of_one_gpu_where_it_can(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], shares: bool
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    assert world._nccl_shares_devices() == shares
    assert os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == ("1" if shares else None)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)


def test_gloo_carries_ranks_of_one_gpu_where_there_is_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert not world._nccl_shares_devices()
