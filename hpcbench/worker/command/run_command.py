"""A process of a user's command, from its rendezvous to its metrics::

    control channel -> run folder, free port -> variables and words -> process -> all have ended -> metrics, outputs

The ranks of hpcbench start the command's processes and wait for them: with ``launch = "rank"`` each starts one, with
``"node"`` the one rank of a node, with ``"job"`` rank 0 alone. They use no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from hpcbench.config.command import LAUNCH_VARIABLES, Command, command_values, fill_word, fill_words
from hpcbench.errors import WorkerError, unsupported
from hpcbench.fileio import printable_text
from hpcbench.results.probe_records import CommandOutcome
from hpcbench.units import format_bytes, pluralize
from hpcbench.worker.command.output import MAX_VALUES, CommandOutput, read_metrics_file
from hpcbench.worker.distributed.rank_environment import RankInfo, cpu_mask, torch_thread_count
from hpcbench.worker.distributed.rendezvous import ControlChannel
from hpcbench.worker.distributed.world import open_control_channel
from hpcbench.worker.finalize import RankMeasurements, RunFinalizer
from hpcbench.worker.measure.counters import RegionCounters
from hpcbench.worker.measure.environment_record import record_provenance
from hpcbench.worker.measure.host import read_counter
from hpcbench.worker.shutdown import StopController

_POLL_S = 0.1
_MAX_HASHED_BYTES = 64 * 2**20
_MEMORY_POLL_S = 1.0
_TERM_PATIENCE_S = 5.0
"""Seconds from SIGTERM to SIGKILL: the scheduler's own patience is often 30 s."""
_SIGNALS_OF_JOBS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
_SIGNAL_PATIENCE_S = 2.0
_ERROR_LINES = 30
MAX_OUTPUT_BYTES = 64 * 2**20
"""The largest sum of a run's kept files."""
_PR_SET_CHILD_SUBREAPER = 36
_OF_THE_LAUNCHER = re.compile(r"TORCHELASTIC_\w+|GROUP_(RANK|WORLD_SIZE)|ROLE_(RANK|WORLD_SIZE|NAME)|PYTHONSAFEPATH")
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|MemoryError|bad_alloc")
_PORT_KEY, _ENDED_KEY, _TIMED_KEY = "command/port", "command/ended", "command/timed"


class CommandFailed(WorkerError):
    """The program ended with an error."""


class _Found(msgspec.Struct):
    """Values and matches in the output of a rank's process."""

    counts: dict[str, int] = {}
    """Values by metric, and 1 by pattern of ``must_match`` that a line matches."""
    timed_unix_s: tuple[float, float] | None = None


def run_command(finalizer: RunFinalizer, command: Command) -> None:
    """Run ``command`` as the run's spec asks; results go into ``finalizer.measurements``.

    Raises:
        WorkerError: the program cannot be started, ended with an error, or printed something else than expected.
        Stopped, PeerEnded: a signal, the time limit or another rank ended it.
    """
    context, stop = finalizer.context, finalizer.stop
    spec, info, attempt = context.spec, context.info, context.attempt
    launch = f"{context.task.run_id}/{attempt.number}"
    channel = finalizer.channel = open_control_channel(
        info, context.header, attempt.rendezvous_path, launch, spec.nodes == 1, stop
    )
    device = _measured_device(context.header.device, info)
    facts = {"program_files_sha256": program_hashes(command, command_values(spec, command))}
    provenance = record_provenance(context.header, spec, info, device, context.user_env, facts)
    finalizer.measurements.result.provenance = provenance
    folder = attempt.folder / "run" if command.folder == "run" else Path(command.folder)
    address = "127.0.0.1" if channel is None else channel.store.host
    variables = {
        "MASTER_ADDR": address, "MASTER_PORT": _agree_on_port(address, channel, stop),
        "RANK": str(info.rank), "LOCAL_RANK": str(info.local_rank), "NODE_RANK": str(info.node_rank),
        "WORLD_SIZE": str(info.world_size), "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "HPCBENCH_SWEEP_FOLDER": command.sweep_folder,
        "HPCBENCH_METRICS": str(attempt.folder / f"metrics-{info.rank}.jsonl"),
        "HPCBENCH_NODES": str(spec.nodes),
        "HPCBENCH_DEVICES_PER_NODE": str(spec.tasks_per_node * spec.devices_per_task),
    }  # fmt: skip
    values = {**command_values(spec, command), **variables}
    folder = Path(fill_word(str(folder), values))
    variables["HPCBENCH_RUN_FOLDER"] = values["HPCBENCH_RUN_FOLDER"] = str(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkerError(f"folder: cannot make {folder} on {socket.gethostname()}: {error.strerror}") from error
    output, found = None, _Found()
    if command.launch != "job" or info.rank == 0:
        words = fill_words(command.argv, values)
        output, outcome = _run_process(finalizer, command, device, words, folder, variables)
        counts = {name: len(numbers) for name, numbers in outcome.values.items()}
        found = _Found(counts | dict.fromkeys(map(_match_key, output.matched), 1), output.timed_unix_s)
    found_by_all = _wait_for_all(channel, found, stop)
    if finalizer.measurements.counters is not None:
        finalizer.measurements.counters.timed_unix_s = _agree_on_timed(channel, found_by_all, stop)
    if info.rank == 0 and output is not None:
        _check_found(command, [one.counts for one in found_by_all], output, spec.warmup_steps)
        # All ranks share the folder.
        outcome.outputs, lost = keep_outputs(command, folder, attempt.folder / "outputs")
        finalizer.measurements.result.warnings += lost


def program_hashes(command: Command, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each word of the command that names a file, such as the interpreter and a script.

    Launches of two versions of a script have two environments, and no table takes a median over both.
    """
    known = {**dict.fromkeys(LAUNCH_VARIABLES, ""), **values, "HPCBENCH_SWEEP_FOLDER": command.sweep_folder}
    hashes = {}
    for word in command.argv:
        path = Path(fill_word(word, known))
        with contextlib.suppress(OSError, ValueError):
            if path.is_absolute() and path.is_file() and path.stat().st_size <= _MAX_HASHED_BYTES:
                hashes[word] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def _agree_on_port(address: str, channel: ControlChannel | None, stop: StopController) -> str:
    """Return a port that was free on the host of rank 0, whose address is ``address``, on all ranks."""
    if channel is not None and channel.rank > 0:
        return _get(channel, _PORT_KEY, stop).decode()
    with socket.create_server(("", 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        port = str(probe.getsockname()[1])
    if channel is not None:
        channel.publish(_PORT_KEY, port)
    return port


def _run_process(
    finalizer: RunFinalizer, command: Command, device: torch.device, words: list[str], folder: Path,
    variables: dict[str, str],
) -> tuple[CommandOutput, CommandOutcome]:  # fmt: skip
    """Start the process and wait for its end, which this rank's record then describes."""
    measurements, stop = finalizer.measurements, finalizer.stop
    # Children of children that outlive their parents become children of this process, which ends them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    outcome = measurements.result.command = CommandOutcome(argv=words)
    log = finalizer.context.attempt.folder / f"rank-{finalizer.context.info.rank}.log"
    output = CommandOutput(command, log, finalizer.context.spec.warmup_steps)
    counters = measurements.counters = _open_counters(device, command, finalizer.context.info)
    began_s = time.monotonic()
    counters.begin()
    context, threads = finalizer.context, None
    if command.launch == "rank":
        # As for ranks of trainings: otherwise each process of a node would use all its cores.
        own_env, cores = context.user_env | context.spec.env, len(cpu_mask())
        threads = torch_thread_count(own_env, cores, context.header.cores_per_task, context.info)
    environment = program_environment(context.user_env, context.spec.env, threads)
    process = _start(words, folder, {**environment, **variables})
    problems: list[BaseException] = []
    reader = threading.Thread(target=_read, args=(output, process, problems), name="output", daemon=True)
    reader.start()
    _end_before_abort(stop, process)
    try:
        _wait_for_end(process, measurements, counters, stop, problems)
    finally:
        _end_children(process)
        outcome.wall_s = time.monotonic() - began_s
        counters.end()
        # A grandchild that escaped every signal may hold the pipe.
        reader.join(_TERM_PATIENCE_S)
        outcome.exit_code, outcome.values = process.returncode, dict(output.values)
        if output.first_step_s is not None:
            measurements.result.time_to_first_step_s = output.first_step_s - began_s
    if output.log_error is not None:
        measurements.result.warnings.append(f"{log.name} is not complete: {output.log_error}")
    for name, values in output.values.items():
        if len(values) >= MAX_VALUES:
            measurements.result.warnings.append(f"{name}: only the first {len(values)} values count")
    if problems:
        raise problems[0]
    if process.returncode:
        _raise_if_job_was_signalled(process.returncode, stop)
        raise _process_error(words[0], process.returncode, output)
    if output.forbidden is not None:
        raise WorkerError(f"must_not_match: {output.forbidden}")
    outcome.values |= read_metrics_file(command, Path(variables["HPCBENCH_METRICS"]))
    return output, outcome


def program_environment(user_env: Mapping[str, str], run_env: Mapping[str, str], threads: int | None) -> dict[str, str]:
    """Return this process's variables for the program, without those of hpcbench's own launcher.

    torchrun's would make the program look for a store of its own, and PYTHONSAFEPATH hides the modules beside a script.
    ``threads`` are those of one of several processes on a node, unless the user sets a number.
    """
    kept = {name: value for name, value in os.environ.items() if not _OF_THE_LAUNCHER.fullmatch(name)}
    if "OMP_NUM_THREADS" not in user_env:
        kept.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        kept["OMP_NUM_THREADS"] = str(threads)
    return {**kept, **run_env}


def _start(words: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = f"cannot start {words[0]!r:.200} on {socket.gethostname()}: {reason}"
        raise unsupported(message, "argv[0] is a program on the PATH of the jobs, or an absolute path") from error


def _wait_for_end(
    process: subprocess.Popen[bytes],
    measurements: RankMeasurements,
    counters: RegionCounters,
    stop: StopController,
    problems: list[BaseException],
) -> None:
    """Wait until ``process`` has ended, and keep its peak memory. Raises a reason to stop.

    On GPUs that is the growth of memory in use on the one with the most growth, else that of the largest process.
    """
    peak_bytes, began_s = 0, time.monotonic()
    before = counters.used_gpu_bytes()
    due_s = began_s
    while process.poll() is None:
        stop.raise_if_stopped()
        if problems:
            raise problems[0]
        if time.monotonic() >= due_s:
            used = counters.used_gpu_bytes()
            grown = [now - first for now, first in zip(used, before, strict=False)]
            peak_bytes = max([peak_bytes, *grown] if before else [peak_bytes, largest_resident_bytes()])
            measurements.peak = (peak_bytes, None)
            counters.read_energy()
            # More often at first: a short program has a peak, too.
            due_s = time.monotonic() + min(_MEMORY_POLL_S, 0.1 * (time.monotonic() - began_s))
        time.sleep(_POLL_S)


def _end_before_abort(stop: StopController, process: subprocess.Popen[bytes]) -> None:
    """Let a thread that ends this process end ``process`` first."""
    abort = stop.abort

    def abort_with_children(cause: BaseException) -> None:
        _end_children(process)
        if abort is not None:
            abort(cause)

    stop.abort = abort_with_children


def largest_resident_bytes() -> int:
    """Return the peak so far of the largest process that this one has started, as the kernel keeps it."""
    peaks = []
    for child in psutil.Process().children(recursive=True):
        peak_kib = read_counter(Path(f"/proc/{child.pid}/status"), "VmHWM:")
        peaks.append((peak_kib or 0) * 1024)
    return max(peaks, default=0)


def _measured_device(kind: str, info: RankInfo) -> torch.device:
    """Return the device that counters are read of. It is not made current: the program alone uses its memory."""
    count = torch.cuda.device_count() if kind == "cuda" else 0
    return torch.device("cuda", info.local_rank % count) if count else torch.device("cpu")


def _open_counters(device: torch.device, command: Command, info: RankInfo) -> RegionCounters:
    """Return the counters of this rank's device, or of all devices of its node where one process drives them."""
    count = torch.cuda.device_count() if device.type == "cuda" and command.launch != "rank" else 0
    others = [torch.device("cuda", number) for number in range(count) if number != device.index]
    return RegionCounters(device, info, others=others)


def _read(output: CommandOutput, process: subprocess.Popen[bytes], problems: list[BaseException]) -> None:
    assert isinstance(process.stdout, BufferedReader), "it is a pipe"
    try:
        output.read(process.stdout)
    except BaseException as error:  # noqa: BLE001 - the main thread raises it
        problems.append(error)


def _end_children(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started: first by SIGTERM, and after a while by SIGKILL."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.terminate()
    _, alive = psutil.wait_procs(children, timeout=_TERM_PATIENCE_S)
    for child in alive:
        with contextlib.suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(alive, timeout=_TERM_PATIENCE_S)
    if process.poll() is None:
        process.kill()
        process.wait()


def _raise_if_job_was_signalled(code: int, stop: StopController) -> None:
    """Raise the reason to stop where the scheduler's signal to the whole job ended the program, too."""
    if -code in _SIGNALS_OF_JOBS:
        # The thread that reads this process's own signals may be a moment later than the program's end.
        give_up_s = time.monotonic() + _SIGNAL_PATIENCE_S
        while not stop.should_stop() and time.monotonic() < give_up_s:
            time.sleep(_POLL_S)
        stop.raise_if_stopped()


def _process_error(program: str, code: int, output: CommandOutput) -> WorkerError:
    """Return the error of a process that ended with ``code``, with its last lines."""
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    lines = [printable_text(line) for line in output.last][-_ERROR_LINES:]
    last = next((line for line in reversed(lines) if re.search(r"\w", line)), None)
    said = f"its last line: {last:.300}" if last is not None else "it printed nothing"
    error = CommandFailed(f"{program} ended with {how}; {said}", status="failed")
    if _OUT_OF_MEMORY.search("\n".join(lines)):
        error.status = "oom"
    error.log_tail = "\n".join(lines)
    return error


def _wait_for_all(channel: ControlChannel | None, own: _Found, stop: StopController) -> list[_Found]:
    """Wait until the processes of all ranks have ended; return on rank 0 what each of them found."""
    if channel is None:
        return [own]
    channel.publish(f"{_ENDED_KEY}/{channel.rank}", msgspec.json.encode(own).decode())
    channel.store.add(_ENDED_KEY, 1)
    while channel.store.add(_ENDED_KEY, 0) < channel.world_size:
        stop.raise_if_stopped()
        time.sleep(_POLL_S)
    ranks = range(channel.world_size if channel.rank == 0 else 0)
    return [msgspec.json.decode(channel.store.get(f"{_ENDED_KEY}/{rank}"), type=_Found) for rank in ranks]


def _agree_on_timed(
    channel: ControlChannel | None, found: list[_Found], stop: StopController
) -> tuple[float, float] | None:
    """Return on all ranks when the timed steps ran, by the first rank that printed their times."""
    timed = next((one.timed_unix_s for one in found if one.timed_unix_s is not None), None)
    if channel is None:
        return timed
    if channel.rank == 0:
        channel.publish(_TIMED_KEY, msgspec.json.encode(timed).decode())
        return timed
    return msgspec.json.decode(_get(channel, _TIMED_KEY, stop), type=tuple[float, float] | None)


def _get(channel: ControlChannel, key: str, stop: StopController) -> bytes:
    """Return a value as soon as it is published. The store's own wait would leave a signal unanswered."""
    while not channel.store.check([key]):
        stop.raise_if_stopped()
        time.sleep(_POLL_S)
    return channel.store.get(key)


def _check_found(command: Command, found: list[dict[str, int]], output: CommandOutput, warmup_steps: int) -> None:
    """Raise ``WorkerError`` where no rank found a pattern, or a metric has too few values."""
    for text in command.must_match:
        if not any(_match_key(text) in one for one in found):
            raise _never_matched("must_match", text, output)
    for metric in command.metrics:
        # The values of the first rank that has any count.
        count = next((one[metric.name] for one in found if one.get(metric.name)), 0)
        if count > (warmup_steps if metric.per == "step" else 0):
            continue
        if count:
            values = pluralize(count, "value")
            raise WorkerError(f"the metric {metric.name} has {values}, and warmup_steps {warmup_steps} leaves none")
        if metric.pattern is None:
            raise WorkerError(f"the metric {metric.name}: no line of $HPCBENCH_METRICS has the key {metric.json!r}")
        raise _never_matched(f"the metric {metric.name}", metric.pattern, output)


def _match_key(pattern: str) -> str:
    return f"must_match {pattern}"


def _never_matched(what: str, pattern: str, output: CommandOutput) -> WorkerError:
    lines = "".join(f"\n  {printable_text(line):.200}" for line in output.similar_lines(pattern))
    found = f"the most similar lines:{lines}" if lines else "the program printed nothing"
    return WorkerError(f"{what}: no line matches {pattern!r}; {found}")


def keep_outputs(command: Command, folder: Path, target: Path) -> tuple[list[str], list[str]]:
    """Copy the files that ``outputs`` names to ``target``; return their names, and warnings about files left out."""
    kept, lost, total_bytes = list[str](), list[str](), 0
    for path in sorted({path for pattern in command.outputs for path in folder.glob(pattern)}):
        name = str(path.relative_to(folder))
        try:
            # Links, also to folders, may lead to files of others.
            if not path.is_file() or path.resolve() != folder.resolve() / name:
                lost.append(f"outputs: {name} is a link or no file")
            elif total_bytes + path.stat().st_size > MAX_OUTPUT_BYTES:
                lost.append(f"outputs: {name} is left out: more than {format_bytes(MAX_OUTPUT_BYTES)} in all")
            else:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / name)
                total_bytes += path.stat().st_size
                kept.append(name)
        except OSError as error:
            lost.append(f"outputs: {name} cannot be copied: {error.strerror}")
    return kept, lost
