"""The TOML text of a cluster profile, from the facts of a live scheduler; unknown keys are comments."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from itertools import count, islice

from hpcbench.config.toml_tables import NAME_PATTERN
from hpcbench.site.node_probe import NodeProbe
from hpcbench.site.partition_facts import GpuCount, NodeFacts, PartitionFacts
from hpcbench.site.slurm_facts import SiteFacts

_PROFILE_HEAD = """\
# Written by `hpcbench cluster init` on {date} from the scheduler of {cluster} (SLURM {version}){looked}.
# Commented-out keys could not be read from the scheduler. Next: hpcbench check, hpcbench doctor --cluster {name}.
name = {quoted}
description = {description}
verified = "none"
source = "scontrol and sacctmgr of {cluster}"
date = "{date}"
"""


def profile_toml(name: str, facts: SiteFacts, probe: NodeProbe | None = None, config_file: str | None = None) -> str:
    """The text of ``<name>.toml``. With a probe it also has the values that only a node knows."""
    default = default_partition(facts)
    kind = default.usual_kind if default else None
    keys = _partition_keys(facts)
    gpus = kind.device_count if kind else 0
    has_devices = bool(probe.devices) if probe else gpus > 0
    head = _PROFILE_HEAD.format(
        date=time.strftime("%Y-%m-%d"), cluster=facts.cluster or "this cluster", version=facts.version, name=name,
        quoted=_toml_string(name), description=_toml_string(f"{facts.cluster}, {_describe_node(kind)}"),
        looked=" and a job on a node" if probe else "",
    )  # fmt: skip
    key = keys[default.name] if default and _why_commented(default, facts) is None else None
    top = _top_level_keys(facts, default, key, gpus=gpus, has_devices=has_devices, probed=probe is not None)
    tables = [
        [*head.rstrip("\n").split("\n"), *top],
        _scheduler_table(facts, config_file),
        _node_table(default, kind, probe),
        _request_table(facts, default, kind, has_devices),
        *(_partition_table(partition, keys[name], facts, default) for name, partition in facts.partitions.items()),
        _network_table(probe),
    ]
    if has_devices and kind:
        tables.append(_device_comment(kind))
    return "\n".join("".join(f"{line}\n" for line in lines) for lines in tables if lines)


def default_partition(facts: SiteFacts) -> PartitionFacts | None:
    """The partition that `device`, `[node]` and `[request]` describe; ``None`` if there is none.

    It is the scheduler's default, or the first one with devices where that has none: `device` holds for all partitions,
    and jobs on a GPU must not compute on the CPU. One that is closed to this user comes last.
    """

    def rank(partition: PartitionFacts) -> tuple[bool, bool, bool]:
        kind = partition.usual_kind
        has_devices = kind is not None and kind.device_count > 0
        return _why_commented(partition, facts) is not None, not has_devices, not partition.is_default

    return min(facts.partitions.values(), key=rank, default=None)


def _why_commented(partition: PartitionFacts, facts: SiteFacts) -> str | None:
    """Why the table of a partition is a comment: its jobs would not start, or the site does not offer it."""
    is_hidden = "is hidden: the site lists it only for `scontrol --all`" if partition.is_hidden else None
    return facts.why_closed(partition) or is_hidden


def _describe_node(kind: NodeFacts | None) -> str:
    if kind is None:
        return "no nodes seen"
    devices = " and ".join(f"{gpu.number}x {gpu.type or 'gpu'}" for gpu in kind.gpus)
    return f"{kind.cpus} CPUs" + (f" and {devices}" if devices else "") + " a node"


def _describe_kinds(kinds: Sequence[NodeFacts]) -> str:
    """Each kind of nodes, with the memory, processor and features that distinguish it from the others."""
    properties = [
        [f"{kind.memory_bytes // 2**20} MiB", f"{kind.threads_per_core} threads a core", kind.arch, *kind.features]
        for kind in kinds
    ]
    common = set(properties[0]).intersection(*properties)
    own = (", ".join(sorted({*words} - common - {""})) for words in properties)
    return "; ".join(
        _describe_node(kind) + (f" ({words})" if words else "") for kind, words in zip(kinds, own, strict=True)
    )


def _toml_string(value: str) -> str:
    """A TOML string; JSON's escapes are among TOML's."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def _keys(**values: str | float | None) -> list[str]:
    """Lines ``key = value`` of the values that are set; text is quoted."""
    return [
        f"{key} = {_toml_string(value) if isinstance(value, str) else value}"
        for key, value in values.items()
        if value is not None
    ]


def _least(limits: Iterable[float | None]) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _partition_keys(facts: SiteFacts) -> dict[str, str]:
    """The key of `partitions` for each partition; a name may be no key, or become another one's key."""
    keys: dict[str, str] = {}
    # Names that are keys already keep them.
    for name in sorted(facts.partitions, key=lambda name: re.match(NAME_PATTERN, name) is None):
        key = re.sub(r"^[^A-Za-z0-9]", "p", re.sub(r"[^A-Za-z0-9._-]", "-", name))[:64] or "p"
        others = (f"{key[:60]}-{number}" for number in count(2))
        keys[name] = next(each for each in (key, *islice(others, len(keys))) if each not in keys.values())
    return keys


def _top_level_keys(
    facts: SiteFacts, default: PartitionFacts | None, key: str | None, *, gpus: int, has_devices: bool, probed: bool
) -> list[str]:
    lines = []
    usual = facts.default_partition
    if default and usual and usual is not default:
        reason = _why_commented(usual, facts) or "has no devices, and `device` holds for all partitions"
        lines.append(f"# The scheduler's default partition, {usual.name}, {reason}.")
    if gpus and not has_devices:
        lines.append("# The scheduler lists devices, but the job found no driver for them.")
    elif gpus and not probed:
        lines.append("# From the scheduler; `--probe` checks whether there is a driver.")
    lines += _keys(device="cuda" if has_devices else "cpu", launcher="srun")
    accounts = [association.account for association in facts.associations]
    if accounts:
        lines.append(f"# Your accounts: {', '.join(accounts)}. The scheduler takes your default where none is named;")
        lines.append("# another one belongs below [accounts] in ~/.config/hpcbench/config.toml.")
    longest = _longest_min(default, facts) if default else None
    lines += [f"# {reservation}." for reservation in facts.reservations]
    lines += _keys(default_partition=key)
    return [*lines, *_keys(time_limit_min=f"{min(30.0, longest or 30.0):g} min")]


def _longest_min(partition: PartitionFacts, facts: SiteFacts) -> float | None:
    return _least([partition.max_time_min, *(qos.max_time_min for qos in facts.limits(partition.name, None))])


def _scheduler_table(facts: SiteFacts, config_file: str | None) -> list[str]:
    lines = ["[scheduler]", *_keys(kind="slurm", config_file=config_file or None)]
    if facts.max_array_size:
        lines.append(f"# Read from the scheduler each time: max_array_size = {facts.max_array_size}")
    qos = facts.qos.get(facts.default_qos or "")
    submitted = [association.max_submitted_jobs for association in facts.associations]
    most = _least([qos.max_submitted_jobs if qos else None, *submitted])
    return [*lines, *_keys(max_submitted_jobs=most, max_running_jobs=qos.max_running_jobs if qos else None)]


def _node_lines(kind: NodeFacts, most_bytes: int) -> list[str]:
    """``most_bytes``: the most memory that a job may ask for on such a node."""
    lines = []
    if kind.cpus:
        threads = f"  # of {kind.threads_per_core} threads" if kind.threads_per_core > 1 else ""
        lines.append(f"cores = {kind.cpus}{threads}")
    if most_bytes < kind.memory_bytes:
        lines.append(f"# Of its {kind.memory_bytes // 2**20} MiB a job may ask for at most:")
    if kind.memory_bytes:
        lines += _keys(memory_bytes=f"{most_bytes // 2**20} MiB")
    if len(kind.gpus) > 1:
        lines.append("# Its devices are of several types: a job that asks for a part of them gets any.")
    gpu_type = next((gpu.type for gpu in kind.gpus if gpu.type), None)
    device_type = gpu_type or ("gpu" if kind.device_count else None)
    return [*lines, *_keys(devices=kind.device_count, device_type=device_type, gres_type=gpu_type)]


def _node_table(default: PartitionFacts | None, kind: NodeFacts | None, probe: NodeProbe | None) -> list[str]:
    if default is None or kind is None:
        return []
    lines = ["[node]", *_node_lines(kind, default.memory.most(kind))]
    if kind.arch in ("x86_64", "aarch64"):
        lines += _keys(arch=kind.arch)
    if probe is not None:
        host_bytes = probe.memory_bytes
        if host_bytes is not None and kind.memory_bytes > 1.2 * host_bytes:
            gib = host_bytes // 2**30
            lines.append(f"# The host has {gib} GiB: the scheduler's figure may count the devices' memory.")
            lines.append("# memory_includes_devices = true")
        if probe.tmp_in_memory:
            lines.append("tmp_in_memory = true")
        if probe.cpus is not None and probe.cpus < kind.cpus:
            lines.append(f"# A job that asked for all of them could use {probe.cpus} CPUs.")
            lines.append(f"# cores = {probe.cpus}")
        if probe.runtimes:
            lines.append(f"# Container runtimes on a node: {', '.join(probe.runtimes)}.")
    return lines


def _request_table(
    facts: SiteFacts, default: PartitionFacts | None, kind: NodeFacts | None, has_devices: bool
) -> list[str]:
    style = "none"
    if has_devices and kind:
        has_gpu_options = "cons_tres" in facts.settings.get("SelectType", "")
        style = "gpus-per-node" if has_gpu_options else "gres"
    lines = ["[request]", *_keys(gpus=style)]
    return [*lines, *_memory_lines(default, kind)]


def _memory_lines(partition: PartitionFacts | None, kind: NodeFacts | None) -> list[str]:
    if partition is None or kind is None or not partition.memory.must_ask(kind):
        return _keys(memory="none")
    given, most = (amount // 2**20 for amount in (partition.memory.default(kind), partition.memory.most(kind)))
    return [
        f"# A job that asks for no memory is given {given} MiB of a node; it may have {most}.",
        *_keys(memory="node"),
    ]


def _partition_table(
    partition: PartitionFacts, key: str, facts: SiteFacts, default: PartitionFacts | None
) -> list[str]:
    table = f"partitions.{_toml_string(key) if '.' in key else key}"
    lines = [f"[{table}]", *_keys(name=partition.name if key != partition.name else None)]
    longest = _longest_min(partition, facts)
    lines += _keys(max_time_min=f"{longest:g} min" if longest is not None else None)
    all_qos = facts.limits(partition.name, None)
    maxima = [partition.max_nodes, partition.nodes, *(qos.max_nodes for qos in all_qos)]
    smallest = max(count or 1 for count in (partition.min_nodes, *(qos.min_nodes for qos in all_qos)))
    lines += _keys(
        max_nodes=_least(count or None for count in maxima) or 1, min_nodes=smallest if smallest > 1 else None
    )
    if partition.absence:
        counts = "It counts" if len(partition.absent_nodes) == 1 else "They count"
        lines.append(f"# {partition.absence}. {counts} in max_nodes.")
    if partition.whole_nodes:
        lines.append("whole_nodes = true")
    lines += _qos_lines(partition, facts)
    if len(partition.kinds) > 1:
        lines.append(f"# Its nodes are of {len(partition.kinds)} kinds: {_describe_kinds(partition.kinds)}.")
        features = sorted(frozenset[str]().union(*(kind.features for kind in partition.kinds)))
        if features:
            lines.append(f"# Features that a constraint may name: {', '.join(features)}.")
    kind, usual = partition.usual_kind, default.usual_kind if default else None
    if kind and usual and default and _numbers(partition, kind) != _numbers(default, usual):
        lines += ["", f"[{table}.node]", *_node_lines(kind, partition.memory.most(kind))]
        own = _keys(gpus="none") if not kind.device_count and usual.gpus else []
        if partition.memory.must_ask(kind) != default.memory.must_ask(usual):
            own += _memory_lines(partition, kind)
        lines += ["", f"[{table}.request]", *own] if own else []
    reason = _why_commented(partition, facts)
    # `check` refuses a table of a partition in which no job starts.
    return [f"# {partition.name} {reason}.", *(f"# {line}".rstrip() for line in lines)] if reason else lines


def _numbers(partition: PartitionFacts, kind: NodeFacts) -> tuple[int, int, bool, tuple[GpuCount, ...]]:
    """The facts that the tables of nodes and requests follow from."""
    return kind.cpus, partition.memory.most(kind), partition.memory.must_ask(kind), kind.gpus


def _qos_lines(partition: PartitionFacts, facts: SiteFacts) -> list[str]:
    """A comment with the QOS that jobs there may name; one of them as a key if the user's default is refused there."""
    usable = facts.usable_qos or facts.qos.keys() or partition.allowed_qos or ()
    names = sorted(filter(partition.takes_qos, usable))
    default = facts.default_qos
    if not names:
        return []
    if default is not None and not partition.takes_qos(default):
        return [f"# QOS: {', '.join(names)}. Your default, {default}, is not taken here.", *_keys(qos=names[0])]
    by_default = f"the scheduler takes {default} where none is named" if default else "none need be named"
    example = _keys(qos=next((name for name in names if name != default), None))
    return [f"# QOS: {', '.join(names)}; {by_default}.", *(f"# {line}" for line in example)]


def _network_table(probe: NodeProbe | None) -> list[str]:
    if probe is None:
        return ["# Found by the ranks themselves, where it is not said:", "# [network]", '# interface = "ib0"']
    addresses = ", ".join(f"{name} {address}" for name, address in probe.interfaces.items())
    lines = [f"# Interfaces of a node: {addresses or 'none with an address'}.", "[network]"]
    lines.append(f'interface = "{probe.fabric}"' if probe.fabric else '# interface = "eth0"')
    return lines


def _device_comment(kind: NodeFacts) -> list[str]:
    name = next((gpu.type for gpu in kind.gpus if gpu.type), "gpu")
    return [
        "# For the oracle and for MFU, from the vendor's data sheet: dense peaks.",
        f"[devices.{_toml_string(name)}]",
        '# memory_bytes = "40 GB"',
        '# memory_bandwidth_bytes_per_s = "1555 GB/s"',
        '# peak_flops_per_s = { fp32 = "19.5 TFLOP/s", bf16 = "312 TFLOP/s" }',
    ]
