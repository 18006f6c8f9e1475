"""Users' own models in a rank: built, trained, recorded; and what is said of those that cannot be."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import RunSpec
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.strategies.check_sweep import check_names
from hpcbench.worker.failure import describe_error
from hpcbench.worker.models.build import build_meta_model, build_model
from tests.worker.helpers import make_spec

MODULE = '''
import torch
from torch import nn

def build(in_shape, outputs, width=8):
    """A perceptron."""
    inputs = torch.Size(in_shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))

def lone(in_shape, outputs):
    return nn.Linear(3, outputs)

def empty(in_shape, outputs):
    return nn.Sequential()

def raises(in_shape, outputs):
    raise ValueError(f"no {outputs} outputs")

def greedy(in_shape, outputs):
    raise MemoryError

def needs_more(in_shape, outputs):
    import package_that_nobody_has
'''


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "hpcbench_test_net.py").write_text(MODULE)
    (tmp_path / "hpcbench_test_torn.py").write_text("from torch import no_such_thing\n")
    (tmp_path / "json.py").write_text("def build(in_shape, outputs): ...\n")
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in ("hpcbench_test_net", "hpcbench_test_torn", "nets", "nets.wide"):
        sys.modules.pop(name, None)


def spec_of(function: str, **values: Any) -> RunSpec:
    return make_spec(model=function if ":" in function else f"hpcbench_test_net:{function}", **values)


def test_a_custom_model_is_built_as_shipped_ones_are(folder: Path) -> None:
    spec = spec_of("build", model_options={"width": 5}, precision="fp64", seed=3)
    built = build_model(spec, str(folder))
    assert built(torch.rand(2, 1, 8, 8, dtype=torch.float64)).shape == (2, 10)
    assert built.state_dict()["1.weight"].shape == (5, 64)
    again = build_model(spec, str(folder))
    assert torch.equal(built.state_dict()["1.weight"], again.state_dict()["1.weight"])
    assert {tensor.device.type for tensor in build_meta_model(spec, str(folder)).state_dict().values()} == {"meta"}


WRONG = [
    ("lone", {}, "unsupported", "must return a torch.nn.Sequential of its blocks, not Linear"),
    ("empty", {}, "unsupported", "not an empty one"),
    ("raises", {}, "failed", "raised ValueError: no 10 outputs"),
    ("build", {"depth": 2}, "failed", "raised TypeError: .*unexpected keyword argument 'depth'"),
    ("gone", {}, "failed", "has no function gone"),
    ("greedy", {}, "oom", None),
    ("needs_more", {}, "unsupported", "package_that_nobody_has"),
    ("hpcbench_test_gone:build", {}, "failed", "there is no module hpcbench_test_gone in"),
    ("hpcbench_test_torn:build", {}, "failed", "importing hpcbench_test_torn raised ImportError"),
    ("json:build", {}, "failed", "json/__init__.py, not a module in"),
]


@pytest.mark.parametrize(("function", "options", "status", "message"), WRONG)
def test_a_custom_model_that_fails_has_status_and_reason(
    folder: Path, function: str, options: dict[str, Any], status: str, message: str | None
) -> None:
    with pytest.raises(Exception, match=message) as caught:
        build_model(spec_of(function, model_options=options), str(folder))
    found, failure = describe_error(caught.value)
    assert found == status, failure


def test_the_example_of_the_page_works(folder: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "add-a-model.md").read_text(encoding="utf-8")
    (folder / "nets").mkdir()
    (folder / "nets" / "wide.py").write_text(page.split("```python\n")[1].split("```")[0])
    (folder / "wide.toml").write_text(textwrap.dedent(page.split("and in the sweep\n")[1].split("\nThe function")[0]))
    sweep = load_sweep(folder / "wide.toml")
    check_names(sweep, ClusterProfile(name="here"))
    spec = spec_of("nets.wide:build", model_options={"width": 7})
    assert build_model(spec, str(sweep.model_folder))(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_a_custom_model_without_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(Exception, match="neither the sweep nor the profile names a model_folder"):
        build_model(spec_of("build"), None)


def test_a_sweep_of_a_custom_model_runs_on_this_machine(folder: Path) -> None:
    """The model beside the sweep is found by every rank, and its file's hash is recorded."""
    (folder / "sub").mkdir()
    (folder / "sub" / "own.toml").write_text(
        'name = "own"\nmodel_folder = ".."\n[fixed]\ndataset = "digits"\nbatch_size = 4\nwarmup_steps = 1\nsteps = 2\n'
        'profile_steps = 0\nstrategy = "ddp"\ntasks_per_node = 2\n'
        "model_options = { width = 6 }\n"
        '[[include]]\nmodel = "hpcbench_test_net:raises"\nstrategy = "single"\ntasks_per_node = 1\n'
        '[[include]]\nmodel = "hpcbench_test_net:build"\n'
    )
    command = [sys.executable, "-m", "hpcbench", "run", "sub/own.toml", "--results", str(folder / "results"), "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1, done.stderr
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("results/local/runs/*/*/result.json"))]
    ended = {result["spec"]["model"].partition(":")[2]: result for result in results}
    assert {name: result["status"] for name, result in ended.items()} == {"build": "ok", "raises": "failed"}
    assert len(ended["build"]["ranks"]) == 2
    assert ended["build"]["spec"]["model_options"] == {"width": 6}
    assert ended["build"]["provenance"]["model_file_sha256"] == hashlib.sha256(MODULE.encode()).hexdigest()
    assert "raised" in ended["raises"]["error"]["message"]
