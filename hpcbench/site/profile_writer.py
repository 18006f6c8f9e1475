"""The TOML text of a cluster profile, from the facts of a live scheduler; unknown keys are comments."""

from __future__ import annotations

import json
import re
import time

from hpcbench.site.node_probe import DeviceTopology, NodeProbe
from hpcbench.site.slurm_facts import NodeFacts, PartitionFacts, SiteFacts

_PROFILE_HEAD = """\
# Written by `hpcbench cluster init` on {date} from the scheduler of {cluster} (SLURM {version}){looked}.
# What is commented out was not to be known from there. Next: hpcbench check, hpcbench doctor --cluster {name}.
name = {quoted}
description = {description}
verified = "none"
source = "scontrol and sacctmgr of {cluster}"
date = "{date}"
"""


def profile_toml(name: str, facts: SiteFacts, probe: NodeProbe | None = None, config_file: str | None = None) -> str:
    """The text of ``<name>.toml``. With a probe it also says what only a node knows."""
    default = default_partition(facts)
    kind = default.kinds[0] if default and default.kinds else None
    gpus = sum(one.number for one in kind.gpus) if kind else 0
    has_devices = bool(probe.devices) if probe else gpus > 0
    head = _PROFILE_HEAD.format(
        date=time.strftime("%Y-%m-%d"), cluster=facts.cluster or "this cluster", version=facts.version, name=name,
        quoted=_toml_string(name), description=_toml_string(f"{facts.cluster}, {_describe_node(kind)}"),
        looked=" and a job on a node" if probe else "",
    )  # fmt: skip
    parts = [head + _top_level_keys(facts, default, gpus=gpus, has_devices=has_devices, probed=probe is not None)]
    parts += [
        _scheduler_table(facts, config_file),
        _node_table(kind, gpus, probe),
        _request_table(facts, default, kind, has_devices),
    ]
    parts += [_partition_table(one, facts, kind) for one in facts.partitions.values()]
    parts.append(_network_table(probe))
    if probe is not None:
        parts += [_binding_comment(probe.topology), _links_comment(probe, gpus)]
    if has_devices and kind:
        parts.append(_device_comment(kind))
    return "\n".join(part for part in parts if part)


def default_partition(facts: SiteFacts) -> PartitionFacts | None:
    """The scheduler's default, else the first that is up."""
    ordered = sorted(facts.partitions.values(), key=lambda one: (not one.is_default, not one.is_up))
    return ordered[0] if ordered else None


def _describe_node(kind: NodeFacts | None) -> str:
    if kind is None:
        return "no nodes seen"
    devices = " and ".join(f"{one.number}x {one.type or 'gpu'}" for one in kind.gpus)
    return f"{kind.cpus} CPUs" + (f" and {devices}" if devices else "") + " a node"


def _toml_string(value: str) -> str:
    """A TOML string; JSON's escapes are among TOML's."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def _partition_key(partition: str) -> str:
    """A key of `partitions` for a name that may be none."""
    return re.sub(r"^[^A-Za-z0-9]", "p", re.sub(r"[^A-Za-z0-9._-]", "-", partition))[:64] or "p"


def _top_level_keys(
    facts: SiteFacts, default: PartitionFacts | None, *, gpus: int, has_devices: bool, probed: bool
) -> str:
    lines = []
    if gpus and not has_devices:
        lines.append("# The scheduler hands out devices, but the job saw no driver for them.")
    elif gpus and not probed:
        lines.append("# As the scheduler says; `--probe` looks whether there is a driver.")
    lines += [f'device = "{"cuda" if has_devices else "cpu"}"', 'launcher = "srun"']
    accounts = [one.account for one in facts.associations]
    if accounts:
        lines.append(f"# Your accounts: {', '.join(accounts)}. The scheduler takes your default where none is named;")
        lines.append("# another one belongs below [accounts] in ~/.config/hpcbench/config.toml.")
    if default is not None:
        lines.append(f"default_partition = {_toml_string(_partition_key(default.name))}")
    longest = _longest_min(default, facts) if default else None
    lines.append(f'time_limit_min = "{min(30.0, longest or 30.0):g} min"')
    return "\n".join(lines) + "\n"


def _longest_min(partition: PartitionFacts, facts: SiteFacts) -> float | None:
    limits = [partition.max_time_min, *(one.max_time_min for one in facts.limits(partition.name, None))]
    return min((limit for limit in limits if limit is not None), default=None)


def _scheduler_table(facts: SiteFacts, config_file: str | None) -> str:
    lines = ["[scheduler]", 'kind = "slurm"']
    if config_file:
        lines.append(f"config_file = {_toml_string(config_file)}")
    if facts.max_array_size:
        lines.append(f"# Read from the scheduler each time: max_array_size = {facts.max_array_size}")
    qos = facts.qos.get(facts.default_qos or "")
    submitted = [qos.max_submitted_jobs if qos else None, *(one.max_submitted_jobs for one in facts.associations)]
    most = min((limit for limit in submitted if limit is not None), default=None)
    if most is not None:
        lines.append(f"max_submitted_jobs = {most}")
    if qos and qos.max_running_jobs is not None:
        lines.append(f"max_running_jobs = {qos.max_running_jobs}")
    return "\n".join(lines) + "\n"


def _node_lines(kind: NodeFacts, gpus: int) -> list[str]:
    lines = []
    if kind.cpus:
        threads = f"  # of {kind.threads_per_core} threads" if kind.threads_per_core > 1 else ""
        lines.append(f"cores = {kind.cpus}{threads}")
    if kind.memory_bytes:
        lines.append(f'memory_bytes = "{kind.memory_bytes // 2**20} MiB"')
    lines.append(f"devices = {gpus}")
    types = [one.type for one in kind.gpus if one.type]
    if types:
        lines += [f"device_type = {_toml_string(types[0])}", f"gres_type = {_toml_string(types[0])}"]
    elif gpus:
        lines.append('device_type = "gpu"')
    return lines


def _node_table(kind: NodeFacts | None, gpus: int, probe: NodeProbe | None) -> str:
    if kind is None:
        return ""
    lines = ["[node]", *_node_lines(kind, gpus)]
    if kind.arch in ("x86_64", "aarch64"):
        lines.append(f'arch = "{kind.arch}"')
    if probe is not None:
        seen = probe.memory_bytes
        if seen is not None and kind.memory_bytes > 1.2 * seen:
            lines.append(f"# The host has {seen // 2**30} GiB: the scheduler's figure may count the devices' memory.")
            lines.append("# memory_includes_devices = true")
        if probe.tmp_in_memory:
            lines.append("tmp_in_memory = true")
        if probe.cpus is not None and probe.cpus < kind.cpus:
            lines.append(f"# A job that asked for all of them could use {probe.cpus} CPUs.")
            lines.append(f"# cores = {probe.cpus}")
        if probe.runtimes:
            lines.append(f"# Container runtimes on a node: {', '.join(probe.runtimes)}.")
    return "\n".join(lines) + "\n"


def _request_table(facts: SiteFacts, default: PartitionFacts | None, kind: NodeFacts | None, has_devices: bool) -> str:
    lines = ["[request]"]
    if has_devices and kind:
        many = len(kind.gpus) > 1
        new = "cons_tres" in facts.settings.get("SelectType", "")
        style = "gres-typed" if many else "gpus-per-node" if new else "gres"
        lines.append(f'gpus = "{style}"')
    else:
        lines.append('gpus = "none"')
    share = default.default_memory_per_cpu_bytes if default else None
    if share and kind and share * kind.cpus < 0.9 * kind.memory_bytes:
        lines.append(f"# A job that asks for no memory gets {share // 2**20} MiB a CPU, less than the node has.")
        lines.append('memory = "node"')
    else:
        lines.append('memory = "none"')
    return "\n".join(lines) + "\n"


def _partition_table(partition: PartitionFacts, facts: SiteFacts, usual: NodeFacts | None) -> str:
    key = _partition_key(partition.name)
    table = f"partitions.{_toml_string(key) if '.' in key else key}"
    lines = [f"[{table}]"]
    if key != partition.name:
        lines.append(f"name = {_toml_string(partition.name)}")
    if not partition.is_up:
        lines.append("# It was not up.")
    longest = _longest_min(partition, facts)
    if longest is not None:
        lines.append(f'max_time_min = "{longest:g} min"')
    qos = facts.limits(partition.name, None)
    most = [partition.max_nodes, partition.nodes, *(one.max_nodes for one in qos)]
    lines.append(f"max_nodes = {min((one for one in most if one), default=1)}")
    least = max(one or 1 for one in (partition.min_nodes, *(one.min_nodes for one in qos)))
    if least > 1:
        lines.append(f"min_nodes = {least}")
    if partition.whole_nodes:
        lines.append("whole_nodes = true")
    names = partition.allowed_qos if partition.allowed_qos is not None else frozenset(facts.qos)
    if names:
        lines.append(f"# QOS: {', '.join(sorted(names))}. The scheduler's default where none is named:")
        lines.append(f"# qos = {_toml_string(min(names))}")
    if len(partition.kinds) > 1:
        lines.append(
            f"# Its nodes are of {len(partition.kinds)} kinds: {'; '.join(map(_describe_node, partition.kinds))}."
        )
        features = sorted(frozenset[str]().union(*(kind.features for kind in partition.kinds)))
        if features:
            lines.append(f"# Features that a constraint may name: {', '.join(features)}.")
    kind = partition.kinds[0] if partition.kinds else None
    if kind is not None and usual is not None and (kind.cpus, kind.memory_bytes, kind.gpus) != (
        usual.cpus, usual.memory_bytes, usual.gpus
    ):  # fmt: skip
        gpus = sum(one.number for one in kind.gpus)
        lines += ["", f"[{table}.node]", *_node_lines(kind, gpus)]
        if not gpus and usual.gpus:
            lines += ["", f"[{table}.request]", 'gpus = "none"']
    return "\n".join(lines) + "\n"


def _network_table(probe: NodeProbe | None) -> str:
    if probe is None:
        return '# Found by the ranks themselves, where it is not said:\n# [network]\n# interface = "ib0"\n'
    seen = ", ".join(f"{name} {address}" for name, address in probe.interfaces.items())
    hcas = list(probe.ports)
    lines = [f"# Interfaces of a node: {seen or 'none with an address'}.", "[network]"]
    lines.append(f'interface = "{probe.fabric}"' if probe.fabric else '# interface = "eth0"')
    if hcas:
        lines.append(f"# nccl_hcas = {json.dumps(hcas)}")
    return "\n".join(lines) + "\n"


def _binding_comment(topology: DeviceTopology) -> str:
    """Only as a comment: a site may bind ranks to cores in a way of its own."""
    if not topology.device_order:
        return ""
    near = "; ".join(f"{number}: {cores}" for number, cores in enumerate(topology.cores))
    return (
        f"# The cores next to each device: {near}. In their order:\n# [binding]\n"
        f"# device_order = {topology.device_order}\n"
    )


def _links_comment(probe: NodeProbe, gpus: int) -> str:
    """Only as a comment: some ports may be the storage's, and no latency is to be seen from one node."""
    lines = []
    if probe.topology.between_devices:
        kinds = ", ".join(sorted(probe.topology.between_devices))
        lines.append(f"# Between the devices of a node: {kinds} (NV12: twelve NVLinks).")
    ports = probe.ports
    if ports:
        share = sum(ports.values()) / max(1, gpus)
        rates = ", ".join(f"{name} {rate / 1e9:g} Gbit/s" for name, rate in ports.items())
        lines += [
            f"# Ports that are up: {rates}; shared by {max(1, gpus)} ranks:", "# [links.inter_node]",
            '# latency_s = "10 us"', f'# bandwidth_bytes_per_s = "{share / 1e9:g} Gbit/s"',
        ]  # fmt: skip
    return "\n".join(lines) + "\n" if lines else ""


def _device_comment(kind: NodeFacts) -> str:
    name = next((one.type for one in kind.gpus if one.type), "gpu")
    return (
        f"# For the oracle and for MFU, from the vendor's data sheet: dense peaks.\n[devices.{_toml_string(name)}]\n"
        '# memory_bytes = "40 GB"\n# memory_bandwidth_bytes_per_s = "1555 GB/s"\n'
        '# peak_flops_per_s = { fp32 = "19.5 TFLOP/s", bf16 = "312 TFLOP/s" }\n'
    )
