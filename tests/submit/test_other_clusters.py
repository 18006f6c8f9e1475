"""A scheduler with several clusters, and a shell with variables of SLURM's commands: every call means the right jobs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.sweep_loader import Sweep
from hpcbench.results.attempts import begin_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.journal import read_journal
from hpcbench.submit.plan import SweepPlan, make_plan
from hpcbench.submit.run_state import cancel_runs, run_states
from hpcbench.submit.scheduler import command_environment
from hpcbench.submit.slurm_queue import SbatchOutcome, classify_sbatch_error
from hpcbench.submit.submit import submit
from tests.submit.conftest import FAKES, SWEEP
from tests.submit.test_send import calls, options

ONE = SWEEP.replace("batch_size = [8, 16]\nnodes = [1, 2]", "seed = [0, 1]").replace('"ddp"', '"ddp"\nbatch_size = 8')


@pytest.fixture
def one(write_sweep: Callable[[str], Sweep], cluster_tree: ClusterTree) -> Callable[..., SweepPlan]:
    """Two runs of one shape on a profile with more keys."""

    def make(**profile: Any) -> SweepPlan:
        text = {"name": "test", "scheduler": {"kind": "slurm"}, **profile}
        return make_plan(write_sweep(ONE), ClusterProfile.model_validate(text), cluster_tree)

    return make


@pytest.fixture
def beta(fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that sends to cluster beta, and a job of the same number on the default cluster."""
    folder = tmp_path / "beta"
    folder.mkdir()
    (folder / "sbatch").write_text('#!/bin/bash\nprintf "%s\\n" "$*" >> "$FAKE_STATE/calls"\necho "4711;beta"\n')
    (folder / "squeue").write_text(
        '#!/bin/bash\nprintf "squeue %s\\n" "$*" >> "$FAKE_STATE/queries"\n'
        'case " $* " in *" -M beta "*) echo "CLUSTER: beta"; echo "JOBID|STATE"; cat "$FAKE_STATE/squeue" ;;\n'
        '*) echo "JOBID|STATE"; echo "4711_0|RUNNING|None|N/A|other-job.sh|n1" ;; esac\n'
    )
    for name in ("sbatch", "squeue"):
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{FAKES}:/usr/bin:/bin")
    (fake_slurm / "squeue").write_text("")
    return fake_slurm


@pytest.mark.parametrize("source", ["directive", "partition", "variable"])
def test_the_cluster_of_a_job_goes_with_its_number(
    source: str, one: Callable[..., SweepPlan], cluster_tree: ClusterTree, beta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "variable":
        monkeypatch.setenv("SLURM_CLUSTERS", "beta")
    profiles: dict[str, dict[str, Any]] = {
        "directive": {"directives": {"clusters": "beta"}},
        "partition": {"default_partition": "gpu", "partitions": {"gpu": {"directives": {"clusters": "beta"}}}},
        "variable": {},
    }
    plan = one(**profiles[source])
    folder = submit(plan, cluster_tree).folder
    assert folder is not None
    (batch,) = read_journal(folder).batches
    assert (batch.job_id, batch.job_cluster) == ("4711", "beta")
    (beta / "squeue").write_text(f"4711_[0-1]|PENDING|Resources|N/A|{batch.name}|\n")
    (beta / "queries").unlink(missing_ok=True)
    states = run_states(cluster_tree, plan.runs, plan.profile, time.time() + 3600)
    assert {state.state for state in states.values()} == {"pending"}
    assert cancel_runs(cluster_tree, states, plan.profile).refused == {}
    asked = (beta / "queries").read_text().splitlines()
    assert [line for line in asked if line.startswith("scancel")] == ["scancel -M beta 4711"]
    assert all("-M beta" in line for line in asked)


def test_a_job_of_the_same_number_on_the_default_cluster_is_nobodys(
    one: Callable[..., SweepPlan], cluster_tree: ClusterTree, beta: Path
) -> None:
    plan = one(directives={"clusters": "beta"})
    submit(plan, cluster_tree)
    states = run_states(cluster_tree, plan.runs, plan.profile, time.time() + 3600)
    assert {state.state for state in states.values()} == {"lost"}


def test_variables_that_select_and_format_do_not_reach_slurms_commands(
    monkeypatch: pytest.MonkeyPatch, slurm_profile: ClusterProfile
) -> None:
    removed = ("SQUEUE_PARTITION", "SQUEUE_FORMAT2", "SACCT_FORMAT", "SCANCEL_INTERACTIVE", "SINFO_FORMAT", "PET_NNODES",
               "SBATCH_ACCOUNT", "SLURM_JOB_ID", "SLURM_TIME_FORMAT", "TORCHELASTIC_RUN_ID")  # fmt: skip
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "PETSC_DIR", "HOME")
    for name in (*removed, *kept):
        monkeypatch.setenv(name, "x")
    environment = command_environment(slurm_profile)
    assert [name for name in removed if name in environment] == []
    assert [name for name in kept if name not in environment] == []


def test_a_refusal_names_the_variables_that_were_not_passed_on(
    one: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", "refuse")
    monkeypatch.setenv("SBATCH_ACCOUNT", "proj1")
    (refused,) = submit(one(), cluster_tree).sent.refused
    assert "SBATCH_ACCOUNT of this shell was not passed on" in str(refused)


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        *((name, SbatchOutcome.REFUSED) for name in (
            "QOSMinGRES", "QOSMaxGRESPerJob", "QOSMaxCpuPerNode", "QOSMaxNodePerJobLimit", "QOSMinCpuNotSatisfied",
            "AssocMaxNodePerJobLimit", "AssocMaxWallDurationPerJobLimit", "QOSMaxWallDurationPerJobLimit",
            "AssocMaxGRESMinutesPerJob", "QOSNotAllowed", "QOSGrpCPULimit",
        )),
        *((name, SbatchOutcome.LIMIT) for name in (
            "QOSMaxSubmitJobPerUserLimit", "AssocMaxSubmitJobLimit", "AssocGrpSubmitJobsLimit",
            "QOSGrpSubmitJobsLimit", "QOSMaxSubmitJobPerAccountLimit",
        )),
    ],
)  # fmt: skip
def test_a_refusal_for_ever_is_told_from_one_for_now_by_the_limits_name(reason: str, outcome: SbatchOutcome) -> None:
    message = (
        f"sbatch: error: {reason}\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
        "(job submit limit, user's size and/or time limits)"
    )
    assert classify_sbatch_error(message) is outcome


COMMENT = '{"OccupiedIdleGPUsJobReaper":{"exemptIdleTimeMins":"90"}}'


@pytest.mark.parametrize(
    ("directives", "drop", "sent"),
    [
        ({}, [], ["--job-name", "--comment"]),
        ({"comment": COMMENT}, [], ["--job-name"]),
        ({"job-name": "acct42-bench.hpc"}, [], ["--comment"]),
        ({"comment": COMMENT, "job-name": "acct42-bench.hpc"}, [], []),
        ({"comment": COMMENT, "job-name": "acct42-bench.hpc"}, ["comment", "job-name"], []),
        ({}, ["comment", "job-name"], []),
        ({}, ["comment"], ["--job-name"]),
    ],
)
def test_the_profiles_comment_and_job_name_are_what_is_sent(
    directives: dict[str, str], drop: list[str], sent: list[str], one: Callable[..., SweepPlan],
    cluster_tree: ClusterTree, fake_slurm: Path,
) -> None:  # fmt: skip
    folder = submit(one(directives=directives, request={"drop": drop}), cluster_tree).folder
    assert folder is not None
    (call,) = calls(fake_slurm)
    assert [word.partition("=")[0] for word in call if word.startswith(("--job-name", "--comment"))] == sent
    script = (folder / "0.sh").read_text()
    for name in ("comment", "job-name"):
        lines = [line for line in script.splitlines() if line.startswith(f"#SBATCH --{name}=")]
        if name in directives:
            assert len(lines) == 1
            assert directives[name].split('"')[0] in lines[0]
        else:
            assert len(lines) == (0 if name in drop else 1)


@pytest.mark.parametrize(
    ("directives", "drop", "name"),
    [
        ({"job-name": "acct42-bench.hpc"}, [], "acct42-bench.hpc"),
        ({}, ["job-name"], "0.sh"),
        ({"job-name": "a,b"}, [], "a,b"),
    ],
)
def test_a_job_without_a_name_of_its_own_is_found_by_its_command(
    directives: dict[str, str], drop: list[str], name: str, one: Callable[..., SweepPlan], cluster_tree: ClusterTree,
    fake_slurm: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("FAKE_SBATCH", "unclear-lost")
    folder = cluster_tree.submissions / "small-0001"
    lines = f"4801|{name}|/elsewhere/0.sh 0\n4802|{name}|{folder}/0.sh 0\n4803|{name}|{folder}/0.sh 1\n"
    for file in ("squeue.named", "squeue.user"):
        (fake_slurm / file).write_text(lines)
    submit(one(directives=directives, request={"drop": drop}), cluster_tree)
    assert read_journal(folder).job_ids() == ["4802_0", "4802_1"]


def test_limits_of_a_partition_count_its_own_jobs(
    write_sweep: Callable[[str], Sweep], cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    """Jobs elsewhere, or of another QOS of the same partition, leave its limit alone; its limit leaves others alone."""
    profile = ClusterProfile.model_validate(
        {
            "name": "test", "scheduler": {"kind": "slurm", "max_submitted_jobs": 100}, "default_partition": "small",
            "partitions": {"small": {"max_submitted_jobs": 3}, "large": {}, "debug": {"name": "small", "qos": "debug", "max_submitted_jobs": 2}},
        }
    )  # fmt: skip
    sweep = write_sweep(ONE.replace("seed = [0, 1]", 'seed = [0, 1, 2, 3]\npartition = ["small", "large", "debug"]'))
    (fake_slurm / "squeue.user").write_text("1|small|normal\n2|large|normal\n3|large|normal\n4|small|debug\n")
    sent = submit(make_plan(sweep, profile, cluster_tree), cluster_tree).sent
    assert options(fake_slurm, "array") == ["0-0", "0-3", "0-0"]
    assert sent.waiting == 6
    assert "submitted jobs in partition" in sent.reason


def test_another_shell_asks_and_cancels_on_the_default_cluster(
    one: Callable[..., SweepPlan], cluster_tree: ClusterTree, beta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was sent without SLURM_CLUSTERS; whoever looks later has it, and on beta is a job of the same number."""
    folder = Path(str(beta)).parent / "seen"
    folder.mkdir()
    (folder / "sbatch").write_text("#!/bin/bash\necho 4711\n")
    for name in ("squeue", "scancel", "sacct"):
        (folder / name).write_text(
            f'#!/bin/bash\nprintf "{name} [%s] %s\\n" "${{SLURM_CLUSTERS-}}" "$*" >> "$FAKE_STATE/seen"\n'
            'echo "JOBID|STATE"; cat "$FAKE_STATE/squeue"\n'
        )
    for path in folder.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{FAKES}:/usr/bin:/bin")
    plan = one()
    submitted = submit(plan, cluster_tree).folder
    assert submitted is not None
    (batch,) = read_journal(submitted).batches
    assert batch.job_cluster == ""
    (beta / "squeue").write_text(f"4711_[0-1]|PENDING|Resources|N/A|{batch.name}|\n")
    monkeypatch.setenv("SLURM_CLUSTERS", "beta")
    states = run_states(cluster_tree, plan.runs, plan.profile, time.time() + 3600)
    assert {state.state for state in states.values()} == {"pending"}
    assert cancel_runs(cluster_tree, states, plan.profile).refused == {}
    seen = (beta / "seen").read_text().splitlines()
    assert {line.split()[0] for line in seen} >= {"squeue", "scancel"}
    assert all("[] " in line and "-M" not in line for line in seen)


def die_in_sbatch(plan: SweepPlan, tree: ClusterTree, sbatch: Path) -> None:
    """A submit that is killed before sbatch has answered."""
    answering = sbatch.read_text()
    sbatch.write_text(answering.replace('echo "4711;beta"', "kill -9 $PPID; sleep 1; exit 1"))
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            submit(plan, tree)
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    sbatch.write_text(answering)


def test_an_unanswered_call_is_looked_for_on_the_cluster_that_it_was_sent_to(
    one: Callable[..., SweepPlan], cluster_tree: ClusterTree, beta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The submitter died with SLURM_CLUSTERS=beta, and the next one has no such variable."""
    monkeypatch.setenv("SLURM_CLUSTERS", "beta")
    plan = one()
    die_in_sbatch(plan, cluster_tree, beta.parent / "beta" / "sbatch")
    monkeypatch.delenv("SLURM_CLUSTERS")
    (folder,) = cluster_tree.submissions.glob("s*-*")
    (batch,) = read_journal(folder).batches
    assert (batch.is_unanswered, batch.job_cluster) == (True, "beta")
    (beta / "squeue").write_text(f"4711|{batch.name}|0.sh\n")
    submit(plan, cluster_tree)
    (batch,) = [one for one in read_journal(folder).batches if one.is_sent]
    assert (batch.job_id, batch.job_cluster) == ("4711", "beta")
    assert len((beta / "calls").read_text().splitlines()) == 1


def test_a_job_that_has_begun_is_on_the_cluster_that_it_was_sent_to(
    one: Callable[..., SweepPlan], cluster_tree: ClusterTree, beta: Path
) -> None:
    """A node has a name for the default cluster, which -M takes only where there is a slurmdbd."""
    plan = one()
    die_in_sbatch(plan, cluster_tree, beta.parent / "beta" / "sbatch")
    (folder,) = cluster_tree.submissions.glob("s*-*")
    begin_attempt(
        cluster_tree.run_folder(next(iter(plan.runs))), launch="x", host="n1", started_unix_s=time.time(),
        job_id="4711_0", job_cluster="linux", task_file=str(folder / "0.jsonl"),
    )  # fmt: skip
    submit(plan, cluster_tree)
    (batch,) = [one for one in read_journal(folder).batches if one.is_sent]
    assert (batch.job_id, batch.job_cluster) == ("4711", "")
