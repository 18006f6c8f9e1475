"""Without a working fairscale, runs and ``doctor`` name the command that installs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import absent
from tests.distributed.launching import ROOT, Launch, environment
from tests.distributed.test_launches import message_of, result_of
from tests.worker.helpers import make_spec, write_tasks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.strategy("fairscale_oss", "fairscale_sddp", "fairscale_fsdp", "fairscale_pipe"),
]

INSTALL = "python -m pip install --no-deps fairscale==0.4.13"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started = Launch(tmp_path)
    yield started
    started.kill()


def path_with(folder: Path, **packages: str) -> str:
    """A PYTHONPATH on which packages with these texts are found before the real ones."""
    for name, text in packages.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    return f"{folder}{os.pathsep}{ROOT}"


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        ("fairscale_oss", "raise ModuleNotFoundError('No module named fairscale')", "ModuleNotFoundError: No module"),
        ("fairscale_fsdp", "raise AttributeError('built for another torch')", "AttributeError: built for another"),
    ],
)
def test_a_run_is_unsupported(tmp_path: Path, launch: Launch, key: str, text: str, says: str) -> None:
    spec = make_spec(strategy=key, tasks_per_node=2, dp_degree=2)
    path = path_with(tmp_path / "first", fairscale=text)
    codes = launch.by_hand(2, write_tasks(tmp_path, spec), PYTHONPATH=path).wait()
    assert codes[0] == 1
    result = result_of(tmp_path, spec)
    assert result.status == "unsupported", launch.logs()
    assert says in message_of(result)
    assert result.error is not None
    assert result.error.hint == INSTALL


def test_doctor_names_what_can_be_installed(tmp_path: Path) -> None:
    text = "raise ImportError('not here')"
    env = environment(PYTHONPATH=path_with(tmp_path / "first", fairscale=text, horovod=text))
    done = subprocess.run(
        [sys.executable, "-m", "hpcbench", "doctor", "--json", "--results", str(tmp_path / "results")],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {one["what"]: one for one in json.loads(done.stdout)["findings"]}
    for name, mend in (("fairscale", INSTALL), ("horovod.torch", "hpcbench.tools.build_horovod")):
        assert not found[name]["works"]
        assert not found[name]["needed"]
        assert mend.removeprefix("python ") in found[name]["mend"]


def test_doctor_suppresses_fairscales_future_warnings() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpcbench.worker", "doctor", "--json"],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)["modules"]["fairscale"]
    if not found["works"]:
        absent("fairscale", found["error"])
    assert "FutureWarning" not in done.stderr
