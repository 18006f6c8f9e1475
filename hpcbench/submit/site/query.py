"""Ask the live scheduler for everything that a profile may say of it."""

from __future__ import annotations

import getpass
import subprocess

from hpcbench.errors import SubmitError
from hpcbench.fileio import printable
from hpcbench.submit.address import Reachable
from hpcbench.submit.scheduler import slurm_environment
from hpcbench.submit.site.facts import (
    SiteFacts,
    parse_associations,
    parse_config,
    parse_nodes,
    parse_partitions,
    parse_qos,
)

_QOS = "format=Name,MaxWall,MaxJobsPU,MaxSubmitPU"
_ASSOCIATION = "format=Account,QOS,DefaultQOS,MaxSubmit"


def ask_site(profile: Reachable) -> SiteFacts:
    """What scontrol says, and what sacctmgr adds where there is accounting.

    Text is read, not JSON: scontrol prints that from SLURM 23.02 on, if built with it, and its form changes.
    Raises ``SubmitError`` where scontrol is absent or does not answer.
    """
    settings = parse_config(_said(["scontrol", "show", "config"], profile))
    nodes = parse_nodes(_said(["scontrol", "show", "node", "--oneliner"], profile))
    partitions = parse_partitions(_said(["scontrol", "show", "partition", "--oneliner"], profile), nodes)
    largest = settings.get("MaxArraySize", "")
    user = f"user={getpass.getuser()}"
    return SiteFacts(
        cluster=settings.get("ClusterName", ""),
        version=settings.get("SLURM_VERSION", ""),
        partitions=partitions,
        qos=parse_qos(_said_by_accounts(["sacctmgr", "-nP", "show", "qos", _QOS], profile)),
        associations=parse_associations(
            _said_by_accounts(["sacctmgr", "-nP", "show", "assoc", "where", user, _ASSOCIATION], profile)
        ),
        max_array_size=int(largest) if largest.isdecimal() else None,
        settings=settings,
    )


def _said_by_accounts(command: list[str], profile: Reachable) -> str:
    """A site may have no accounting, or keep it from users."""
    try:
        return _said(command, profile)
    except SubmitError:
        return ""


def _said(command: list[str], profile: Reachable) -> str:
    try:
        done = subprocess.run(
            command, env=slurm_environment(profile),
            capture_output=True, text=True, errors="replace", timeout=60, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SubmitError(f"{command[0]}: {error}", hint="run this on a login node of the cluster") from None
    if done.returncode != 0:
        raise SubmitError(f"{' '.join(command[:3])}: {printable(done.stderr.strip())}", hint="is the controller up?")
    return done.stdout
