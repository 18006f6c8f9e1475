"""Several panels of one picture, beside and below each other, with the same axes."""

from __future__ import annotations

from typing import Any

_BESIDE = 2
_SMALLER = 0.62


def facets(
    values: list[dict[str, Any]], unit: dict[str, Any], panels: list[str], width: int, height: int
) -> dict[str, Any]:
    """``unit`` over ``values``, once for each of ``panels`` where there are several."""
    if len(panels) < 2:
        return {"data": {"values": values}, "width": width, "height": height, **unit}
    small = {"width": round(width * _SMALLER), "height": round(height * _SMALLER)}
    return {
        "data": {"values": values},
        "facet": {"field": "panel", "type": "nominal", "sort": panels, "title": None},
        "columns": _BESIDE,
        "spec": {**small, **unit},
    }
