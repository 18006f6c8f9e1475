"""Sweep files as text: for recommended candidates and for the points of a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hpcbench.config.sweep_file import TABLE_PARAMETERS


def sweep_toml(settings: Mapping[str, Any], fixed: Mapping[str, Any], points: Iterable[Mapping[str, Any]]) -> str:
    """Return a sweep file with top-level ``settings``, the table ``[fixed]`` and one ``[[include]]`` per point."""
    lines = [*_settings_lines(settings), "", "[fixed]", *_settings_lines(fixed)]
    for point in points:
        lines += ["", "[[include]]", *_settings_lines(point)]
    return "\n".join(lines) + "\n"


def _settings_lines(values: Mapping[str, Any]) -> list[str]:
    """One line per setting; tables of options by dotted names."""
    lines = []
    for key, value in values.items():
        if key in TABLE_PARAMETERS and isinstance(value, dict):
            lines += [f"{key}.{_toml_key(name)} = {_toml_value(part)}" for name, part in value.items()]
        else:
            lines.append(f"{key} = {_toml_value(value)}")
    return lines


def _toml_key(name: str) -> str:
    return name if name.replace("_", "a").replace("-", "a").isalnum() and name.isascii() else _toml_value(name)


def _toml_value(value: Any) -> str:
    # JSON's strings, numbers and truth values are TOML's, except for DEL.
    return json.dumps(value).replace("\x7f", "\\u007f")
