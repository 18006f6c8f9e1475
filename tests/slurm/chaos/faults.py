"""The faults of a storm: each is a function that breaks something for a while and mends it again.

A fault returns what it hit; ``None`` if there was nothing to hit.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.slurm.box import paths
from tests.slurm.chaos.world import BIN, MODES, NODES, PROJECT, SWEEPS, TREE, box, call, read_events

Fault = Callable[[random.Random], str | None]
_PIDS = Path(paths.SLURM_CONF).parent / "pid"


def processes(test: Callable[[list[str]], bool]) -> list[int]:
    """The processes whose command line passes ``test``."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if test(words):
                    found.append(int(folder.name))
    return found


def _is_rank(words: list[str]) -> bool:
    return f"{BIN}/rank.py" in words[:4]


def _signalled(test: Callable[[list[str]], bool], number: signal.Signals, *, thaws: bool = False) -> Fault:
    def fault(rng: random.Random) -> str | None:
        pids = processes(test)
        if not pids:
            return None
        pid = rng.choice(pids)
        with contextlib.suppress(OSError):
            os.kill(pid, number)
            if thaws:
                time.sleep(rng.uniform(5, 20))
                os.kill(pid, signal.SIGCONT)
        return str(pid)

    return fault


def daemon_pid(name: str) -> int:
    return int((_PIDS / f"{name}.pid").read_text())


def _daemon(name: str, longest_s: float, *, kills: bool = False) -> Fault:
    def fault(rng: random.Random) -> str:
        if kills:
            os.kill(daemon_pid(name), signal.SIGKILL)
        else:
            box("stop-daemon", name)
        time.sleep(rng.uniform(2, longest_s))
        box("start-daemon", name)
        return name

    return fault


def freeze_controller(seconds: float) -> None:
    """Stop slurmctld for a while, as a slow disk does: its sockets stay open."""
    pid = daemon_pid("slurmctld")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def _frozen_controller(rng: random.Random) -> str:
    seconds = rng.uniform(20, 60)
    freeze_controller(seconds)
    return f"{seconds:.0f} s"


def _frozen_at_an_sbatch(rng: random.Random) -> str | None:
    """An sbatch has asked, and slurmctld accepts the job only after the hang."""
    sbatch, give_up = shutil.which("sbatch"), time.monotonic() + 30
    while not (called := processes(lambda words: words[0] == sbatch)):
        if time.monotonic() > give_up:
            return None
        time.sleep(0.01)
    seconds = rng.uniform(20, 60)
    freeze_controller(seconds)
    return f"{seconds:.0f} s at {called}"


def _node(break_it: Callable[[str], object], mend: Callable[[str], object], longest_s: float) -> Fault:
    def fault(rng: random.Random) -> str:
        node = rng.choice(NODES)
        break_it(node)
        time.sleep(rng.uniform(3, longest_s))
        mend(node)
        return node

    return fault


def _set_node(state: str) -> Callable[[str], object]:
    return lambda node: call("scontrol", "update", f"nodename={node}", f"state={state}", "reason=chaos")


def _kill_slurmd(node: str) -> None:
    with contextlib.suppress(OSError):
        os.kill(daemon_pid(node), signal.SIGKILL)


def jobs(*states: str) -> list[str]:
    """The ids of the sweeps' jobs in the queue."""
    rows = [line.split("|") for line in call("squeue", "-h", "-r", "-o", "%i|%T|%j").stdout.splitlines()]
    ours = tuple(f"hpcbench-{name}-" for name in SWEEPS)
    return [row[0] for row in rows if len(row) == 3 and row[2].startswith(ours) and (not states or row[1] in states)]


def _job(words: str, *states: str, after: str = "") -> Fault:
    """A command about a job; JOB is its id. ``after``: another one, some seconds later."""

    def fault(rng: random.Random) -> str | None:
        found = jobs(*states)
        if not found:
            return None
        job = rng.choice(found)
        call(*words.replace("JOB", job).split())
        if after:
            time.sleep(rng.uniform(3, 15))
            call(*after.replace("JOB", job).split())
        return job

    return fault


def _requeue_several(rng: random.Random) -> str | None:
    found = jobs("RUNNING")[:4]
    for job in found:
        call("scontrol", "requeuehold", job)
    time.sleep(4)
    for job in found:
        call("scontrol", "release", job)
    return " ".join(found) or None


def _mode(name: str, mode: str, longest_s: float = 15.0) -> Fault:
    def fault(rng: random.Random) -> str:
        (MODES / name).write_text(mode)
        time.sleep(rng.uniform(4, longest_s))
        (MODES / name).unlink(missing_ok=True)
        return mode

    return fault


@contextlib.contextmanager
def _full_disk() -> Iterator[None]:
    ballast = PROJECT / "results" / "ballast"
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 65536)
    try:
        yield
    finally:
        ballast.unlink(missing_ok=True)


def _disk_full(rng: random.Random) -> str:
    with _full_disk():
        time.sleep(rng.uniform(3, 15))
    return "full"


def _disk_full_at_an_end(rng: random.Random) -> str | None:
    """Full for up to 40 s, from the moment in which a rank that is at work now has measured."""
    give_up = time.monotonic() + 20
    seen = len(read_events("ranks.jsonl"))
    while time.monotonic() < give_up:
        if any(event["kind"] == "at work" for event in read_events("ranks.jsonl")[seen:]):
            with _full_disk():
                time.sleep(rng.uniform(10, 40))
            return "full"
        time.sleep(0.2)
    return None


def _read_only(rng: random.Random) -> str:
    """A remount stops writers of any account, root included."""
    results = PROJECT / "results"
    call("mount", "-o", "remount,ro", results)
    time.sleep(rng.uniform(3, 30))
    call("mount", "-o", "remount,rw", results)
    return "read-only"


def _stale_lock(rng: random.Random) -> str | None:
    """The lock of a dead process of this host, of another host, or one that cannot be read."""
    path = TREE / "submissions" / ".lock"
    kind = rng.choice(["dead process", "other host", "unreadable"])
    holder = {
        "owner": "ghost", "host": os.uname().nodename if kind == "dead process" else "login-other", "pid": 999999,
        "since_unix_s": time.time() + rng.choice([-3600, 0, 3600]), "lease_s": 20.0,
    }  # fmt: skip
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if kind == "unreadable" else 0o664)
    except OSError:
        return None
    os.write(descriptor, json.dumps(holder).encode())
    os.close(descriptor)
    if kind != "unreadable":
        os.chown(path, pwd.getpwnam("boxuser1").pw_uid, pwd.getpwnam("boxuser1").pw_gid)
    return kind


def _private_jobs(rng: random.Random) -> str:
    """SLURM shows each account its own jobs alone."""
    text = paths.SLURM_CONF.read_text()
    paths.SLURM_CONF.write_text(f"{text}PrivateData=jobs\n")
    call("scontrol", "reconfigure")
    time.sleep(rng.uniform(20, 60))
    paths.SLURM_CONF.write_text(text)
    call("scontrol", "reconfigure")
    return "hidden"


_BATCH = re.compile(r".*/slurm_script")
SERIOUS = frozenset({
    "slurmctld stopped", "slurmctld killed", "slurmctld frozen", "slurmctld frozen at an sbatch", "slurmd killed",
    "node power cut", "node down", "node drained", "slurmdbd stopped", "disk full", "disk full at an end",
    "tree read-only", "private jobs",
})  # fmt: skip
"""One of them at a time."""
FAULTS: dict[str, tuple[Fault, int]] = {
    "rank killed": (_signalled(_is_rank, signal.SIGKILL), 12),
    "rank terminated": (_signalled(_is_rank, signal.SIGTERM), 4),
    "rank frozen": (_signalled(_is_rank, signal.SIGSTOP, thaws=True), 3),
    "batch script killed": (_signalled(lambda w: len(w) > 1 and bool(_BATCH.fullmatch(w[1])), signal.SIGKILL), 8),
    "slurmstepd killed": (_signalled(lambda w: w[0].startswith("slurmstepd: ["), signal.SIGKILL), 6),
    "srun killed": (_signalled(lambda w: w[0] == "srun" and "hpcbench.worker" in w, signal.SIGKILL), 6),
    "begin or end killed": (
        _signalled(lambda w: "hpcbench.worker" in w and bool({"begin", "end"} & set(w)), signal.SIGKILL), 6,
    ),
    "job started twice": (_mode("begin", "twice", 30), 6),
    "slurmctld stopped": (_daemon("slurmctld", 20), 4),
    "slurmctld killed": (_daemon("slurmctld", 10, kills=True), 3),
    "slurmctld frozen": (_frozen_controller, 3),
    "slurmctld frozen at an sbatch": (_frozen_at_an_sbatch, 6),
    "slurmdbd stopped": (_daemon("slurmdbd", 30), 4),
    "node down": (_node(_set_node("down"), _set_node("resume"), 15), 4),
    "node drained": (_node(_set_node("drain"), _set_node("resume"), 15), 4),
    "slurmd killed": (_node(_kill_slurmd, lambda node: box("restart-node", node), 20), 3),
    "node power cut": (_node(lambda node: box("kill-node", node), lambda node: box("restart-node", node), 50), 3),
    "node link down": (
        _node(
            lambda node: call("ip", "link", "set", f"sbx-{node}", "down"),
            lambda node: call("ip", "link", "set", f"sbx-{node}", "up"), 60,
        ), 3,
    ),
    "private jobs": (_private_jobs, 3),
    **{f"squeue {mode}": (_mode("squeue", mode), weight) for mode, weight in
       (("slow", 4), ("fail", 5), ("empty", 4), ("garbage", 4))},
    **{f"sbatch {mode}": (_mode("sbatch", mode), weight) for mode, weight in
       (("lost-timeout", 6), ("lost-plugin", 5), ("lost-empty", 5), ("lost-kill", 5), ("fail", 3), ("hang", 2),
        ("late", 2))},
    **{f"sacct {mode}": (_mode("sacct", mode), 3) for mode in ("fail", "empty", "slow", "garbage")},
    "scancel fail": (_mode("scancel", "fail"), 3),
    "scontrol fail": (_mode("scontrol", "fail"), 3),
    "scancel by hand": (_job("scancel JOB", "RUNNING"), 6),
    "scancel of a pending job": (_job("scancel JOB", "PENDING"), 4),
    "scancel of the batch step": (_job("scancel --batch --signal=KILL JOB", "RUNNING"), 4),
    "scancel of all steps": (_job("scancel --full --signal=KILL JOB", "RUNNING"), 4),
    "requeue": (_job("scontrol requeue JOB", "RUNNING"), 7),
    "hold": (_job("scontrol hold JOB", "PENDING", after="scontrol release JOB"), 3),
    "suspend": (_job("scontrol suspend JOB", "RUNNING", after="scontrol resume JOB"), 3),
    "requeue of several": (_requeue_several, 3),
    "time limit cut": (_job("scontrol update jobid=JOB timelimit=0:01", "RUNNING"), 4),
    "disk full": (_disk_full, 3),
    "disk full at an end": (_disk_full_at_an_end, 4),
    "tree read-only": (_read_only, 4),
    "stale lock": (_stale_lock, 4),
}  # fmt: skip


def heal() -> None:
    """Undo every fault, whatever stopped the storm."""
    for mode in MODES.glob("*"):
        mode.unlink()
    call("mount", "-o", "remount,rw", PROJECT / "results")
    (PROJECT / "results" / "ballast").unlink(missing_ok=True)
    text = paths.SLURM_CONF.read_text()
    if "PrivateData=jobs\n" in text:
        paths.SLURM_CONF.write_text(text.replace("PrivateData=jobs\n", ""))
    for name in ("slurmctld", "slurmdbd"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(daemon_pid(name), signal.SIGCONT)
        box("start-daemon", name)
    call("scontrol", "reconfigure")
    for node in NODES:
        call("ip", "link", "set", f"sbx-{node}", "up")
        with contextlib.suppress(OSError, ValueError):
            os.kill(daemon_pid(node), 0)
            continue
        box("restart-node", node)
    for node in NODES:
        if re.search("down|drain|fail", call("sinfo", "-h", "-N", "-n", node, "-o", "%T").stdout):
            box("restart-node", node)
            call("scontrol", "update", f"nodename={node}", "state=resume")
    for job in jobs("PENDING"):
        call("scontrol", "release", job)
    for job in jobs("SUSPENDED"):
        call("scontrol", "resume", job)
