"""Checks of a profile against this machine and its scheduler: login node, limits, nodes, and ``sbatch --test-only``."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path

from hpcbench.config.cluster_profile import ClusterProfile, LoginNodeMatch
from hpcbench.config.profile_tables import PartitionConfig
from hpcbench.config.toml_tables import TomlSource
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, SubmitError, did_you_mean
from hpcbench.fileio import printable_text
from hpcbench.render.job_script import render_script
from hpcbench.render.launch_step import JobShape
from hpcbench.render.template_engine import TemplateEngine
from hpcbench.site.slurm_facts import NodeFacts, PartitionFacts, SiteFacts, query_site
from hpcbench.submit.scheduler import account_error
from hpcbench.submit.scheduler_settings import run_command
from hpcbench.submit.slurm_queue import SbatchOutcome, classify_sbatch_error
from hpcbench.units import format_bytes


def is_login_node(match: LoginNodeMatch, host: str | None = None, environment: Mapping[str, str] | None = None) -> bool:
    """Whether any of the host names, variables or files fit. ``host`` is the full name of this machine by default."""
    full = socket.getfqdn() if host is None else host
    short = full.partition(".")[0]
    if any(re.fullmatch(pattern, name) for pattern in match.hosts for name in (full, short)):
        return True
    variables = os.environ if environment is None else environment
    if any(variables.get(name) == value for name, value in match.variables.items()):
        return True
    return any(_file_holds(Path(name), text) for name, text in match.files.items())


def _file_holds(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() == text
    except OSError:
        return False


_TEMPORARY_REFUSALS = ("busy", "DOWN, DRAINED", "not available now", "not currently available")
"""Refusals that another hour has not: no fault of a profile."""


def sbatch_test_problems(profile: ClusterProfile, source: TomlSource) -> Iterator[HpcbenchError]:
    """The smallest job with all devices of its nodes, in each partition, through ``sbatch --test-only``.

    The site's own rules count there, too, which nothing but a submission meets. Where the scheduler cannot be asked,
    nothing is said.
    """
    for key in profile.partitions or [None]:
        said = _sbatch_refusal(profile, key)
        if said:
            where = source.where(("partitions", key) if key else ())
            yield ConfigError(f"sbatch refuses a job{f' in {key}' if key else ''}: {said}", where=where)


def _sbatch_refusal(profile: ClusterProfile, key: str | None) -> str | None:
    partition, node = profile.partition(key), profile.node_of(key)
    nodes = partition.min_nodes or 1
    longest_min = partition.longest_min(nodes)
    limit_min = partition.time_limit_min or profile.time_limit_min
    shape = JobShape(
        partition=key or profile.default_partition,
        environment=profile.default_environment,
        nodes=nodes,
        tasks_per_node=node.devices or 1,
        devices_per_task=1,
        time_limit_s=60 * (limit_min if longest_min is None else min(limit_min, longest_min)),
    )
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "0.sh"
        text = render_script(TemplateEngine(), profile, shape, "check", script.parent, 0)
        script.write_text(text, encoding="utf-8")
        command = ["sbatch", "--test-only", str(script)]
        result = run_command(command, profile)
    if result.exit_code is None or result.exit_code == 0:
        return None
    message = result.complaint or result.output
    is_refused = classify_sbatch_error(message) is SbatchOutcome.REFUSED
    if not is_refused or any(words in message for words in _TEMPORARY_REFUSALS):
        return None
    lines = (line.removeprefix("sbatch: ").removeprefix("error: ") for line in message.splitlines())
    # Where an option is wrong, sbatch adds an advice that is none here.
    kept = [line for line in lines if line.strip() and not line.startswith('Try "')]
    return printable_text("; ".join(kept)) or f"exit code {result.exit_code}"


def check_against_scheduler(profile: ClusterProfile, source: TomlSource) -> bool:
    """Ask the scheduler about all that ``profile`` says of it.

    ``False`` where there is none to ask. Raises ``ConfigErrors`` with everything that jobs would be refused for.
    """
    if profile.scheduler.kind != "slurm":
        return False
    try:
        facts = query_site(profile)
    except SubmitError:
        return False
    # What the tables contradict is said with its line; only what is left is put to sbatch, which names none.
    problems = list(compare_profile(profile, facts, source)) or list(sbatch_test_problems(profile, source))
    if problems:
        raise ConfigErrors(problems)
    return True


def scheduler_partitions(profile: ClusterProfile) -> set[str] | None:
    """Names of the scheduler's partitions; ``None`` where it is absent or does not answer."""
    try:
        return set(query_site(profile).partitions)
    except SubmitError:
        return None


def compare_profile(profile: ClusterProfile, facts: SiteFacts, source: TomlSource) -> Iterator[HpcbenchError]:
    """What ``facts`` contradict in ``profile``, each with the line that says it."""
    yield from _cluster_problems(profile, facts, source)
    for key, partition in profile.partitions.items():
        yield from _partition_problems(profile, key, partition, facts, source)
    if not profile.partitions:
        default = next((one for one in facts.partitions.values() if one.is_default), None)
        if default is not None:
            yield from _node_problems(profile, None, default, source)


def _cluster_problems(profile: ClusterProfile, facts: SiteFacts, source: TomlSource) -> Iterator[HpcbenchError]:
    missing = account_error(profile)
    if missing is not None:
        yield missing
    accounts = {one.account for one in facts.associations}
    if profile.account is not None and accounts and profile.account not in accounts:
        hint = did_you_mean(profile.account, accounts)
        yield ConfigError(f"you have no account {profile.account!r} here", where=source.where(("account",)), hint=hint)
    wanted, largest = profile.scheduler.max_array_size, facts.max_array_size
    if wanted is not None and largest is not None and wanted > largest:
        where = source.where(("scheduler", "max_array_size"))
        yield ConfigError(f"max_array_size = {wanted}, the scheduler's is {largest}", where=where)


def _partition_problems(
    profile: ClusterProfile, key: str, partition: PartitionConfig, facts: SiteFacts, source: TomlSource
) -> Iterator[HpcbenchError]:
    name, place = partition.name or key, ("partitions", key)
    if "partition" in profile.request_of(key).drop:
        name = next((one.name for one in facts.partitions.values() if one.is_default), name)
    there = facts.partitions.get(name)
    if partition.qos is not None and facts.qos and partition.qos not in facts.qos:
        where = source.where((*place, "qos"))
        yield ConfigError(
            f"the scheduler has no QOS {partition.qos!r}", where=where, hint=did_you_mean(partition.qos, facts.qos)
        )
    elif partition.qos is not None:
        yield from _qos_problems(partition.qos, there, facts, source.where((*place, "qos")))
    if there is None:
        yield ConfigError(
            f"the scheduler has no partition {name!r}",
            where=source.where(place),
            hint=did_you_mean(name, facts.partitions),
        )
        return
    if not there.is_up:
        yield ConfigError(f"partition {name} is not up", where=source.where(place))
    account = profile.account
    if account is not None and there.allowed_accounts is not None and account not in there.allowed_accounts:
        listed = ", ".join(sorted(there.allowed_accounts))
        yield ConfigError(f"partition {name} does not take account {account!r}: {listed}", where=source.where(place))
    yield from _limit_problems(profile, key, partition, there, facts, source)
    yield from _node_problems(profile, key, there, source)


def _qos_problems(qos: str, there: PartitionFacts | None, facts: SiteFacts, where: str) -> Iterator[HpcbenchError]:
    if there is not None and there.allowed_qos is not None and qos not in there.allowed_qos:
        listed = ", ".join(sorted(there.allowed_qos))
        yield ConfigError(f"partition {there.name} does not take QOS {qos!r}: {listed}", where=where)
    own = {name for one in facts.associations for name in one.qos}
    if own and qos not in own:
        yield ConfigError(f"you may not use QOS {qos!r}", where=where, hint=f"yours: {', '.join(sorted(own))}")


def _limit_problems(
    profile: ClusterProfile,
    key: str,
    partition: PartitionConfig,
    there: PartitionFacts,
    facts: SiteFacts,
    source: TomlSource,
) -> Iterator[HpcbenchError]:
    place = ("partitions", key)
    bounds = [(there.max_time_min, f"partition {there.name}")]
    bounds += [(one.max_time_min, f"QOS {one.name}") for one in facts.limits(there.name, partition.qos)]
    longest, owner = min(((minutes, owner) for minutes, owner in bounds if minutes is not None), default=(None, ""))
    own_longest = partition.max_time_min or float("inf")
    asked = {
        "max_time_min": partition.max_time_min,
        "time_limit_min": partition.time_limit_min or min(profile.time_limit_min, own_longest),
    }
    for name, minutes in asked.items():
        if longest is not None and minutes is not None and minutes > longest:
            where = source.where((*place, name) if getattr(partition, name) else (name,))
            yield ConfigError(f"{name} = {minutes:g} min, {owner} allows {longest:g}", where=where)
            break
    yield from _node_count_problems(partition, there, facts, source, place)
    submitted = [one.max_submitted_jobs for one in facts.limits(there.name, partition.qos)]
    most = min((limit for limit in submitted if limit is not None), default=None)
    told = partition.max_submitted_jobs or profile.scheduler.max_submitted_jobs
    if most is not None and told is not None and told > most:
        inner = bool(partition.max_submitted_jobs)
        where = source.where((*place, "max_submitted_jobs") if inner else ("scheduler", "max_submitted_jobs"))
        yield ConfigError(f"max_submitted_jobs = {told}, the QOS allows {most}", where=where)


def _node_count_problems(
    partition: PartitionConfig, there: PartitionFacts, facts: SiteFacts, source: TomlSource, place: tuple[str, ...]
) -> Iterator[HpcbenchError]:
    """How many nodes a job may have: what the partition has and gives, and what its QOS allow."""
    qos = facts.limits(there.name, partition.qos)
    most = [(min(there.max_nodes or there.nodes, there.nodes), f"{there.name} gives")]
    most += [(one.max_nodes, f"QOS {one.name} allows") for one in qos if one.max_nodes is not None]
    largest, owner = min(most, key=itemgetter(0))
    if partition.max_nodes is not None and partition.max_nodes > largest:
        where = source.where((*place, "max_nodes"))
        yield ConfigError(f"max_nodes = {partition.max_nodes}, {owner} {largest}", where=where)
    least = [(there.min_nodes or 1, f"{there.name} takes")]
    least += [(one.min_nodes, f"QOS {one.name} takes") for one in qos if one.min_nodes is not None]
    smallest, owner = max(least, key=itemgetter(0))
    if (partition.min_nodes or 1) < smallest:
        where = source.where((*place, "min_nodes") if partition.min_nodes else place)
        hint = f"min_nodes = {smallest}"
        yield ConfigError(f"{owner} no job of fewer than {smallest} nodes", where=where, hint=hint)


def _node_problems(
    profile: ClusterProfile, key: str | None, there: PartitionFacts, source: TomlSource
) -> Iterator[HpcbenchError]:
    """Against the nodes that the constraint leaves; each number against the best of them."""
    partition, request, node = profile.partition(key), profile.request_of(key), profile.node_of(key)
    own = partition.node is not None
    place = ("partitions", key or "", "node") if own else ("node",)
    wanted = set(partition.constraint.replace("|", "&").split("&")) if partition.constraint else set()
    features = frozenset[str]().union(*(kind.features for kind in there.kinds))
    unknown = {name for name in wanted if name.isidentifier()} - features
    if unknown and there.kinds:
        where = source.where(("partitions", key or "", "constraint"))
        hint = f"features there: {', '.join(sorted(features)) or 'none'}"
        yield ConfigError(
            f"no node of {there.name} has the feature {', '.join(sorted(unknown))}", where=where, hint=hint
        )
        return
    kinds = [kind for kind in there.kinds if wanted <= kind.features] or list(there.kinds)
    if not kinds:
        return
    cpus, memory = max(kind.cpus for kind in kinds), max(kind.memory_bytes for kind in kinds)
    if node.cores is not None and node.cores > cpus:
        yield ConfigError(
            f"cores = {node.cores}, nodes of {there.name} have {cpus}", where=source.where((*place, "cores"))
        )
    asked = request.memory_bytes or (node.memory_bytes if request.memory == "node" else None)
    if asked is not None and asked > memory:
        where = source.where(("request", "memory_bytes") if request.memory_bytes else (*place, "memory_bytes"))
        yield ConfigError(
            f"jobs ask for {format_bytes(asked)} a node, those of {there.name} have {format_bytes(memory)}", where=where
        )
    yield from _device_problems(profile, key, kinds, there, source, place)


def _device_problems(
    profile: ClusterProfile,
    key: str | None,
    kinds: list[NodeFacts],
    there: PartitionFacts,
    source: TomlSource,
    place: tuple[str, ...],
) -> Iterator[HpcbenchError]:
    request, node = profile.request_of(key), profile.node_of(key)
    if request.gpus == "none":
        return
    most = max(sum(one.number for one in kind.gpus) for kind in kinds)
    if most == 0:
        message = f"request.gpus = {request.gpus!r}, but nodes of {there.name} have no gpu among their GRES"
        yield ConfigError(
            message, where=source.where(("request", "gpus")), hint='gpus = "none", where they come anyway'
        )
        return
    if node.devices is not None and node.devices > most:
        where = source.where((*place, "devices"))
        yield ConfigError(f"devices = {node.devices}, nodes of {there.name} have {most}", where=where)
    types = {one.type for kind in kinds for one in kind.gpus if one.type}
    wanted = node.gres_type or node.device_type
    if request.gpus == "gres-typed" and wanted not in types:
        where = source.where((*place, "gres_type" if node.gres_type else "device_type"))
        hint = did_you_mean(wanted or "", types) if types else 'the scheduler names no types: gpus = "gres"'
        yield ConfigError(f"nodes of {there.name} have no gpu of type {wanted!r}", where=where, hint=hint)
