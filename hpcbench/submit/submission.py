"""One submit on disk: ``submissions/<id>/`` with a script and a task file per array, and what became of them."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.spec import RunSpec, config_id
from hpcbench.config.task import Task, TaskHeader, write_lines
from hpcbench.fileio import make_folder, storage_error, write_atomic
from hpcbench.render.directives import Shape, cpus_per_task
from hpcbench.render.engine import TemplateEngine
from hpcbench.render.script import render_script
from hpcbench.results.store import ClusterTree
from hpcbench.submit.environment import scrubbed_names
from hpcbench.submit.plan import Plan


class Array(msgspec.Struct, kw_only=True):
    """Runs that share a script: the lines of ``<number>.jsonl``, submitted as one array."""

    number: int
    run_ids: list[str]
    ranks: int
    nodes: int
    cores_per_run: int
    time_limit_s: float
    job_ids: list[str] = []
    """One per run, once the scheduler has taken the array: ``<job>`` or ``<job>_<task>``."""


class Submission(msgspec.Struct, kw_only=True):
    """``submission.json``."""

    submission: str
    sweep: str
    cluster: str
    scheduler: str
    created_unix_s: float
    arrays: list[Array]


@dataclass(frozen=True)
class Rendered:
    """The bytes that a submission consists of, by file name, before anything is written."""

    record: Submission
    files: dict[str, bytes]


def next_submission_folder(tree: ClusterTree, sweep: str) -> Path:
    """``submissions/<sweep>-<number>``, the first number that is free."""
    pattern = re.compile(re.escape(sweep) + r"-(\d+)")
    numbers = [0]
    if tree.submissions.is_dir():
        matches = (pattern.fullmatch(entry.name) for entry in tree.submissions.iterdir())
        numbers += [int(match[1]) for match in matches if match]
    return tree.submissions / f"{sweep}-{max(numbers) + 1:04d}"


def render_submission(plan: Plan, runs: dict[str, RunSpec], tree: ClusterTree, folder: Path) -> Rendered:
    """Everything that submitting ``runs`` would write into ``folder``. Writes nothing."""
    engine = TemplateEngine()
    files: dict[str, bytes] = {}
    arrays = []
    for number, (shape, keys) in enumerate(plan.groups(runs).items()):
        files[f"{number}.sh"] = render_script(engine, plan.profile, shape, plan.sweep.name, folder, number).encode()
        tasks = [_task(plan, key, runs[key], shape) for key in keys]
        files[f"{number}.jsonl"] = write_lines(_header(plan, tree, folder, shape), tasks)
        arrays.append(
            Array(
                number=number,
                run_ids=keys,
                ranks=shape.ranks,
                nodes=shape.nodes,
                cores_per_run=_cores_per_run(shape, plan.profile),
                time_limit_s=shape.time_limit_s,
            )
        )
    record = Submission(
        submission=folder.name,
        sweep=plan.sweep.name,
        cluster=plan.profile.name,
        scheduler=plan.profile.scheduler.kind,
        created_unix_s=time.time(),
        arrays=arrays,
    )
    return Rendered(record, files)


ALL_CORES = 2**20
"""More than any machine has: such a run waits until it is alone."""


def _cores_per_run(shape: Shape, profile: ClusterProfile) -> int:
    """What the local queue counts. Runs on an accelerator, which has no cores to count, are alone on the machine."""
    if profile.request.exclusive or profile.device != "cpu":
        return ALL_CORES
    return shape.tasks_per_node * cpus_per_task(shape, profile)


def _task(plan: Plan, key: str, spec: RunSpec, shape: Shape) -> Task:
    return Task(
        run_id=key,
        config_id=config_id(spec),
        sweep=plan.sweep.name,
        spec=spec,
        time_limit_s=shape.time_limit_s,
    )


def _header(plan: Plan, tree: ClusterTree, folder: Path, shape: Shape) -> TaskHeader:
    profile = plan.profile
    device = profile.devices.get(profile.node_of(shape.partition).device_type or "")
    return TaskHeader(
        cluster=profile.name,
        device=profile.device,
        tree=str(tree.root),
        submission=folder.name,
        interface=profile.network.interface,
        host_suffix=profile.network.host_suffix,
        wait_s=profile.network.wait_s,
        peak_flops_per_s={str(key): value for key, value in device.peak_flops_per_s.items()} if device else {},
        cores_per_task=cpus_per_task(shape, profile),
        scrubbed=scrubbed_names(),
    )


def write_submission(rendered: Rendered, folder: Path) -> None:
    """Write ``rendered`` whole, the record last: a folder without one was never complete."""
    make_folder(folder.parent)
    try:
        folder.mkdir()
    except OSError as error:
        raise storage_error(error, folder) from error
    for name, data in rendered.files.items():
        write_atomic(folder / name, data)
    save_record(rendered.record, folder)


def save_record(record: Submission, folder: Path) -> None:
    """Write ``submission.json`` anew."""
    write_atomic(folder / "submission.json", msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def read_record(folder: Path) -> Submission | None:
    """The record of a submission; ``None`` where it is absent or broken."""
    try:
        return msgspec.json.decode((folder / "submission.json").read_bytes(), type=Submission)
    except (OSError, msgspec.MsgspecError):
        return None


def read_specs(folder: Path, record: Submission) -> dict[str, RunSpec]:
    """The specifications of a submission's runs, from its task files; files that are gone or broken are passed over."""
    found: dict[str, RunSpec] = {}
    for array in record.arrays:
        try:
            lines = (folder / f"{array.number}.jsonl").read_bytes().splitlines()[1:]
            found |= {task.run_id: task.spec for task in (msgspec.json.decode(line, type=Task) for line in lines)}
        except (OSError, msgspec.MsgspecError):
            continue
    return found


NO_ARRAY_TASK = "4294967294"
"""What SLURM writes for %a in the log's name of a job that is no array."""


def job_log(folder: Path, record: Submission, number: int, job_id: str) -> Path:
    """What the script of a job said itself; the ranks' words are in the attempt's folder."""
    if record.scheduler == "local":
        return folder / "jobs" / f"{job_id}_0_log.out"
    job, _, task = job_id.partition("_")
    return folder / f"{number}.{job}.{task or NO_ARRAY_TASK}.log"


def submissions_of(tree: ClusterTree, sweep: str | None = None) -> list[tuple[Path, Submission]]:
    """The submissions in a tree, oldest first, of one sweep or of all."""
    if not tree.submissions.is_dir():
        return []
    found = []
    for folder in sorted(tree.submissions.iterdir()):
        record = read_record(folder) if folder.is_dir() and not folder.is_symlink() else None
        if record is not None and sweep in (None, record.sweep):
            found.append((folder, record))
    return sorted(found, key=lambda entry: entry[1].created_unix_s)
