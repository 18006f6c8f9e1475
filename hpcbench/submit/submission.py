"""The files of one submission: ``submissions/<id>/`` with a job script and a task file per array, and the record of
both.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.config.run_spec import RunSpec, RunTask, TaskFileHeader, config_id, encode_task_file
from hpcbench.fileio import make_folder, write_atomic, write_error
from hpcbench.render.job_script import render_script
from hpcbench.render.launch_step import JobShape, cpus_per_task
from hpcbench.render.template_engine import TemplateEngine
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.plan import JobGroup, SweepPlan
from hpcbench.submit.scheduler_settings import scrubbed_names
from hpcbench.submit.stop_groups import StopGroups
from hpcbench.submit.submission_record import JobArray, Submission

if TYPE_CHECKING:
    from hpcbench.oracle.machine import Machine


def emulated_clusters(specs: Iterable[RunSpec], tree: ClusterTree) -> dict[str, Any]:
    """The compute speed of each cluster that ``specs`` emulate (key ``rehearse``), for the task file's header."""
    names = sorted({spec.rehearse for spec in specs if spec.rehearse is not None})
    if not names:
        # Nearly all submits return here without loading the oracle.
        return {}
    from hpcbench.oracle.machine import emulated_compute

    return {name: msgspec.to_builtins(emulated_compute(emulated_machine(name, tree))) for name in names}


def emulated_machine(name: str, tree: ClusterTree | None) -> Machine:
    """The machine of cluster ``name``, by its newest calibration beside ``tree``, or by its profile.

    Raises ``ConfigError`` if there is no such profile.
    """
    from hpcbench.oracle.calibration.calibration_store import machine_for

    profile, _ = load_cluster(name)
    return machine_for(profile, ClusterTree(tree.root.parent / profile.name) if tree else None)


@dataclass(frozen=True)
class RenderedSubmission:
    """The files of a submission before anything is written: bytes by file name."""

    record: Submission
    files: dict[str, bytes]


def render_submission(
    plan: SweepPlan,
    runs: dict[str, RunSpec],
    tree: ClusterTree,
    folder: Path,
    superseded: Mapping[str, str] = MappingProxyType({}),
    *,
    obeys_stops: bool = True,
) -> RenderedSubmission:
    """The files that submitting ``runs`` would write into ``folder``. Nothing is written.

    Args:
        superseded: for runs that are measured again, the environment key of the result that they replace.
        obeys_stops: whether runs check at their start if a stop rule excludes them.
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
        tasks = [
            RunTask(
                run_id=key,
                config_id=config_id(runs[key]),
                sweep=plan.sweep.name,
                spec=runs[key],
                time_limit_s=shape.time_limit_s,
                stop_groups=stops.of_run.get(key, []),
                supersedes=superseded.get(key),
            )
            for key in keys
        ]
        files[f"{number}.jsonl"] = encode_task_file(_task_header(plan, tree, folder, group), tasks)
        arrays.append(
            JobArray(
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
    return RenderedSubmission(_submission_record(plan, folder, arrays), files)


def _submission_record(plan: SweepPlan, folder: Path, arrays: list[JobArray]) -> Submission:
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
"""More cores than any machine has: such a run waits until it is alone."""


def _cores_per_run(shape: JobShape, profile: ClusterProfile) -> int:
    """The cores that the local queue reserves for a run. Runs on an accelerator are alone on the machine."""
    if profile.request_of(shape.partition).exclusive or profile.device != "cpu":
        return ALL_CORES
    return shape.tasks_per_node * cpus_per_task(shape, profile)


def _task_header(plan: SweepPlan, tree: ClusterTree, folder: Path, group: JobGroup) -> TaskFileHeader:
    profile, shape = plan.profile, group.shape
    device = profile.devices.get(profile.node_of(shape.partition).device_type or "")
    return TaskFileHeader(
        cluster=profile.name,
        device=profile.device,
        tree=str(tree.root),
        submission=folder.name,
        interface=profile.network.interface,
        host_suffix=profile.network.host_suffix,
        meet_by_host_name=profile.network.meet_by == "host-name",
        wait_s=profile.network.wait_s,
        data_folder=plan.data_folder,
        rehearsed=emulated_clusters((plan.runs[key] for key in group.run_ids if key in plan.runs), tree),
        peak_flops_per_s={str(key): value for key, value in device.peak_flops_per_s.items()} if device else {},
        cores_per_task=cpus_per_task(shape, profile),
        pack=group.pack,
        environment_key=plan.environment_key(shape.environment),
        model_folder=str(plan.model_folder) if plan.model_folder else None,
        scrubbed=scrubbed_names(),
    )


def write_submission(rendered: RenderedSubmission, folder: Path) -> None:
    """Write all files, the record last: a folder without a record was never complete.

    Raises ``StorageError`` if the file system refuses.
    """
    make_folder(folder.parent)
    try:
        folder.mkdir()
        for name, data in rendered.files.items():
            with open(folder / name, "xb") as file:
                file.write(data)
        # All at the end: the first fsync writes most of the others, too.
        for name in rendered.files:
            with open(folder / name, "rb") as file:
                os.fsync(file.fileno())
    except OSError as error:
        raise write_error(error, folder) from error
    write_atomic(folder / "submission.json", msgspec.json.encode(rendered.record) + b"\n")
