"""Sweeps on a real SLURM: arrays, several nodes, jobs that are stopped, killed or run out of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from submitit.slurm.slurm import SlurmJob

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.journal import read_journal
from hpcbench.submit.scheduler import command_environment
from hpcbench.submit.submission_record import list_submissions

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Results = Callable[[], list[dict[str, Any]]]

SWEEP = """name = "{name}"
[fixed]
model = "{model}"
dataset = "digits"
strategy = "ddp"
batch_size = 8
warmup_steps = 1
profile_steps = 0
"""


def sweep(folder: Path, name: str, text: str, model: str = "vit") -> str:
    path = folder / f"{name}.toml"
    path.write_text(SWEEP.format(name=name, model=model) + text)
    return str(path)


def wait_for(what: str, found: Callable[[], Any], limit_s: float = 120.0) -> Any:
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        value = found()
        if value:
            return value
        time.sleep(0.5)
    raise AssertionError(f"waited {limit_s:g} s for {what}")


def job_ids(tmp_path: Path) -> list[str]:
    (folder,) = [folder for folder, _ in list_submissions(ClusterTree(tmp_path / "results" / "slurmbox"))]
    return read_journal(folder).job_ids()


def rank_logs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "results" / "slurmbox" / "runs").glob("*/*/attempts/1/rendezvous.json"))


def starts(tmp_path: Path) -> int:
    return len(list((tmp_path / "results" / "slurmbox" / "runs").glob("*/*/attempts/*/attempt.json")))


@pytest.mark.releases
def test_the_box_sweep_runs_on_as_many_hosts_as_nodes(hpcbench: Command, results: Results, tmp_path: Path) -> None:
    short = [word for key in ("grid.batch_size=8", "steps=2", "profile_steps=0") for word in ("--set", key)]
    done = hpcbench("run", "box", "--cluster", "slurmbox", *short)
    assert done.returncode == 0, done.stderr + done.stdout
    found = results()
    assert len(found) == 4
    for result in found:
        hosts = {rank["host"] for rank in result["ranks"]}
        assert (result["status"], len(hosts)) == ("ok", result["spec"].get("nodes", 1)), result
        assert result["provenance"]["job"]
    assert ["_" in job for job in job_ids(tmp_path)] == [True, True, False, False], "the runs of one node are an array"
    assert starts(tmp_path) == 4
    again = hpcbench("submit", "box", "--cluster", "slurmbox", *short)
    assert "0 submitted, 4 done before" in again.stderr
    assert starts(tmp_path) == 4


def two_array_tasks_meet_on_the_same_nodes(
    hpcbench: Command, results: Results, tmp_path: Path, slurm: Callable[..., str]
) -> None:
    """Both run on the same two nodes at the same time, and neither joins the other's ranks."""
    path = sweep(tmp_path, "pair", "steps = 6\nnodes = 2\n[grid]\nseed = [1, 2]\n")
    submitted = hpcbench("submit", path, "--cluster", "slurmbox", "--wait")
    assert submitted.returncode == 0, submitted.stderr
    found = results()
    assert [result["status"] for result in found] == ["ok", "ok"], [result.get("error") for result in found]
    one, two = ({rank["host"] for rank in result["ranks"]} for result in found)
    assert one == two
    master = job_ids(tmp_path)[0].partition("_")[0]
    lines = slurm("sacct", "-X", "-n", "-P", "-j", master, "-o", "Start,End").split()
    (start_1, end_1), (start_2, end_2) = (line.split("|") for line in lines)
    assert start_1 < end_2
    assert start_2 < end_1
    assert all(len(result["ranks"]) == 2 for result in found)


@pytest.fixture
def two_nodes_only(slurm: Callable[..., str]) -> Any:
    """Only n1 and n2 take jobs, so that both array tasks must share them."""
    slurm("scontrol", "update", "nodename=n[3-4]", "state=drain", "reason=test")
    yield
    slurm("scontrol", "update", "nodename=n[3-4]", "state=resume")


@pytest.mark.usefixtures("two_nodes_only")
def test_two_array_tasks_share_nodes_without_conflict(
    hpcbench: Command, results: Results, tmp_path: Path, slurm: Callable[..., str]
) -> None:
    two_array_tasks_meet_on_the_same_nodes(hpcbench, results, tmp_path, slurm)


@pytest.mark.releases
def test_a_submitit_job_on_slurm_reports_its_state_and_cancels(
    hpcbench: Command, results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurements until then are kept, and submit would run it again."""
    path = sweep(tmp_path, "long", "steps = 100000\nnodes = 2\n")
    assert hpcbench("submit", path, "--cluster", "slurmbox").returncode == 0
    environment = command_environment(load_cluster("slurmbox")[0])
    for name in {"PATH", "SLURM_CONF"} & environment.keys():
        monkeypatch.setenv(name, environment[name])
    job: SlurmJob[Any] = SlurmJob(folder=tmp_path, job_id=job_ids(tmp_path)[0], tasks=[0])
    wait_for("the job to run", lambda: job.get_info(mode="force").get("State") == "RUNNING")
    wait_for("its ranks to meet", lambda: rank_logs(tmp_path))
    rank = rank_process(next((tmp_path / "results").glob("slurmbox/submissions/*/0.jsonl")), 0)
    before_s = cpu_time_s(rank)
    wait_for("its rank to work", lambda: cpu_time_s(rank) > before_s + 10, 300)
    status = hpcbench("status", "long", "--json")
    assert '"state": "running"' in status.stdout
    job.cancel(check=False)
    (result,) = wait_for("the result", results, 60)
    assert result["status"] == "cancelled"
    assert "SIGTERM" in result["error"]["message"]
    assert len(result["step_times_s"]) >= 1
    wait_for("SLURM to say so", lambda: job.get_info(mode="force").get("State", "").startswith("CANCELLED"), 60)
    wait_for("status to say so", lambda: hpcbench("status", "long").returncode == 1, 60)


@pytest.mark.releases
def test_the_time_limit_leaves_what_was_measured(hpcbench: Command, results: Results, tmp_path: Path) -> None:
    """The scheduler warns the ranks a minute before the limit; the longer one is for a machine that starts slowly."""
    for seed, limit_min in enumerate((1.4, 2.8)):
        text = f"steps = 100000\nseed = {seed}\ntime_limit_min = {limit_min}\n"
        done = hpcbench("run", sweep(tmp_path, f"slow{seed}", text), "--cluster", "slurmbox")
        assert done.returncode == 1, done.stderr
        (result,) = (one for one in results() if one["spec"].get("seed", 0) == seed)
        assert result["status"] == "timeout", result["error"]
        assert "timeout" in done.stdout
        if result.get("step_times_s"):
            break
    assert len(result["step_times_s"]) >= 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_named(
    victim: int, hpcbench: Command, results: Results, tmp_path: Path, slurm: Callable[..., str]
) -> None:
    """srun tells the other rank TERM; the result says all the same that nobody cancelled the run."""
    path = sweep(tmp_path, "killed", "steps = 100000\nnodes = 2\n")
    assert hpcbench("submit", path, "--cluster", "slurmbox").returncode == 0
    wait_for("its ranks to meet", lambda: rank_logs(tmp_path))
    time.sleep(5)
    tasks = next((tmp_path / "results").glob("slurmbox/submissions/*/0.jsonl"))
    os.kill(rank_process(tasks, victim), signal.SIGKILL)
    wait_for("the job to end", lambda: not slurm("squeue", "-h", "-j", job_ids(tmp_path)[0]).strip())
    (result,) = results()
    assert result["status"] == "failed", result["error"]
    assert f"rank {victim} ended without leaving a file" in result["error"]["message"]


def rank_process(tasks: Path, rank: int) -> int:
    """The process of a rank: its environment says which it is."""
    found = subprocess.run(
        ["pgrep", "-f", f"hpcbench.worker --tasks {tasks}"], capture_output=True, text=True, check=True
    )
    for pid in found.stdout.split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"SLURM_PROCID={rank}".encode() in environment and b"SLURM_STEP_ID=0" in environment:
            return int(pid)
    raise AssertionError(f"no process of rank {rank} among {found.stdout.split()}")


def cpu_time_s(process: int) -> float:
    """Return the processor time of the process so far: other processes do not change it."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.releases
def test_out_of_memory_is_called_so(hpcbench: Command, results: Results, tmp_path: Path) -> None:
    """More than the node's memory cgroup has: the kernel kills the rank, the node stays, the next job runs."""
    path = sweep(tmp_path, "greedy", "steps = 2\ntime_limit_min = 5\n", model="resnet18")
    text = Path(path).read_text().replace('"digits"', '"imagenet"').replace("batch_size = 8", "batch_size = 512")
    Path(path).write_text(text)
    done = hpcbench("run", path, "--cluster", "slurmbox")
    (result,) = results()
    assert result["status"] == "oom", (result["error"], done.stderr)
    assert "asked for 1.4 GiB a node; the limit of its memory group is 3.0 GiB" in result["error"]["message"]
    assert done.returncode == 0
    after = sweep(tmp_path, "after", "steps = 2\n")
    assert hpcbench("run", after, "--cluster", "slurmbox").returncode == 0


@pytest.mark.releases
def test_a_refusal_by_the_real_sbatch_leaves_nothing(hpcbench: Command, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "clusters").mkdir(parents=True)
    profile = load_cluster("slurmbox")[1].text.replace('name = "slurmbox"', 'name = "refused"\naccount = "nobody"')
    (project / "clusters" / "refused.toml").write_text(profile)
    path = sweep(tmp_path, "refused", "steps = 2\n")
    env = {**os.environ, "HPCBENCH_RESULTS": str(tmp_path / "results")}
    done = subprocess.run(
        [sys.executable, "-m", "hpcbench", "submit", path, "--cluster", "refused"],
        cwd=project, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "sbatch refused" in done.stderr
    assert "account" in done.stderr
    assert list((tmp_path / "results" / "refused" / "submissions").iterdir()) == []
    assert not (tmp_path / "results" / "refused" / "runs").exists()


@pytest.mark.releases
def test_check_and_doctor_query_the_real_scheduler(hpcbench: Command, tmp_path: Path) -> None:
    assert "the scheduler agrees" in hpcbench("check", "clusters/slurmbox.toml").stderr
    doctor = hpcbench("doctor", "--cluster", "slurmbox", "--json")
    assert doctor.returncode == 0, doctor.stdout
    assert "partitions high, low, normal" in doctor.stdout
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(
        load_cluster("slurmbox")[1]
        .text.replace('"slurmbox"', '"wrong"')
        .replace("[partitions.high]", "[partitions.hgih]")
    )
    done = hpcbench("check", str(wrong))
    assert done.returncode == 2
    assert "the scheduler has no partition 'hgih'\n  did you mean 'high'?" in done.stderr
