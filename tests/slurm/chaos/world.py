"""The world of a storm: a project on the box that three users share, commands that can be broken, ranks that take notes.

/var/tmp/hpcbench-chaos/project      clusters, sweeps, and results on a small file system of their own
                       /wrap         squeue, sbatch, ... : the real ones, unless modes/<name> has another word
                       /bin          interpreters of the jobs: nine of ten ranks sleep instead of training
                       /history      what every rank, command and fault noted, outside of the tree
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

from tests.slurm.box import paths

ROOT = Path(__file__).resolve().parents[3]
HERE = Path("/var/tmp/hpcbench-chaos")
PROJECT, HISTORY, MODES, WRAP, BIN = (HERE / name for name in ("project", "history", "modes", "wrap", "bin"))
TREE = PROJECT / "results" / "chaos"
NODES = ("n1", "n2", "n3", "n4")
UMASKS = {"boxuser1": 0o022, "boxuser2": 0o077, "boxuser3": 0o027}
CLOCK_SKEWS_S = {"boxuser1": 0.0, "boxuser2": 600.0, "boxuser3": -600.0}
"""Each user is on a login node of their own, and two of these have wrong clocks."""
COMMAND_LIMIT_S = 400.0
SWEEPS = {
    "one": ("single", 40, ""),
    "two": ("ddp", 12, "nodes = 2\n"),
    "packed": ("single", 24, "[submit]\npack = 4\n"),
    "throttled": ("single", 16, "[submit]\nmax_running_jobs = 4\n"),
    "limited": ("single", 10, 'partition = "limited"\n'),
}
"""Strategy, runs for three minutes of a storm, and more keys, by name."""
_ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "HPCBENCH_"))
} | {"SLURM_CONF": str(paths.SLURM_CONF)}

_WRAPPER = """#!/bin/bash
mode=$(cat {modes}/{name} 2> /dev/null)
case $mode in
  slow) sleep $((RANDOM % 12 + 2)) ;;
  hang) sleep 75 ;;
  fail) echo "{name}: error: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
  lost-timeout) {real} "$@" > /dev/null; echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1 ;;
  lost-plugin) {real} "$@" > /dev/null; echo "sbatch: error: cli_filter plugin terminated with error" >&2; exit 1 ;;
  lost-empty) {real} "$@" > /dev/null; exit 0 ;;
  lost-kill) {real} "$@" > /dev/null; kill -9 $PPID; exit 1 ;;
  late) (sleep 6; exec setsid {real} "$@") > /dev/null 2>&1 & sleep 70; exit 1 ;;
  empty) exit 0 ;;
  garbage) echo "<html>502 Bad gateway</html>"; exit 0 ;;
esac
exec {real} "$@"
"""

# Ranks take notes from a thread of their own, so that the history shows how long each was at work, however it ended.
_RANK = '''
import json, os, random, sys, threading, time, types

def note(kind, **fields):
    entry = {"t": REAL_TIME(), "kind": kind, "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID"),
             "array": os.environ.get("SLURM_ARRAY_JOB_ID"), "task": os.environ.get("SLURM_ARRAY_TASK_ID"),
             "restart": os.environ.get("SLURM_RESTART_COUNT", "0"), "rank": os.environ.get("SLURM_PROCID"), **fields}
    descriptor = os.open("HISTORY/ranks.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(descriptor, json.dumps(entry).encode() + b"\\n")
    os.close(descriptor)

REAL_TIME = time.time
from hpcbench.worker import run_rank

execute = run_rank.execute_rank

def noted(header, task, attempt, *others):
    def beat():
        while True:
            note("at work", run=task.run_id, attempt=attempt.number)
            time.sleep(0.5)
    threading.Thread(target=beat, daemon=True).start()
    code = execute(header, task, attempt, *others)
    note("ended", run=task.run_id, attempt=attempt.number, code=code)
    return code

run_rank.execute_rank = noted

def measure_run(finalizer):
    """Sleep instead of training; the rest of a rank's life is hpcbench's own."""
    task, measurements = finalizer.context.task, finalizer.measurements
    spec, result = task.spec, measurements.result
    attempt = finalizer.context.attempt.number
    length_s = random.Random(f"{task.run_id}-{attempt}").choice([0.2, 1, 3, 6, 10, 20])
    end_s = time.monotonic() + length_s
    while time.monotonic() < end_s:
        time.sleep(0.1)
        finalizer.stop.raise_if_stopped()
    result.steps_done = spec.steps
    result.step_times_s = [0.01] * spec.steps
    result.step_samples = [spec.batch_size] * spec.steps
    result.losses = [1.0] * (spec.steps + spec.warmup_steps)
    note("measured", run=task.run_id, attempt=attempt)

if "--index" in sys.argv and int(sys.argv[sys.argv.index("--index") + 1]) % 10:
    stub = types.ModuleType("hpcbench.worker.measured_run")
    stub.measure_run = measure_run
    sys.modules["hpcbench.worker.measured_run"] = stub
    sys.modules["torch"] = types.ModuleType("torch")
from hpcbench.worker.__main__ import main
sys.exit(main(sys.argv[1:]))
'''

_INTERPRETER = """#!/bin/bash
export PYTHONPATH={packages} PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
if [ "${{1-}}" = -m ] && [ "${{2-}}" = hpcbench.worker ]; then
  if [ "${{3-}}" = begin ] && [ -s {modes}/begin ]; then
    # The scheduler starts the job several times at once, on a slow file system: of the processes that begin its run,
    # one may.
    export CHAOS_FILE_DELAY_S=0.7
    folder=$(mktemp -d)
    for number in 1 2 3 4; do
      ({python} "$@" > "$folder/$number" 2> /dev/null && mv "$folder/$number" "$folder/begun-$number") &
    done
    own=$({python} "$@")
    own_code=$?
    wait
    for other in "$folder"/begun-*; do
      [ -e "$other" ] || continue
      if [ $own_code -eq 0 ]; then
        echo "job $SLURM_JOB_ID: $own and $(cat "$other")" >> {history}/begun-twice
      else
        own=$(cat "$other")
        own_code=0
      fi
    done
    rm -rf "$folder"
    [ -z "$own" ] || echo "$own"
    exit $own_code
  fi
  case "${{3-}}" in begin|end|doctor|data) ;; *) shift 2; exec {python} {bin}/rank.py "$@" ;; esac
fi
exec {python} "$@"
"""

_lock = threading.Lock()


def note(kind: str, **fields: Any) -> None:
    """Append an event to the history."""
    line = json.dumps({"t": round(time.time(), 3), "kind": kind, **fields})
    with _lock, open(HISTORY / "events.jsonl", "a") as file:
        file.write(line + "\n")


def read_events(name: str) -> list[dict[str, Any]]:
    """The events in ``events.jsonl`` or ``ranks.jsonl``, in the order of their times."""
    events = []
    for line in (HISTORY / name).read_text().splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return sorted(events, key=lambda event: float(event["t"]))


def call(*words: object, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """A command of the machine, with the box's SLURM; the real one, never a wrapper."""
    argv = [str(word) for word in words]
    try:
        return subprocess.run(
            argv, env=_ENVIRONMENT, capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", "timed out")


def box(*words: str) -> None:
    """A command of the box."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.slurm.box", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=180, env=_ENVIRONMENT, check=False,
    )  # fmt: skip
    if done.returncode:
        note("box refused", words=words, complaint=done.stderr[-500:])


def make_world(length_s: float = 0.0) -> None:
    """Make everything anew, with work for a storm of that length."""
    remove_world()
    for folder in (HISTORY, MODES, WRAP, BIN, PROJECT / "clusters", PROJECT / "sweeps", PROJECT / "results"):
        folder.mkdir(parents=True)
    HISTORY.chmod(0o777)
    (HISTORY / "ranks.jsonl").touch()
    (HISTORY / "ranks.jsonl").chmod(0o666)
    owner = pwd.getpwnam("boxuser1")
    for user in ("boxuser2", "boxuser3"):
        call("gpasswd", "-a", user, "boxuser1")
    (HERE / "python").mkdir()
    subprocess.run(["mount", "-o", "bind,ro", sys.base_prefix, str(HERE / "python")], check=True)
    for name in ("squeue", "sbatch", "sacct", "scancel", "scontrol"):
        _write_program(WRAP / name, _WRAPPER.format(modes=MODES, name=name, real=shutil.which(name)))
    (BIN / "rank.py").write_text(_RANK.replace("HISTORY", str(HISTORY)))
    _write_program(
        BIN / "python",
        _INTERPRETER.format(packages=_packages(), python=_python(), bin=BIN, modes=MODES, history=HISTORY),
    )
    (PROJECT / "clusters" / "chaos.toml").write_text(_profile())
    for place, (name, (strategy, runs, more)) in enumerate(SWEEPS.items()):
        seeds = range(10_000 * place, 10_000 * place + round(runs * max(1.0, length_s / 180)))
        table, _, submit = more.partition("[submit]")
        (PROJECT / "sweeps" / f"{name}.toml").write_text(
            f'name = "{name}"\n[fixed]\nmodel = "vit"\ndataset = "digits"\nbatch_size = 4\nwarmup_steps = 1\nsteps = 1\n'
            f'profile_steps = 0\nstrategy = "{strategy}"\ntime_limit_min = "3 min"\n{table}\n'
            f"[grid]\nseed = {list(seeds)}\n" + (f"[submit]{submit}" if submit else "")
        )
    results = PROJECT / "results"
    options = f"size=200m,mode=2775,uid={owner.pw_uid},gid={owner.pw_gid}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(results)], check=True)
    os.chown(PROJECT, owner.pw_uid, owner.pw_gid)


def remove_world() -> None:
    """Remove everything but the history of the last storm, which is kept beside."""
    if not HERE.exists():
        return
    for mount in _mounts():
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
    if left := _mounts():
        raise RuntimeError(f"still mounted, so nothing is removed: {left}")
    shutil.rmtree(HERE)
    for user in ("boxuser2", "boxuser3"):
        call("gpasswd", "-d", user, "boxuser1")


def _mounts() -> list[Path]:
    """What is mounted below; also binds of the same file system, which ``Path.is_mount`` does not see."""
    places = (Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines())
    return [place for place in places if place.is_relative_to(HERE)]


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _python() -> Path:
    return HERE / "python" / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


def _packages() -> str:
    return os.pathsep.join((str(ROOT / "tests/slurm/plants"), str(ROOT), sysconfig.get_paths()["purelib"]))


def _profile() -> str:
    text = (ROOT / "clusters" / "slurmbox.toml").read_text()
    text = text.replace('name = "slurmbox"', 'name = "chaos"')
    text = text.replace('warning_s = "60 s"', f'warning_s = "20 s"\nbin_folder = "{WRAP}"')
    text = text.replace('poll_s = "5 s"', 'poll_s = "3 s"').replace('"1400 MiB"', '"700 MiB"')
    text = text.replace('default_partition = "normal"', 'default_partition = "normal"\ndefault_environment = "noted"')
    limited = '[partitions.limited]\nname = "normal"\nqos = "limited"\n'
    # The clock of a login node is not that of the nodes.
    noted = f'[environments.noted]\npython = "{BIN}/python"\n[environments.noted.env]\nCHAOS_CLOCK_SKEW_S = "0"\n'
    return f"{text}\n{limited}\n{noted}"


def hpcbench(user: str, *words: str, kill_after_s: float | None = None) -> tuple[int, str, str]:
    """A command as a user with their umask and clock; the history has its outcome."""
    account = pwd.getpwnam(user)
    group = pwd.getpwnam("boxuser1").pw_gid
    env = {name: value for name, value in _ENVIRONMENT.items() if name != "SLURM_CONF"} | {
        "HOME": account.pw_dir, "USER": user, "LOGNAME": user, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": _packages(), "CHAOS_CLOCK_SKEW_S": str(CLOCK_SKEWS_S[user]),
    }  # fmt: skip
    began = time.time()
    process = subprocess.Popen(
        [str(_python()), "-m", "hpcbench", *words], cwd=PROJECT, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", user=account.pw_uid,
        group=account.pw_gid, extra_groups=[account.pw_gid, group], umask=UMASKS[user], start_new_session=True,
    )  # fmt: skip
    killed = hung = False
    try:
        out, err = process.communicate(timeout=kill_after_s or COMMAND_LIMIT_S)
    except subprocess.TimeoutExpired:
        killed, hung = kill_after_s is not None, kill_after_s is None
        os.kill(process.pid, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            out, err = "", "its pipes stay open"
    note("command", user=user, words=words, code=process.returncode, s=round(time.time() - began, 1), began=began,
         killed=killed, hung=hung, out=out[-4000:] if "--json" not in words else "", err=err[-3000:])  # fmt: skip
    if words[0] == "status" and "--json" in words and not killed and process.returncode in (0, 1):
        for sweep in json.loads(out)["sweeps"]:
            runs = {run["run_id"]: [run["state"], run["reason"][:300]] for run in sweep["runs"]}
            note("states", began=began, sweep=sweep["sweep"], runs=runs)
    return process.returncode, out, err
