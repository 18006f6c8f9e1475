"""How to measure the same again: a sweep of the very points, and the commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from hpcbench.config.spec import RunSpec, as_dict
from hpcbench.config.sweep import NESTED

MOST_POINTS = 200
_DEFAULTS = {one.name: one.default for one in structs.fields(RunSpec) if not one.required}


def sweep_text(specs: Sequence[RunSpec], repeats: int, name: str = "again") -> str | None:
    """A sweep of ``specs``, each so often; ``None`` where they are too many to be read.

    Every parameter that is not at its default stands in it, degrees included, so that the runs keep their names.
    """
    points: dict[str, dict[str, Any]] = {}
    for spec in specs:
        point = {
            key: value
            for key, value in as_dict(spec).items()
            if key not in ("spec_version", "repeat") and value != _DEFAULTS.get(key)
        }
        points[json.dumps(point, sort_keys=True)] = point
    if not points or len(points) > MOST_POINTS:
        return None
    given = list(points.values())
    fixed = {key: value for key, value in given[0].items() if all(one.get(key) == value for one in given)}
    # A table of options is joined with that of the fixed ones, so it is fixed for all or for none.
    lines = [f'name = "{name}"', f"repeats = {repeats}", "", "[fixed]", *_settings(fixed)]
    for point in given if len(given) > 1 else []:
        own = {key: value for key, value in point.items() if key not in fixed}
        lines += ["", "[[include]]", *_settings(own)]
    return "\n".join(lines) + "\n"


def _settings(values: dict[str, Any]) -> list[str]:
    """A line each; tables by their dotted names, as sweeps are written."""
    lines = []
    for key, value in values.items():
        if key in NESTED and isinstance(value, dict):
            lines += [f"{key}.{_key(name)} = {_toml(one)}" for name, one in value.items()]
        else:
            lines.append(f"{key} = {_toml(value)}")
    return lines


def _key(name: str) -> str:
    return name if name.replace("_", "a").replace("-", "a").isalnum() and name.isascii() else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # JSON's strings and numbers are TOML's, but for DEL.
    return json.dumps(value).replace("\x7f", "\\u007f")


def commands(sources: Sequence[str], clusters: Sequence[str], where: str | None, *, has_sweep: bool) -> list[str]:
    """What made this page, and what would measure it again."""
    narrowed = ["--where", where] if where else []
    made = shlex.join(["hpcbench", "report", *sources, *narrowed, "--out", "report.html"])
    if not has_sweep:
        return [made]
    again = [shlex.join(["hpcbench", "submit", "again.toml", "--cluster", cluster]) for cluster in clusters]
    return [made, *again, shlex.join(["hpcbench", "report", "again", *narrowed, "--out", "report.html"])]
