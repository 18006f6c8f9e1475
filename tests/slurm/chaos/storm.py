"""A storm: commands of three users and faults, all drawn from a seed beforehand, so that a part can be played again."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.slurm.chaos.faults import FAULTS, SERIOUS, heal
from tests.slurm.chaos.world import CLOCK_SKEWS_S, SWEEPS, TREE, hpcbench, note

_COMMANDS = {
    "submit": 30, "submit --wait": 4, "run": 4, "status": 6, "status --json": 22, "status --audit": 3, "retry": 10,
    "cancel": 2, "cancel --where": 6, "clean": 5, "collect": 3, "logs": 3, "table": 2,
}  # fmt: skip
_KILLED = ("submit", "submit --wait", "run", "retry", "cancel", "cancel --where", "clean")


class Action(NamedTuple):
    """A command or a fault. ``seed`` decides what it hits, and how long it lasts."""

    at_s: float
    actor: str
    """A user, or ``fault``."""
    words: list[str]
    kill_after_s: float | None = None
    seed: int = 0


def draw(seed: int, length_s: float) -> list[Action]:
    """The actions of a storm, by time."""
    actions: list[Action] = []
    for user in CLOCK_SKEWS_S:
        rng = random.Random(f"{seed} {user}")
        at_s = rng.uniform(0, 4)
        while at_s < length_s:
            kind = rng.choices(list(_COMMANDS), list(_COMMANDS.values()))[0]
            kills = kind in _KILLED and rng.random() < (1.0 if kind in ("submit --wait", "run") else 0.3)
            longest_s = 60.0 if kind in ("submit --wait", "run") else 4.0
            kill_after_s = rng.uniform(0.3, longest_s) if kills else None
            actions.append(Action(at_s, user, _words(kind, rng.choice(list(SWEEPS)), rng), kill_after_s))
            at_s += rng.uniform(1.5, 6)
    rng = random.Random(f"{seed} fault")
    at_s = 3.0
    while at_s < length_s:
        name = rng.choices(list(FAULTS), [weight for _, weight in FAULTS.values()])[0]
        actions.append(Action(at_s, "fault", [name], seed=rng.randrange(2**31)))
        at_s += rng.uniform(0.5, 6)
    return sorted(actions, key=lambda action: action.at_s)


def _words(kind: str, sweep: str, rng: random.Random) -> list[str]:
    if kind == "cancel --where":
        return ["cancel", sweep, "--where", f"seed % 7 == {rng.randrange(7)}"]
    if kind == "clean":
        return ["clean", "--yes", "--older-than", rng.choice(["1 s", "20 s", "1 min"])]
    if kind == "status":
        return ["status"]
    if kind == "logs":
        return ["logs", sweep, "--failed"]
    verb, *options = kind.split()
    on_cluster = ["--cluster", "chaos"] if verb in ("submit", "run", "retry") else []
    return [verb, sweep, *on_cluster, *options]


def save(actions: Sequence[Action], path: Path) -> None:
    path.write_text("\n".join(json.dumps(action._asdict()) for action in actions) + "\n")


def load(path: Path) -> list[Action]:
    return [Action(**json.loads(line)) for line in path.read_text().splitlines()]


def play(actions: Sequence[Action]) -> None:
    """Play ``actions`` at their times, and heal. A user's command waits for the one before."""
    began_s = time.monotonic() - (actions[0].at_s if actions else 0.0)
    stop = threading.Event()
    watch = threading.Thread(target=_watch_results, args=(stop,), daemon=True)
    watch.start()
    threads = [
        threading.Thread(target=_play_user, args=([one for one in actions if one.actor == user], began_s), daemon=True)
        for user in CLOCK_SKEWS_S
    ]
    threads.append(
        threading.Thread(
            target=_play_faults, args=([one for one in actions if one.actor == "fault"], began_s), daemon=True
        )
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heal()
    time.sleep(2)
    stop.set()
    watch.join()


def _wait_until(at_s: float, began_s: float) -> None:
    time.sleep(max(0.0, began_s + at_s - time.monotonic()))


def _play_user(actions: Sequence[Action], began_s: float) -> None:
    length_s = actions[-1].at_s if actions else 0.0
    for action in actions:
        _wait_until(action.at_s, began_s)
        if time.monotonic() - began_s > length_s + 60:
            return  # commands that waited for faults have used the time up
        hpcbench(action.actor, *action.words, kill_after_s=action.kill_after_s)


def _play_faults(actions: Sequence[Action], began_s: float) -> None:
    running: dict[threading.Thread, str] = {}
    for action in actions:
        _wait_until(action.at_s, began_s)
        running = {thread: name for thread, name in running.items() if thread.is_alive()}
        (name,), active = action.words, set(running.values())
        # One mode a command, and one serious fault at a time; what does not fit is left out.
        is_mode = name.split()[0] in ("squeue", "sbatch", "sacct", "scancel", "scontrol")
        same_command = is_mode and any(other.split()[0] == name.split()[0] for other in active)
        if len(running) >= 4 or name in active or (name in SERIOUS and active & SERIOUS) or same_command:
            continue
        thread = threading.Thread(target=_inject, args=(name, action.seed), daemon=True)
        thread.start()
        running[thread] = name
    for thread in running:
        thread.join()


def _inject(name: str, seed: int) -> None:
    began = time.time()
    note("fault begins", name=name)
    try:
        hit = FAULTS[name][0](random.Random(seed))
    except Exception as error:  # noqa: BLE001 - the storm goes on, and the history has it
        note("injector failed", name=name, error=repr(error))
        return
    note("fault", name=name, began=began, hit=hit)


def _watch_results(stop: threading.Event) -> None:
    """An ok result never changes or vanishes, and no result is ever half written."""
    seen: dict[str, bytes] = {}
    while not stop.wait(1.0):
        for path in TREE.glob("runs/*/*/result.json"):
            run_id = path.parent.name
            try:
                data = path.read_bytes()
            except OSError:
                continue
            try:
                status = json.loads(data)["status"]
            except (ValueError, KeyError):
                note("violation", what=f"{run_id}: a result of {len(data)} bytes cannot be read")
                continue
            if status == "ok" and seen.setdefault(run_id, data) != data:
                note("violation", what=f"{run_id}: its ok result has changed")
        for run_id in seen:
            if not (TREE / "runs" / run_id[:2] / run_id / "result.json").exists():
                note("violation", what=f"{run_id}: its ok result has vanished")


def converge(patience_s: float = 900.0) -> dict[str, Any]:
    """Submit until no run is queued or to be run, or none has ended for so long; return the states by run.

    How fast a backlog shrinks is a property of the machine; that it shrinks is one of the program.
    """
    give_up, fewest = time.monotonic() + patience_s, 10**9
    states: dict[str, Any] = {}
    while time.monotonic() < give_up:
        for sweep in SWEEPS:
            for user in CLOCK_SKEWS_S:
                hpcbench(user, "submit", sweep, "--cluster", "chaos")
        states = {}
        for sweep in SWEEPS:
            code, out, _ = hpcbench("boxuser1", "status", sweep, "--json")
            if code in (0, 1):
                for found in json.loads(out)["sweeps"]:
                    states |= {run["run_id"]: (run["state"], run["reason"]) for run in found["runs"]}
        # What left the queue without a trace is for its user to send again.
        for sweep in SWEEPS if any(state == "lost" for state, _ in states.values()) else ():
            hpcbench("boxuser1", "retry", sweep, "--cluster", "chaos", "--status", "lost")
        open_states = {"lost", "planned", "waiting", "pending", "running", "failed", "cancelled", "preempted"}
        unfinished = sum(state in open_states for state, _ in states.values())
        if states and not unfinished:
            break
        if unfinished < fewest:
            give_up, fewest = time.monotonic() + patience_s, unfinished
        time.sleep(5)
    return states
