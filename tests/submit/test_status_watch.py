"""``status --watch`` where nobody watches: a block of text a change, and an end."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from hpcbench.cli import status_command
from hpcbench.errors import StorageError
from hpcbench.fileio import read_error
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.plan import SweepPlan
from hpcbench.submit.submit import submit
from hpcbench.submit.watcher import SweepWatcher, poll_pause_s


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: SweepPlan, fake_slurm: Path) -> Path:
    """Four runs that were submitted and are pending."""
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "test.toml").write_text('name = "test"\n[scheduler]\npoll_s = 0.5\n')
    submit(plan, ClusterTree(tmp_path / "results" / "test"))
    answer(fake_slurm, "PENDING|Priority")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(fake_slurm: Path, said: str) -> None:
    (fake_slurm / "squeue").write_text("".join(f"4711_{task}|{said}|N/A|\n" for task in range(2)))


def test_watching_prints_one_block_per_change_until_all_runs_end(
    project: Path, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Callable[[], None]] = [
        lambda: None,
        lambda: answer(fake_slurm, "RUNNING|None"),
        lambda: None,
        lambda: answer(fake_slurm, "TIMEOUT|None"),
    ]
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        looks.pop(0)()

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=time.time)
    for module in ("hpcbench.cli.status_command", "hpcbench.submit.watcher"):
        monkeypatch.setattr(f"{module}.time", clock)
    done = CliRunner().invoke(status_command.status, ["small", "--watch"])
    blocks = [line for line in done.output.splitlines() if line.startswith("small on test")]
    assert [line.partition("4 runs: ")[2] for line in blocks] == ["4 pending", "4 running", "4 timeout"]
    assert (looks, done.exit_code) == ([], 1)


def test_several_sweeps_of_a_cluster_need_one_query(project: Path, fake_slurm: Path) -> None:
    tree = ClusterTree(project / "results" / "test")
    record = json.loads(tree.sweep_path("small").read_text())
    tree.sweep_path("other").write_text(json.dumps({**record, "sweep": "other", "run_ids": record["run_ids"][:2]}))
    (fake_slurm / "queries").unlink()
    done = CliRunner().invoke(status_command.status, ["--json"])
    assert [(one["sweep"], one["counts"]) for one in json.loads(done.output)["sweeps"]] == [
        ("other", {"pending": 2}),
        ("small", {"pending": 4}),
    ]
    assert (fake_slurm / "queries").read_text().count("squeue") == 1


@pytest.mark.parametrize(
    ("every_s", "took_s", "expected_s"), [(10.0, 0.2, 10.0), (10.0, 2.0, 18.0), (0.5, 0.1, 0.9), (10.0, 60.0, 120.0)]
)
def test_the_polling_pause_grows_with_the_answer_time(every_s: float, took_s: float, expected_s: float) -> None:
    assert poll_pause_s(every_s, took_s) == pytest.approx(expected_s)


def test_ctrl_c_leaves_without_a_traceback(project: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcbench", "status", "--watch"],
        cwd=project, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "small on test: 4 runs: 4 pending\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.split()) == (130, ["interrupted"])


def test_status_imports_nothing_that_only_submit_needs(project: Path) -> None:
    code = "import sys; sys.argv = ['hpcbench', 'status']\nfrom hpcbench.cli.main import entry_point\ntry: entry_point()\nexcept SystemExit: pass\nprint(sorted({'torch', 'submitit', 'polars', 'jinja2'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("code", "goes_on"), [(errno.ESTALE, True), (errno.EIO, True), (errno.EACCES, False)])
def test_watching_goes_on_while_a_file_system_is_away(
    code: int,
    goes_on: bool,
    plan: SweepPlan,
    cluster_tree: ClusterTree,
    fake_slurm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit(plan, cluster_tree)
    watcher = SweepWatcher(cluster_tree.root, plan.profile, {"small": list(plan.runs)})
    states = watcher.query()

    def refuse(*_: object) -> None:
        raise read_error(OSError(code, os.strerror(code)), cluster_tree.root)

    monkeypatch.setattr(type(watcher.tree), "summaries", refuse)
    if goes_on:
        assert watcher.query_again(states) == watcher.refresh_results(states) == states
    else:
        with pytest.raises(StorageError):
            watcher.query_again(states)
