"""The command ``dry-run``: its document, its exit codes, and what it finds in a user's own model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from hpcbench.cli.dry_run_command import dry_run
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, WorkerError
from hpcbench.predict import dry_runs as dry_runs_module
from hpcbench.predict.dry_runs import shares_of_processes, step_key
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.prediction import Prediction
from hpcbench.results.probe_records import DryRunTask

GIB = 2**30
FIELDS = {
    "config_id", "spec", "outcome", "reason", "peak_memory_bytes", "peak_layer", "operators", "collectives",
    "host_syncs", "host_sync_sites", "modelled", "seconds",
}  # fmt: skip
MODEL = """
import time
import torch
from torch import nn

class Keeper(nn.Module):
    floats = 4

    def forward(self, x):
        self.kept = torch.empty(self.floats, device=x.device)
        return x + self.kept[0]

class BufferKeeper(nn.Module):
    floats = 4

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.empty(self.floats))

    def forward(self, x):
        return x + self.kept[0]

class ParameterKeeper(nn.Module):
    floats = 4

    def __init__(self):
        super().__init__()
        self.kept = nn.Parameter(torch.empty(self.floats), requires_grad=False)

    def forward(self, x):
        return x + self.kept[0]

class LazyKeeper(Keeper):
    def forward(self, x):
        return x + self.kept[0] if hasattr(self, "kept") else super().forward(x)

class LargeKeeper(Keeper):
    floats = 2**28

class LargeBufferKeeper(BufferKeeper):
    floats = 2**28

class LargeParameterKeeper(ParameterKeeper):
    floats = 2**28

class LargeLazyKeeper(LazyKeeper):
    floats = 2**28

class Reader(nn.Module):
    def forward(self, x):
        return x * x.mean().item()

class Brancher(nn.Module):
    def forward(self, x):
        return x if x.mean() > 0 else -x

class Chooser(nn.Module):
    def forward(self, x):
        return x[x[:, 0] > 0].sum() + x

class Wrong(nn.Module):
    def forward(self, x):
        return x @ x

class Sleeper(nn.Module):
    def forward(self, x):
        time.sleep(600)
        return x

class Copier(nn.Module):
    def forward(self, x):
        return x * x.new_tensor([2.0])

def model(in_shape, outputs, block="Keeper"):
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU())
    return nn.Sequential(first, globals()[block](), nn.Linear(256, outputs))
"""
KEEPERS = ["Keeper", "BufferKeeper", "ParameterKeeper", "LazyKeeper"]
BLOCKS = [*KEEPERS, *(f"Large{name}" for name in KEEPERS), "Reader", "Brancher", "Chooser", "Wrong", "Copier"]


def write_sweep(folder: Path, grid: str) -> str:
    (folder / "mine.py").write_text(MODEL)
    path = folder / "mine.toml"
    path.write_text(
        f'name = "mine"\nrepeats = 2\nmodel_folder = "."\n[fixed]\ndataset = "digits"\nbatch_size = 8\n[grid]\n{grid}\n'
    )
    return str(path)


def invoke(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    where = [] if "--cluster" in arguments else ["--cluster", "local"]
    done = CliRunner().invoke(dry_run, [*arguments, *where, "--json"], catch_exceptions=False)
    return done.exit_code, json.loads(done.stdout)["dry_runs"]


@pytest.fixture(scope="module")
def own_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The dry run of a model with each of the blocks."""
    grid = f'model = ["mine:model"]\nstrategy = ["single"]\nmodel_options = {{block = {json.dumps(BLOCKS)}}}'
    code, dry_runs = invoke(write_sweep(tmp_path_factory.mktemp("own"), grid), "--cluster", "snellius")
    assert code == 1
    assert len(dry_runs) == len(BLOCKS)
    return dict(zip(BLOCKS, dry_runs, strict=True))


@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_gibibyte_more_is_counted_and_its_layer_named(own_models: dict[str, dict[str, Any]], keeper: str) -> None:
    small, large = own_models[keeper], own_models[f"Large{keeper}"]
    assert set(small) == FIELDS
    assert small["outcome"] == large["outcome"] == "ok"
    assert small["reason"] is None
    # From the second step on the first one's tensor is alive while the next is made.
    held = 2 if keeper == "Keeper" else 1
    assert large["peak_memory_bytes"] - small["peak_memory_bytes"] == pytest.approx(held * GIB, rel=0.001)
    assert (small["peak_layer"], large["peak_layer"]) == ("0.1", "1")


def test_a_value_that_the_host_reads_is_a_wait_with_its_line(own_models: dict[str, dict[str, Any]]) -> None:
    found = own_models["Reader"]
    line = MODEL.splitlines().index("        return x * x.mean().item()") + 1
    assert (found["outcome"], found["host_syncs"], found["modelled"]) == ("ok", 1, ["host_values"])
    assert [site.partition(": ")[0].rpartition("/")[2] for site in found["host_sync_sites"]] == [f"mine.py:{line}"]


@pytest.mark.parametrize(("block", "text"), [("Brancher", "if x.mean() > 0"), ("Chooser", "x[x[:, 0] > 0]")])
def test_a_model_that_branches_on_values_is_not_fakeable(
    own_models: dict[str, dict[str, Any]], block: str, text: str
) -> None:
    line = next(number for number, line in enumerate(MODEL.splitlines(), 1) if text in line)
    assert own_models[block]["outcome"] == "not_fakeable"
    assert f"mine.py:{line}" in own_models[block]["reason"]
    assert own_models[block]["peak_memory_bytes"] is None


def test_an_error_of_the_model_is_the_message_of_the_run(own_models: dict[str, dict[str, Any]]) -> None:
    assert own_models["Wrong"]["outcome"] == "unsupported"
    assert "RuntimeError" in own_models["Wrong"]["reason"]


def test_where_selects_runs_and_equal_steps_run_once(tmp_path: Path) -> None:
    grid = 'model = ["mine:model"]\nstrategy = ["single", "ddp"]\ntasks_per_node = [1, 2]\nlearning_rate = [0.1, 0.2]'
    sweep = write_sweep(tmp_path, grid)
    code, dry_runs = invoke(sweep, "--where", "strategy == 'ddp'")
    assert code == 0
    assert all((one["host_syncs"], one["host_sync_sites"]) == (0, []) for one in dry_runs)
    assert [one["spec"]["strategy"] for one in dry_runs] == ["ddp"] * 4
    assert len({one["config_id"] for one in dry_runs}) == 4
    assert all(one["modelled"] == ["reducer"] for one in dry_runs)
    assert any(one["seconds"] == 0 for one in dry_runs)
    with pytest.raises(ConfigError, match="satisfies"):
        invoke(sweep, "--where", "batch_size == 7")


def test_a_strategy_of_another_library_has_the_peak_of_the_oracle(tmp_path: Path) -> None:
    path = tmp_path / "library.toml"
    path.write_text(
        'name = "library"\n[fixed]\nmodel = "vgg11"\ndataset = "digits"\nbatch_size = 8\ntasks_per_node = 2\n'
        '[grid]\nstrategy = ["horovod", "fairscale_fsdp"]\n'
    )
    code, dry_runs = invoke(str(path))
    forecast = Forecast(load_cluster("local")[0])
    assert code == 1
    for one in dry_runs:
        spec = one["spec"]
        prediction = forecast.predict_alone(msgspec.convert(spec, RunSpec))
        assert isinstance(prediction, Prediction)
        assert (one["outcome"], one["peak_memory_bytes"]) == ("not_fakeable", prediction.peak_memory_bytes)
        assert one["operators"] is None
        assert f"{spec['strategy'].partition('_')[0]} executes {spec['strategy']}" in one["reason"]


def test_a_strategy_of_another_library_that_does_not_fit_is_out_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    path.write_text(
        'name = "large"\n[fixed]\nmodel = "gpt_6_7b"\ndataset = "tokens"\nbatch_size = 8\nstrategy = "horovod"\n'
        'tasks_per_node = 4\n[grid]\npartition = ["gpu_a100"]\n'
    )
    code, (one,) = invoke(str(path), "--cluster", "snellius")
    assert (code, one["outcome"]) == (1, "oom")
    assert "GiB by the oracle; its device has 36.7 GiB" in one["reason"]


@pytest.mark.parametrize("block", ["Reader", "Copier"])
def test_on_cpus_the_host_waits_for_no_device(tmp_path: Path, block: str) -> None:
    grid = f'model = ["mine:model"]\nstrategy = ["single"]\nmodel_options = {{block = ["{block}"]}}'
    done = CliRunner().invoke(dry_run, [write_sweep(tmp_path, grid), "--cluster", "local"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "host waits" not in done.stdout
    assert "1 configuration: 1 ok" in done.stderr


@pytest.mark.slow
def test_a_step_that_does_not_end_is_left_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_runs_module, "TASK_LIMIT_S", 15.0)
    monkeypatch.setattr(dry_runs_module, "_MAX_PROCESSES", 1)
    grid = 'model = ["mine:model"]\nstrategy = ["single"]\nmodel_options = {block = ["Sleeper", "Keeper"]}'
    code, (sleeper, keeper) = invoke(write_sweep(tmp_path, grid))
    line = MODEL.splitlines().index("        time.sleep(600)") + 1
    assert (code, sleeper["outcome"], keeper["outcome"]) == (1, "not_fakeable", "ok")
    assert sleeper["reason"] == f"took longer than 15 s (at {tmp_path / 'mine.py'}:{line})"


def test_a_worker_that_does_not_start_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(dry_runs_module, "_SILENCE_LIMIT_S", 1.0)
    _, (dry_run_record,) = invoke(write_sweep(tmp_path, 'model = ["mine:model"]\nstrategy = ["single"]'))
    assert dry_run_record["outcome"] == "error"
    assert "exit code -9" in dry_run_record["reason"]


def test_a_dry_run_that_cannot_start_with_this_torch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = "ImportError: cannot import name 'FakeStore' from 'torch.testing'"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "{fault}" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(WorkerError, match=f"does not start with this torch: .*{fault}"):
        invoke(write_sweep(tmp_path, 'model = ["mine:model"]\nstrategy = ["single"]'))


LARGE = 'model = ["gpt_17b"]\nstrategy = ["single"]'


def write_large(folder: Path, batch_size: int) -> str:
    path = folder / "large.toml"
    path.write_text(f'name = "large"\n[fixed]\ndataset = "tokens"\nbatch_size = {batch_size}\n[grid]\n{LARGE}\n')
    return str(path)


@pytest.mark.slow
def test_a_model_larger_than_a_device_is_oom(tmp_path: Path) -> None:
    reasons = []
    for batch_size in (1, 2):
        code, (large,) = invoke(write_large(tmp_path, batch_size), "--cluster", "snellius")
        assert (code, large["outcome"]) == (1, "oom")
        # Weights and gradients in fp32, of 17 * 10^9 parameters.
        assert large["peak_memory_bytes"] > 2 * 4 * 16e9
        reasons.append(large["reason"])
    assert re.match(
        r"out of memory: the tensors of a rank take 1\d\d GiB, the largest part in .+ its device has [\d.]+ GiB",
        reasons[0],
    )
    assert "fsdp, tensor or a pipeline" in reasons[0]
    assert "batch_size" not in reasons[0]
    assert "a smaller batch_size or more micro_batches" in reasons[1]


def test_infeasible_points_are_counted(tmp_path: Path) -> None:
    grid = 'model = ["mine:model"]\nstrategy = ["single", "ddp"]\ntasks_per_node = [1, 2, 4]'
    sweep = write_sweep(tmp_path, grid)
    done = CliRunner().invoke(dry_run, [sweep, "--cluster", "local", "--where", "strategy == 'single'"])
    assert done.exit_code == 0, done.output
    count = re.search(
        r"(\d+) points are infeasible: hpcbench plan (\S+) --cluster local lists the reasons", done.stderr
    )
    assert count is not None, done.stderr
    assert int(count[1]) == 4
    assert Path(count[2]).resolve() == Path(sweep)


def test_without_torch_the_error_contains_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = write_sweep(tmp_path, 'model = ["mine:model"]\nstrategy = ["single"]')
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(WorkerError, match="pip install torch") as raised:
        invoke(sweep)
    assert raised.value.exit_code == 2


def test_the_steps_of_replicas_that_share_nothing_are_equal() -> None:
    ddp = RunSpec(model="vgg11", dataset="cifar10", strategy="ddp", batch_size=8, tasks_per_node=2, dp_degree=2)
    larger = msgspec.structs.replace(ddp, nodes=4, tasks_per_node=4, dp_degree=16, learning_rate=1.0, seed=3)
    assert step_key(ddp) == step_key(larger)
    assert step_key(ddp) != step_key(msgspec.structs.replace(ddp, batch_size=16))
    sharded = msgspec.structs.replace(ddp, strategy="fsdp")
    assert step_key(sharded) != step_key(msgspec.structs.replace(larger, strategy="fsdp"))


@pytest.mark.parametrize("counts", [[1], [7], [20] * 24, [3, 50, 1]])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_get_steps_of_one_model_together_and_about_as_many(counts: list[int], processes: int) -> None:
    models = [f"model{number}" for number, count in enumerate(counts) for _ in range(count)]
    tasks = [
        DryRunTask(index=index, spec=RunSpec(model=model, dataset="digits", strategy="ddp", batch_size=2), device="cpu")
        for index, model in enumerate(models)
    ]
    shares = shares_of_processes(tasks, processes)
    assert sorted(task.index for share in shares for task in share) == list(range(len(tasks)))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= max(1, len(tasks) // (2 * processes))
    if len(counts) == 24:
        assert all(len({task.spec.model for task in share}) == 24 // processes for share in shares)
