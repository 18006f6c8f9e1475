"""The first day on a GPU: its parts, what it finds out about a machine, its report, and all of it on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day import preflight, status
from benchmarks.gpu_day.kit import missing_predictions
from benchmarks.gpu_day.loops import loop_specs
from benchmarks.gpu_day.machines import NODES, write_profiles
from benchmarks.gpu_day.outputs import LOG, MACHINE, REPORT, RESULTS, DayFiles, committed_days, read_day
from benchmarks.gpu_day.parts import SHARED_RANKS, Size, day_parts, part_sweep
from benchmarks.gpu_day.preflight import Gpu, Machine, is_hopeless
from benchmarks.gpu_day.shards import shard_specs
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import RunResult
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.submit.plan import make_plan

ROOT = Path(__file__).parents[1]
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * 2**30, 79 * 2**30, "580.159.04", (13, 0))


def machine(**changes: Any) -> Machine:
    given: dict[str, Any] = {
        "size": "full", "python": "3.12.3", "cores": 16, "packages": {"torch": "2.11.0"}, "torch_cuda": "13.0",
        "gpu": H100, "compiler": "/usr/bin/gcc", "has_python_headers": True, "cupti": "found", "problems": [],
    }  # fmt: skip
    return Machine(**{**given, **changes})


def problems(device: Any = "cuda", reason: str | None = None, **changes: Any) -> list[str]:
    return [*preflight._problems(machine(**changes), device, reason)]


@pytest.mark.parametrize("size", ["full", "small"])
def test_every_run_of_the_day_is_feasible_on_one_device(size: Size, tmp_path: Path) -> None:
    for name in NODES:
        profiles = write_profiles(tmp_path / name, "cuda", name, 16)
        for part in day_parts(size, large_memory=name == "H200"):
            plan = make_plan(part_sweep(part), profiles.of(part.is_shared), ClusterTree(tmp_path))
            assert plan.dropped == []
            assert len(plan.runs) == len(part.points)


@pytest.mark.parametrize(
    ("changes", "text", "hopeless"),
    [
        ({"gpu": None}, "no GPU: there is none; HPCBENCH_GPU_DAY=cpu rehearses the day", True),
        ({"torch_cuda": None}, "this torch was built without CUDA: nothing can run", True),
        ({"packages": {}}, "no torch in", True),
        (
            {"gpu": H100._replace(driver="535.1", driver_cuda=(12, 2))},
            "the driver 535.1 runs CUDA 12.2, torch was built with 13.0: nothing can run", True,
        ),
        ({"gpu": H100._replace(driver_cuda=(13, 0))}, None, False),
        ({"cupti": "libcupti does not load: kernels are not counted"}, "libcupti does not load", False),
        ({"compiler": None}, "no C compiler: runs that need a compiler are left out", False),
        ({"has_python_headers": False}, "no Python.h: runs that need a compiler are left out", False),
        (
            {"gpu": H100._replace(memory_bytes=24 * 2**30, free_bytes=24 * 2**30)},
            "has 24 GiB, the largest configurations need 70: they will end as oom", False,
        ),
        ({"gpu": H100._replace(free_bytes=40 * 2**30)}, "40 of 80 GiB are free: other processes use the device", False),
    ],
)  # fmt: skip
def test_a_machine_that_lacks_something_says_so(changes: dict[str, Any], text: str | None, hopeless: bool) -> None:
    found = problems(reason="there is none", **changes)
    assert [each for each in found if text is not None and text in each] or (text is None and found == [])
    assert is_hopeless(machine(**changes, problems=found), "cuda") == hopeless


def test_a_day_without_a_gpu_ends_at_once(tmp_path: Path) -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    words = ["-m", "benchmarks.gpu_day", "run", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "PROBLEM: no GPU: CUDA_VISIBLE_DEVICES is '', which hides every GPU" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"machine.json", "log.txt"}


def test_every_timed_configuration_and_shard_was_predicted() -> None:
    assert missing_predictions() == []


def day(*results: RunResult, **changes: Any) -> DayFiles:
    return DayFiles("2026-12-01-h100", machine(**changes), [*results], [], [], [])


def test_the_status_page_is_that_of_the_committed_days() -> None:
    page = status.PAGE.read_text()
    assert page == status.page_text(page, committed_days())


@pytest.mark.soak  # tests/cuda/test_gpu_day.py runs the same parts on a stub of CUDA
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_the_day_runs_on_cpus_from_start_to_report(tmp_path: Path) -> None:
    out = tmp_path / "day"
    words = ["-m", "benchmarks.gpu_day", "run", "--out", str(out), "--device", "cpu", "--seconds", "3000"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    found = read_day(out)
    wrong = [
        (run.sweep, run.spec.strategy, run.error.message if run.error else "")
        for run in found.results
        if run.status != "ok" and run.spec.strategy != "horovod"
    ]
    assert wrong == [], done.stdout
    assert {path.name for path in out.iterdir()} == {
        "machine.json", "results.tar.gz", "loops.json", "shards.json", "report.md", "log.txt",
    }  # fmt: skip
    parts = {part.name: len(part.points) for part in day_parts("small", large_memory=False)}
    assert {name: len(found.of_part(name)) for name in parts} == parts
    assert all(run.untimed for run in found.of_part("shared") if run.spec.devices > 1)
    assert all(run.metrics.step_time_s for run in found.of_part("singles"))
    verified = [run for run in found.results if run.spec.verify and run.spec.strategy != "horovod"]
    assert all(run.verification is not None and run.verification.passed for run in verified)
    assert [figures.error for figures in found.loops] == [None] * len([*loop_specs("small")])
    assert [shard.error for shard in found.shards] == [None] * len([*shard_specs("small")])
    text = (out / "report.md").read_text()
    assert f"| shared | strategies, ranks sharing the device | {parts['shared']} |" in text
    # It ran on no GPU, whatever it executed.
    assert "executed on a cpu" not in text
    table = [sys.executable, "-m", "hpcbench", "table", str(out / "results.tar.gz")]
    shown = subprocess.run(table, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr


@pytest.mark.slow
def test_a_day_that_is_cut_keeps_what_came_before(tmp_path: Path) -> None:
    words = ["-m", "benchmarks.gpu_day", "run", "--out", str(tmp_path / "day"), "--device", "cpu", "--seconds", "20"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no time is left for" in done.stdout
    assert {MACHINE, RESULTS, REPORT, LOG} <= {path.name for path in (tmp_path / "day").iterdir()}


def test_the_day_covers_every_strategy_family_and_precision() -> None:
    parts = {part.name: part for part in day_parts("full", large_memory=False)}
    divided = {key for key, entry in STRATEGIES.items() if entry.own_degree is not None}
    assert {point["strategy"] for point in parts["shared"].points} == divided
    assert {point.get("tasks_per_node", 1) for point in parts["shared"].points} == {1, 2, SHARED_RANKS}
    kernels = parts["kernels"].points
    families = {point["model"] for point in kernels}
    precisions = {"fp32", "tf32", "bf16", "fp16", "bf16_params"}
    assert families >= {"resnet18", "vgg11", "mobilenetv2", "cosmoflow", "vit", "gpt", "llama"}
    for family in families:
        assert {point.get("precision") for point in kernels if point["model"] == family} >= precisions
    cnns = {point["model"] for point in kernels if point.get("channels_last")}
    assert cnns == families - {"gpt", "llama"}
    assert {point["model"] for point in parts["compiled"].points if point["compile"]} == families
    assert len(parts["singles"].points) == 10
    assert all(parts[name].fixed["verify"] for name in ("launcher", "kernels", "shared", "compiled"))
