"""What must hold of every history, checked after a storm.

once       at most one job for each name, one attempt for each start of a job, no two attempts of a run at work at
           the same time, none after an ok one
lost       no ok result without ranks that measured; no measured attempt without an ok result, unless it was stopped
true       no status failed, lost, timeout or oom of a run at work; no result that is not ok without a reason; no
           reason that names something broken that is only unreadable
alive      no traceback, no command that hangs, no temporary file left, and in the end every run is done
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.slurm.chaos.world import HISTORY, TREE, call, read_events

_OVERLAP_S = 0.6
"""Notes are half a second apart."""


class Work(NamedTuple):
    """What the ranks of one attempt noted."""

    began: float
    last: float
    job: tuple[str, int]
    """The job's number with its task, and its restarts."""
    measured: int
    """Ranks that have measured."""


def check(states: Mapping[str, tuple[str, str]]) -> list[str]:
    """The violations in the history, as sentences that begin with their kind.

    Args:
        states: state and reason of each run once all faults were healed and everything was submitted again.
    """
    events, work = read_events("events.jsonl"), _work()
    found = [f"lost: {event['what']}" for event in events if event["kind"] == "violation"]
    found += _doubled(work)
    found += _results(work)
    found += _statuses(events, work)
    found += _commands(events)
    found += [
        f"alive: run {run_id} is {state} in the end: {reason[:200]}"
        for run_id, (state, reason) in states.items()
        if state not in ("ok", "timeout", "oom")
    ]
    leftovers = [path for path in TREE.rglob(".*") if path.is_file() and time.time() - path.stat().st_mtime > 200]
    found += [f"alive: {path} was left" for path in leftovers if path.name.endswith((".lock", ".sending"))]
    return sorted(set(found))


def _work() -> dict[str, dict[int, Work]]:
    """By run and attempt."""
    notes: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for event in read_events("ranks.jsonl"):
        notes[event["run"], event["attempt"]].append(event)
    work: dict[str, dict[int, Work]] = defaultdict(dict)
    for (run_id, attempt), of_attempt in notes.items():
        first = of_attempt[0]
        job = f"{first['array']}_{first['task']}" if first["array"] else str(first["job"])
        measured = len({one["rank"] for one in of_attempt if one["kind"] == "measured"})
        work[run_id][attempt] = Work(first["t"], of_attempt[-1]["t"], (job, int(first["restart"] or 0)), measured)
    return work


def _doubled(work: Mapping[str, Mapping[int, Work]]) -> Iterator[str]:
    for run_id, attempts in work.items():
        for (first, a), (second, b) in itertools.combinations(sorted(attempts.items()), 2):
            # A job that SLURM starts again while its old node is out of reach has ended for SLURM.
            is_restart = a.job[0] == b.job[0] and a.job[1] < b.job[1]
            if a.last > b.began + _OVERLAP_S and not is_restart:
                yield (
                    f"once: run {run_id}: attempts {first} (job {a.job}) and {second} (job {b.job}) overlap by "
                    f"{a.last - b.began:.1f} s"
                )
    begun_twice = HISTORY / "begun-twice"
    if begun_twice.exists():
        yield from (
            f"once: {line}: one start of a job began two attempts" for line in begun_twice.read_text().splitlines()
        )
    yield from (
        f"once: {name} is {len(ids)} jobs: {', '.join(sorted(ids))}" for name, ids in _jobs().items() if len(ids) > 1
    )
    starts: Counter[tuple[str, str, int]] = Counter()
    for path in TREE.glob("runs/*/*/attempts/*/attempt.json"):
        start = json.loads(path.read_bytes())
        starts[path.parents[2].name, start.get("job_id", ""), start.get("restart_count", 0)] += 1
    yield from (f"once: {count} attempts of one start of job {job} for run {run_id}"
                for (run_id, job, _), count in starts.items() if count > 1)  # fmt: skip
    journalled: Counter[str] = Counter()
    for folder in TREE.glob("submissions/*"):
        numbers = set()
        for path in folder.glob("sent-*.jsonl"):
            for line in path.read_text().splitlines():
                batch = json.loads(line).get("chunk") or {}
                if batch.get("job_id"):
                    numbers.add((batch["array"], batch["first"], batch["job_id"]))
        journalled.update(number for _, _, number in numbers)
    yield from (f"once: job {number} is in {count} journals" for number, count in journalled.items() if count > 1)


def _results(work: Mapping[str, Mapping[int, Work]]) -> Iterator[str]:
    for path in TREE.glob("runs/*/*/result.json"):
        result = json.loads(path.read_bytes())
        run_id, status, attempt = path.parent.name, result["status"], result["attempt"]
        attempts = work.get(run_id, {})
        message = (result.get("error") or {}).get("message", "")
        if status == "ok" and attempt not in attempts:
            yield f"lost: run {run_id} is ok of attempt {attempt}, in which no rank was at work"
        if status == "ok" and attempts and max(attempts) > attempt:
            later = {number: one for number, one in attempts.items() if number > attempt}
            if any(one.began > attempts[attempt].last for one in later.values()):
                yield f"once: run {run_id}: attempt {max(later)} began after attempt {attempt} was ok"
        if status != "ok" and not message:
            yield f"true: run {run_id} is {status} without a reason"


def _statuses(events: list[dict[str, Any]], work: Mapping[str, Mapping[int, Work]]) -> Iterator[str]:
    for event in events:
        if event["kind"] != "states":
            continue
        for run_id, (state, reason) in event["runs"].items():
            if "Permission denied" in reason:
                yield f"true: status calls run {run_id} {state} for a file that it cannot read: {reason[:150]}"
            if state not in ("failed", "lost", "timeout", "oom"):
                continue
            newest = max(work.get(run_id, {0: None}))
            at_work = work.get(run_id, {}).get(newest)
            if at_work and at_work.began + 2 < event["began"] and event["t"] + 2 < at_work.last:
                yield (
                    f"true: status called run {run_id} {state} at {event['t']:.0f} while attempt {newest} was at "
                    f"work from {at_work.began:.0f} to {at_work.last:.0f}: {reason[:150]}"
                )


def _commands(events: list[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        if event["kind"] != "command":
            continue
        words = " ".join(event["words"])
        if "Traceback" in event["err"]:
            yield f"alive: {words}: {event['err'][-700:]}"
        if event["hung"]:
            yield f"alive: {words} of {event['user']} did not end"
        if event["code"] not in (0, 1, 2, 3, -9, 130):
            yield f"alive: {words} ended with {event['code']}: {event['err'][-300:]}"


def summary() -> str:
    """The size of the history, in a line."""
    events = read_events("events.jsonl")
    faults = [event for event in events if event["kind"] == "fault" and event["hit"]]
    killed = sum(event["kind"] == "command" and event["killed"] for event in events)
    commands = sum(event["kind"] == "command" for event in events)
    starts = sum(len(attempts) for attempts in _work().values())
    return (
        f"{len(faults)} faults, {killed} commands killed, {commands} commands, {starts} attempts, "
        f"{len(_jobs())} jobs and arrays"
    )


def _jobs() -> dict[str, set[str]]:
    """The numbers of the scheduler's jobs by name."""
    names: dict[str, set[str]] = defaultdict(set)
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(read_events("events.jsonl")[0]["t"]))
    tokens = {json.loads(path.read_bytes())["token"] for path in TREE.glob("submissions/*/submission.json")}
    for line in call("sacct", "-n", "-X", "-P", "-D", "-a", "-S", since, "-o", "JobID,JobName").stdout.splitlines():
        job_id, _, name = line.partition("|")
        if name.startswith("hpcbench-") and tokens & set(name.split("-")):
            names[name].add(job_id.partition("_")[0])
    return names
