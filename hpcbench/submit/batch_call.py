"""The call of sbatch for one batch: the name by which its job is found again, and its options.

A job has a name of its own, unless the profile prescribes one, or drops ours. It is then found by its command, the
script with its argument, which no other batch of the tree has.
"""

from __future__ import annotations

from pathlib import Path

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.submit.journal import JobBatch
from hpcbench.submit.submission_record import JobArray, Submission
from hpcbench.submit.throttle_groups import Throttle, split_arrays, throttle_group_sizes, throttle_scopes


def new_batch(
    folder: Path, record: Submission, array: JobArray, first: int, count: int, profile: ClusterProfile, group: int = 0
) -> JobBatch:
    """The batch of ``count`` jobs of an array from ``first`` on, before it is sent.

    Args:
        folder: the submission's.
        group: its throttle group.
    """
    script = folder / f"{array.number}.sh"
    own = record.batch_name(array.number, first, count)
    # Without a name, sbatch calls a job after its script.
    default = script.name if "job-name" in profile.request_of(array.partition).drop else own
    name = _profile_directive("job-name", profile, array.partition) or default
    return JobBatch(
        array=array.number,
        first=first,
        count=count,
        name=name,
        command="" if name == own else f"{script} {first}",
        group=group,
        is_array=array.jobs > 1,
    )


def batch_options(
    batch: JobBatch, record: Submission, profile: ClusterProfile, throttle: Throttle | None = None
) -> list[str]:
    """The options of sbatch for a batch: its own name and comment, unless the profile has others; its array."""
    partition = record.arrays[batch.array].partition
    own, drop = record.batch_name(batch.array, batch.first, batch.count), profile.request_of(partition).drop
    options = [
        f"--{name}={own}"
        for name in ("job-name", "comment")
        if name not in drop and _profile_directive(name, profile, partition) is None
    ]
    if batch.is_array:
        size = throttle.sizes[batch.group] if throttle and throttle.sizes else batch.count
        options.append(f"--array=0-{batch.count - 1}" + (f"%{size}" if size < batch.count else ""))
    if throttle and batch.group in throttle.last_job:
        options.append(f"--dependency=afterany:{throttle.last_job[batch.group]}")
    return options


def sbatch_command(script: Path, options: list[str], argument: int) -> list[str]:
    """The words of the call that submits the jobs of an array from number ``argument`` on."""
    return ["sbatch", "--parsable", *options, str(script), str(argument)]


def planned_calls(folder: Path, record: Submission, profile: ClusterProfile) -> dict[int, list[list[str]]]:
    """The calls of sbatch by array of a submission of which nothing was sent, if no limit but the profile's divides it.

    The number of a job that another one waits for is known once it was sent; its script stands in its place.
    """
    largest = profile.scheduler.max_array_size or max(array.jobs for array in record.arrays)
    scopes = throttle_scopes(record.max_running_jobs, {one.partition: one.max_running_jobs for one in record.arrays})
    throttles: dict[str, Throttle] = {}
    for name, limit in set(scopes.values()):
        jobs = (one.jobs for one in record.arrays if scopes.get(one.partition, ("", 0))[0] == name)
        throttles[name] = Throttle(throttle_group_sizes(limit, split_arrays(jobs, largest)))
    calls: dict[int, list[list[str]]] = {}
    for array in record.arrays:
        throttle = throttles[scopes[array.partition][0]] if array.partition in scopes else Throttle()
        script = folder / f"{array.number}.sh"
        for first in range(0, array.jobs, largest):
            count = min(largest, array.jobs - first)
            batch = new_batch(folder, record, array, first, count, profile, throttle.next_group())
            options = batch_options(batch, record, profile, throttle)
            calls.setdefault(array.number, []).append(sbatch_command(script, options, first))
            throttle.add(batch.group, f"<the job of {script.name} {first}>")
    return calls


def _profile_directive(name: str, profile: ClusterProfile, partition: str | None) -> str | None:
    """The value of a directive that the profile writes into every job; ``None`` if it has none."""
    value = {**profile.directives, **profile.partition(partition).directives}.get(name)
    return None if value is None or value is False else str(value)
