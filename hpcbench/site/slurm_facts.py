"""Partitions, nodes, GPUs, QOS and accounts of a cluster, from the output of scontrol, sinfo and sacctmgr."""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from hpcbench.errors import SubmitError
from hpcbench.fileio import printable_text
from hpcbench.submit.scheduler_settings import HasSchedulerSettings, run_command

_GPU_PATTERN = re.compile(
    r"(?:^|,)(?P<tres>gres/)?gpu"
    r"(?::(?P<type>[A-Za-z_][^:=,(\s]*))?(?:[:=](?P<count>\d+))?(?:\((?:S|IDX):[^)]*\))?(?=,|$)"
)


class GpuCount(NamedTuple):
    """Accelerators of one type of a node."""

    type: str | None
    number: int


def parse_gres(text: str) -> list[GpuCount]:
    """The accelerators in ``text``, by type; empty for ``(null)`` and for what is none (mps, shard, bandwidth).

    Totals of trackable resources (``gres/gpu=8,gres/gpu:h100=8``) count no device twice.
    """
    found: dict[str | None, int] = {}
    totals = False
    for match in _GPU_PATTERN.finditer(text.strip()):
        kind = match["type"]
        found[kind] = found.get(kind, 0) + int(match["count"] or 1)
        totals = totals or match["tres"] is not None
    if totals and len(found) > 1:
        found.pop(None, None)
    return [GpuCount(kind, count) for kind, count in found.items() if count]


_KEY_VALUE_PATTERN = re.compile(
    r"(?:^|\s)(?P<key>[A-Z][A-Za-z]*(?:[:/][A-Za-z]+)*)=(?P<value>.*?)(?=\s+[A-Z][A-Za-z]*(?:[:/][A-Za-z]+)*=|$)"
)
_TIME_LIMIT_PATTERN = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_EMPTY_VALUES = frozenset({"", "(null)", "N/A", "NONE", "UNLIMITED", "INFINITE", "NOT_SET"})


@dataclass(frozen=True)
class NodeFacts:
    """Nodes that are alike."""

    cpus: int
    memory_bytes: int
    gpus: tuple[GpuCount, ...]
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
class AccountAssociation:
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
    associations: tuple[AccountAssociation, ...] = ()
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


def parse_minutes(text: str) -> float | None:
    """``1-12:00:00``, ``30:00``, ``30`` in minutes; ``None`` for no limit."""
    match = _TIME_LIMIT_PATTERN.fullmatch(text.strip())
    if text.strip() in _EMPTY_VALUES or match is None:
        return None
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:
        hours, mins, seconds = (*parts, 0, 0)[:3]
        return int(match["days"]) * 1440 + hours * 60 + mins + seconds / 60
    if len(parts) == 1:
        return float(parts[0])
    hours, mins, seconds = parts if len(parts) == 3 else (0, *parts)
    return hours * 60 + mins + seconds / 60


def parse_oneliner(text: str) -> list[dict[str, str]]:
    """The lines of ``scontrol show ... --oneliner``, each as its keys and values."""
    lines = (line for line in text.splitlines() if line.strip())
    return [{match["key"]: match["value"].strip() for match in _KEY_VALUE_PATTERN.finditer(line)} for line in lines]


def parse_nodes(text: str) -> dict[str, list[NodeFacts]]:
    """``scontrol show node --oneliner``: per partition its nodes."""
    return nodes_by_partition(parse_oneliner(text))


def nodes_by_partition(nodes: Iterable[dict[str, str]]) -> dict[str, list[NodeFacts]]:
    """The same from the records, keys as scontrol's."""
    found: dict[str, list[NodeFacts]] = {}
    for record in nodes:
        node = NodeFacts(
            cpus=_parse_int(record.get("CPUEfctv", "")) or _parse_int(record.get("CPUTot", "")) or 0,
            memory_bytes=(_parse_int(record.get("RealMemory", "")) or 0) * 2**20,
            gpus=tuple(_parse_node_gpus(record)),
            features=frozenset(_parse_names(record.get("AvailableFeatures", "")) or ()),
            arch=record.get("Arch", ""),
            threads_per_core=_parse_int(record.get("ThreadsPerCore", "")) or 1,
        )
        for partition in filter(None, record.get("Partitions", "").split(",")):
            found.setdefault(partition, []).append(node)
    return found


def _parse_node_gpus(record: dict[str, str]) -> list[GpuCount]:
    """Those of Gres, which names types; the configured totals only where it is silent."""
    return parse_gres(record.get("Gres", "")) or parse_gres(record.get("CfgTRES", ""))


def parse_partitions(text: str, nodes: dict[str, list[NodeFacts]]) -> dict[str, PartitionFacts]:
    """``scontrol show partition --oneliner``."""
    return {
        record["PartitionName"]: _parse_partition(record, nodes)
        for record in parse_oneliner(text)
        if "PartitionName" in record
    }


def _parse_partition(record: dict[str, str], nodes: dict[str, list[NodeFacts]]) -> PartitionFacts:
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
        max_time_min=parse_minutes(record.get("MaxTime", "")),
        default_time_min=parse_minutes(record.get("DefaultTime", "")),
        max_nodes=number("MaxNodes"),
        min_nodes=number("MinNodes"),
        nodes=number("TotalNodes") or len(there),
        allowed_qos=_parse_names(record.get("AllowQos", "ALL")),
        allowed_accounts=_parse_names(record.get("AllowAccounts", "ALL")),
        qos=None if qos in _EMPTY_VALUES else qos,
        whole_nodes=record.get("OverSubscribe") == "EXCLUSIVE",
        default_memory_per_cpu_bytes=per_cpu * 2**20 if per_cpu else None,
        kinds=tuple(sorted(set(there), key=there.count, reverse=True)),
    )


def _parse_names(text: str) -> frozenset[str] | None:
    return None if text == "ALL" or text in _EMPTY_VALUES else frozenset(text.split(","))


def parse_qos(text: str) -> dict[str, QosFacts]:
    """``sacctmgr -nP show qos format=Name,MaxWall,MaxJobsPU,MaxSubmitPU,MaxTRES,MinTRES``."""
    found = {}
    for name, wall, running, submitted, most, least in _parse_rows(text, 6):
        limits = _node_count(most), _node_count(least)
        found[name] = QosFacts(name, parse_minutes(wall), _parse_int(running), _parse_int(submitted), *limits)
    return found


def _node_count(resources: str) -> int | None:
    """Those of ``cpu=64,node=4,gres/gpu=8``."""
    return next((_parse_int(one[5:]) for one in resources.split(",") if one.startswith("node=")), None)


def parse_associations(text: str) -> tuple[AccountAssociation, ...]:
    """``sacctmgr -nP show assoc where user=... format=Account,QOS,DefaultQOS,MaxSubmit``."""
    return tuple(
        AccountAssociation(account, frozenset(filter(None, qos.split(","))), default or None, _parse_int(submitted))
        for account, qos, default, submitted in _parse_rows(text, 4)
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


JSON_NODE_COMMANDS = (["scontrol", "show", "node", "--json"], ["sinfo", "--json"])
"""Which know it: the first from SLURM 23.02 on, the second in 21.08 and 22.05; both only with the plugin built."""

_JSON_NODE_KEYS = {
    "CPUEfctv": "effective_cpus", "CPUTot": "cpus", "RealMemory": "real_memory", "Gres": "gres", "CfgTRES": "tres",
    "AvailableFeatures": "features", "Arch": "architecture", "ThreadsPerCore": "threads", "Partitions": "partitions",
}  # fmt: skip


def parse_json_nodes(text: str) -> dict[str, list[NodeFacts]]:
    """Per partition its nodes; none where ``text`` is another form of JSON, or none."""
    try:
        answer = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    nodes = answer.get("nodes") if isinstance(answer, dict) else None
    if not isinstance(nodes, list):
        return {}
    found = (
        {key: _json_word(node.get(name)) for key, name in _JSON_NODE_KEYS.items()}
        for node in nodes
        if isinstance(node, dict)
    )
    return nodes_by_partition(found)


def _json_word(value: Any) -> str:
    """As the text would have it. Lists were words with commas once, and numbers may say whether they are set."""
    if isinstance(value, list):
        return ",".join(str(one) for one in value)
    if isinstance(value, dict):
        return str(value.get("number", "")) if value.get("set") else ""
    return "" if value is None else str(value)


_CONTROL_CHARACTERS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_QOS_FORMAT = "format=Name,MaxWall,MaxJobsPU,MaxSubmitPU,MaxTRES,MinTRES"
_ASSOCIATION_FORMAT = "format=Account,QOS,DefaultQOS,MaxSubmit"


def query_site(profile: HasSchedulerSettings) -> SiteFacts:
    """What scontrol says, and what sacctmgr adds where there is accounting.

    Text is read; JSON, which not every SLURM prints and whose form changes, only where the text says nothing of nodes.
    Raises ``SubmitError`` where scontrol is absent or does not answer.
    """
    settings = parse_slurm_config(_run_query(["scontrol", "show", "config"], profile))
    nodes = _query_nodes(profile)
    partitions = parse_partitions(_run_query(["scontrol", "show", "partition", "--oneliner"], profile), nodes)
    largest = settings.get("MaxArraySize", "")
    user = f"user={getpass.getuser()}"
    return SiteFacts(
        cluster=settings.get("ClusterName", ""),
        version=settings.get("SLURM_VERSION", ""),
        partitions=partitions,
        qos=parse_qos(_run_optional_query(["sacctmgr", "-nP", "show", "qos", _QOS_FORMAT], profile)),
        associations=parse_associations(
            _run_optional_query(["sacctmgr", "-nP", "show", "assoc", "where", user, _ASSOCIATION_FORMAT], profile)
        ),
        max_array_size=int(largest) if largest.isdecimal() else None,
        settings=settings,
    )


def _query_nodes(profile: HasSchedulerSettings) -> dict[str, list[NodeFacts]]:
    found = parse_nodes(_run_optional_query(["scontrol", "show", "node", "--oneliner"], profile))
    for command in JSON_NODE_COMMANDS:
        found = found or parse_json_nodes(_run_optional_query(command, profile))
    return found


def _run_optional_query(command: list[str], profile: HasSchedulerSettings) -> str:
    """A site may have no accounting, an older SLURM, or keep things from users."""
    try:
        return _run_query(command, profile)
    except SubmitError:
        return ""


def _run_query(command: list[str], profile: HasSchedulerSettings) -> str:
    result = run_command(command, profile)
    if result.exit_code is None:
        raise SubmitError(f"{command[0]}: {result.complaint}", hint="run this on a login node of the cluster")
    if result.exit_code != 0:
        complaint = printable_text(result.complaint.strip())
        raise SubmitError(f"{' '.join(command[:3])}: {complaint}", hint="is the controller up?")
    # Names from there become TOML and go to a terminal.
    return _CONTROL_CHARACTERS.sub(" ", result.output)
