"""Pydantic's findings as this tool's errors: all at once, each with file, line, value and the nearest right key."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from hpcbench.config.tomlfile import LineIndex, line_index, line_of
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean

_M = TypeVar("_M", bound=BaseModel)


class Source:
    """Where data came from, to say so when something in it is wrong."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text

    @cached_property
    def _lines(self) -> LineIndex:
        return line_index(self.text)

    def where(self, key_path: Sequence[str | int]) -> str:
        """``file:line`` of a key."""
        line = line_of(self._lines, key_path) if key_path else None
        return f"{self.path}:{line}" if line else str(self.path)


def validate(model: type[_M], data: dict[str, Any], source: Source) -> _M:
    """``data`` as ``model``, or ``ConfigErrors`` with everything that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigErrors(problems(model, data, source, error)) from None


def problems(
    model: type[BaseModel], data: dict[str, Any], source: Source, error: ValidationError
) -> list[HpcbenchError]:
    """One error per key that is wrong; of the alternatives of a union only the first."""
    found: dict[tuple[str | int, ...], HpcbenchError] = {}
    for detail in error.errors(include_url=False):
        key_path = existing_path(data, detail["loc"], detail["type"])
        found.setdefault(key_path, _problem(model, key_path, detail, source))
    return list(found.values())


def existing_path(data: Any, location: Sequence[str | int], kind: str) -> tuple[str | int, ...]:
    """``location`` without the steps that pydantic adds for unions: only what stands in the data (or is missing)."""
    path: list[str | int] = []
    node = data
    for step in location:
        if _has(node, step):
            node = node[step]
        elif kind != "missing" or step != location[-1]:
            break
        path.append(step)
    return tuple(path)


def _has(node: Any, step: str | int) -> bool:
    if isinstance(node, dict):
        return step in node
    return isinstance(node, list) and isinstance(step, int) and step < len(node)


def _problem(model: type[BaseModel], key_path: tuple[str | int, ...], detail: Any, source: Source) -> HpcbenchError:
    name = ".".join(str(step) for step in key_path) or "the file"
    if detail["type"] == "extra_forbidden":
        parent, wrong = key_path[:-1], str(key_path[-1])
        table = ".".join(str(step) for step in parent)
        message = f"unknown key {wrong!r}" + (f" in [{table}]" if table else "")
        known = known_keys(model, parent)
        hint = did_you_mean(wrong, known)
        if "options" in known and not hint.startswith("did"):
            hint += "; what a strategy alone knows goes into options = { ... }"
        return ConfigError(message, where=source.where(key_path), hint=hint)
    if detail["type"] == "missing":
        return ConfigError(f"{name} is missing", where=source.where(key_path[:-1]))
    text = detail["msg"].removeprefix("Value error, ")
    value = "" if detail["type"] == "value_error" else f", not {detail['input']!r:.80}"
    return ConfigError(f"{name}: {text[:1].lower()}{text[1:]}{value}", where=source.where(key_path))


def known_keys(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that the table at ``path`` takes."""
    kind: Any = model
    for step in path:
        kind = _descend(kind, step)
    return [field.alias or name for name, field in kind.model_fields.items()] if _is_model(kind) else []


def _descend(kind: Any, step: str | int) -> Any:
    """The type of what stands at ``step`` in a table, a dictionary or a list of type ``kind``."""
    if _is_model(kind):
        field = kind.model_fields.get(step)
        return field.annotation if field is not None else None
    arguments = [argument for argument in get_args(kind) if argument is not type(None)]
    if get_origin(kind) in (dict, list):
        return arguments[-1]
    inner = (_descend(argument, step) for argument in arguments)
    return next((found for found in inner if found is not None), None)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
