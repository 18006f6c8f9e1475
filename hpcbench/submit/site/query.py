"""Ask the live scheduler for everything that a profile may say of it."""

from __future__ import annotations

import getpass
import re
import subprocess

from hpcbench.errors import SubmitError
from hpcbench.fileio import printable
from hpcbench.submit.address import Reachable
from hpcbench.submit.scheduler import slurm_environment
from hpcbench.submit.site.facts import (
    NodeFacts,
    SiteFacts,
    parse_associations,
    parse_config,
    parse_nodes,
    parse_partitions,
    parse_qos,
)
from hpcbench.submit.site.json_nodes import COMMANDS, parse_json_nodes

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_QOS = "format=Name,MaxWall,MaxJobsPU,MaxSubmitPU,MaxTRES,MinTRES"
_ASSOCIATION = "format=Account,QOS,DefaultQOS,MaxSubmit"


def ask_site(profile: Reachable) -> SiteFacts:
    """What scontrol says, and what sacctmgr adds where there is accounting.

    Text is read; JSON, which not every SLURM prints and whose form changes, only where the text says nothing of nodes.
    Raises ``SubmitError`` where scontrol is absent or does not answer.
    """
    settings = parse_config(_said(["scontrol", "show", "config"], profile))
    nodes = _nodes(profile)
    partitions = parse_partitions(_said(["scontrol", "show", "partition", "--oneliner"], profile), nodes)
    largest = settings.get("MaxArraySize", "")
    user = f"user={getpass.getuser()}"
    return SiteFacts(
        cluster=settings.get("ClusterName", ""),
        version=settings.get("SLURM_VERSION", ""),
        partitions=partitions,
        qos=parse_qos(_said_if_at_all(["sacctmgr", "-nP", "show", "qos", _QOS], profile)),
        associations=parse_associations(
            _said_if_at_all(["sacctmgr", "-nP", "show", "assoc", "where", user, _ASSOCIATION], profile)
        ),
        max_array_size=int(largest) if largest.isdecimal() else None,
        settings=settings,
    )


def _nodes(profile: Reachable) -> dict[str, list[NodeFacts]]:
    found = parse_nodes(_said_if_at_all(["scontrol", "show", "node", "--oneliner"], profile))
    for command in COMMANDS:
        found = found or parse_json_nodes(_said_if_at_all(command, profile))
    return found


def _said_if_at_all(command: list[str], profile: Reachable) -> str:
    """A site may have no accounting, an older SLURM, or keep things from users."""
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
    # Names from there become TOML and go to a terminal.
    return _CONTROL.sub(" ", done.stdout)
