"""JSON Schemas of cluster profiles, sweeps and results."""

from __future__ import annotations

from typing import Any

import msgspec


def make_json_schema(kind: str) -> dict[str, Any]:
    """The schema of ``cluster``, ``sweep`` or ``result`` (JSON Schema 2020-12)."""
    if kind == "result":
        from hpcbench.results.schema import RunResult

        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(RunResult)}
    if kind == "cluster":
        from hpcbench.config.cluster_profile import ClusterProfile

        return ClusterProfile.model_json_schema()
    return _make_sweep_schema()


def _make_sweep_schema() -> dict[str, Any]:
    """Pydantic's schema with the names that exist, so that an editor can complete them."""
    from hpcbench.config.sweep_file import SweepFile
    from hpcbench.parallel.catalog import selectable_strategies, shipped_model_entries
    from hpcbench.parallel.workloads import CUSTOM_MODEL_PATTERN, DATASETS

    document = SweepFile.model_json_schema()
    names = {
        "model": sorted(shipped_model_entries()),
        "dataset": sorted(DATASETS),
        "strategy": sorted(selectable_strategies()),
    }
    for table in ("Fixed", "Grid", "Exclude"):
        properties = document["$defs"][table]["properties"]
        for parameter, choices in names.items():
            for node in _find_string_nodes(properties[parameter]):
                # A user's own model has a name of its own.
                own = {"anyOf": [{"enum": choices}, {"pattern": CUSTOM_MODEL_PATTERN}]}
                node.update(own if parameter == "model" else {"enum": choices})
    return document


def _find_string_nodes(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, dict):
        own = [node] if node.get("type") == "string" else []
        return own + [found for value in node.values() for found in _find_string_nodes(value)]
    if isinstance(node, list):
        return [found for value in node for found in _find_string_nodes(value)]
    return []
