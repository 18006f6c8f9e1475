"""TOML with line numbers: parsed at once by tomli, searched for a key's line only when there is an error to report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcbench.errors import ConfigError

_HEADER = re.compile(r"^\s*\[\[?(?P<path>[^\[\]]+)\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*(?P<key>(?:[A-Za-z0-9_.\- ]|"[^"\n]*"|'[^'\n]*')+?)\s*=""")
_POSITION = re.compile(r"\(at (line (?P<line>\d+)|end of document)")

Path_ = tuple["str | int", ...]
LineIndex = dict[Path_, int]


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """The data of a TOML file and its text. Raises ``ConfigError`` with file and line where it cannot be read."""
    import tomli

    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text (byte {error.start})", where=str(path)) from error
    try:
        return tomli.loads(text), text
    except tomli.TOMLDecodeError as error:
        match = _POSITION.search(str(error))
        line = int(match["line"]) if match and match["line"] else text.count("\n") + 1
        raise ConfigError(f"not valid TOML: {error}", where=f"{path}:{line}") from error


def line_of(index: LineIndex, path: Sequence[str | int]) -> int | None:
    """The line (from 1) of the key ``path``, or of the nearest of its parents that has one.

    Integers in ``path`` are positions in an array of tables, or in a list: the latter has the line of its key.
    """
    for length in range(len(path), 0, -1):
        line = index.get(tuple(path[:length]))
        if line is not None:
            return line
    return None


def line_index(text: str) -> LineIndex:
    """The lines of the keys of TOML ``text``."""
    index: LineIndex = {}
    lengths: dict[Path_, int] = {}
    prefix: Path_ = ()
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        header = _HEADER.match(line)
        if header:
            is_array = line.lstrip().startswith("[[")
            prefix = _array_path(lengths, _keys(header["path"]), is_array)
            index.setdefault(prefix, number + 1)
        elif match := _KEY.match(line):
            keys = _keys(match["key"])
            for length in range(1, len(keys) + 1):
                index.setdefault((*prefix, *keys[:length]), number + 1)
            number = _end_of_value(lines, number)
        number += 1
    return index


def _keys(dotted: str) -> tuple[str, ...]:
    import tomli

    try:
        node: Any = tomli.loads(f"{dotted} = 0")
    except tomli.TOMLDecodeError:
        return ()
    keys = []
    while isinstance(node, dict):
        key, node = next(iter(node.items()))
        keys.append(key)
    return tuple(keys)


def _array_path(lengths: dict[Path_, int], keys: tuple[str, ...], is_array: bool) -> Path_:
    """``keys`` with the position of the newest element after each array of tables on the way."""
    path: Path_ = ()
    for depth, key in enumerate(keys):
        path = (*path, key)
        count = lengths.get(path, 0)
        if is_array and depth == len(keys) - 1:
            lengths[path] = count + 1
            return (*path, count)
        if count:
            path = (*path, count - 1)
    return path


_ENDS = ("]", "}", '"""', "'''")


def _end_of_value(lines: list[str], first: int) -> int:
    """The last line of the value that begins on line ``first``: arrays and multi-line strings take several."""
    import tomli

    for last in range(first, len(lines)):
        if last > first and not any(end in lines[last] for end in _ENDS):
            continue
        try:
            tomli.loads("\n".join(lines[first : last + 1]))
        except tomli.TOMLDecodeError:
            continue
        return last
    return first
