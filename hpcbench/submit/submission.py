"""What a submit writes: ``submissions/<id>/`` with a script and a task file per array, and the record of both."""

from __future__ import annotations

import os
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
from hpcbench.parallel.check import model_folder
from hpcbench.paths import data_folder
from hpcbench.render.engine import TemplateEngine
from hpcbench.render.script import render_script
from hpcbench.render.shape import Shape, cpus_per_task
from hpcbench.results.store import ClusterTree
from hpcbench.submit.environment import scrubbed_names
from hpcbench.submit.packing import JobGroup
from hpcbench.submit.plan import Plan
from hpcbench.submit.rehearsal import rehearsed_clusters
from hpcbench.submit.stop import StopGroups
from hpcbench.submit.submission_record import Array, Submission


@dataclass(frozen=True)
class Rendered:
    """The bytes that a submission consists of, by file name, before anything is written."""

    record: Submission
    files: dict[str, bytes]


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
    partitions = [plan.profile.partition(array.partition).max_running_jobs for array in arrays]
    limits = (plan.sweep.submit.max_running_jobs, plan.profile.scheduler.max_running_jobs, *partitions)
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
    if profile.request_of(shape.partition).exclusive or profile.device != "cpu":
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
    models = model_folder(plan.sweep, profile)
    return TaskHeader(
        cluster=profile.name,
        device=profile.device,
        tree=str(tree.root),
        submission=folder.name,
        interface=profile.network.interface,
        host_suffix=profile.network.host_suffix,
        meet_by_host_name=profile.network.meet_by == "host-name",
        wait_s=profile.network.wait_s,
        data_folder=data_folder(None, profile.data_folder),
        rehearsed=rehearsed_clusters((plan.runs[key] for key in group.run_ids if key in plan.runs), tree),
        peak_flops_per_s={str(key): value for key, value in device.peak_flops_per_s.items()} if device else {},
        cores_per_task=cpus_per_task(shape, profile),
        pack=group.pack,
        environment_key=plan.environment_key(shape.environment),
        model_folder=str(models) if models else None,
        scrubbed=scrubbed_names(),
    )


def write_submission(rendered: Rendered, folder: Path) -> None:
    """Write ``rendered`` whole, the record last: a folder without one was never complete."""
    make_folder(folder.parent)
    try:
        folder.mkdir()
        for name, data in rendered.files.items():
            with open(folder / name, "xb") as file:
                file.write(data)
        # All at the end: the first takes most of the others with it.
        for name in rendered.files:
            with open(folder / name, "rb") as file:
                os.fsync(file.fileno())
    except OSError as error:
        raise storage_error(error, folder) from error
    write_atomic(folder / "submission.json", msgspec.json.encode(rendered.record) + b"\n")
