"""A project of its own on the box: a profile, sweeps and a tree, and the command as a person would call it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.results.attempts import Attempt, attempt_numbers
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.submission_record import Submission, list_submissions, read_sweep_record
from tests.slurm.box import Box

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = "faulty"
SWEEP = """name = "{name}"
[fixed]
model = "{model}"
dataset = "digits"
strategy = "ddp"
batch_size = 4
warmup_steps = 1
steps = {steps}
profile_steps = 0
"""
# As it was when the tests were collected: scenarios run in threads, while tests change and restore variables.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "HPCBENCH_"))
}
LIMITED = '[partitions.limited]\nname = "normal"\nqos = "limited"\n'


class Project:
    """A folder with ``clusters``, ``sweeps`` and ``results``. Every ok result that it ever saw is remembered."""

    def __init__(self, folder: Path, box: Box, scheduler: str = 'warning_s = "20 s"\nretry_s = "2 s"') -> None:
        self.folder, self.box = folder, box
        for name in ("clusters", "sweeps"):
            (folder / name).mkdir(parents=True)
        text = load_cluster("slurmbox")[1].text
        text = text.replace('name = "slurmbox"', f'name = "{CLUSTER}"').replace('warning_s = "60 s"', scheduler)
        (folder / "clusters" / f"{CLUSTER}.toml").write_text(text + LIMITED)
        self.tree = ClusterTree(folder / "results" / CLUSTER)
        self.variables: dict[str, str] = {}
        """Of every command, and of the jobs that it sends."""
        self.seen_ok: dict[str, bytes] = {}
        self.damaged: set[str] = set()
        """Runs whose ok result a test spoiled: they are to be measured again."""
        """Set where a project was done before it was looked at."""

    def add_sweep(self, name: str, more: str, steps: int = 1, model: str = "vit") -> None:
        """Most faults need a run, whatever it trains: "vit" is the cheapest."""
        (self.folder / "sweeps" / f"{name}.toml").write_text(SWEEP.format(name=name, steps=steps, model=model) + more)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "hpcbench", *arguments]

    def environment(self) -> dict[str, str]:
        packages = os.pathsep.join((str(ROOT / "tests/slurm/plants"), str(ROOT)))
        return {**ENVIRONMENT, "PYTHONPATH": packages, "XDG_CONFIG_HOME": str(self.folder / "xdg"), **self.variables}

    def start(self, *arguments: str, command: list[str] | None = None) -> subprocess.Popen[str]:
        self.remember()
        return subprocess.Popen(
            command or self.command(*arguments),
            cwd=self.folder, env=self.environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def call(self, *arguments: str, command: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, command=command)
        out, err = process.communicate()
        self.remember()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def submit(self, sweep: str, *options: str) -> subprocess.CompletedProcess[str]:
        return self.call("submit", sweep, "--cluster", CLUSTER, *options)

    def retry(self, sweep: str, *options: str) -> subprocess.CompletedProcess[str]:
        return self.call("retry", sweep, "--cluster", CLUSTER, *options)

    def finish(self, sweep: str) -> subprocess.CompletedProcess[str]:
        """Submit until all is done; the last call must have nothing left to complain about."""
        done = self.submit(sweep, "--wait")
        assert done.returncode == 0, (done.stderr, self.states(sweep))
        return done

    def states(self, sweep: str) -> dict[str, str]:
        """``run_id`` to state, as status says it."""
        return {run["run_id"]: run["state"] for run in self.status(sweep)}

    def status(self, sweep: str) -> list[dict[str, Any]]:
        done = self.call("status", sweep, "--json")
        assert done.returncode in (0, 1), done.stderr
        (found,) = json.loads(done.stdout)["sweeps"]
        runs: list[dict[str, Any]] = found["runs"]
        return runs

    def run_ids(self, sweep: str) -> list[str]:
        record = read_sweep_record(self.tree, sweep)
        assert record is not None, sweep
        return record.run_ids

    def results(self, sweep: str) -> list[dict[str, Any]]:
        """The results that there are, in the sweep's order."""
        paths = (self.tree.result_path(run_id) for run_id in self.run_ids(sweep))
        return [json.loads(path.read_bytes()) for path in paths if path.exists()]

    def remember(self) -> None:
        for path in self.tree.root.glob("runs/*/*/result.json"):
            data = path.read_bytes()
            if b'"status": "ok"' in data and path.parent.name not in self.damaged:
                self.seen_ok.setdefault(path.parent.name, data)

    def spoil(self, run_id: str, data: bytes) -> None:
        """Put ``data`` in the place of an ok result, as a bad disk would."""
        self.tree.result_path(run_id).write_bytes(data)
        self.damaged.add(run_id)
        self.seen_ok.pop(run_id, None)

    def submissions(self) -> list[tuple[Path, Submission]]:
        return list_submissions(self.tree)

    def attempts(self) -> Iterator[tuple[str, Attempt]]:
        """Every attempt in the tree, those of a run ascending."""
        for run_id in self.tree.run_ids():
            folder = self.tree.run_folder(run_id)
            for number in attempt_numbers(folder):
                yield run_id, Attempt(folder, number)

    def slurm(self, *command: str, check: bool = True) -> str:
        """A command of SLURM, and what it printed."""
        env = {**ENVIRONMENT, "SLURM_CONF": str(self.box.slurm_conf)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode == -signal.SIGPIPE and command[0] == "squeue":
            # A controller under load closes connections; a query may be repeated.
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if check:
            done.check_returncode()
        return done.stdout

    def jobs(self, *states: str) -> list[str]:
        """The ids of this project's jobs that are in the queue, in one of ``states`` where any are given."""
        tokens = [record.token for _, record in self.submissions()]
        lines = self.slurm("squeue", "-h", "-r", "-o", "%i|%T|%j").splitlines()
        found = [line.split("|") for line in lines]
        return [job for job, state, name in found if any(t in name for t in tokens) and (not states or state in states)]

    def age_of_newest_submission_s(self) -> float:
        return time.time() - max(record.created_unix_s for _, record in self.submissions())

    def begun(self) -> int:
        """Return the number of attempts with a start marker."""
        return sum(attempt.read_start() is not None for _, attempt in self.attempts())


def wait_for(what: str, found: Callable[[], Any], limit_s: float = 120.0) -> Any:
    """The first true answer of ``found``."""
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        value = found()
        if value:
            return value
        time.sleep(0.2)
    raise AssertionError(f"waited {limit_s:g} s for {what}")


def rank_process(project: Project, index: int = 0, rank: int = 0) -> int | None:
    """The process of a rank of one of the project's runs: its command line and its environment say which it is."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            b"hpcbench.worker" in words
            and b"--attempt" in words
            and b"end" not in words
            and not words[0].endswith(b"srun")
            and any(word.startswith(str(project.tree.root).encode()) for word in words)
            and words[words.index(b"--index") + 1] == str(index).encode()
            and f"SLURM_PROCID={rank}".encode() in environment
            and any(name.startswith(b"SLURM_STEP_ID=") for name in environment)
        ):
            return int(folder.name)
    return None
