"""Nodes from the schedulers' JSON, for where their text says nothing of them."""

from __future__ import annotations

from typing import Any

import msgspec

from hpcbench.submit.site.facts import NodeFacts, nodes_by_partition

COMMANDS = (["scontrol", "show", "node", "--json"], ["sinfo", "--json"])
"""Which know it: the first from SLURM 23.02 on, the second in 21.08 and 22.05; both only with the plugin built."""

_KEYS = {
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
    found = ({key: _word(node.get(name)) for key, name in _KEYS.items()} for node in nodes if isinstance(node, dict))
    return nodes_by_partition(found)


def _word(value: Any) -> str:
    """As the text would have it. Lists were words with commas once, and numbers may say whether they are set."""
    if isinstance(value, list):
        return ",".join(str(one) for one in value)
    if isinstance(value, dict):
        return str(value.get("number", "")) if value.get("set") else ""
    return "" if value is None else str(value)
