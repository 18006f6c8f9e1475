"""A machine with Python's packages on PYTHONPATH and hpcbench as a checkout, and without polars or scipy.

GPU nodes without a network are used so: packages come as wheels, and polars is larger than all others together.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hpcbench.results.results_tree import ClusterTree

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SWEEP = """name = "short"
[fixed]
model = "vgg11"
dataset = "digits"
batch_size = 4
warmup_steps = 1
steps = 2
[grid]
strategy = ["single"]
"""


class BareMachine:
    """Calls hpcbench in the checkout, with an interpreter that has nothing installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "python")], check=True)
        (folder / "short.toml").write_text(SWEEP)
        for package in ("polars", "scipy"):
            (folder / package).mkdir()
            (folder / package / f"{package}.py").write_text(
                f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')\n"
            )

    def call(self, *words: str, absent: str = "polars") -> subprocess.CompletedProcess[str]:
        """Run a command of hpcbench."""
        packages = os.pathsep.join((os.path.relpath(self.folder / absent, ROOT), sysconfig.get_path("purelib")))
        kept = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        return subprocess.run(
            [str(self.folder / "python/bin/python"), "-m", "hpcbench", *words], cwd=ROOT, text=True, check=False,
            capture_output=True, stdin=subprocess.DEVNULL,
            env={**kept, "PYTHONPATH": packages, "HPCBENCH_RESULTS": str(self.folder / "results"),
                 "TMPDIR": str(self.folder)},
        )  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> BareMachine:
    machine = BareMachine(tmp_path_factory.mktemp("bare"))
    done = machine.call("submit", str(machine.folder / "short.toml"), "--cluster", "local", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    return machine


def test_runs_of_a_checkout_find_it_from_the_folder_of_their_queue(bare: BareMachine) -> None:
    tree = ClusterTree(bare.folder / "results/local")
    results = [tree.read_result(run_id) for run_id in tree.run_ids()]
    assert [result.status for result in results if result is not None] == ["ok"]


@pytest.mark.parametrize(
    "command",
    [
        "status", "plan SWEEP", "predict SWEEP", "dry-run SWEEP", "cluster calibrate --help",
        "cluster calibrate local --out FOLDER/probes.toml", "doctor",
        "recommend --model resnet18 --dataset digits --batch-size 16 --nodes 1",
    ],
)  # fmt: skip
def test_what_measures_and_predicts_needs_no_polars(bare: BareMachine, command: str) -> None:
    words = command.replace("SWEEP", str(bare.folder / "short.toml")).replace("FOLDER", str(bare.folder)).split()
    done = bare.call(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("package", "command"),
    [
        *(("polars", command) for command in ("table", "report", "validate", "compare short short", "collect")),
        *(("scipy", command) for command in ("report", "compare short short")),
    ],
)
def test_what_needs_a_package_names_it_in_one_line(bare: BareMachine, package: str, command: str) -> None:
    done = bare.call(*command.split(), absent=package)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: this needs the package {package}: {bare.folder}/python/bin/python -m pip install {package}\n"
    )


def test_tables_need_no_scipy(bare: BareMachine) -> None:
    assert bare.call("table", absent="scipy").returncode == 0
