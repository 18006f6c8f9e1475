"""Conditions after any fault: one truthful result a run, none lost, none run twice."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from typing import Any, NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.attempts import Attempt
from hpcbench.results.schema import STATUSES
from hpcbench.submit.journal import read_journal
from hpcbench.submit.plan import RERUN_ON_SUBMIT
from tests.slurm.faults.project import Project

TO_BE_RUN = frozenset({"planned", "waiting"}) | RERUN_ON_SUBMIT
_CHUNK = re.compile(r"hpcbench-(?P<submission>.+)-(?P<token>[0-9a-f]{8})-(?P<array>\d+)\.(?P<first>\d+)-(?P<last>\d+)")


class Truth(NamedTuple):
    """The outcome; ``lost`` and ``doubled`` name runs with the reason."""

    runs: int
    ok: int
    lost: list[str]
    doubled: list[str]


def find_truth(project: Project, sweep: str) -> Truth:
    """Look at everything that a sweep left: status, results, attempts, journals, the scheduler's accounts."""
    run_ids = project.run_ids(sweep)
    states = project.states(sweep)
    lost = [f"{run_id}: an ok result has changed" for run_id in _changed(project)]
    ok = 0
    for run_id in run_ids:
        path = project.tree.result_path(run_id)
        result = _read(path.read_bytes()) if path.exists() else None
        if result is not None:
            lost += [f"{run_id}: {word}" for word in _untrue(project, run_id, result)]
            ok += result["status"] == "ok"
        if result is None and states[run_id] not in TO_BE_RUN:
            lost.append(f"{run_id}: no result, and its state is {states[run_id]}")
        elif result is not None and states[run_id] != result["status"]:
            lost.append(f"{run_id}: the result says {result['status']}, status says {states[run_id]}")
    if set(states) != set(run_ids):
        lost.append("status speaks of other runs than the sweep")
    return Truth(len(run_ids), ok, lost, [*run_twice(project), *_sent_twice(project)])


def _changed(project: Project) -> list[str]:
    return [run_id for run_id, data in project.seen_ok.items() if project.tree.result_path(run_id).read_bytes() != data]


def _read(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _untrue(project: Project, run_id: str, result: dict[str, Any]) -> list[str]:
    """Return the contradictions within a result, or to the rank files."""
    status, spec = result["status"], msgspec.convert(result["spec"], RunSpec)
    if result["run_id"] != run_id or status not in STATUSES:
        return [f"a result of {result['run_id']} with status {status}"]
    if status != "ok":
        return [] if result.get("error", {}).get("message") else [f"{status} without a reason"]
    world = spec.ranks
    ranks = Attempt(project.tree.run_folder(run_id), result["attempt"]).read_ranks()
    found = []
    if sorted(ranks) != list(range(world)) or [rank["rank"] for rank in result["ranks"]] != list(range(world)):
        found.append(f"ok with ranks {sorted(ranks)} of {world}")
    # The number of steps of a command is the program's own.
    is_training = spec.workload == "training"
    if any(rank.status != "ok" or (is_training and rank.steps_done != spec.steps) for rank in ranks.values()):
        found.append("ok, but not all ranks are")
    if len({rank["host"] for rank in result["ranks"]}) != spec.nodes:
        found.append("ok on other hosts than asked for")
    if "error" in result or (is_training and len(result["step_times_s"]) != spec.steps):
        found.append("ok with an error or without all steps")
    return found


def run_twice(project: Project) -> list[str]:
    """Attempts that ought not to be: after an ok one, or begun before the one before had ended."""
    attempts: dict[str, list[Attempt]] = defaultdict(list)
    for run_id, attempt in project.attempts():
        if attempt.read_start() is not None:
            attempts[run_id].append(attempt)
    found = []
    for run_id, of_run in attempts.items():
        starts = [attempt.read_start() for attempt in of_run]
        launches = {(start.job_id, start.restart_count, start.launch) for start in starts if start}
        if len(launches) != len(of_run):
            found.append(f"{run_id}: two attempts of one launch")
        jobs = {(start.job_id, start.restart_count) for start in starts if start}
        if len(jobs) != len(of_run):
            found.append(f"{run_id}: two attempts of one start of a job")
        for before, after in itertools.pairwise(of_run):
            found += [f"{run_id}: {word}" for word in _out_of_turn(project, run_id, before, after)]
    return found


def _out_of_turn(project: Project, run_id: str, before: Attempt, after: Attempt) -> list[str]:
    second = after.read_start()
    assert second is not None
    found = []
    if run_id not in project.damaged and _is_ok(project, run_id, before):
        found.append(f"attempt {after.number} began after attempt {before.number} had ended ok")
    if max(path.stat().st_mtime for path in before.folder.iterdir()) > second.started_unix_s:
        found.append(f"attempt {before.number} was still at work when attempt {after.number} began")
    return found


def _is_ok(project: Project, run_id: str, attempt: Attempt) -> bool:
    """Whether all ranks of the attempt left a file that says ok."""
    start, ranks = attempt.read_start(), attempt.read_ranks()
    assert start is not None
    (world,) = {
        array.ranks
        for folder, record in project.submissions()
        for array in record.arrays
        if start.belongs_to(folder.name) and run_id in array.run_ids
    }
    return len(ranks) == world and all(rank.status == "ok" for rank in ranks.values())


def _sent_twice(project: Project) -> list[str]:
    """Jobs that the scheduler has taken twice: by name, in its accounts and in the journals."""
    text = project.slurm("sacct", "-n", "-X", "-P", "-D", "-a", "-S", "now-2hours", "-o", "JobID,JobName")
    masters: dict[str, set[str]] = defaultdict(set)
    for line in text.splitlines():
        job_id, _, name = line.partition("|")
        masters[name].add(job_id.partition("_")[0])
    found = []
    for folder, record in project.submissions():
        places: set[tuple[int, int]] = set()
        for name, ids in masters.items():
            match = _CHUNK.fullmatch(name)
            if match is None or (match["submission"], match["token"]) != (record.submission, record.token):
                continue
            if len(ids) > 1:
                found.append(f"{name} is {len(ids)} jobs: {', '.join(sorted(ids))}")
            for number in range(int(match["first"]), int(match["last"]) + 1):
                place = int(match["array"]), number
                if place in places:
                    found.append(f"job {number} of array {place[0]} of {folder.name} was sent twice")
                places.add(place)
        known = read_journal(folder).job_ids()
        if len(known) != len(set(known)):
            found.append(f"the journal of {folder.name} has a job twice")
        unknown = {job.partition("_")[0] for job in known} - {job for ids in masters.values() for job in ids}
        found += [f"the accounts have no job {job} of {folder.name}" for job in unknown]
    return found
