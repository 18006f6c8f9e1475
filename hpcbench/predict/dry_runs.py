"""Dry runs of a plan's configurations: worker processes step them on fake tensors, equal steps only once.

A dry run needs torch on this machine, its build for CPUs is enough; it needs no device, no network and no other rank.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from hpcbench.config.run_spec import RunSpec, config_id
from hpcbench.errors import HpcbenchError, WorkerError
from hpcbench.fileio import printable_text
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.prediction import Prediction, format_need_and_limit
from hpcbench.predict.strategy_cost import find_cost
from hpcbench.results.probe_records import DryRun, DryRunAnswer, DryRunOutcome, DryRunTask
from hpcbench.strategies.catalog import get_strategy
from hpcbench.strategies.mesh import RankMesh
from hpcbench.submit.plan import SweepPlan, available_cores
from hpcbench.submit.scheduler import scrubbed_environment

_WORKER_MODULE = "hpcbench.worker.dry_run"
_MAX_PROCESSES = 4
"""A login node belongs to others, too."""
_INSTALL_HINT = (
    "python -m pip install torch --index-url https://download.pytorch.org/whl/cpu\n"
    "  the build for CPUs is enough; or run the command where torch is installed, for instance in a job"
)
_PIECES_PER_PROCESS = 4
"""Smallest number of pieces of work per process: with several, all processes end at about the same time."""
TASK_LIMIT_S = 120.0
"""Wall time of one rank of a configuration."""
_SILENCE_LIMIT_S = 600.0
"""Time without an answer after which a worker process is ended: it does not start, or ignores the limit of its task."""
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in ')
_UNNAMED_FRAME = re.compile(r"^<|/torch/|/hpcbench/worker/dry_run/|/lib/python[0-9.]+/(?!site-packages/)")
_BATCH_HINT = "a smaller batch_size or more micro_batches need less memory"
_SPLIT_HINT = (
    "one sample is the smallest micro-batch: fsdp, tensor or a pipeline (1f1b) on more ranks need less memory per rank"
)
_FIGURES = (
    "peak_memory_bytes", "peak_layer", "operators", "collectives", "host_syncs", "host_sync_sites", "modelled",
)  # fmt: skip


_FAKED_LIBRARIES = (None, "torch")
"""Values of ``StrategyEntry.library_name`` of which steps run on fake tensors."""


def distinct_configurations(runs: Iterable[RunSpec]) -> dict[str, RunSpec]:
    """Return the first run of each configuration by ``config_id``."""
    configurations: dict[str, RunSpec] = {}
    for spec in runs:
        configurations.setdefault(config_id(spec), spec)
    return configurations


def dry_run_configurations(
    plan: SweepPlan,
    configurations: Mapping[str, RunSpec],
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[DryRun]:
    """Step ``configurations`` (by ``config_id``) on fake tensors and compare their peaks with the devices' memory.

    Those of strategies of other libraries than torch are ``not_fakeable``, with the peak that the oracle predicts.

    Args:
        plan: Its profile describes the devices.
        configurations: What to step.
        on_progress: Called with the number of configurations that are done and of all.

    Raises:
        WorkerError: torch is not installed here, or a worker process cannot start.
    """
    forecast = Forecast(plan.profile, model_folder=plan.model_folder)
    records: dict[str, DryRun] = {}
    shapes: dict[Any, list[str]] = {}
    for key, spec in configurations.items():
        if get_strategy(spec.strategy).library_name in _FAKED_LIBRARIES:
            shapes.setdefault(step_key(spec), []).append(key)
        else:
            records[key] = _predicted_record(key, spec, forecast)
    groups = list(shapes.values())
    folder = str(plan.model_folder.resolve()) if plan.model_folder else None
    # The largest world of those that share a step.
    largest_runs = [max((configurations[key] for key in keys), key=lambda spec: spec.ranks) for keys in groups]
    tasks = [
        DryRunTask(
            index=index,
            spec=largest,
            ranks=tuple(ranks_of_every_kind(largest)),
            device=plan.profile.device,
            model_folder=folder,
            limit_s=TASK_LIMIT_S,
        )
        for index, largest in enumerate(largest_runs)
    ]
    done = len(records)

    def count(answer: DryRunAnswer) -> None:
        nonlocal done
        done += len(groups[answer.index])
        on_progress(done, len(configurations))

    answers = {answer.index: answer for answer in _answers(tasks, count)}
    for index, keys in enumerate(groups):
        for place, key in enumerate(keys):
            records[key] = _record(key, configurations[key], answers[index], forecast, is_shared=place > 0)
    return [records[key] for key in configurations]


_NEUTRAL: dict[str, Any] = {
    "learning_rate": 0.01, "warmup_steps": 0, "steps": 1, "profile_steps": 0, "drop_last": False, "evaluate_every": 0,
    "target_accuracy": None, "verify": False, "seed": 0, "repeat": 0, "time_limit_min": None,
    "partition": None, "environment": None, "env": {}, "cudnn_benchmark": True,
}  # fmt: skip
"""Parameters that do not change what a rank does within a step."""


def _has_alike_replicas(spec: RunSpec) -> bool:
    cost = find_cost(spec.strategy)
    return cost is not None and cost.alike_replicas


def ranks_of_every_kind(spec: RunSpec) -> list[int]:
    """Return the first and the last rank, and one rank of each kind that lies between them.

    Replicas that share nothing are of one kind. Other ranks differ by their place along the axes that split the model:
    the first, the second and the last stage of a pipeline, and the first, an inner and the last part of split maps.
    """
    mesh = RankMesh.of(spec)
    if mesh.size != spec.ranks:
        # One process drives several devices.
        return list(range(spec.ranks))
    if _has_alike_replicas(spec) and spec.dp_degree == spec.ranks:
        return [0]
    ranks = {0, spec.ranks - 1}
    for axis in ("pp", "sp"):
        degree = getattr(mesh, axis)
        ranks |= {mesh.rank(RankMesh(0, 0, 0, 0)._replace(**{axis: place})) for place in (1, degree - 1) if degree > 2}
    return sorted(ranks)


def step_key(spec: RunSpec) -> bytes:
    """Return a key that is equal for runs whose ranks do the same within a step, learning rates aside.

    Where nothing is sharded among replicas, their number does not matter, from two on.
    """
    if _has_alike_replicas(spec) and spec.dp_degree > 1:
        ranks = 2 * spec.ranks // spec.dp_degree
        spec = msgspec.structs.replace(spec, dp_degree=2, nodes=1, tasks_per_node=ranks)
    changed: dict[str, Any] = {"nodes": 1, "tasks_per_node": spec.ranks}
    for name in ("weight_decay", "momentum"):
        changed[name] = 0.5 if getattr(spec, name) else 0.0
    return msgspec.json.encode(msgspec.structs.replace(spec, **_NEUTRAL, **changed), order="deterministic")


def _record(key: str, spec: RunSpec, answer: DryRunAnswer, forecast: Forecast, *, is_shared: bool) -> DryRun:
    outcome: DryRunOutcome = answer.outcome
    reason = answer.reason
    figures: dict[str, Any] = dict.fromkeys(_FIGURES)
    figures |= {"host_sync_sites": [], "modelled": []}
    if answer.figures is not None:
        figures = {name: getattr(answer.figures, name) for name in _FIGURES}
        limit = _memory_limit(spec, forecast)
        if limit is not None and answer.figures.peak_memory_bytes > limit:
            need, capacity = format_need_and_limit(answer.figures.peak_memory_bytes, round(limit))
            outcome = "oom"
            hint = _BATCH_HINT if spec.batch_size > spec.micro_batches else _SPLIT_HINT
            reason = (
                f"out of memory: the tensors of a rank take {need}, the largest part in {answer.figures.peak_layer}, "
                f"at the peak in {answer.figures.running_layer}; its device has {capacity}\n  {hint}"
            )
    seconds = 0.0 if is_shared else answer.seconds
    return DryRun(config_id=key, spec=spec, outcome=outcome, reason=reason, seconds=seconds, **figures)


def _predicted_record(key: str, spec: RunSpec, forecast: Forecast) -> DryRun:
    """Return the record of a strategy whose library has threads and tensors that no recorder follows."""
    outcome: DryRunOutcome = "not_fakeable"
    reason = f"{get_strategy(spec.strategy).library_name} executes {spec.strategy}, and does not run on fake tensors"
    figures: dict[str, Any] = {**dict.fromkeys(_FIGURES), "host_sync_sites": [], "modelled": []}
    prediction = forecast.predict_alone(spec)
    if isinstance(prediction, Prediction):
        peak_bytes = figures["peak_memory_bytes"] = prediction.peak_memory_bytes
        reason += "; its peak is the oracle's"
        limit = _memory_limit(spec, forecast)
        if limit is not None and peak_bytes > limit:
            need, capacity = format_need_and_limit(peak_bytes, round(limit))
            outcome, reason = "oom", f"out of memory: a rank needs {need} by the oracle; its device has {capacity}"
    return DryRun(config_id=key, spec=spec, outcome=outcome, reason=reason, seconds=0.0, **figures)


def _memory_limit(spec: RunSpec, forecast: Forecast) -> float | None:
    """Return the bytes that a rank's tensors may take, as ``predict`` counts them."""
    try:
        machine = forecast.machine(spec)
    except HpcbenchError:
        return None
    return None if machine.memory_bytes is None else machine.memory_bytes - machine.base_bytes


def _answers(tasks: Sequence[DryRunTask], on_answer: Callable[[DryRunAnswer], None]) -> list[DryRunAnswer]:
    """Share ``tasks`` among processes; a task whose process ended without an answer gets one with that reason."""
    processes = max(1, min(_MAX_PROCESSES, available_cores(), len(tasks)))
    lock = threading.Lock()

    def notify(answer: DryRunAnswer) -> None:
        with lock:
            on_answer(answer)

    with ThreadPoolExecutor(processes) as pool:
        parts = pool.map(lambda part: _answers_of_process(part, notify), shares_of_processes(tasks, processes))
        return [answer for part in parts for answer in part]


def shares_of_processes(tasks: Sequence[DryRunTask], processes: int) -> list[list[DryRunTask]]:
    """Deal ``tasks`` out in pieces of one model and data set, which share what a process keeps of them."""
    groups: dict[tuple[str, str], list[DryRunTask]] = {}
    for task in tasks:
        groups.setdefault((task.spec.model, task.spec.dataset), []).append(task)
    longest = max(1, len(tasks) // (_PIECES_PER_PROCESS * processes))
    pieces = [group[first : first + longest] for group in groups.values() for first in range(0, len(group), longest)]
    return [[task for piece in pieces[number::processes] for task in piece] for number in range(processes)]


def _answers_of_process(tasks: Sequence[DryRunTask], on_answer: Callable[[DryRunAnswer], None]) -> list[DryRunAnswer]:
    answers: list[DryRunAnswer] = []
    remaining = list(tasks)

    def keep(answer: DryRunAnswer) -> None:
        answers.append(answer)
        on_answer(answer)

    while remaining:
        count, errors = _run_process(remaining, keep)
        remaining = remaining[count:]
        if not remaining:
            break
        error = printable_text(errors[-1])
        if not answers and count == 0 and re.search("No module named '(torch|msgspec|hpcbench)", error):
            raise WorkerError(f"a dry run needs torch: {sys.executable} reports: {error}", hint=_INSTALL_HINT)
        if not answers and re.match("(Import|ModuleNotFound|Attribute)Error: ", error):
            raise WorkerError(f"the dry run does not start with this torch: {sys.executable} reports: {error}")
        outcome: DryRunOutcome = "error"
        reason = f"the process of the dry run ended in this configuration: {error}"
        if any(line.startswith("Timeout (") for line in errors):
            outcome = "not_fakeable"
            reason = f"took longer than {remaining[0].limit_s:g} s (at {_site_of_stack(errors)})"
        keep(DryRunAnswer(index=remaining.pop(0).index, outcome=outcome, reason=reason, seconds=0.0))
    return answers


def _site_of_stack(errors: Sequence[str]) -> str:
    """Return ``file:line`` of the innermost frame of a model or of hpcbench in the stack that ends ``errors``."""
    beginnings = [number for number, line in enumerate(errors) if line.endswith("(most recent call first):")]
    frames = [match for line in errors[beginnings[-1] :] if (match := _FRAME.match(line))] if beginnings else []
    frames = [frame for frame in frames if not _UNNAMED_FRAME.search(frame["file"])]
    return printable_text(f"{frames[0]['file']}:{frames[0]['line']}") if frames else "unknown"


def _run_process(tasks: Sequence[DryRunTask], on_answer: Callable[[DryRunAnswer], None]) -> tuple[int, list[str]]:
    """Run one worker process; return the number of its answers, and the lines of its errors, at least one."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", _WORKER_MODULE], env=scrubbed_environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise WorkerError(f"a dry run cannot start {sys.executable}: {error}") from error
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    assert process.stderr is not None, "a pipe"
    errors: list[bytes] = []
    reader = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
    reader.start()
    count = 0
    timer = _kill_later(process)
    try:
        with process.stdin as stream:
            stream.write(msgspec.json.encode(list(tasks)))
        for line in process.stdout:
            timer.cancel()
            timer = _kill_later(process)
            on_answer(msgspec.json.decode(line, type=DryRunAnswer))
            count += 1
    except BrokenPipeError:
        pass
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait()
        timer.cancel()
        reader.join()
    lines = b"".join(errors).decode(errors="replace").strip().splitlines()
    return count, lines or [f"exit code {process.returncode}"]


def _kill_later(process: subprocess.Popen[bytes]) -> threading.Timer:
    timer = threading.Timer(_SILENCE_LIMIT_S, process.kill)
    timer.daemon = True
    timer.start()
    return timer
