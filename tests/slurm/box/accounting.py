"""Accounts, users and QOS in slurmdbd."""

from __future__ import annotations

from collections.abc import Sequence

from . import paths
from .shell import run

ACCOUNT = "box"
# Small on purpose: tests meet the limits with a handful of jobs.
LIMITED_MAX_SUBMIT, LIMITED_MAX_RUNNING = 5, 2


def commands(users: Sequence[str]) -> list[list[str]]:
    """Arguments of `sacctmgr -i`, in order; slurmctld starts after them, so that it finds its limits."""
    return [
        ["add", "cluster", paths.CLUSTER],
        [
            "add", "qos", "limited", "set", f"MaxSubmitJobsPerUser={LIMITED_MAX_SUBMIT}",
            f"MaxJobsPerUser={LIMITED_MAX_RUNNING}",
        ],
        ["add", "account", ACCOUNT, f"Cluster={paths.CLUSTER}", "QOS=normal,limited", "DefaultQOS=normal"],
        ["add", "user", ",".join(users), f"Account={ACCOUNT}", f"DefaultAccount={ACCOUNT}", f"Cluster={paths.CLUSTER}"],
    ]  # fmt: skip


def create(users: Sequence[str]) -> None:
    for args in commands(users):
        run(["sacctmgr", "-i", *args], timeout=60)
