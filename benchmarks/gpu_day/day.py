"""The day itself: all parts in order, in one pool of ranks, within a limit of time, into at most seven files.

    machine.json     the machine, and what it lacks
    results.tar.gz   the results of all runs with their logs: a bundle, as `hpcbench table` and `report` read it
    loops.json       hpcbench's training loop beside others
    shards.json      one real rank among ranks that do not exist
    report.md        what ran, what failed, predictions against measurements
    log.txt          one line for each run, with its time

Files are replaced as runs end, so that a day that is cut keeps everything up to the cut.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from benchmarks.gpu_day.machines import LARGE_MEMORY, DayProfiles, device_key, write_profiles
from benchmarks.gpu_day.outputs import LOG, LOOPS, MACHINE, REPORT, RESULTS, SHARDS
from benchmarks.gpu_day.parts import Device, Part, Size, day_parts, part_sweep
from benchmarks.gpu_day.preflight import Machine, inspect_machine, is_hopeless, machine_lines
from benchmarks.gpu_day.report import write_report
from hpcbench.errors import HpcbenchError
from hpcbench.fileio import encode_indented_json, make_folder, write_atomic
from hpcbench.report.sweep_bundle import write_bundle
from hpcbench.results.results_tree import ResultsTree
from hpcbench.submit.local_scheduler import queue_process
from hpcbench.submit.plan import SweepPlan, make_plan
from hpcbench.submit.submission_record import next_submission_folder, read_sweep_record
from hpcbench.submit.submit import render_submission, submit, write_submission, write_sweep_record

LIMIT_S = 420.0
_BUNDLE_EVERY_S = 15.0
_RESERVE_S = 15.0
"""Kept from the parts for the last bundle and the report."""
_SCRIPT_S = 60.0
"""Time that the loops, and the shards, may take before the parts after them."""


class Day:
    """One day: its folder of outputs, its results tree and its clock."""

    def __init__(
        self, out: Path, device: Device, size: Size, limit_s: float, wheels: Path | None, *, verifies: bool
    ) -> None:
        self.began_s = time.monotonic()
        self.out, self.device, self.limit_s, self.verifies = out, device, limit_s, verifies
        make_folder(out)
        for name in (MACHINE, RESULTS, LOOPS, SHARDS, REPORT, LOG):
            # A day that is cut must not leave files of an earlier one.
            (out / name).unlink(missing_ok=True)
        self._log: IO[str] = (out / LOG).open("w")
        self.machine: Machine = inspect_machine(device, size, wheels)
        write_atomic(out / MACHINE, encode_indented_json(self.machine))
        for line in machine_lines(self.machine):
            self.say(line)

    @property
    def left_s(self) -> float:
        """Seconds that runs may still take."""
        return self.limit_s - _RESERVE_S - (time.monotonic() - self.began_s)

    def say(self, text: str) -> None:
        """Print a line with the time, and keep it."""
        for stream in (sys.stdout, self._log):
            print(f"{time.monotonic() - self.began_s:6.1f} s  {text}", file=stream, flush=True)

    def run(self) -> int:
        """Run all parts; return 0 if the day went to its end, 1 if runs failed or were cut, 2 if none can start."""
        if is_hopeless(self.machine, self.device):
            return 2
        work = Path(tempfile.mkdtemp(prefix="hpcbench-gpu-day-"))
        gpu = self.machine.gpu.name if self.machine.gpu is not None else None
        profiles = write_profiles(work / "clusters", self.device, gpu, self.machine.cores)
        self.tree = ResultsTree(work / "results")
        lacking = self.machine.lacks()
        self.parts = [
            part if self.verifies else part._replace(fixed={**part.fixed, "verify": False})
            for part in day_parts(self.machine.size, large_memory=device_key(gpu) in LARGE_MEMORY)
            if not lacking & set(part.needs)
        ]
        plans = {part.name: self._plan(part, profiles) for part in self.parts}
        queue = self._launch(plans["launcher"])
        pooled = [part for part in self.parts if part.name != "launcher"]
        after = [part.name for part in pooled].index("singles") + 1
        codes = [self._pool(plans, pooled[:after], self.left_s)]
        codes.append(self._script("training_loops", LOOPS, min(self.left_s, _SCRIPT_S)))
        codes.append(self._script("real_rank", SHARDS, min(self.left_s, _SCRIPT_S)))
        codes.append(self._pool(plans, pooled[after:], self.left_s))
        self._end_queue(queue)
        self.bundle()
        self.say(f"wrote {', '.join(sorted(path.name for path in self.out.iterdir()))} into {self.out}")
        shutil.rmtree(work, ignore_errors=True)
        return int(any(codes))

    def _plan(self, part: Part, profiles: DayProfiles) -> SweepPlan:
        profile = profiles.of(part.is_shared)
        plan = make_plan(part_sweep(part), profile, self.tree.cluster(profile.name))
        for dropped in plan.dropped:
            self.say(f"{part.name}: left out: {dropped.point['strategy']} {dropped.point['model']}: {dropped.reason}")
        return plan

    def _launch(self, plan: SweepPlan) -> Path | None:
        """Submit the part of the real launcher, whose queue works beside the pool; return its folder."""
        try:
            outcome = submit(plan, plan.tree)
        except HpcbenchError as error:
            self.say(f"launcher: not submitted: {error}")
            return None
        return outcome.folder

    def _end_queue(self, folder: Path | None) -> None:
        if folder is None:
            return
        while (process := queue_process(folder)) is not None and self.left_s > 0:
            time.sleep(0.2)
        if process is not None:
            self.say("launcher: ended by the day's limit")
            process.terminate()
            with suppress(Exception):
                process.wait(5)

    def _pool(self, plans: dict[str, SweepPlan], parts: Sequence[Part], limit_s: float) -> int:
        """Run ``parts`` in one pool of ranks."""
        files = [str(file) for part in parts for file in _task_files(plans[part.name])]
        if limit_s <= 0:
            self.say(f"no time is left for {', '.join(part.name for part in parts)}")
            return 1
        self.say(f"pool: {', '.join(part.name for part in parts)}")
        return self._follow(["-m", "benchmarks.gpu_day.rank_pool", "--limit-s", f"{limit_s:.1f}", "--tasks", *files])

    def _script(self, module: str, file: str, limit_s: float) -> int:
        """Run a module of this package that writes ``file``; no plan has its configurations."""
        if limit_s <= 0:
            self.say(f"no time is left for {file}")
            return 1
        options = [
            "--device",
            self.device,
            "--size",
            self.machine.size,
            "--out",
            str(self.out / file),
            "--limit-s",
            f"{limit_s:.1f}",
        ]
        return self._follow(["-m", f"benchmarks.gpu_day.{module}", *options], limit_s=max(limit_s, self.left_s))

    def _follow(self, words: list[str], limit_s: float = float("inf")) -> int:
        """Run Python with ``words``, log what it prints, and bundle the results from time to time."""
        process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        began_s = bundled_s = time.monotonic()
        while process.poll() is None:
            self._say_lines(process.stdout)
            if time.monotonic() - bundled_s > _BUNDLE_EVERY_S:
                self.bundle()
                bundled_s = time.monotonic()
            if time.monotonic() - began_s > limit_s:
                process.kill()
            time.sleep(0.1)
        self._say_lines(process.stdout)
        self.bundle()
        return process.returncode

    def _say_lines(self, stream: IO[str]) -> None:
        for line in stream.readlines():
            self.say(line.rstrip())

    def bundle(self) -> None:
        """Write the results so far, and the report on them."""
        sweeps = []
        for cluster in self.tree.clusters() if self.tree.root.is_dir() else []:
            for part in self.parts:
                record = read_sweep_record(self.tree.cluster(cluster), part.sweep_name)
                sweeps += [(cluster, record)] if record is not None else []
        if sweeps:
            write_bundle(self.tree, sweeps, self.out / RESULTS, logs=True)
            write_report(self.out)


def _task_files(plan: SweepPlan) -> Iterable[Path]:
    """Write a submission of ``plan`` without submitting it; return its task files in order."""
    folder = next_submission_folder(plan.tree, plan.sweep.name)
    rendered = render_submission(plan, plan.runs, plan.tree, folder)
    write_sweep_record(plan, plan.tree)
    write_submission(rendered, folder)
    return [folder / f"{array.number}.jsonl" for array in rendered.record.arrays]


def run_day(
    out: Path,
    device: Device,
    size: Size,
    limit_s: float = LIMIT_S,
    wheels: Path | None = None,
    *,
    verifies: bool = True,
) -> int:
    """Run the day into the folder ``out``; see ``Day.run``."""
    return Day(out, device, size, limit_s, wheels, verifies=verifies).run()
