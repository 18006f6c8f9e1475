"""Checks of a profile against this machine and its scheduler: login node, limits, nodes, and ``sbatch --test-only``."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.profile_tables import NodeConfig, PartitionConfig
from hpcbench.config.toml_tables import TomlSource
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, SubmitError, did_you_mean
from hpcbench.fileio import printable_text
from hpcbench.render.job_script import make_job_shape, render_script
from hpcbench.render.template_engine import TemplateEngine
from hpcbench.site.partition_facts import NodeFacts, PartitionFacts
from hpcbench.site.slurm_facts import SiteFacts, query_access, query_site
from hpcbench.submit.scheduler import account_error, command_environment, run_program
from hpcbench.submit.slurm_queue import SbatchOutcome, classify_sbatch_error, first_cluster
from hpcbench.units import format_bytes

_TEMPORARY_REFUSALS = (
    "busy", "DOWN, DRAINED", "not available now", "not currently available", "(inactive or drain)",
)  # fmt: skip
"""Refusals that pass by themselves: no error of a profile."""
_UNAVAILABLE = "Requested node configuration is not available"


def sbatch_test_problems(
    profile: ClusterProfile, source: TomlSource, facts: SiteFacts | None = None
) -> Iterator[HpcbenchError]:
    """The smallest job with all devices of its nodes, in each partition, through ``sbatch --test-only``.

    That applies the site's own rules, too, which nothing but a submission meets. Without an answer of the scheduler
    there are no problems.
    """
    for key in profile.partitions or [None]:
        refusal = _sbatch_refusal(profile, key)
        live = _live_partition(profile, facts, key) if facts else None
        # sbatch answers so, too, where the nodes that a job needs are drained, or reserved before it would end.
        is_short_of_nodes = bool(live and live.absent_nodes) or bool(facts and facts.reservations)
        if refusal and not (is_short_of_nodes and _UNAVAILABLE in refusal):
            where = source.where(("partitions", key) if key else ())
            yield ConfigError(f"sbatch refuses a job{f' in {key}' if key else ''}: {refusal}", where=where)


def _sbatch_refusal(profile: ClusterProfile, key: str | None) -> str | None:
    partition = profile.partition(key)
    shape = make_job_shape(profile, partition.min_nodes or 1, partition.node.devices or 1, partition=key)
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "0.sh"
        text = render_script(TemplateEngine(), shape, "check", script.parent, 0)
        script.write_text(text, encoding="utf-8")
        command = ["sbatch", "--test-only", str(script)]
        result = run_program(command, command_environment(profile))
    if result.exit_code is None or result.exit_code == 0:
        return None
    message = result.complaint or result.output
    is_refused = classify_sbatch_error(message) is SbatchOutcome.REFUSED
    if not is_refused or any(words in message for words in _TEMPORARY_REFUSALS):
        return None
    lines = (line.removeprefix("sbatch: ").removeprefix("error: ") for line in message.splitlines())
    # For a wrong option sbatch adds the advice to try --help, which does not help here.
    texts = [line for line in lines if line.strip() and not line.startswith('Try "')]
    return printable_text("; ".join(texts)) or f"exit code {result.exit_code}"


def check_against_scheduler(profile: ClusterProfile, source: TomlSource) -> list[HpcbenchError] | None:
    """Compare ``profile`` with its scheduler; ``None`` if there is none here that answers.

    Returns the causes that keep jobs waiting now and pass by themselves. Raises ``ConfigErrors`` with everything that
    jobs would be refused for.
    """
    if not profile.scheduler.traits.is_slurm:
        return None
    try:
        facts = query_site(profile, first_cluster(profile))
    except SubmitError:
        return None
    found = compare_profile(profile, facts, source)
    # The comparison names the line of each problem, sbatch does not: it is called only if the comparison has none.
    problems = found.problems or list(sbatch_test_problems(profile, source, facts))
    if problems:
        raise ConfigErrors(problems)
    return found.warnings


def closed_partitions(profile: ClusterProfile, keys: Collection[str | None]) -> dict[str, str]:
    """The partitions among ``keys`` in which no job of this user starts, by their names, each with the reason.

    Empty without an answer of the scheduler.
    """
    if not keys or not profile.scheduler.traits.is_slurm:
        return {}
    try:
        facts = query_access(profile, first_cluster(profile))
    except SubmitError:
        return {}
    closed: dict[str, str] = {}
    for key in keys:
        live, qos = _live_partition(profile, facts, key), profile.partition(key).qos
        if live is None:
            continue
        reason = facts.why_closed(live, profile.account, qos) or facts.why_qos_refused(live, profile.account, qos)
        if reason:
            closed[live.name] = reason
    return closed


class Comparison(NamedTuple):
    """A profile beside its scheduler, each entry with the line of the profile."""

    problems: list[HpcbenchError]
    """Contradictions for which jobs are refused, or wait without end."""
    warnings: list[HpcbenchError]
    """Causes that keep jobs waiting today: the profile may be right."""


def compare_profile(profile: ClusterProfile, facts: SiteFacts, source: TomlSource) -> Comparison:
    """The contradictions between ``profile`` and ``facts``."""
    check = _ProfileCheck(profile, facts, source)
    check.cluster()
    for key, partition in profile.partitions.items():
        check.partition(key, partition)
    default = facts.default_partition
    if not profile.partitions and default is not None:
        check.service(None, default)
        check.nodes(None, default)
    return Comparison(check.problems, check.warnings)


def _least(limits: Iterable[tuple[float | None, str]]) -> tuple[float, str]:
    """The least of the limits that are set, and whose it is."""
    finite = [(limit, owner) for limit, owner in limits if limit is not None]
    return min(finite, key=itemgetter(0), default=(math.inf, ""))


def _live_partition(profile: ClusterProfile, facts: SiteFacts, key: str | None) -> PartitionFacts | None:
    """The scheduler's partition of jobs with the profile's partition ``key``: the default where none is named."""
    named = None if key is None else facts.partitions.get(profile.partition(key).name or key)
    is_default = key is None or "partition" in profile.partition(key).request.drop
    return facts.default_partition or named if is_default else named


class _ProfileCheck:
    """The comparison of one profile with one scheduler; each method checks one table.

    It adds to ``problems`` and ``warnings``.
    """

    def __init__(self, profile: ClusterProfile, facts: SiteFacts, source: TomlSource) -> None:
        self.profile, self.facts, self._source = profile, facts, source
        self.problems: list[HpcbenchError] = []
        self.warnings: list[HpcbenchError] = []

    def report(self, message: str, *key: str, hint: str | None = None) -> None:
        """Add a problem of the TOML key ``key``."""
        self.problems.append(self._source.error(message, *key, hint=hint))

    def cluster(self) -> None:
        profile, facts = self.profile, self.facts
        missing = account_error(profile)
        if missing is not None:
            self.problems.append(missing)
        accounts = {association.account for association in facts.associations}
        if profile.account is not None and accounts and profile.account not in accounts:
            hint = did_you_mean(profile.account, accounts)
            self.report(f"you have no account {profile.account!r} here", "account", hint=hint)
        size, largest = profile.scheduler.max_array_size, facts.max_array_size
        if size is not None and largest is not None and size > largest:
            message = f"max_array_size = {size}, the scheduler's is {largest}"
            self.report(message, "scheduler", "max_array_size")
        self.warnings += [self._source.error(reservation) for reservation in facts.reservations]

    def service(self, key: str | None, live: PartitionFacts) -> None:
        """Warn of a partition, or nodes of it, that are out of service today."""
        table = () if key is None else ("partitions", key)
        if live.state != "UP":
            effect = "its jobs wait" if live.state == "DOWN" else "sbatch refuses jobs for it"
            self.warnings.append(self._source.error(f"partition {live.name} is {live.state}: {effect}", *table))
        if live.absence:
            self.warnings.append(self._source.error(f"partition {live.name}: {live.absence}", *table))

    def partition(self, key: str, partition: PartitionConfig) -> None:
        facts, account, name = self.facts, self.profile.account, partition.name or key
        live = _live_partition(self.profile, facts, key)
        if partition.qos is not None:
            self._qos(key, partition.qos, live)
        if live is None:
            hint = did_you_mean(name, facts.partitions)
            self.report(f"the scheduler has no partition {name!r}", "partitions", key, hint=hint)
            return
        self.service(key, live)
        reason = facts.why_closed(live, account, partition.qos) if live.state == "UP" else None
        # A QOS that the profile names has a line of its own.
        if reason is None and partition.qos is None:
            reason = facts.why_qos_refused(live, account, None)
        if reason:
            self.report(f"partition {live.name} {reason}", "partitions", key)
        self._time_limits(key, partition, live)
        self._node_counts(key, partition, live)
        self._submitted_jobs(key, partition, live)
        self.nodes(key, live)

    def _qos(self, key: str, qos: str, live: PartitionFacts | None) -> None:
        if self.facts.qos and qos not in self.facts.qos:
            hint = did_you_mean(qos, self.facts.qos)
            self.report(f"the scheduler has no QOS {qos!r}", "partitions", key, "qos", hint=hint)
            return
        if live is not None and (reason := self.facts.why_qos_refused(live, self.profile.account, qos)):
            self.report(f"partition {live.name} {reason}", "partitions", key, "qos")
        usable = self.facts.usable_qos
        if usable and qos not in usable:
            hint = f"yours: {', '.join(sorted(usable))}"
            self.report(f"you may not use QOS {qos!r}", "partitions", key, "qos", hint=hint)

    def _time_limits(self, key: str, partition: PartitionConfig, live: PartitionFacts) -> None:
        limits = [(live.max_time_min, f"partition {live.name}")]
        limits += [(qos.max_time_min, f"QOS {qos.name}") for qos in self.facts.limits(live.name, partition.qos)]
        longest, owner = _least(limits)
        usual_min = min(self.profile.time_limit_min, partition.max_time_min or math.inf)
        times = {"max_time_min": partition.max_time_min, "time_limit_min": partition.time_limit_min or usual_min}
        for name, minutes in times.items():
            if minutes is not None and minutes > longest:
                toml_key = ("partitions", key, name) if getattr(partition, name) else (name,)
                self.report(f"{name} = {minutes:g} min, {owner} allows {longest:g}", *toml_key)
                break

    def _submitted_jobs(self, key: str, partition: PartitionConfig, live: PartitionFacts) -> None:
        limits = [(qos.max_submitted_jobs, "") for qos in self.facts.limits(live.name, partition.qos)]
        most, _ = _least(limits)
        profile_limit = partition.max_submitted_jobs or self.profile.scheduler.max_submitted_jobs
        if profile_limit is not None and profile_limit > most:
            table = ("partitions", key) if partition.max_submitted_jobs else ("scheduler",)
            message = f"max_submitted_jobs = {profile_limit}, the QOS allows {most}"
            self.report(message, *table, "max_submitted_jobs")

    def _node_counts(self, key: str, partition: PartitionConfig, live: PartitionFacts) -> None:
        all_qos = self.facts.limits(live.name, partition.qos)
        limits: list[tuple[float | None, str]]
        limits = [(min(live.max_nodes or live.nodes, live.nodes), f"{live.name} gives")]
        limits += [(qos.max_nodes, f"QOS {qos.name} allows") for qos in all_qos]
        largest, owner = _least(limits)
        if partition.max_nodes is not None and partition.max_nodes > largest:
            message = f"max_nodes = {partition.max_nodes}, {owner} {largest}"
            self.report(message, "partitions", key, "max_nodes")
        minima = [(live.min_nodes or 1, f"{live.name} takes")]
        minima += [(qos.min_nodes, f"QOS {qos.name} takes") for qos in all_qos if qos.min_nodes is not None]
        smallest, owner = max(minima, key=itemgetter(0))
        if (partition.min_nodes or 1) < smallest:
            toml_key = ("partitions", key, "min_nodes") if partition.min_nodes else ("partitions", key)
            message = f"{owner} no job of fewer than {smallest} nodes"
            self.report(message, *toml_key, hint=f"min_nodes = {smallest}")

    def nodes(self, key: str | None, live: PartitionFacts) -> None:
        """Compare with the nodes that the constraint leaves; each number with the best of them."""
        profile = self.profile
        partition = profile.partition(key)
        request, node = partition.request, partition.node
        own = profile.partitions.get(key or "")
        table = ("partitions", key or "", "node") if own is not None and own.node is not None else ("node",)
        required = set(partition.constraint.replace("|", "&").split("&")) if partition.constraint else set()
        features = frozenset[str]().union(*(kind.features for kind in live.kinds))
        unknown = {name for name in required if name.isidentifier()} - features
        if unknown and live.kinds:
            message = f"no node of {live.name} has the feature {', '.join(sorted(unknown))}"
            hint = f"features there: {', '.join(sorted(features)) or 'none'}"
            self.report(message, "partitions", key or "", "constraint", hint=hint)
            return
        kinds = [kind for kind in live.kinds if required <= kind.features] or list(live.kinds)
        if not kinds:
            return
        cpus, memory = max(kind.cpus for kind in kinds), max(map(live.memory.most, kinds))
        if node.cores is not None and node.cores > cpus:
            self.report(f"cores = {node.cores}, nodes of {live.name} have {cpus}", *table, "cores")
        requested = request.memory_bytes or (node.memory_bytes if request.memory == "node" else None)
        if request.memory == "all" and live.memory.most_per_node:
            # --mem=0 is all of a node, and such a job waits for ever where it may not have that.
            requested = min(kind.memory_bytes for kind in kinds)
        if requested is not None and requested > memory:
            toml_key = ("request", "memory") if request.memory == "all" else (*table, "memory_bytes")
            toml_key = ("request", "memory_bytes") if request.memory_bytes else toml_key
            available = f"those of {live.name} give at most {format_bytes(memory)}"
            self.report(f"jobs ask for {format_bytes(requested)} a node, {available}", *toml_key)
        if request.gpus != "none":
            self._devices(request.gpus, node, kinds, live.name, table)

    def _devices(
        self, style: str, node: NodeConfig, kinds: list[NodeFacts], partition: str, table: tuple[str, ...]
    ) -> None:
        device_type = node.gres_type or node.device_type
        types = {gpu.type for kind in kinds for gpu in kind.gpus if gpu.type}
        is_typed = style == "gres-typed" and device_type in types
        usable = [[gpu.number for gpu in kind.gpus if not is_typed or gpu.type == device_type] for kind in kinds]
        most = max(map(sum, usable))
        if most == 0:
            message = f"request.gpus = {style!r}, but nodes of {partition} have no gpu among their GRES"
            self.report(message, "request", "gpus", hint='gpus = "none", where they come anyway')
            return
        if node.devices is not None and node.devices > most:
            of_type = f" of type {device_type}" if is_typed else ""
            self.report(f"devices = {node.devices}, nodes of {partition} have {most}{of_type}", *table, "devices")
        if style == "gres-typed" and device_type not in types:
            hint = did_you_mean(device_type or "", types) if types else 'the scheduler names no types: gpus = "gres"'
            message = f"nodes of {partition} have no gpu of type {device_type!r}"
            self.report(message, *table, "gres_type" if node.gres_type else "device_type", hint=hint)
