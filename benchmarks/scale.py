"""``plan`` and ``render`` of large sweeps, as a user calls them, against a naive expansion in plain Python, in turn.

Every sweep has 20 shapes, a derived parameter and a rule that leaves points out. Prints one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.processes import Measured, timed
from benchmarks.ratios import median_interval

BUDGET_S = 15.0
"""For the pairs on one file system, at least three of them."""
IN_MEMORY = Path("/dev/shm")
ROUNDS = 5
RUNS = 10_000
SIZES = (1_000, 10_000, 100_000)
GOAL_RATIO = 1.0
GOAL_MIB = 300
GOAL_GROWTH = 1.2

SWEEP = """name = "scale"
[fixed]
model = "resnet18"
dataset = "imagenet"
strategy = "ddp"
options = {{ static_graph = true }}
[grid]
nodes = [1, 2, 4, 8]
tasks_per_node = [1, 2, 3, 4, 8]
batch_size = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
learning_rate = {rates}
[derive]
warmup_steps = "5 if nodes < 4 else 2"
[[exclude]]
when = "batch_size > 512 and nodes >= 1"
"""


def sweep_file(folder: Path, runs: int) -> Path:
    path = folder / f"scale-{runs}.toml"
    path.write_text(SWEEP.format(rates=[number / 10_000 for number in range(1, runs // 200 + 1)]))
    return path


def ours(sweep: Path, place: Path | None = None) -> Measured:
    with _emptied(place) as folder:
        command = [sys.executable, "-m", "hpcbench"]
        on = ["--cluster", "generic-slurm", "--results", str(folder / "results")]
        parts = (["plan", str(sweep), *on, "--json"], ["render", str(sweep), *on, "--out", str(folder / "out")])
        ran = [timed([*command, *part]) for part in parts]
        files = sum(1 for path in folder.rglob("*") if path.is_file())
        return Measured(
            sum(one.seconds for one in ran), sum(one.cpu_s for one in ran), max(one.peak_mib for one in ran), files
        )


def naive(runs: int, place: Path | None = None) -> Measured:
    with _emptied(place) as folder:
        ran = timed([sys.executable, "benchmarks/naive_sweep.py", str(folder), str(runs // 200)])
        return ran._replace(files=2 * runs)


@contextmanager
def _emptied(place: Path | None) -> Iterator[Path]:
    """A new folder in ``place`` or where temporary files lie, removed outside what is timed."""
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield Path(name)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        sweeps = {size: sweep_file(Path(name), size) for size in SIZES}
        on_disk = _pairs(sweeps[RUNS], None)
        in_memory = _pairs(sweeps[RUNS], IN_MEMORY) if IN_MEMORY.is_dir() else []
        rounds = [{size: ours(sweep) for size, sweep in sweeps.items()} for _ in range(ROUNDS)]
    print(json.dumps([*_floor_rows(on_disk, in_memory), *_growth_rows(rounds)]))


def _pairs(sweep: Path, place: Path | None) -> list[tuple[Measured, Measured]]:
    began = time.monotonic()
    pairs: list[tuple[Measured, Measured]] = []
    while len(pairs) < 3 or time.monotonic() - began < BUDGET_S:
        pairs.append((ours(sweep, place), naive(RUNS, place)))
    return pairs


def _floor_rows(
    on_disk: list[tuple[Measured, Measured]], in_memory: list[tuple[Measured, Measured]]
) -> list[dict[str, object]]:
    rows = [_ratio_row(on_disk, "on disk", GOAL_RATIO)]
    if in_memory:
        # A floor for its floor: a file costs nothing there, and what is left is the start of our two processes.
        rows.append(_ratio_row(in_memory, "in memory", None))
    peak_mib = max(one.peak_mib for one, _ in on_disk)
    return [
        *rows,
        {
            "figure": f"their peak memory at {RUNS:,} runs",
            "measured": f"{peak_mib:.0f} MiB", "goal": f"under {GOAL_MIB} MiB", "met": peak_mib < GOAL_MIB,
        },
    ]  # fmt: skip


def _ratio_row(pairs: list[tuple[Measured, Measured]], place: str, goal: float | None) -> dict[str, object]:
    ratio, low, high = median_interval([one.seconds / other.seconds for one, other in pairs])
    times = [statistics.median(one.seconds for one in column) for column in zip(*pairs, strict=True)]
    return {
        "figure": f"plan and render of {RUNS:,} runs of 20 shapes over a naive expansion, files {place}, "
        f"{len(pairs)} pairs",
        "measured": f"{ratio:.2f} [{low:.2f} {high:.2f}] ({times[0]:.2f} s over {times[1]:.2f} s)",
        "goal": "" if goal is None else f"at most {goal:.1f}", "met": None if goal is None else ratio <= goal,
    }  # fmt: skip


def _growth_rows(rounds: list[dict[int, Measured]]) -> list[dict[str, object]]:
    """The start of the two processes is in all three sizes alike; differences are free of it.

    Of processor time: a round takes seconds, and what else the machine does in them is no growth of ours.
    """
    small, middle, large = SIZES
    steps = (large - small) / (middle - small)
    growths = [(one[large].cpu_s - one[small].cpu_s) / (one[middle].cpu_s - one[small].cpu_s) / steps for one in rounds]
    growth, low, high = median_interval(growths)
    seconds = statistics.median(one[large].seconds for one in rounds)
    plain = statistics.median(one[large].cpu_s / one[middle].cpu_s / (large / middle) for one in rounds)
    files = {size: {one[size].files for one in rounds} for size in SIZES}
    return [
        {
            "figure": f"processor time per run at {large:,} runs over that at {middle:,}, without the processes' start",
            "measured": f"{growth:.2f} [{low:.2f} {high:.2f}] ({plain:.2f} with it; {seconds:.1f} s, "
            f"{max(one[large].peak_mib for one in rounds):.0f} MiB)",
            "goal": f"at most {GOAL_GROWTH}", "met": growth <= GOAL_GROWTH,
        },
        {
            "figure": "files that render writes at " + ", ".join(f"{size:,}" for size in SIZES) + " runs",
            "measured": ", ".join("/".join(map(str, sorted(counts))) for counts in files.values()),
            "goal": "as many at each", "met": len(set().union(*files.values())) == 1,
        },
    ]  # fmt: skip


if __name__ == "__main__":
    main()
