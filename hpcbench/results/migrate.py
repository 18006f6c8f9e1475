"""Results of earlier schema versions, brought to this one. A later one is refused: its words may mean other things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcbench.results.schema import SCHEMA_VERSION

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""From version n to n + 1, on the decoded document. Raising ``SCHEMA_VERSION`` adds one here."""


def migrated(document: Any) -> dict[str, Any] | None:
    """``document`` in this version; ``None`` where it is in it already. ``ValueError`` says why that cannot be."""
    version = document.get("schema_version", SCHEMA_VERSION) if isinstance(document, dict) else SCHEMA_VERSION
    if version == SCHEMA_VERSION:
        return None
    if type(version) is not int or version > SCHEMA_VERSION:
        raise ValueError(
            f"schema_version {version!r:.40}; this hpcbench reads up to {SCHEMA_VERSION}: read it with a newer one"
        )
    while version < SCHEMA_VERSION:
        if version not in MIGRATIONS:
            raise ValueError(f"schema_version {version}, from which nothing leads to {SCHEMA_VERSION}")
        document = MIGRATIONS[version](document)
        version += 1
    return {**document, "schema_version": SCHEMA_VERSION}
