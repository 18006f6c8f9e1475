"""One submit on disk: ``submissions/<id>/`` with a script and a task file per array, and what became of them."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

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
from hpcbench.submit.packing import JobGroup
from hpcbench.submit.plan import Plan
from hpcbench.submit.stop import StopGroups


class Array(msgspec.Struct, kw_only=True):
    """Runs that share a script: the lines of ``<number>.jsonl``. Job ``k`` has ``pack`` of them, from ``k * pack``."""

    number: int
    run_ids: list[str]
    pack: int = 1
    ranks: int
    nodes: int
    partition: str | None = None
    cores_per_run: int
    job_limit_s: float

    @property
    def jobs(self) -> int:
        """How many jobs carry the runs."""
        return -(-len(self.run_ids) // self.pack)

    def runs_of(self, job: int) -> list[str]:
        """The runs of one job."""
        return self.run_ids[job * self.pack : (job + 1) * self.pack]


class Submission(msgspec.Struct, kw_only=True):
    """``submission.json``: what is to be submitted. Written once; the journal says how far it has come."""

    submission: str
    token: str
    """Part of every job's name, so that a job is found again by it and never taken for another tree's."""
    sweep: str
    cluster: str
    scheduler: str
    created_unix_s: float
    max_running_jobs: int | None = None
    arrays: list[Array]

    def chunk_name(self, array: int, first: int, count: int) -> str:
        """The name of the jobs ``first`` to ``first + count - 1`` of an array at the scheduler."""
        return f"hpcbench-{self.submission}-{self.token}-{array}.{first}-{first + count - 1}"


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


def render_submission(
    plan: Plan,
    runs: dict[str, RunSpec],
    tree: ClusterTree,
    folder: Path,
    superseded: Mapping[str, str] = MappingProxyType({}),
    *,
    obeys_stops: bool = True,
) -> Rendered:
    """Everything that submitting ``runs`` would write into ``folder``. Writes nothing.

    ``obeys_stops``: runs look at their start whether a stop rule has made them pointless.
    ``superseded``: of runs that are measured again, the environment key of the result that they replace.
    """
    engine = TemplateEngine()
    files: dict[str, bytes] = {}
    arrays = []
    stops = plan.stops if obeys_stops else StopGroups([], {})
    if stops.groups:
        files["stop.jsonl"] = stops.lines()
    for number, group in enumerate(plan.jobs(runs)):
        shape, keys = group.shape, group.run_ids
        script = render_script(
            engine, plan.profile, shape, plan.sweep.name, folder, number, pack=group.pack, runs=len(keys)
        )
        files[f"{number}.sh"] = script.encode()
        tasks = [_task(plan, key, runs[key], shape, stops.of_run.get(key, []), superseded.get(key)) for key in keys]
        files[f"{number}.jsonl"] = write_lines(_header(plan, tree, folder, group), tasks)
        arrays.append(
            Array(
                number=number,
                run_ids=keys,
                pack=group.pack,
                ranks=shape.ranks,
                nodes=shape.nodes,
                partition=shape.partition,
                cores_per_run=_cores_per_run(shape, plan.profile),
                job_limit_s=group.limit_s,
            )
        )
    return Rendered(_record(plan, folder, arrays), files)


def _record(plan: Plan, folder: Path, arrays: list[Array]) -> Submission:
    limits = (plan.sweep.submit.max_running_jobs, plan.profile.scheduler.max_running_jobs)
    return Submission(
        submission=folder.name,
        token=secrets.token_hex(4),
        sweep=plan.sweep.name,
        cluster=plan.profile.name,
        scheduler=plan.profile.scheduler.kind,
        created_unix_s=time.time(),
        max_running_jobs=min((limit for limit in limits if limit is not None), default=None),
        arrays=arrays,
    )


ALL_CORES = 2**20
"""More than any machine has: such a run waits until it is alone."""


def _cores_per_run(shape: Shape, profile: ClusterProfile) -> int:
    """What the local queue counts. Runs on an accelerator, which has no cores to count, are alone on the machine."""
    if profile.request.exclusive or profile.device != "cpu":
        return ALL_CORES
    return shape.tasks_per_node * cpus_per_task(shape, profile)


def _task(plan: Plan, key: str, spec: RunSpec, shape: Shape, stops: list[int], superseded: str | None) -> Task:
    return Task(
        run_id=key,
        config_id=config_id(spec),
        sweep=plan.sweep.name,
        spec=spec,
        time_limit_s=shape.time_limit_s,
        stop_groups=stops,
        supersedes=superseded,
    )


def _header(plan: Plan, tree: ClusterTree, folder: Path, group: JobGroup) -> TaskHeader:
    profile, shape = plan.profile, group.shape
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
        pack=group.pack,
        environment_key=plan.environment_key(shape.environment),
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
    write_atomic(folder / "submission.json", msgspec.json.encode(rendered.record) + b"\n")


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
