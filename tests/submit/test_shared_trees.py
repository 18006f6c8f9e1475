"""A tree that several people share: permissions follow the umask, and what another user owns is refused in words."""

from __future__ import annotations

import grp
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcbench.results.attempts import begin_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import RankResult
from hpcbench.submit.plan import SweepPlan
from hpcbench.submit.submit import submit
from tests.submit.test_submit import finish

TINY = 'name = "tiny"\n[fixed]\nmodel = "resnet18"\ndataset = "digits"\nstrategy = "ddp"\nbatch_size = 4\nwarmup_steps = 1\nsteps = 2\n'


def modes(root: Path) -> dict[str, str]:
    """Every file and folder below ``root`` with its permissions, setgid included."""
    return {
        str(path.relative_to(root)): f"{stat.S_IMODE(path.lstat().st_mode):04o}" for path in sorted(root.rglob("*"))
    }


def expected(root: Path, umask: int, setgid: int) -> dict[str, str]:
    return {
        str(path.relative_to(root)): f"{(0o777 & ~umask) | setgid if path.is_dir() else 0o666 & ~umask:04o}"
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture(params=[0o022, 0o027, 0o002, 0o077], ids=lambda umask: f"{umask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("setgid", [0, stat.S_ISGID], ids=["plain", "setgid"])
def test_files_of_submit_and_worker_follow_the_umask(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, umask: int, setgid: int
) -> None:
    root = cluster_tree.root.parent
    root.mkdir()
    root.chmod(0o777 & ~umask | setgid)
    submit(plan, cluster_tree)
    run_id = next(iter(plan.runs))
    attempt = begin_attempt(cluster_tree.run_folder(run_id), launch="l", host="h", started_unix_s=1.0)
    attempt.write_rank(RankResult(rank=0, local_rank=0, node_rank=0, host="h", pid=1, device="cpu"))
    finish(cluster_tree, plan, run_id)
    found = modes(root)
    assert len(found) >= 16
    assert found == expected(root, umask, setgid)


@pytest.mark.parametrize("umask", [0o022], indirect=True)
def test_folders_below_a_shared_one_are_writable_for_the_group(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, umask: int
) -> None:
    root = cluster_tree.root.parent
    root.mkdir()
    root.chmod(0o2775)
    submit(plan, cluster_tree)
    run_id = next(iter(plan.runs))
    begin_attempt(cluster_tree.run_folder(run_id), launch="l", host="h", started_unix_s=1.0)
    finish(cluster_tree, plan, run_id)
    folders = {str(path.relative_to(root)): path.stat().st_mode for path in root.rglob("*") if path.is_dir()}
    assert len(folders) >= 8
    assert {name: f"{stat.S_IMODE(mode):04o}" for name, mode in folders.items()} == dict.fromkeys(folders, "2775")


def test_init_shares_the_results_folder(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    command = [sys.executable, "-m", "hpcbench", "init", str(tmp_path / "project"), "--shared"]
    done = subprocess.run([*command, group], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{stat.S_IMODE((tmp_path / 'project' / 'results').stat().st_mode):04o}" == "2775"
    wrong = subprocess.run([*command, "no-such-group"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, "no such group" in wrong.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o007], indirect=True)
def test_a_real_run_leaves_a_tree_that_its_group_can_go_on_with(tmp_path: Path, umask: int) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    root = tmp_path / "results"
    root.mkdir()
    root.chmod(0o2770)
    command = [sys.executable, "-m", "hpcbench", "run", str(tmp_path / "tiny.toml"), "--results", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    found = modes(root)
    assert {"queue.log", "queue.json", "out.log", "err.log", "result.json"} <= {Path(name).name for name in found}
    assert found == expected(root, umask, stat.S_ISGID)


def unprivileged(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run python without root's right to write anywhere, so that owner and mode count."""
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []
    return subprocess.run(
        [*drop, sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "HPCBENCH_RESULTS": str(cwd / "results")},
    )  # fmt: skip


def give_away(folder: Path, mode: int) -> str:
    """Let ``folder`` belong to another user where this one may do that; returns how a message names it."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(mode)
    if os.getuid() == 0:
        shutil.chown(folder, "nobody")
    state = folder.stat()
    return f"{folder} belongs to uid {state.st_uid}, gid {state.st_gid}, mode {mode:04o}"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path


@pytest.mark.parametrize("mode", [0o555, 0o755 if os.getuid() == 0 else 0o500])
@pytest.mark.parametrize("name", ["results", "results/local", "results/local/submissions", "results/local/sweeps"])
def test_submit_into_a_foreign_folder_names_its_owner(project: Path, name: str, mode: int) -> None:
    owner = give_away(project / name, mode)
    done = unprivileged("-m", "hpcbench", "submit", "tiny.toml", "--cluster", "local", cwd=project)
    assert (done.returncode, done.stdout) == (3, "")
    assert "error: cannot write" in done.stderr
    assert owner in done.stderr
    assert "Traceback" not in done.stderr
    left = [path for path in (project / "results").rglob("*") if path.is_file()]
    assert left == []


@pytest.fixture
def tasks(plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path) -> Path:
    folder = submit(plan, cluster_tree).folder
    assert folder is not None
    return folder / "0.jsonl"


@pytest.mark.parametrize("below", ["", "attempts"])
def test_a_worker_without_access_to_its_run_names_the_owner(
    plan: SweepPlan, cluster_tree: ClusterTree, tasks: Path, tmp_path: Path, below: str
) -> None:
    run_folder = cluster_tree.run_folder(next(iter(plan.runs)))
    owner = give_away(run_folder / below, 0o555)
    begin = unprivileged("-m", "hpcbench.worker", "begin", "--tasks", str(tasks), "--index", "0", cwd=tmp_path)
    assert (begin.returncode, begin.stdout, owner in begin.stderr) == (3, "", True), begin.stderr
    words = ["--tasks", str(tasks), "--index", "0", "--attempt", "1", "--exit-code", "0"]
    give_away(run_folder, 0o555)
    end = unprivileged("-m", "hpcbench.worker", "end", *words, cwd=tmp_path)
    assert (end.returncode, f"{run_folder} belongs to uid" in end.stderr) == (3, True), end.stderr
    assert "Traceback" not in begin.stderr + end.stderr


def test_an_unreadable_result_is_a_row_with_the_reason(
    plan: SweepPlan, cluster_tree: ClusterTree, tasks: Path, tmp_path: Path
) -> None:
    first, second, third, *_ = plan.runs
    for run_id in (first, second, third):
        finish(cluster_tree, plan, run_id)
    give_away(cluster_tree.run_folder(first), 0o000)
    cluster_tree.result_path(second).chmod(0o000)
    if os.getuid() == 0:
        shutil.chown(cluster_tree.result_path(second), "nobody")
    done = unprivileged("-m", "hpcbench", "table", "small", "--json", cwd=tmp_path)
    rows = {row["run_ids"][0]: row for row in json.loads(done.stdout)["rows"]}
    assert {key: row["status"] for key, row in rows.items()} == {first: "broken", second: "broken", third: "ok"}
    for run_id in (first, second):
        assert f"cannot read {cluster_tree.result_path(run_id)}: Permission denied" in rows[run_id]["reason"]
        assert "belongs to uid" in rows[run_id]["reason"]


def test_a_tree_without_read_permission_names_its_owner(project: Path) -> None:
    owner = give_away(project / "results", 0o000)
    done = unprivileged("-m", "hpcbench", "table", cwd=project)
    assert (done.returncode, owner in done.stderr, "Traceback" in done.stderr) == (3, True, False)
