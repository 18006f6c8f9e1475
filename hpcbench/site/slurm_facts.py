"""Partitions, nodes, GPUs, QOS and accounts of a cluster, from the output of scontrol, sinfo and sacctmgr."""

from __future__ import annotations

import grp
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.fileio import printable_text
from hpcbench.identity import account_name
from hpcbench.site.partition_facts import GpuCount, MemoryLimits, NodeFacts, PartitionFacts
from hpcbench.submit.slurm_queue import run_on_cluster

_IN_PARENTHESES = re.compile(r"\([^)]*\)")
_COUNT_PATTERN = re.compile(r"(?P<number>[0-9]+)(?P<suffix>[kKmM]?)")
_SUFFIX_FACTORS = {"": 1, "k": 1024, "m": 1024**2}


def parse_gres(text: str) -> list[GpuCount]:
    """The accelerators in ``text``, by type; empty for ``(null)`` and for other resources (mps, shard, bandwidth).

    Totals of trackable resources (``gres/gpu=8,gres/gpu:h100=8``) count no device twice.
    """
    counts: dict[str | None, int] = {}
    has_totals = False
    # Parentheses (sockets, indices) may contain commas, and "(null)" is nothing.
    for item in _IN_PARENTHESES.sub("", text).split(","):
        kind, *fields = (field for field in re.split("[:=]", item.strip()) if field != "no_consume")
        count = _COUNT_PATTERN.fullmatch(fields[-1]) if fields else None
        types = fields[:-1] if count else fields
        if kind not in ("gpu", "gres/gpu") or len(types) > 1 or "" in types:
            continue
        has_totals = has_totals or kind == "gres/gpu"
        number = int(count["number"]) * _SUFFIX_FACTORS[count["suffix"].lower()] if count else 1
        gpu_type = types[0] if types else None
        counts[gpu_type] = counts.get(gpu_type, 0) + number
    if has_totals and None in counts:
        counts[None] -= sum(number for gpu_type, number in counts.items() if gpu_type is not None)
    return [GpuCount(gpu_type, number) for gpu_type, number in counts.items() if number > 0]


_KEY_VALUE_PATTERN = re.compile(
    r"(?:^|\s)(?P<key>[A-Z][A-Za-z]*(?:[:/][A-Za-z]+)*)=(?P<value>.*?)(?=\s+[A-Z][A-Za-z]*(?:[:/][A-Za-z]+)*=|$)"
)
_TIME_LIMIT_PATTERN = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_REASON_STAMP = re.compile(r"\s*\[[^\[\]]*@[^\[\]]*\]$")
"""The author and the time of a reason."""
_EMPTY_VALUES = frozenset({"", "(null)", "N/A", "NONE", "UNLIMITED", "INFINITE", "NOT_SET"})


@dataclass(frozen=True)
class QosFacts:
    """One QOS; ``None`` is no limit."""

    name: str
    max_time_min: float | None = None
    max_running_jobs: int | None = None
    max_submitted_jobs: int | None = None
    max_nodes: int | None = None
    min_nodes: int | None = None


@dataclass(frozen=True)
class AccountAssociation:
    """An account that the user may charge, and the QOS that jobs of it may name."""

    account: str
    qos: frozenset[str]
    default_qos: str | None
    max_submitted_jobs: int | None = None


@dataclass(frozen=True)
class SiteFacts:
    """The configuration of a cluster, from its scheduler and its accounting."""

    cluster: str
    version: str
    partitions: dict[str, PartitionFacts]
    qos: dict[str, QosFacts] = field(default_factory=dict)
    """Empty if the accounting did not answer."""
    associations: tuple[AccountAssociation, ...] = ()
    max_array_size: int | None = None
    settings: dict[str, str] = field(default_factory=dict)
    reservations: tuple[str, ...] = ()
    """Descriptions of the reservations that have not begun."""
    groups: frozenset[str] | None = None
    """The Unix groups of this user; ``None`` if they are unknown, or limit nothing as for root."""

    def why_closed(self, partition: PartitionFacts, account: str | None = None, qos: str | None = None) -> str | None:
        """Why no job of this user starts in ``partition``; ``None`` where one may.

        Args:
            account: Account of the jobs; ``None`` for any of the user's accounts.
            qos: QOS that jobs name; ``None`` for any of the user's QOS.
        """
        accounts = {account} if account else {association.account for association in self.associations}
        whose = f"account {account!r}" if account else f"any of your accounts ({', '.join(sorted(accounts))})"
        allowed, denied = partition.allowed_accounts, partition.denied_accounts
        if partition.state != "UP":
            return f"is {partition.state}"
        if accounts and allowed is not None and accounts.isdisjoint(allowed):
            return f"does not take {whose}: {', '.join(sorted(allowed))}"
        if accounts and accounts <= denied:
            return f"does not take {whose}: it denies {', '.join(sorted(denied))}"
        if qos is None and self.usable_qos and not any(map(partition.takes_qos, self.usable_qos)):
            listed = ", ".join(sorted(partition.allowed_qos or ()))
            return f"does not take any of your QOS ({', '.join(sorted(self.usable_qos))})" + (listed and f": {listed}")
        if self.groups is not None and partition.allowed_groups and self.groups.isdisjoint(partition.allowed_groups):
            return f"takes members of the groups {', '.join(sorted(partition.allowed_groups))} only"
        return None

    @property
    def usable_qos(self) -> frozenset[str]:
        """The QOS that the user may name; empty if the accounting did not answer."""
        return frozenset[str]().union(*(association.qos for association in self.associations))

    def limits(self, partition: str, qos: str | None) -> list[QosFacts]:
        """The QOS that limit a job: the partition's own, and the one that the job names or gets by default."""
        names = (self.partitions[partition].qos, qos or self.default_qos)
        return [self.qos[name] for name in names if name in self.qos]

    @property
    def default_qos(self) -> str | None:
        """The QOS of jobs that name none; ``None`` if no association of the user has a default."""
        return next((each.default_qos for each in self.associations if each.default_qos), None)

    def why_qos_refused(self, partition: PartitionFacts, account: str | None, qos: str | None) -> str | None:
        """Why ``partition`` does not take jobs of QOS ``qos``, or of the user's default one; ``None`` if it does."""
        default = next((each.default_qos for each in self.associations if each.account == account), self.default_qos)
        chosen = qos or default
        if chosen is None or partition.takes_qos(chosen):
            return None
        known = self.usable_qos or self.qos.keys() or partition.allowed_qos or ()
        taken = ", ".join(sorted(filter(partition.takes_qos, known)))
        listed = f"; it takes {taken}" if taken else ""
        return f"does not take QOS {chosen!r}{'' if qos else ', your default'}{listed}"

    @property
    def default_partition(self) -> PartitionFacts | None:
        """The scheduler's default partition; ``None`` if it has none."""
        return next((partition for partition in self.partitions.values() if partition.is_default), None)


def parse_minutes(text: str) -> float | None:
    """``1-12:00:00``, ``30:00``, ``30`` in minutes; ``None`` for no limit."""
    match = _TIME_LIMIT_PATTERN.fullmatch(text.strip())
    if text.strip() in _EMPTY_VALUES or match is None:
        return None
    parts = [int(part) for part in match["clock"].split(":")]
    # With days, or in three parts, the first part is hours; otherwise minutes.
    has_hours = match["days"] is not None or len(parts) == 3
    hours, mins, seconds = (*parts, 0, 0)[:3] if has_hours else (0, *parts, 0)[:3]
    return int(match["days"] or 0) * 1440 + hours * 60 + mins + seconds / 60


def parse_oneliner(text: str) -> list[dict[str, str]]:
    """The lines of ``scontrol show ... --oneliner``, each as its keys and values."""
    lines = (line for line in text.splitlines() if line.strip())
    return [{match["key"]: match["value"].strip() for match in _KEY_VALUE_PATTERN.finditer(line)} for line in lines]


def parse_nodes(text: str) -> dict[str, list[NodeFacts]]:
    """The nodes in the output of ``scontrol show node --oneliner``, by partition."""

    def number(record: Mapping[str, str], key: str) -> int:
        return _parse_int(record.get(key, "")) or 0

    by_partition: dict[str, list[NodeFacts]] = {}
    for record in parse_oneliner(text):
        node = NodeFacts(
            cpus=number(record, "CPUEfctv") or number(record, "CPUTot"),
            # MemSpecLimit is kept for slurmd and the system.
            memory_bytes=(number(record, "RealMemory") - number(record, "MemSpecLimit")) * 2**20,
            # Gres names types; the configured totals count only if it is silent.
            gpus=tuple(parse_gres(record.get("Gres", "")) or parse_gres(record.get("CfgTRES", ""))),
            features=frozenset(_parse_names(record.get("AvailableFeatures", "")) or ()),
            arch=record.get("Arch", ""),
            threads_per_core=number(record, "ThreadsPerCore") or 1,
            name=record.get("NodeName", ""),
            state=record.get("State", ""),
            reason=_REASON_STAMP.sub("", record.get("Reason", "")),
        )
        for partition in filter(None, record.get("Partitions", "").split(",")):
            by_partition.setdefault(partition, []).append(node)
    return by_partition


def parse_partitions(
    text: str, nodes: dict[str, list[NodeFacts]], settings: Mapping[str, str] = MappingProxyType({})
) -> dict[str, PartitionFacts]:
    """``scontrol show partition --oneliner``; ``settings`` are those of all partitions, in slurm.conf."""
    return {
        record["PartitionName"]: _parse_partition(record, nodes, settings)
        for record in parse_oneliner(text)
        if "PartitionName" in record
    }


def _parse_partition(
    record: dict[str, str], nodes: dict[str, list[NodeFacts]], settings: Mapping[str, str]
) -> PartitionFacts:
    def number(key: str) -> int | None:
        value = record.get(key, "")
        return int(value) if value.isdecimal() and int(value) > 0 else None

    name = record["PartitionName"]
    own_nodes = nodes.get(name, [])
    qos = record.get("QoS", "")
    return PartitionFacts(
        name=name,
        is_default=record.get("Default") == "YES",
        state=record.get("State", "UP"),
        is_hidden=record.get("Hidden") == "YES",
        max_time_min=parse_minutes(record.get("MaxTime", "")),
        default_time_min=parse_minutes(record.get("DefaultTime", "")),
        max_nodes=number("MaxNodes"),
        min_nodes=number("MinNodes"),
        nodes=number("TotalNodes") or len(own_nodes),
        allowed_qos=_parse_names(record.get("AllowQos", "ALL")),
        allowed_accounts=_parse_names(record.get("AllowAccounts", "ALL")),
        denied_accounts=_parse_names(record.get("DenyAccounts", "")) or frozenset(),
        denied_qos=_parse_names(record.get("DenyQos", "")) or frozenset(),
        allowed_groups=_parse_names(record.get("AllowGroups", "ALL")),
        absent_nodes=tuple(node for node in own_nodes if not node.in_service),
        qos=None if qos in _EMPTY_VALUES else qos,
        whole_nodes=record.get("OverSubscribe") == "EXCLUSIVE",
        memory=_parse_memory_limits(record, settings),
        kinds=tuple(sorted(dict.fromkeys(own_nodes), key=own_nodes.count, reverse=True)),
    )


def _parse_memory_limits(record: Mapping[str, str], settings: Mapping[str, str]) -> MemoryLimits:
    """The partition's own limits; a pair of them that it leaves open is that of slurm.conf."""
    found: list[int | None] = []
    for keys in (("DefMemPerCPU", "DefMemPerNode"), ("MaxMemPerCPU", "MaxMemPerNode")):
        values = [[_parse_int(each.get(key, "")) for key in keys] for each in (record, settings)]
        mib = next((pair for pair in values if any(pair)), (None, None))
        found += [number * 2**20 if number else None for number in mib]
    return MemoryLimits(*found)


def _parse_names(text: str) -> frozenset[str] | None:
    return None if text == "ALL" or text in _EMPTY_VALUES else frozenset(text.split(","))


def parse_qos(text: str) -> dict[str, QosFacts]:
    """``sacctmgr -nP show qos format=Name,MaxWall,MaxJobsPU,MaxSubmitPU,MaxTRES,MinTRES``."""
    qos = {}
    for name, wall, running, submitted, *resources in _parse_rows(text, 6):
        limits = map(_node_count, resources)
        qos[name] = QosFacts(name, parse_minutes(wall), _parse_int(running), _parse_int(submitted), *limits)
    return qos


def _node_count(resources: str) -> int | None:
    """The number of nodes in a list such as ``cpu=64,node=4,gres/gpu=8``."""
    return next((_parse_int(item[5:]) for item in resources.split(",") if item.startswith("node=")), None)


def parse_associations(text: str) -> tuple[AccountAssociation, ...]:
    """``sacctmgr -nP show assoc where user=... format=Account,QOS,DefaultQOS,MaxSubmit``."""
    return tuple(
        AccountAssociation(account, frozenset(filter(None, qos.split(","))), default or None, _parse_int(submitted))
        for account, qos, default, submitted in _parse_rows(text, 4)
    )


def parse_reservations(text: str) -> tuple[str, ...]:
    """``scontrol show reservation --oneliner``: descriptions of those to come; nodes show those that have begun."""
    records = (record for record in parse_oneliner(text) if record.get("State") == "INACTIVE")
    return tuple(
        f"reservation {record.get('ReservationName', '')} holds {record.get('Nodes', '')} from "
        f"{record.get('StartTime', '')} to {record.get('EndTime', '')}: jobs of others that may last into it wait"
        for record in records
    )


def _parse_rows(text: str, columns: int) -> Iterable[list[str]]:
    rows = (line.split("|") for line in text.splitlines())
    return [row[:columns] for row in rows if len(row) >= columns and row[0]]


def _parse_int(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def parse_slurm_config(text: str) -> dict[str, str]:
    """``scontrol show config``: its lines ``Key = value``."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


_CONTROL_CHARACTERS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_QOS_FORMAT = "format=Name,MaxWall,MaxJobsPU,MaxSubmitPU,MaxTRES,MinTRES"
_ASSOCIATION_FORMAT = "format=Account,QOS,DefaultQOS,MaxSubmit"


def query_site(profile: ClusterProfile, cluster: str = "") -> SiteFacts:
    """The facts from scontrol, and from sacctmgr if there is accounting.

    ``cluster``: the scheduler's name of the cluster; empty for the default one.

    Raises ``SubmitError`` if scontrol is absent or does not answer.
    """
    settings = parse_slurm_config(_run_query(["scontrol", "show", "config"], profile, cluster))
    # --all: a partition that the site hides may still be this user's.
    nodes = parse_nodes(_run_optional_query(["scontrol", "--all", "show", "node", "--oneliner"], profile, cluster))
    shown = _run_query(["scontrol", "--all", "show", "partition", "--oneliner"], profile, cluster)
    partitions = parse_partitions(shown, nodes, settings)
    return SiteFacts(
        cluster=settings.get("ClusterName", ""),
        version=settings.get("SLURM_VERSION", ""),
        partitions=partitions,
        qos=parse_qos(_run_optional_query(["sacctmgr", "-nP", "show", "qos", _QOS_FORMAT], profile)),
        associations=_query_associations(settings, profile),
        max_array_size=_parse_int(settings.get("MaxArraySize", "")),
        settings=settings,
        reservations=parse_reservations(
            _run_optional_query(["scontrol", "show", "reservation", "--oneliner"], profile, cluster)
        ),
        groups=_own_groups(),
    )


def query_access(profile: ClusterProfile, cluster: str = "") -> SiteFacts:
    """The partitions, and what decides whether this user's jobs start in them: fewer questions than ``query_site``.

    Raises ``SubmitError`` if scontrol is absent or does not answer.
    """
    shown = _run_query(["scontrol", "--all", "show", "partition", "--oneliner"], profile, cluster)
    partitions = parse_partitions(shown, {})
    settings: dict[str, str] = {}
    associations: tuple[AccountAssociation, ...] = ()
    if any(each.limits_accounts for each in partitions.values()):
        settings = parse_slurm_config(_run_query(["scontrol", "show", "config"], profile, cluster))
        associations = _query_associations(settings, profile)
    return SiteFacts(settings.get("ClusterName", ""), "", partitions, associations=associations, groups=_own_groups())


def _query_associations(settings: Mapping[str, str], profile: ClusterProfile) -> tuple[AccountAssociation, ...]:
    name = settings.get("ClusterName", "")
    # One slurmdbd serves several clusters: the associations of the others are not for jobs here.
    whose = [f"user={account_name()}", *([f"cluster={name}"] if name else [])]
    command = ["sacctmgr", "-nP", "show", "assoc", "where", *whose, _ASSOCIATION_FORMAT]
    return parse_associations(_run_optional_query(command, profile))


def _own_groups() -> frozenset[str] | None:
    try:
        return frozenset(grp.getgrgid(gid).gr_name for gid in {os.getgid(), *os.getgroups()}) if os.getuid() else None
    except KeyError:
        return None


def _run_optional_query(command: list[str], profile: ClusterProfile, cluster: str = "") -> str:
    """The output; empty if the site has no accounting, an older SLURM, or hides this from users."""
    try:
        return _run_query(command, profile, cluster)
    except SubmitError:
        return ""


def _run_query(command: list[str], profile: ClusterProfile, cluster: str = "") -> str:
    result = run_on_cluster(command, cluster, profile)
    if result.exit_code is None:
        raise SubmitError(f"{command[0]}: {result.complaint}", hint="run this on a login node of the cluster")
    if result.exit_code != 0:
        complaint = printable_text(result.complaint.strip())
        raise SubmitError(f"{' '.join(command[:3])}: {complaint}", hint="is the controller up?")
    # Names from there become TOML and go to a terminal.
    return _CONTROL_CHARACTERS.sub(" ", result.output)
