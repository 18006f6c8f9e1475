"""Jobs that a real SLURM interrupts: preempted, requeued, a node lost, a run of a pack at its own limit.

Start markers count what ran: nothing runs twice that had ended, and what was interrupted ends with one ok result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec, encode_task_file, run_id
from hpcbench.paths import shared_folder
from hpcbench.render.job_script import make_job_shape, render_script
from hpcbench.render.template_engine import TemplateEngine
from hpcbench.results.attempts import Attempt, AttemptStart
from hpcbench.results.schema import RunResult
from tests.slurm.box import Box
from tests.worker.helpers import make_header, make_spec, make_task, tree_of

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]


def short(seed: int) -> RunSpec:
    return make_spec(model="vit", strategy="ddp", dp_degree=2, seed=seed, nodes=2, warmup_steps=0, steps=1)


def long(seed: int) -> RunSpec:
    """Long enough to be interrupted, short enough to be repeated."""
    return make_spec(strategy="ddp", dp_degree=2, seed=seed, nodes=2, warmup_steps=0, steps=20)


def endless(seed: int) -> RunSpec:
    return make_spec(model="vit", strategy="ddp", dp_degree=2, seed=seed, nodes=2, steps=1_000_000)


class Job:
    """One job on the box, as a submission would send it."""

    def __init__(self, folder: Path, slurm: Callable[..., str]) -> None:
        self.folder = folder
        self.slurm = slurm
        self.specs: list[RunSpec] = []
        self.id = ""

    def submit(
        self,
        specs: list[RunSpec],
        *,
        partition: str = "normal",
        pack: int | None = None,
        time_limit_s: float = 240.0,
        options: tuple[str, ...] = (),
    ) -> None:
        """All of ``specs`` in one job, unless ``pack`` and ``options`` say otherwise."""
        self.specs = specs
        profile, _ = load_cluster("slurmbox")
        header = make_header(
            self.folder, pack=pack or len(specs), cluster="slurmbox", interface="eth0", wait_s=60.0, cores_per_task=1
        )
        tasks = [make_task(spec, time_limit_s) for spec in specs]
        (self.folder / "0.jsonl").write_bytes(encode_task_file(header, tasks))
        shape = make_job_shape(profile, specs[0].nodes, 1, 1, time_limit_s, partition=partition)
        engine = TemplateEngine([shared_folder("templates")])
        text = render_script(engine, shape, "s", self.folder, 0, pack=pack or len(specs), runs=len(specs))
        (self.folder / "0.sh").write_text(text)
        self.id = self.slurm("sbatch", "--parsable", *options, str(self.folder / "0.sh"), "0").strip()

    def state(self) -> str:
        """SLURM's word for it; empty once it has forgotten the job."""
        lines = self.slurm("squeue", "--noheader", "--states=all", "--format=%F %T").splitlines()
        return next((state for job, state in (line.split() for line in lines) if job == self.id), "")

    def wait_for_training(self, index: int) -> None:
        folder = tree_of(self.folder).run_folder(run_id(self.specs[index])) / "attempts" / "1"
        wait_for(f"the ranks of run {index} to meet", (folder / "rendezvous.json").exists, self.log)
        time.sleep(5)

    def wait_for_end(self, state: str = "COMPLETED") -> None:
        wait_for(f"job {self.id} to be {state}", lambda: self.state() == state, self.log)

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("0.*.log")))

    def result(self, index: int) -> RunResult | None:
        return tree_of(self.folder).read_result(run_id(self.specs[index]))

    def statuses(self) -> list[str | None]:
        results = [self.result(index) for index in range(len(self.specs))]
        return [None if result is None else result.status for result in results]

    def attempts(self) -> list[list[int]]:
        """The restart counts of every run's start markers."""
        return [[marker.restart_count for marker in self.markers(spec)] for spec in self.specs]

    def markers(self, spec: RunSpec) -> list[AttemptStart]:
        folder = tree_of(self.folder).run_folder(run_id(spec))
        numbers = sorted(int(path.parent.name) for path in folder.glob("attempts/*/attempt.json"))
        found = [Attempt(folder, number).read_start() for number in numbers]
        return [marker for marker in found if marker is not None]


def wait_for(what: str, found: Callable[[], Any], log: Callable[[], str] = str, limit_s: float = 240.0) -> Any:
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        if value := found():
            return value
        time.sleep(0.5)
    raise AssertionError(f"waited {limit_s:g} s for {what}\n{log()}")


@pytest.fixture
def job(box: Box, tmp_path: Path, slurm: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    one = Job(tmp_path, slurm)
    yield one
    if one.id:
        slurm("scancel", one.id)
        wait_for("the job to be gone", lambda: one.state() not in ("PENDING", "RUNNING", "COMPLETING"))


@pytest.fixture
def preempt(slurm: Callable[..., str]) -> Iterator[Callable[..., None]]:
    """A job in `high` that wants some nodes, or all, for a second."""
    ids = []

    def start(names: list[str] | None = None) -> None:
        nodes = names or ["n1", "n2", "n3", "n4"]
        ids.append(slurm("sbatch", "--parsable", "--partition=high", f"--nodes={len(nodes)}", "--exclusive", "--time=1",
                         f"--nodelist={','.join(nodes)}", "--output=/dev/null", "--wrap=sleep 1").strip())  # fmt: skip

    yield start
    for one in ids:
        slurm("scancel", one)


@pytest.mark.slurm
def test_a_short_job_that_is_preempted_runs_again(job: Job, preempt: Callable[..., None]) -> None:
    job.submit([long(0)], partition="low")
    job.wait_for_training(0)
    preempt()
    wait_for("the run to be called preempted", lambda: job.statuses() == ["preempted"], job.log)
    job.wait_for_end()
    assert job.statuses() == ["ok"], job.log()
    assert job.attempts() == [[0, 1]]


@pytest.mark.soak
def test_a_pack_that_is_preempted_goes_on_where_it_was(job: Job, preempt: Callable[..., None]) -> None:
    job.submit([short(0), long(1), short(2)], partition="low")
    job.wait_for_training(1)
    preempt()
    wait_for("the second run to be preempted", lambda: job.statuses() == ["ok", "preempted", None], job.log)
    wait_for("the job to wait", lambda: job.state() == "PENDING", job.log)
    assert job.attempts() == [[0], [0], []], "the third run waits for the restart"
    job.wait_for_end()
    assert job.statuses() == ["ok", "ok", "ok"], job.log()
    assert job.attempts() == [[0], [0, 1], [1]]


@pytest.mark.soak
def test_a_job_that_may_not_be_requeued_leaves_its_run_preempted(job: Job, preempt: Callable[..., None]) -> None:
    job.submit([long(0), short(1)], partition="low", options=("--no-requeue",))
    job.wait_for_training(0)
    preempt()
    job.wait_for_end()
    assert job.statuses() == ["preempted", None]
    assert "may not be requeued" in job.log()
    assert job.attempts() == [[0], []]


@pytest.mark.soak
def test_a_job_that_a_person_requeues_runs_again(job: Job) -> None:
    job.submit([short(0), long(1)])
    job.wait_for_training(1)
    job.slurm("scontrol", "requeue", job.id)
    wait_for("the job to wait", lambda: job.state() == "PENDING", job.log)
    job.wait_for_end()
    assert job.statuses() == ["ok", "ok"], job.log()
    assert job.attempts() == [[0], [0, 1]]


@pytest.mark.soak
def test_only_the_interrupted_task_of_an_array_is_started_again(job: Job, preempt: Callable[..., None]) -> None:
    """The array's last task has the array's own number as its job's: by it all tasks would be restarted."""
    job.submit([long(0), long(1)], partition="low", pack=1, options=("--array=0-1", "--exclusive"))
    for index in (0, 1):
        job.wait_for_training(index)
    preempt(nodes_of(job, f"{job.id}_1"))
    wait_for("both runs to end", lambda: job.statuses() == ["ok", "ok"], job.log)
    assert job.attempts() == [[0], [0, 1]]


@pytest.mark.slurm
def test_a_run_of_a_pack_that_reaches_its_limit_leaves_the_next_its_time(job: Job) -> None:
    job.submit([short(0), endless(1), short(2)], time_limit_s=45.0)
    job.wait_for_end()
    assert job.statuses() == ["ok", "timeout", "ok"], job.log()
    assert job.attempts() == [[0], [0], [0]]
    result = job.result(1)
    assert result is not None
    assert len(result.step_times_s) >= 1


def nodes_of(job: Job, number: str) -> list[str]:
    """The nodes of the job ``number``, that of the batch script first."""
    shown = job.slurm("scontrol", "show", "job", number, "--oneliner")
    batch = shown.split(" BatchHost=")[1].split()[0]
    names = job.slurm("scontrol", "show", "hostnames", shown.split(" NodeList=")[1].split()[0]).split()
    return [batch, *(name for name in names if name != batch)]
