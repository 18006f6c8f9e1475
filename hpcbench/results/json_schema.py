"""JSON Schemas of the files that people and scripts read and write."""

from __future__ import annotations

from typing import Any

import msgspec


def json_schema(kind: str) -> dict[str, Any]:
    """The schema of ``cluster``, ``sweep`` or ``result`` (JSON Schema 2020-12)."""
    if kind == "result":
        from hpcbench.results.schema import RunResult

        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(RunResult)}
    if kind == "cluster":
        from hpcbench.config.cluster import ClusterProfile

        return ClusterProfile.model_json_schema()
    return _sweep_schema()


def _sweep_schema() -> dict[str, Any]:
    """Pydantic's schema with the names that exist, so that an editor can complete them."""
    from hpcbench.config.sweep import SweepFile
    from hpcbench.parallel.catalog import models, named
    from hpcbench.parallel.datasets import DATASETS
    from hpcbench.parallel.own_model import FORM

    document = SweepFile.model_json_schema()
    names = {"model": sorted(models()), "dataset": sorted(DATASETS), "strategy": sorted(named())}
    for table in ("Fixed", "Grid", "Exclude"):
        properties = document["$defs"][table]["properties"]
        for parameter, choices in names.items():
            for node in _string_nodes(properties[parameter]):
                # A user's own model has a name of its own.
                own = {"anyOf": [{"enum": choices}, {"pattern": FORM}]}
                node.update(own if parameter == "model" else {"enum": choices})
    return document


def _string_nodes(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, dict):
        own = [node] if node.get("type") == "string" else []
        return own + [found for value in node.values() for found in _string_nodes(value)]
    if isinstance(node, list):
        return [found for value in node for found in _string_nodes(value)]
    return []
