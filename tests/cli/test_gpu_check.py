"""``doctor --gpu``: the sweep that it runs, the document that it writes, and what it says where no GPU is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from hpcbench.cli import gpu_check_command
from hpcbench.cli.gpu_check_command import EXIT_CODES
from hpcbench.cli.main import cli
from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.config.sweep_loader import Sweep
from hpcbench.errors import ConfigError
from hpcbench.forecast.forecast import Forecast
from hpcbench.forecast.gpu_check import GpuCheck, evaluate_check, make_check_sweep
from hpcbench.parallel.catalog import STRATEGIES
from hpcbench.results.probe_records import LoopProbe, ProbeResults
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import (
    FailureRecord,
    RunMetrics,
    RunResult,
    StepTimeStatistics,
)
from hpcbench.submit.plan import SweepPlan, make_plan
from hpcbench.submit.run_state import RunState

CUDA = 'name = "gpus"\ndevice = "cuda"\nlauncher = "torchrun"\n[scheduler]\nkind = "local"\n'


def profile_of(devices: int) -> ClusterProfile:
    local, _ = load_cluster("local")
    return local.model_copy(
        update={"name": "gpus", "device": "cuda", "node": local.node.model_copy(update={"devices": devices})}
    )


def plan_of(devices: int, folder: Path) -> SweepPlan:
    profile = profile_of(devices)
    return make_plan(make_check_sweep(profile), profile, ClusterTree(folder / "results" / "gpus"))


@pytest.mark.parametrize("devices", [2, 3, 4, 8, 16])
def test_every_strategy_is_run_once_on_a_nodes_devices(devices: int, tmp_path: Path) -> None:
    plan = plan_of(devices, tmp_path)
    specs = {spec.strategy: spec for spec in plan.runs.values()}
    assert plan.dropped == []
    assert specs.keys() == STRATEGIES.keys() | {"probe_loops"}
    assert len(plan.runs) == len(specs)
    assert all(spec.verify for key, spec in specs.items() if key in STRATEGIES)
    largest = {2: 2, 3: 2, 4: 4, 8: 8, 16: 8}[devices]
    assert specs["ddp"].devices == specs["fairscale_pipe"].devices == specs["zero_bubble"].devices == largest
    assert (specs["single"].devices, specs["probe_loops"].model) == (1, "resnet50")
    # vit has four heads.
    assert specs["tensor"].devices == min(largest, 4)


def test_one_device_leaves_the_reason_of_every_strategy_that_needs_two(tmp_path: Path) -> None:
    plan = plan_of(1, tmp_path)
    assert {spec.strategy for spec in plan.runs.values()} == {"single", "probe_loops"}
    check = evaluate_check(plan, ClusterTree(tmp_path), {}, Forecast(plan.profile))
    reasons = {one.strategy: one.reason for one in check.strategies if one.outcome == "infeasible"}
    assert reasons.keys() == STRATEGIES.keys() - {"single"}
    assert reasons["ddp"] == "2 devices per node, but gpus allows 1"


def result_of(spec: RunSpec, predicted_bytes: int, **values: Any) -> RunResult:
    times = StepTimeStatistics(median=0.1, mean=0.1, std=0, p10=0.1, p90=0.1, min=0.1, max=0.1, ci95_low=0.1, ci95_high=0.1)  # fmt: skip
    rank = {"rank": 0, "device": "cuda:0", "gpu_model": "NVIDIA H200", "host_syncs": {"per_step": 0}}
    given: dict[str, Any] = {
        "status": "ok", "ranks": [rank],
        "metrics": RunMetrics(step_time_s=times, steady_peak_memory_bytes=predicted_bytes),
        "provenance": {"torch": "2.14.1", "host": "gpunode17", "hosts": ["gpunode17"], "executable": "/home/ada/py"},
    }  # fmt: skip
    if spec.strategy == "probe_loops":
        loops = [LoopProbe(loop=name, model="m", seconds=s, spread=0.0, repeats=3) for name, s in LOOPS_S.items()]
        given["probe"] = ProbeResults(loops=loops)
    key = run_id(spec)
    return RunResult(
        run_id=key, config_id=config_id(spec), attempt=1, sweep="gpu-check", cluster="gpus", spec=spec,
        **{**given, **values},
    )  # fmt: skip


LOOPS_S = {"hpcbench": 0.102, "plain": 0.1, "timm": 0.12}


@pytest.fixture
def evaluate(tmp_path: Path) -> Callable[..., GpuCheck]:
    """Evaluate results of every strategy on two GPUs, changed by strategy; ``None`` is no result."""

    def call(states: dict[str, RunState] | None = None, **changed: dict[str, Any] | None) -> GpuCheck:
        plan, tree = plan_of(2, tmp_path), ClusterTree(tmp_path / "results" / "gpus")
        forecast = Forecast(plan.profile)
        for spec in plan.runs.values():
            values = changed.get(spec.strategy, {})
            if values is not None:
                predicted = getattr(forecast.predict_alone(spec), "peak_memory_bytes", 0)
                tree.write_result(result_of(spec, predicted, **values))
        keys = {spec.strategy: key for key, spec in plan.runs.items()}
        return evaluate_check(plan, tree, {keys[name]: one for name, one in (states or {}).items()}, forecast)

    return call


def test_right_runs_on_gpus_leave_no_finding(evaluate: Callable[..., GpuCheck]) -> None:
    check = evaluate()
    assert (check.outcome, check.on_gpu, check.findings, check.failed_parts()) == ("ok", True, [], [])
    assert check.gpus == ["NVIDIA H200"]
    assert check.versions == {"torch": "2.14.1"}
    assert check.loops.ratios == pytest.approx({"plain": 1.02, "timm": 0.85})
    assert {one.outcome for one in check.strategies} == {"ok"}
    assert msgspec.json.decode(msgspec.json.encode(check), type=GpuCheck) == check


def rank_with(**syncs: Any) -> list[dict[str, Any]]:
    return [{"rank": 0, "device": "cuda:0", "gpu_model": "NVIDIA H200", "host_syncs": syncs}]


def test_waits_peaks_and_slow_steps_are_findings(
    evaluate: Callable[..., GpuCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOOPS_S, "plain", 0.05)
    waiting = rank_with(per_step=2, calls={"cudaStreamSynchronize": 4}, sites=["hpcbench/worker/x.py:7"])
    large = RunMetrics(steady_peak_memory_bytes=10**11)
    check = evaluate(ddp={"ranks": waiting}, fsdp={"metrics": large}, zero1={"ranks": rank_with(per_step=0, pageable_copies=3)})  # fmt: skip
    assert check.outcome == "findings"
    assert check.findings[0] == (
        "ddp: the host waits 2 times in a step for the device (cudaStreamSynchronize 4): hpcbench/worker/x.py:7"
    )
    assert "zero1: the host waits 0 times" in check.findings[1]
    assert "3 copies of memory that is not pinned" in check.findings[1]
    assert check.findings[2].startswith("fsdp: a rank's peak of 93.1 GiB is ")
    assert (
        check.findings[3] == "one device: the step of hpcbench takes 102 ms, 2.04 times the 50.0 ms of the loop plain"
    )
    assert len(check.findings) == 4


@pytest.mark.parametrize(
    ("sites", "known"),
    [
        (["/site/fairscale/nn/fsdp.py:880", "/site/fairscale/optim/oss.py:608"], "known waits inside fairscale: "),
        (["/site/fairscale/nn/fsdp.py:880", "hpcbench/worker/x.py:7"], ""),
        ([], ""),
    ],
)
def test_waits_inside_a_library_are_named_as_its_own(
    evaluate: Callable[..., GpuCheck], sites: list[str], known: str
) -> None:
    waiting = rank_with(per_step=2, calls={"cudaDeviceSynchronize": 4}, sites=sites)
    (finding,) = evaluate(fairscale_fsdp={"ranks": waiting}).findings
    assert finding.startswith(f"fairscale_fsdp: {known}the host waits 2 times in a step")


def test_a_strategy_that_fails_is_named_and_the_others_count(evaluate: Callable[..., GpuCheck]) -> None:
    differs = FailureRecord(type="VerificationFailed", message="compared with its reference in fp64, ...")
    lacking = FailureRecord(type="MissingModule", message="no horovod")
    check = evaluate(
        gpipe={"status": "failed", "error": differs}, horovod={"status": "unsupported", "error": lacking}, spatial=None,
        states={"spatial": RunState("lost", "its job ended without a result")},
    )  # fmt: skip
    outcomes = {one.strategy: (one.outcome, one.reason) for one in check.strategies if one.outcome != "ok"}
    assert outcomes == {
        "gpipe": ("differs", differs.message),
        "horovod": ("unsupported", "no horovod"),
        "spatial": ("lost", "its job ended without a result"),
    }
    assert (check.outcome, check.failed_parts()) == ("failed", ["spatial", "gpipe"])


def test_results_of_cpus_are_no_check_of_a_gpu(evaluate: Callable[..., GpuCheck]) -> None:
    on_cpu = {"ranks": [{"rank": 0, "device": "cpu"}]}
    check = evaluate(**dict.fromkeys([*STRATEGIES, "probe_loops"], on_cpu))
    assert (check.outcome, check.on_gpu, EXIT_CODES[check.outcome]) == ("no_gpu", False, 3)


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str) -> Result:
        return CliRunner().invoke(cli, ["doctor", *words])

    return call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "local", "--gpu", "--no-job"], "--no-job submits nothing"),
        (["--cluster", "local", "--out", "x.json"], "add --gpu"),
        (["--cluster", "gpus.toml", "--gpu"], "cluster gpus computes on cuda, but node.devices is not set"),
        (["--cluster", "local", "--gpu", "--out", "."], "--out . is a folder"),
        (["--cluster", "local", "--gpu", "--out", "gpus.toml/x.json"], "--out gpus.toml/x.json cannot be written"),
        (["--cluster", "local", "--gpu", "--out", "/proc/none/x.json"], "--out /proc/none/x.json cannot be written"),
    ],
)
def test_wrong_input_submits_nothing(
    doctor: Callable[..., Result], tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "gpus.toml").write_text(CUDA)
    done = doctor(*words)
    assert isinstance(done.exception, ConfigError), done.output
    assert said in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["gpus.toml"]


def test_missing_gpus_and_a_missing_torch_end_the_check_before_it_submits(
    doctor: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "gpus.toml").write_text(f"{CUDA}[node]\ndevices = 2\n")
    done = doctor("--cluster", "gpus.toml", "--gpu")
    assert (done.exit_code, "gpus is not ready, missing: accelerators" in done.output) == (3, True), done.output
    (tmp_path / "gpus.toml").write_text(
        f'default_environment = "x"\n{CUDA}[node]\ndevices = 2\n[environments.x]\npython = "/bin/false"\n'
    )
    done = doctor("--cluster", "gpus.toml", "--gpu")
    assert (done.exit_code, "gpus is not ready, missing: python" in done.output) == (3, True), done.output
    assert [path.name for path in tmp_path.iterdir()] == ["gpus.toml"]


BROKEN = "def build(in_shape, outputs):\n    raise RuntimeError('no such layer')\n"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_the_check_runs_on_this_machine(
    doctor: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks; a strategy that fails does not keep the others from being checked."""
    (tmp_path / "broken.py").write_text(BROKEN)
    strategies = {key: STRATEGIES[key] for key in ("single", "1f1b")}

    def reduced(profile: ClusterProfile) -> Sweep:
        return make_check_sweep(profile, strategies)

    def with_a_failure(profile: ClusterProfile) -> Sweep:
        sweep = reduced(profile)
        broken = {
            **sweep.includes[1], ("strategy",): "zero1", ("model",): "broken:build"
        }  # fmt: skip
        return dataclasses.replace(sweep, includes=[broken, *sweep.includes], model_folder=tmp_path)

    monkeypatch.setattr(gpu_check_command, "make_check_sweep", with_a_failure)
    done = doctor("--cluster", "local", "--gpu", "--json")
    assert done.exit_code == 1, done.output
    document = json.loads(done.stdout)
    assert json.loads((tmp_path / "gpu-check-local.json").read_text()) == document
    outcomes = {one["strategy"]: one["outcome"] for one in document["strategies"]}
    assert outcomes == {"zero1": "failed", "single": "ok", "1f1b": "ok"}
    assert "no such layer" in document["strategies"][0]["reason"]
    for one in document["strategies"][1:]:
        assert one["verification"]["passed"]
        assert one["step_time_s"] > 0
        assert one["peak_memory_bytes"] > 0
        assert one["predicted_peak_memory_bytes"] > 0
        assert one["host_syncs"] is None
    assert [loop["loop"] for loop in document["loops"]["loops"]] == ["hpcbench", "plain", "timm"]
    assert (document["outcome"], document["on_gpu"], document["gpus"]) == ("failed", False, [])
    assert document["versions"]["torch"]
    # What has a result is not run again.
    monkeypatch.setattr(gpu_check_command, "make_check_sweep", reduced)
    done = doctor("--cluster", "local", "--gpu", "--out", "sent/x.json")
    assert done.exit_code == 3, done.output
    assert "local: NOTHING WAS CHECKED ON A GPU" in done.stdout
    assert "0 submitted, 3 done before" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert json.loads((tmp_path / "sent" / "x.json").read_text())["outcome"] == "no_gpu"
