"""Job scripts that carry several runs, run for real by bash without a scheduler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
from tests.distributed.launching import environment
from tests.worker.helpers import make_header, make_spec, make_task, tree_of

pytestmark = pytest.mark.slow

WAIT_S = 120.0


def short(seed: int) -> RunSpec:
    return make_spec(seed=seed, warmup_steps=0, steps=1)


def endless(seed: int) -> RunSpec:
    return make_spec(seed=seed, steps=1_000_000)


def broken(seed: int) -> RunSpec:
    return make_spec(seed=seed, model="tests.absent:model")


class Pack:
    """A script and its task file in ``folder``, and the process that runs it."""

    def __init__(
        self, folder: Path, specs: list[RunSpec], pack: int, time_limit_s: float = 600.0, **changes: str
    ) -> None:
        self.folder = folder
        self.specs = specs
        lines = encode_task_file(make_header(folder, pack=pack), [make_task(spec, time_limit_s) for spec in specs])
        (folder / "0.jsonl").write_bytes(lines)
        engine = TemplateEngine([shared_folder("templates")])
        profile, _ = load_cluster("local")
        shape = make_job_shape(profile, 1, specs[0].tasks_per_node, 1, time_limit_s)
        text = render_script(engine, shape, "s", folder, 0, pack=pack, runs=len(specs))
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        self.script = folder / "0.sh"
        self.script.write_text(text)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, job: int = 0, **variables: str) -> subprocess.Popen[bytes]:
        with open(self.folder / "job.log", "ab") as log:
            self.process = subprocess.Popen(
                ["bash", str(self.script), str(job)], env=environment(**variables), cwd=self.folder, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        return self.process

    def run(self, job: int = 0, **variables: str) -> int:
        return self.start(job, **variables).wait(WAIT_S)

    def log(self) -> str:
        return (self.folder / "job.log").read_text()

    def statuses(self) -> list[str | None]:
        results = [tree_of(self.folder).read_result(run_id(spec)) for spec in self.specs]
        return [None if result is None else result.status for result in results]

    def attempts(self) -> list[int]:
        """Start markers of every run."""
        folders = [tree_of(self.folder).run_folder(run_id(spec)) for spec in self.specs]
        return [len(list(folder.glob("attempts/*/attempt.json"))) for folder in folders]

    def wait_for_steps(self, index: int) -> None:
        """Until the rank of a run is past its imports and trains."""
        folder = tree_of(self.folder).run_folder(run_id(self.specs[index]))
        wait_until(lambda: any(folder.glob("attempts/*/out.log")), f"run {index} to be launched")
        pid = rank_process(self.script.with_suffix(".jsonl"), index)
        wait_until(lambda: "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text(), f"run {index} to import torch")
        time.sleep(4)


def rank_process(tasks: Path, index: int) -> int:
    """The process of the only rank of run ``index``."""
    wanted = f"hpcbench.worker\0--tasks\0{tasks}\0--index\0{index}\0".encode()

    def found() -> list[int]:
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if is_rank(path)]

    def is_rank(path: Path) -> bool:
        try:
            words = path.read_bytes()
        except OSError:
            return False
        return wanted in words and words.startswith(sys.executable.encode())

    wait_until(lambda: bool(found()), f"the rank of run {index}")
    return found()[0]


def wait_until(true: Callable[[], Any], what: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < give_up, f"waited {WAIT_S:g} s for {what}"
        time.sleep(0.05)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Pack]]:
    made: list[Pack] = []

    def pack(*arguments: Any, **options: Any) -> Pack:
        made.append(Pack(tmp_path, *arguments, **options))
        return made[-1]

    yield pack
    for one in made:
        if one.process is not None and one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


def test_a_crash_within_a_pack_leaves_the_other_runs(make: Callable[..., Pack]) -> None:
    pack = make([short(0), broken(1), short(2), short(3)], 3)
    assert pack.run() == 0, pack.log()
    assert pack.statuses() == ["ok", "failed", "ok", None]
    assert pack.run(1) == 0
    assert pack.statuses() == ["ok", "failed", "ok", "ok"]
    assert pack.attempts() == [1, 1, 1, 1]
    assert pack.run() == 0
    assert pack.attempts() == [1, 1, 1, 1], "what has ended in this submission is not run twice"
    assert pack.run(SLURM_RESTART_COUNT="1") == 0
    assert pack.attempts() == [1, 1, 1, 1], "the broken one was not the interrupted one"


def test_a_terminated_job_begins_no_further_run(make: Callable[..., Pack]) -> None:
    pack = make([short(0), endless(1), short(2)], 3)
    process = pack.start()
    pack.wait_for_steps(1)
    process.terminate()
    assert process.wait(WAIT_S) == 143
    assert pack.statuses() == ["ok", "cancelled", None], pack.log()
    assert pack.attempts() == [1, 1, 0]


@pytest.mark.parametrize("verb", ["begin", "end"])
def test_a_signal_to_all_processes_spares_begin_and_end(verb: str, make: Callable[..., Pack], tmp_path: Path) -> None:
    """A scheduler tells the batch script's children, too."""
    slow = tmp_path / "slow.sh"
    slow.write_text(
        f'#!/bin/bash\nif [ "$3" = {verb} ]; then touch {tmp_path}/here; sleep 2; fi\nexec {sys.executable} "$@"\n'
    )
    slow.chmod(0o755)
    pack = make([short(0), short(1)], 2, **{f"python=({sys.executable})": f"python=({slow})"})
    process = pack.start()
    wait_until((tmp_path / "here").exists, verb)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(WAIT_S) == 143
    assert pack.attempts() == [1, 0], pack.log()
    assert pack.statuses() == ["cancelled" if verb == "begin" else "ok", None]


def test_a_rank_that_is_stuck_is_killed_at_its_own_limit_and_the_next_run_starts(make: Callable[..., Pack]) -> None:
    pack = make([endless(0), short(1)], 2, time_limit_s=30.0, **{"--kill-after=40": "--kill-after=1"})
    process = pack.start()
    pack.wait_for_steps(0)
    os.kill(rank_process(pack.script.with_suffix(".jsonl"), 0), signal.SIGSTOP)
    assert process.wait(WAIT_S) == 0, pack.log()
    assert pack.statuses() == ["timeout", "ok"]
    assert pack.attempts() == [1, 1]


def test_a_link_in_place_of_a_log_is_not_followed(make: Callable[..., Pack], tmp_path: Path) -> None:
    """Put there, in a tree that others can write to, between the attempt's begin and the launch."""
    (tmp_path / "somebodys").write_text("mine")
    plant = f'attempt=${{attempt_folder##*/}}; ln -s "{tmp_path}/somebodys" "$attempt_folder/err.log"'
    pack = make([short(1)], 1, **{"attempt=${attempt_folder##*/}": plant})
    assert pack.run() == 0
    assert pack.statuses() == ["failed"]
    assert (tmp_path / "somebodys").read_text() == "mine"
    assert "cannot overwrite existing file" in pack.log()


def test_no_run_begins_that_the_job_has_no_time_for(make: Callable[..., Pack]) -> None:
    """The first run leaves less of the job's time than the second may take."""
    pack = make([short(0), short(1)], 2, **{"-gt 1260": "-gt 600"})
    assert pack.run() == 0
    assert pack.statuses() == ["ok", None]
    assert "no time is left for run 1" in pack.log()
    assert pack.attempts() == [1, 0]
