"""``hpcbench models`` as a person and as a script sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcbench.strategies.layer_table import LayerRow, read_shipped_table
from tests.cli.test_cli import hpcbench


def test_models_lists_every_pair_within_80_columns() -> None:
    done = hpcbench("models", "--model", "resnet18", "--sort", "forward_flops", env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("resnet18")]
    assert [row[1] for row in rows] == ["highres", "imagenet", "cifar10", "mnist", "digits"]
    assert rows[1][2:] == ["224", "11.7", "M", "3.63", "G", "7.02", "G", "21.2", "MiB", "70"]
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_models_with_layers_lists_the_layers_of_a_pair() -> None:
    done = hpcbench("models", "--model", "vgg11", "--dataset", "digits", "--layers", env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    assert "vgg11 on digits, input size 8: 12 blocks" in done.stdout
    assert [line.split()[:3] for line in done.stdout.splitlines() if line.startswith("0.")] == [
        ["0.0", "Conv2d", "64x8x8"],
        ["0.1", "BatchNorm2d", "64x8x8"],
        ["0.2", "ReLU", "64x8x8"],
    ]
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_json_holds_the_sums_and_every_layer() -> None:
    done = hpcbench("models", "--model", "resnet18", "--dataset", "imagenet", "--json")
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)["models"]
    table = read_shipped_table("resnet18", "imagenet")
    assert table is not None
    assert {"model", "dataset", "parameters", "forward_flops", "backward_flops", "activation_bytes"} <= entry.keys()
    assert entry["parameters"] == 11_689_512
    assert entry["forward_flops"] == sum(layer["forward_flops"] for layer in entry["layers"])
    assert [layer["name"] for layer in entry["layers"]] == [layer.name for layer in table.layers]
    assert set(entry["layers"][0]) == set(LayerRow.__struct_fields__)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "resnt18"), "did you mean 'resnet18'?"),
        (("--dataset", "imgnet"), "did you mean 'imagenet'?"),
        (("--model", "resnet18", "--dataset", "tokens"), "resnet18 takes images; tokens holds tokens"),
        (("--model", "resnet18", "--dataset", "cifar10", "--input-size", "4"), "needs an input of 8 or more"),
        (("--layers",), "--layers shows one pair"),
        (("--sort", "size"), "'size' is not one of"),
    ],
)
def test_wrong_input_names_the_valid_choices(arguments: tuple[str, ...], said: str) -> None:
    done = hpcbench("models", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_shipped_numbers_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['hpcbench', 'models']\n"
        "from hpcbench.cli.main import entry_point\n"
        "entry_point()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "imagenet" in done.stdout


OWN = """from torch import nn
def small(in_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_shape[0] * in_shape[1] * in_shape[2], outputs))
def reads(in_shape, outputs):
    class Reads(nn.Module):
        def forward(self, x):
            return x if x.sum().item() else -x
    return nn.Sequential(nn.Flatten(), Reads(), nn.Linear(64, outputs))
"""


def test_a_custom_model_is_measured_and_listed(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(OWN)
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    own = ("models", "--dataset", "digits", "--model-folder", str(tmp_path), "--model")
    done = hpcbench(*own, "nets:small", "--layers", env=env)
    assert done.returncode == 0, done.stderr
    assert ["1", "Linear", "10", "650", "1.28", "k"] in [line.split()[:6] for line in done.stdout.splitlines()]
    assert "did you mean 'small'?" in hpcbench(*own, "nets:smal", env=env).stderr
    assert "name one with --dataset" in hpcbench("models", "--model", "nets:small", cwd=tmp_path, env=env).stderr
    refused = hpcbench(*own, "nets:reads", env=env)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "nets:reads cannot be measured with fake tensors" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_another_size_is_measured(tmp_path: Path) -> None:
    arguments = ("models", "--model", "vgg11", "--dataset", "cifar10", "--input-size", "40", "--json")
    done = hpcbench(*arguments, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)["models"]
    assert (entry["input_size"], entry["layers"][0]["output_shape"]) == (40, [64, 40, 40])
    assert len(list((tmp_path / "hpcbench" / "layers").iterdir())) == 1
