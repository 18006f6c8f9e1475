"""The schedulers by the kind that a profile names: those of hpcbench and those of third parties."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hpcbench.config.scheduler_kinds import load_scheduler_plugin
from hpcbench.errors import ConfigError
from hpcbench.submit.local_scheduler import LocalScheduler
from hpcbench.submit.scheduler import Notify, Scheduler, SendOutcome, ignore_message
from hpcbench.submit.slurm_scheduler import SlurmScheduler
from hpcbench.submit.submission_record import SubmittedRun, list_submissions

if TYPE_CHECKING:
    from hpcbench.config.cluster_profile import ClusterProfile
    from hpcbench.results.results_tree import ClusterTree


def job_log(run: SubmittedRun) -> Path | None:
    """The file with the output of the script of a run's job; ``None`` if the run has no job yet."""
    return scheduler_class(run.record.scheduler, run.record.cluster).job_log(run)


_RENDERED_ONLY = {
    "pbs": (
        "is run by PBS, which hpcbench writes for but does not submit to",
        "hpcbench render SWEEP --cluster NAME --out DIR writes complete jobs: qsub DIR/0.sh, and so on",
    ),
    "none": ("is only predicted for: no job reaches it", "plan and predict take it; hpcbench cluster list has others"),
}


_SHIPPED: dict[str, type[Scheduler]] = {"slurm": SlurmScheduler, "local": LocalScheduler}


def scheduler_class(kind: str, cluster: str) -> type[Scheduler]:
    """The class for ``scheduler.kind`` of a profile, or for ``scheduler`` of a submission's record.

    Raises ``ConfigError``, which names ``cluster``, if no module implements the kind, or a module without a scheduler.
    """
    if kind in _SHIPPED:
        return _SHIPPED[kind]
    module = load_scheduler_plugin(kind)
    if module is None:
        reason, hint = _RENDERED_ONLY.get(kind, (f"has a scheduler of the unknown kind {kind!r}", None))
        raise ConfigError(f"cluster {cluster} {reason}", hint=hint)
    implementation = getattr(module, "SCHEDULER", None)
    if not isinstance(implementation, type) or not issubclass(implementation, Scheduler):
        message = f"cluster {cluster}: {module.__name__}.SCHEDULER is {implementation!r}, not a subclass of Scheduler"
        raise ConfigError(message, hint="hpcbench/submit/scheduler.py describes the class that is required")
    return implementation


def poll_period_s(kind: str, cluster: str, profile: ClusterProfile) -> float:
    """Pause (s) between two queries of a scheduler: ``scheduler.poll_s`` of the profile, else that of the kind."""
    period = profile.scheduler.poll_s
    return scheduler_class(kind, cluster).poll_s if period is None else period


def check_scheduler(profile: ClusterProfile) -> None:
    """Raise ``SubmitError`` or ``ConfigError`` if no job can be submitted to the cluster from this machine."""
    scheduler_class(profile.scheduler.kind, profile.name)(profile).check()


def send_unsent(
    tree: ClusterTree, run_ids: Iterable[str], profile: ClusterProfile, notify: Notify = ignore_message
) -> SendOutcome:
    """Submit every job that carries one of ``run_ids`` and was not submitted yet, the oldest submission first."""
    wanted = set(run_ids)
    total = SendOutcome()
    for folder, record in list_submissions(tree):
        if not wanted.isdisjoint(run_id for array in record.arrays for run_id in array.run_ids):
            scheduler = scheduler_class(record.scheduler, record.cluster)(profile)
            total.add(scheduler.submit(folder, record, tree, notify))
            if total.failed is not None:
                break
    return total
