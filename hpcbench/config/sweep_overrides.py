"""Changes of a sweep's TOML for one command: ``--set key=value``. The changed sweep is validated as if written so."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpcbench.config.sweep_file import TABLE_PARAMETERS, SweepFile, parameter_types
from hpcbench.config.toml_tables import KeyPath, parse_toml_value
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean

_SETTABLE_TABLES = ("fixed", "grid", "scaling", "derive", "stop", "submit")
_SETTABLE_KEYS = ("name", "description", "model_folder", "repeats")


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> dict[KeyPath, str]:
    """Change the sweep ``data`` in place.

    A bare parameter (``steps=5``, ``options.x=1``) goes to ``[fixed]`` and leaves every other table, so that all points
    have it. ``grid.x=a,b`` makes it an axis. Other keys are those of the file: ``repeats=5``, ``submit.pack=4``.

    Args:
        data: The decoded TOML file.
        overrides: ``key=value`` each; the value is TOML, or text as it stands.

    Returns:
        For each key that was set its origin, for messages.

    Raises:
        ConfigErrors: Every override that is wrong.
    """
    origins: dict[KeyPath, str] = {}
    problems: list[HpcbenchError] = []
    for text in overrides:
        try:
            origins[_apply(data, text)] = f"--set {text}"
        except ConfigError as error:
            problems.append(error)
    if problems:
        raise ConfigErrors(problems)
    return origins


def _apply(data: dict[str, Any], text: str) -> KeyPath:
    key, separator, value_text = (part.strip() for part in text.partition("="))
    where = f"--set {text}"
    if not separator or not key:
        raise ConfigError("no key=value", where=where, hint="for instance steps=5 or grid.batch_size=8,16")
    path = _key_path(key, where)
    is_list = path[0] == "grid" or path == ("scaling", "nodes")
    value = _parse_list(value_text) if is_list else parse_toml_value(value_text)
    if path[0] == "fixed" and path[1] != "env" and isinstance(value, str) and "," in value:
        raise ConfigError(f"{path[-1]} is one value", where=where, hint=f"an axis is grid.{'.'.join(path[1:])}={value}")
    if path == ("model_folder",):
        value = str(Path(str(value)).expanduser().absolute())
    if path[0] in ("fixed", "grid"):
        had_axes = _has_axes(data)
        _remove_parameter(data, path[1:], with_includes=path[0] == "fixed")
        if path[1] in ("nodes", "global_batch_size") and path[1] in _table(data, "scaling"):
            # Scaling has an axis of nodes of its own; the kind of scaling stays.
            path = ("scaling", path[1])
            if path[1] == "nodes" and not is_list:
                # Includes are no part of the axis.
                data["include"] = [{**include, "nodes": value} for include in data.get("include", [])]
                value = [value]
        elif path[0] == "fixed" and had_axes and not _has_axes(data) and data.get("include"):
            # A sweep of includes alone has no other points: the product stays, with one value.
            path, value = ("grid", *path[1:]), [value]
    table = data
    for step in path[:-1]:
        table = table.setdefault(step, {})
    table[path[-1]] = value
    return path


def _key_path(key: str, where: str) -> tuple[str, ...]:
    """The place of ``key`` in the file: parameters without a table stand in ``[fixed]``."""
    first, _, rest = key.partition(".")
    known = parameter_types()
    if first in known:
        first, rest = "fixed", key
    if first in ("fixed", "grid"):
        name, _, option = rest.partition(".")
        if name not in known:
            raise ConfigError(f"unknown parameter {name!r}", where=where, hint=did_you_mean(name, known))
        return (first, name, option) if name in TABLE_PARAMETERS and option else (first, rest)
    if first in _SETTABLE_TABLES and rest:
        return (first, rest)
    if key in _SETTABLE_KEYS:
        return (key,)
    if first in (field.alias or name for name, field in SweepFile.model_fields.items()):
        raise ConfigError(f"[{first}] cannot be set here", where=where, hint="change it in the sweep's file")
    raise ConfigError(f"unknown key {key!r}", where=where, hint=did_you_mean(key, [*known, *_SETTABLE_KEYS]))


def _parse_list(text: str) -> list[Any]:
    if text.startswith("["):
        value = parse_toml_value(text)
        return value if isinstance(value, list) else [value]
    return [parse_toml_value(part.strip()) for part in text.split(",")]


def _table(data: dict[str, Any], name: str) -> dict[str, Any]:
    table = data.get(name)
    return table if isinstance(table, dict) else {}


def _has_axes(data: dict[str, Any]) -> bool:
    return bool(_table(data, "grid") or data.get("zip") or "scaling" in data)


def _remove_parameter(data: dict[str, Any], parameter: tuple[str, ...], *, with_includes: bool) -> None:
    """Take ``parameter`` out of every table that gives it values; ``[scaling]`` keeps its own."""
    dotted = ".".join(parameter)
    groups = [group for group in data.get("zip", []) if isinstance(group, dict)]
    includes = [include for include in data.get("include", []) if isinstance(include, dict)] if with_includes else []
    for table in (_table(data, "fixed"), _table(data, "grid"), *groups, *includes):
        inner: Any = table if len(parameter) == 1 else table.get(parameter[0])
        if isinstance(inner, dict):
            inner.pop(parameter[-1], None)
    _table(data, "derive").pop(dotted, None)
    if "zip" in data:
        data["zip"] = [group for group in data["zip"] if group]
    if with_includes:
        # What has one value is no size along which runs can be stopped.
        stops = _table(data, "stop")
        for status, names in list(stops.items()):
            kept = [name for name in ([names] if isinstance(names, str) else names) if name != dotted]
            if kept:
                stops[status] = kept
            else:
                del stops[status]
