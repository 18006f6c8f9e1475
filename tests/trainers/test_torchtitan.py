"""torchtitan 0.3.0 in an environment of its own: its parser takes the flags of written sweeps, and it trains on CPUs."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.command import command_values, fill_words
from hpcbench.config.sweep_loader import Sweep
from tests.cli.test_cli import hpcbench
from tests.environments import EnvironmentMissing, make_trainer_environment
from tests.predict.test_trainers import CASES, recommended, runs_of, written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ON_CPU = Path(__file__).with_name("torchtitan_on_cpu.py")
PARSE = """\
import json, sys
from torchtitan.config import ConfigManager
parsed = []
for words in json.load(sys.stdin):
    config = ConfigManager().parse_args(words)
    parsed.append({**{name: getattr(config.parallelism, name) for name in config.parallelism.__dataclass_fields__},
                   **{name: getattr(config.training, name) for name in config.training.__dataclass_fields__},
                   "config": config.model_spec.flavor, "compile": config.compile.enable, "log_freq": config.metrics.log_freq,
                   "recompute": type(config.activation_checkpoint).__qualname__,
                   "path": config.dataloader.dataset_path, "validates": config.validator.enable})
json.dump(parsed, sys.stdout)
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of torchtitan's environment, outside of the tree."""
    try:
        return make_trainer_environment("torchtitan", ["torchtitan==0.3.0", "triton==3.9.0"])
    except EnvironmentMissing as reason:
        pytest.fail(str(reason))


def test_its_parser_takes_the_flags(write_sweep: Callable[[str], Sweep], tmp_path: Path, python: Path) -> None:
    specs, words = [], []
    for trainer, model, nodes, _ in CASES[:2]:
        command, found = runs_of(write_sweep(written(trainer, recommended(trainer, model, nodes))), tmp_path)
        places = {"NODE_RANK": 0, "MASTER_ADDR": "a", "MASTER_PORT": 1}
        filled = [fill_words(command.argv, {**command_values(spec, command), **places}) for spec in found]
        words += [line[line.index("torchtitan.train") + 1 :] for line in filled]
        specs += found
    done = subprocess.run([python, "-c", PARSE], input=json.dumps(words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    parsed: list[dict[str, Any]] = json.loads(done.stdout)
    for spec, config in zip(specs, parsed, strict=True):
        given = spec.parameters
        degrees = [config[f"{name}_degree"] for name in (
            "data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel")]  # fmt: skip
        assert degrees == [given[name] for name in ("dp", "shards", "tp", "pp")]
        assert degrees[0] * degrees[1] * degrees[2] * degrees[3] == spec.devices
        assert (config["seq_len"], config["global_batch_size"]) == (8192, given["global_batch"])
        assert config["local_batch_size"] % config["pipeline_parallel_microbatch_size"] == 0
        assert config["pipeline_parallel_schedule"] == given["schedule"]
        assert config["recompute"] == {"none": "NoneType", "full": "FullAC.Config"}[str(given["recompute"])]
        assert (config["compile"], config["log_freq"], config["validates"]) == (True, 1, False)
        assert config["path"] == given["texts"]
    assert {config["config"] for config in parsed} == {"8B", "70B"}


SWEEP = """\
name = "titan"
[command]
argv = [
    "{python}", "-m", "torch.distributed.run", "--nnodes={{nodes}}", "--nproc-per-node={{devices_per_node}}",
    "--master-addr={{MASTER_ADDR}}", "--master-port={{MASTER_PORT}}", "--local-ranks-filter=0", "--role=rank",
    "--tee=3", "{program}", "--module=llama3", "--config=llama3_debugmodel", "--hf-assets-path={assets}/tokenizer",
    "--dataloader.dataset=c4_test", "--dataloader.dataset-path={assets}/texts", "--training.steps=4",
    "--training.seq-len=64", "--training.local-batch-size=1", "--parallelism.spmd-backend=partial_dtensor",
    "--metrics.log-freq=1", "--metrics.disable-color-printing", "--validator.no-enable", "activation-checkpoint:none",
]
launch = "node"
must_match = ["Training completed"]
[[command.metrics]]
name = "step_time"
unit = "s"
better = "lower"
per = "step"
pattern = 'step: .* tps: ([0-9,]+)'
value = "64 * devices / (value * devices)"
[fixed]
tasks_per_node = 2
warmup_steps = 1
time_limit_min = 5
env.OMP_NUM_THREADS = "1"
"""


def test_it_trains_its_debug_model_on_cpu_ranks(tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCBENCH_CLUSTER", "local")
    monkeypatch.delenv("HPCBENCH_RESULTS", raising=False)
    assets = tmp_path / "assets"
    subprocess.run([python, ON_CPU, "--make", assets], check=True)
    text = SWEEP.format(python=python, program=ON_CPU, assets=assets)
    (tmp_path / "titan.toml").write_text(text)
    done = hpcbench("run", "titan.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert hpcbench("collect", "titan", "--out", "all.json", cwd=tmp_path).returncode == 0
    (result,) = json.loads((tmp_path / "all.json").read_text())["results"]
    rates = re.findall(r"step: .* tps: ([0-9,]+)", hpcbench("logs", result["run_id"], cwd=tmp_path).stdout)
    assert len(rates) == 4
    assert result["step_times_s"] == pytest.approx([64 / float(rate.replace(",", "")) for rate in rates[1:]])
