"""Partitions, nodes, QOS and accounts, from what scontrol and sacctmgr print for scripts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from hpcbench.submit.site.gres import Gpus, parse_gres

_PAIR = re.compile(
    r"(?:^|\s)(?P<key>[A-Z][A-Za-z]*(?:[:/][A-Za-z]+)*)=(?P<value>.*?)(?=\s+[A-Z][A-Za-z]*(?:[:/][A-Za-z]+)*=|$)"
)
_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_NOTHING = frozenset({"", "(null)", "N/A", "NONE", "UNLIMITED", "INFINITE", "NOT_SET"})


@dataclass(frozen=True)
class NodeFacts:
    """Nodes that are alike."""

    cpus: int
    memory_bytes: int
    gpus: tuple[Gpus, ...]
    features: frozenset[str]
    arch: str
    threads_per_core: int


@dataclass(frozen=True)
class PartitionFacts:
    """One partition as the scheduler has it; ``None`` is no limit."""

    name: str
    is_default: bool = False
    is_up: bool = True
    max_time_min: float | None = None
    default_time_min: float | None = None
    max_nodes: int | None = None
    min_nodes: int | None = None
    nodes: int = 0
    allowed_qos: frozenset[str] | None = None
    allowed_accounts: frozenset[str] | None = None
    qos: str | None = None
    whole_nodes: bool = False
    default_memory_per_cpu_bytes: int | None = None
    kinds: tuple[NodeFacts, ...] = ()
    """Its kinds of nodes, the one with most nodes first."""


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
class Association:
    """An account that the user may charge, and the QOS that he may then name."""

    account: str
    qos: frozenset[str]
    default_qos: str | None
    max_submitted_jobs: int | None = None


@dataclass(frozen=True)
class SiteFacts:
    """Everything."""

    cluster: str
    version: str
    partitions: dict[str, PartitionFacts]
    qos: dict[str, QosFacts] = field(default_factory=dict)
    """Empty where the accounts did not answer."""
    associations: tuple[Association, ...] = ()
    max_array_size: int | None = None
    settings: dict[str, str] = field(default_factory=dict)

    def limits(self, partition: str, qos: str | None) -> list[QosFacts]:
        """The QOS that bound a job there: the partition's own, and that which it names or gets."""
        names = (self.partitions[partition].qos, qos or self.default_qos)
        return [self.qos[name] for name in names if name in self.qos]

    @property
    def default_qos(self) -> str | None:
        """That of jobs which name none."""
        return next((one.default_qos for one in self.associations if one.default_qos), None)


def minutes(text: str) -> float | None:
    """``1-12:00:00``, ``30:00``, ``30`` in minutes; ``None`` for no limit."""
    match = _CLOCK.fullmatch(text.strip())
    if text.strip() in _NOTHING or match is None:
        return None
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:
        hours, mins, seconds = (*parts, 0, 0)[:3]
        return int(match["days"]) * 1440 + hours * 60 + mins + seconds / 60
    if len(parts) == 1:
        return float(parts[0])
    hours, mins, seconds = parts if len(parts) == 3 else (0, *parts)
    return hours * 60 + mins + seconds / 60


def records(text: str) -> list[dict[str, str]]:
    """The lines of ``scontrol show ... --oneliner``, each as its keys and values."""
    lines = (line for line in text.splitlines() if line.strip())
    return [{match["key"]: match["value"].strip() for match in _PAIR.finditer(line)} for line in lines]


def parse_nodes(text: str) -> dict[str, list[NodeFacts]]:
    """``scontrol show node --oneliner``: per partition its nodes."""
    return nodes_by_partition(records(text))


def nodes_by_partition(nodes: Iterable[dict[str, str]]) -> dict[str, list[NodeFacts]]:
    """The same from the records, keys as scontrol's."""
    found: dict[str, list[NodeFacts]] = {}
    for record in nodes:
        node = NodeFacts(
            cpus=_number(record.get("CPUEfctv", "")) or _number(record.get("CPUTot", "")) or 0,
            memory_bytes=(_number(record.get("RealMemory", "")) or 0) * 2**20,
            gpus=tuple(_gpus(record)),
            features=frozenset(_names(record.get("AvailableFeatures", "")) or ()),
            arch=record.get("Arch", ""),
            threads_per_core=_number(record.get("ThreadsPerCore", "")) or 1,
        )
        for partition in filter(None, record.get("Partitions", "").split(",")):
            found.setdefault(partition, []).append(node)
    return found


def _gpus(record: dict[str, str]) -> list[Gpus]:
    """Those of Gres, which names types; the configured totals only where it is silent."""
    return parse_gres(record.get("Gres", "")) or parse_gres(record.get("CfgTRES", ""))


def parse_partitions(text: str, nodes: dict[str, list[NodeFacts]]) -> dict[str, PartitionFacts]:
    """``scontrol show partition --oneliner``."""
    return {record["PartitionName"]: _partition(record, nodes) for record in records(text) if "PartitionName" in record}


def _partition(record: dict[str, str], nodes: dict[str, list[NodeFacts]]) -> PartitionFacts:
    def number(key: str) -> int | None:
        value = record.get(key, "")
        return int(value) if value.isdecimal() and int(value) > 0 else None

    name = record["PartitionName"]
    there = nodes.get(name, [])
    per_cpu = number("DefMemPerCPU")
    qos = record.get("QoS", "")
    return PartitionFacts(
        name=name,
        is_default=record.get("Default") == "YES",
        is_up=record.get("State", "UP") == "UP",
        max_time_min=minutes(record.get("MaxTime", "")),
        default_time_min=minutes(record.get("DefaultTime", "")),
        max_nodes=number("MaxNodes"),
        min_nodes=number("MinNodes"),
        nodes=number("TotalNodes") or len(there),
        allowed_qos=_names(record.get("AllowQos", "ALL")),
        allowed_accounts=_names(record.get("AllowAccounts", "ALL")),
        qos=None if qos in _NOTHING else qos,
        whole_nodes=record.get("OverSubscribe") == "EXCLUSIVE",
        default_memory_per_cpu_bytes=per_cpu * 2**20 if per_cpu else None,
        kinds=tuple(sorted(set(there), key=there.count, reverse=True)),
    )


def _names(text: str) -> frozenset[str] | None:
    return None if text == "ALL" or text in _NOTHING else frozenset(text.split(","))


def parse_qos(text: str) -> dict[str, QosFacts]:
    """``sacctmgr -nP show qos format=Name,MaxWall,MaxJobsPU,MaxSubmitPU,MaxTRES,MinTRES``."""
    found = {}
    for name, wall, running, submitted, most, least in _rows(text, 6):
        limits = _nodes_in(most), _nodes_in(least)
        found[name] = QosFacts(name, minutes(wall), _number(running), _number(submitted), *limits)
    return found


def _nodes_in(resources: str) -> int | None:
    """Those of ``cpu=64,node=4,gres/gpu=8``."""
    return next((_number(one[5:]) for one in resources.split(",") if one.startswith("node=")), None)


def parse_associations(text: str) -> tuple[Association, ...]:
    """``sacctmgr -nP show assoc where user=... format=Account,QOS,DefaultQOS,MaxSubmit``."""
    return tuple(
        Association(account, frozenset(filter(None, qos.split(","))), default or None, _number(submitted))
        for account, qos, default, submitted in _rows(text, 4)
    )


def _rows(text: str, columns: int) -> Iterable[list[str]]:
    rows = (line.split("|") for line in text.splitlines())
    return [row[:columns] for row in rows if len(row) >= columns and row[0]]


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def parse_config(text: str) -> dict[str, str]:
    """``scontrol show config``: its lines ``Key = value``."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}
