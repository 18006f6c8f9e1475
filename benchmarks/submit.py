"""``submit`` and ``status`` of large sweeps on the SLURM box, against bare sbatch and squeue, in turn.

Nothing runs: the partition takes jobs and starts none. Starts the box where there is none. Prints one line of JSON.
"""

from __future__ import annotations

import getpass
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.ratios import median_interval
from tests.slurm.box import Box, BoxError

RUNS = 10_000
SIZES = (1_000, 10_000, 50_002, 100_000)
PAIRS = 7
ROUNDS = 3
GOAL_SUBMIT = 2.0
GOAL_STATUS = 3.0
GOAL_GROWTH = 1.2
PARTITION = "normal"

SWEEP = """name = "many-{runs}"
[fixed]
model = "resnet18"
dataset = "digits"
strategy = "ddp"
batch_size = 8
[grid]
nodes = [1, 2, 4]
seed = {seeds}
[[exclude]]
nodes = [2, 4]
seed = {last}
"""


class Look(NamedTuple):
    """Times measured while the jobs of one submit were pending."""

    submit_s: float
    status_s: float
    help_s: float
    asked_s: float
    scan_s: float
    files: int


class Bare(NamedTuple):
    """A submission without hpcbench: its files, and array, first job and number of jobs of each call of sbatch."""

    files: dict[str, bytes]
    calls: list[tuple[int, int, int]]

    def seconds(self) -> float:
        """Return the seconds to write the files and to make the calls, one after another."""
        with cancelled() as folder:
            return timed(lambda: self._submit(folder))

    def _submit(self, folder: Path) -> None:
        for name, data in self.files.items():
            with open(folder / name, "wb") as file:
                file.write(data)
        for array, first, count in self.calls:
            command = ["sbatch", f"--array=0-{count - 1}", str(folder / f"{array}.sh"), str(first)]
            subprocess.run(command, capture_output=True, check=True)


def sweep_file(folder: Path, runs: int) -> Path:
    """A sweep of ``runs`` runs of three shapes, one run more than a multiple of three."""
    assert runs % 3 == 1, runs
    path = folder / f"many-{runs}.toml"
    last = runs // 3
    path.write_text(SWEEP.format(runs=runs, seeds=list(range(last + 1)), last=last))
    return path


def hpcbench(*arguments: str | Path) -> float:
    return seconds([sys.executable, "-m", "hpcbench", *map(str, arguments)])


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"exit code {done.returncode}: {' '.join(command)}: {done.stderr.strip()}")
    return time.perf_counter() - began


def look(sweep: Path) -> Look:
    """One submit into a new tree, and one status."""
    with cancelled() as results:
        submit_s = hpcbench("submit", sweep, *on(results))
        asked_s, scan_s = seconds(["squeue", "-h", "-r"]), timed(lambda: scan(results))
        status_s, help_s = hpcbench("status", "--results", results), hpcbench("--help")
        files = sum(1 for path in results.rglob("*") if path.is_file())
        return Look(submit_s, status_s, help_s, asked_s, scan_s, files)


def render_s(sweep: Path) -> float:
    with tempfile.TemporaryDirectory() as name:
        return hpcbench("render", sweep, *on(Path(name)), "--out", Path(name, "out"))


def on(results: Path) -> tuple[str | Path, ...]:
    return "--cluster", "slurmbox", "--results", results


def bare_of(sweep: Path) -> Bare:
    """Return the files and calls of a submit of ``sweep``, to repeat them without hpcbench."""
    with cancelled() as results:
        hpcbench("submit", sweep, *on(results))
        (folder,) = (results / "slurmbox" / "submissions").iterdir()
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    chunks = [json.loads(line).get("chunk", {}) for line in files["sent-1.jsonl"].splitlines()]
    calls = [(chunk["array"], chunk["first"], chunk["count"]) for chunk in chunks if "job_id" in chunk]
    return Bare(files, calls)


def scan(results: Path) -> None:
    """List the tree and read the submission's files."""
    folders = [str(results)]
    while folders:
        for entry in os.scandir(folders.pop()):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                with open(entry.path, "rb") as file:
                    file.read()


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def cancelled() -> Iterator[Path]:
    """A new folder, and no job that was submitted meanwhile left behind."""
    with tempfile.TemporaryDirectory() as name:
        try:
            yield Path(name)
        finally:
            subprocess.run(["scancel", "-u", getpass.getuser()], check=True)
            while subprocess.run(["squeue", "-h"], capture_output=True, check=True).stdout:
                time.sleep(0.2)


@contextmanager
def held_box() -> Iterator[None]:
    """The box, started where there is none, with a partition that starts no job."""
    box = Box()
    started = box.up(box.options)
    try:
        os.environ["SLURM_CONF"] = str(box.slurm_conf)
        subprocess.run(["scontrol", "update", f"partitionname={PARTITION}", "state=down"], check=True)
        try:
            yield
        finally:
            subprocess.run(["scontrol", "update", f"partitionname={PARTITION}", "state=up"], check=True)
    finally:
        if started:
            box.down()


def main() -> None:
    try:
        with held_box(), tempfile.TemporaryDirectory() as name:
            sweeps = {size: sweep_file(Path(name), size) for size in SIZES}
            bare = bare_of(sweeps[RUNS])
            pairs = [pair(sweeps[RUNS], bare, ours_first=bool(number % 2)) for number in range(PAIRS)]
            rounds = [{size: look(path) for size, path in sweeps.items()} for _ in range(ROUNDS)]
    except BoxError as error:
        print(json.dumps([row("submit and status on the SLURM box", f"not measured: {error}", "")]))
        return
    print(json.dumps([*ratio_rows(pairs), *growth_rows(rounds)]))


def pair(sweep: Path, bare: Bare, *, ours_first: bool) -> tuple[Look, float, float]:
    if ours_first:
        return look(sweep), render_s(sweep), bare.seconds()
    floor_s, rendered_s = bare.seconds(), render_s(sweep)
    return look(sweep), rendered_s, floor_s


def ratio_rows(pairs: list[tuple[Look, float, float]]) -> list[dict[str, object]]:
    submit = [(one.submit_s - rendered_s) / floor_s for one, rendered_s, floor_s in pairs]
    status = [(one.status_s - one.help_s) / (one.asked_s + one.scan_s) for one, _, _ in pairs]
    middle = Look(*map(statistics.median, zip(*(one for one, _, _ in pairs), strict=True)))
    rendered_s = statistics.median(one for _, one, _ in pairs)
    floor_s = statistics.median(one for _, _, one in pairs)
    return [
        ratio_row(
            f"submit less render of {RUNS:,} runs of 3 shapes over bare sbatch and writing",
            submit,
            f"{middle.submit_s:.2f} s - {rendered_s:.2f} s over {floor_s:.2f} s",
            GOAL_SUBMIT,
        ),
        ratio_row(
            f"status less --help of {RUNS:,} pending runs over squeue -r and a scan",
            status,
            f"{middle.status_s:.2f} s - {middle.help_s:.2f} s over {middle.asked_s:.2f} s + {middle.scan_s:.3f} s",
            GOAL_STATUS,
        ),
    ]


def growth_rows(rounds: list[dict[int, Look]]) -> list[dict[str, object]]:
    """Differences of two sizes leave out constant costs, such as the start of a process."""
    sizes = ", ".join(f"{size:,}" for size in SIZES)
    _, few, more, most = SIZES
    rows = []
    for what in ("submit", "status"):
        # Others only ever make it slower.
        best = {size: min(getattr(one[size], f"{what}_s") for one in rounds) for size in SIZES}
        growth = (best[most] - best[more]) / (most - more) / ((best[more] - best[few]) / (more - few))
        words = ", ".join(f"{seconds:.2f}" for seconds in best.values())
        figure = f"{what}: time of a further run beyond {more:,} over that beyond {few:,}, best of {len(rounds)}"
        goal = f"at most {GOAL_GROWTH}"
        rows.append(row(figure, f"{growth:.2f} ({words} s at {sizes})", goal, met=growth <= GOAL_GROWTH))
    files = [{one[size].files for one in rounds} for size in SIZES]
    counts = ", ".join("/".join(map(str, sorted(one))) for one in files)
    return [
        *rows,
        row(f"files that submit writes at {sizes} runs", counts, "as many at each", met=len(set().union(*files)) == 1),
    ]


def ratio_row(figure: str, ratios: list[float], words: str, goal: float) -> dict[str, object]:
    ratio, low, high = median_interval(ratios)
    figure = f"{figure}, {len(ratios)} times"
    return row(figure, f"{ratio:.2f} [{low:.2f} {high:.2f}] ({words})", f"at most {goal:.1f}", met=ratio <= goal)


def row(figure: str, measured: str, goal: str, *, met: bool | None = None) -> dict[str, object]:
    return {"figure": figure, "measured": measured, "goal": goal, "met": met}


if __name__ == "__main__":
    main()
