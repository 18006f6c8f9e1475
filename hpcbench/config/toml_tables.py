"""TOML files with line numbers, their validation by pydantic, and the field types that all tables share.
All errors of one file are reported at once, each with file, line, value and the nearest valid key."""

from __future__ import annotations

import ast
import codecs
import inspect
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import tomli
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue

from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean
from hpcbench.units import MAX_COUNT, MAX_NUMBER, MAX_TIME_S, parse_quantity

_TABLE_HEADER = re.compile(r"^\s*\[\[?(?P<path>[^\[\]]+)\]\]?\s*(#.*)?$")
_KEY_ASSIGNMENT = re.compile(r"""^\s*(?P<key>(?:[A-Za-z0-9_.\- ]|"[^"\n]*"|'[^'\n]*')+?)\s*=""")
_ERROR_POSITION = re.compile(r"\(at (line (?P<line>\d+)|end of document)")

KeyPath = tuple["str | int", ...]
LineIndex = dict[KeyPath, int]
KeyHint = Callable[[KeyPath], "str | None"]
_M = TypeVar("_M", bound=BaseModel)


def read_toml(path: Path) -> tuple[dict[str, Any], TomlSource]:
    """The data of a TOML file and its source. Raises ``ConfigError`` with file and line where it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", where=str(path)) from error
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError("UTF-16 or UTF-32 text", where=str(path), hint="save it as UTF-8")
    try:
        return parse_toml(data.decode("utf-8-sig"), path)
    except UnicodeDecodeError as error:
        where = f"{path}:{data.count(10, 0, error.start) + 1}"
        message = f"not UTF-8 text: byte 0x{data[error.start]:02x} at position {error.start}"
        raise ConfigError(message, where=where, hint="save it as UTF-8") from error


def parse_toml(text: str, path: Path) -> tuple[dict[str, Any], TomlSource]:
    """The data and the source of the TOML ``text`` of the file ``path``. Raises as ``read_toml``."""
    try:
        return tomli.loads(text), TomlSource(path, text)
    except (ValueError, RecursionError) as error:
        # Integers of thousands of digits and thousands of brackets have no position.
        match = _ERROR_POSITION.search(str(error))
        line = int(match["line"]) if match and match["line"] else text.count("\n") + 1
        where = f"{path}:{line}" if isinstance(error, tomli.TOMLDecodeError) else str(path)
        raise ConfigError(f"not valid TOML: {_toml_problem(str(error), text, line)}", where=where) from error


def _toml_problem(message: str, text: str, line: int) -> str:
    """tomli's message, or what the author of the file did where tomli reports characters and values."""
    written = text.split("\n")[line - 1 : line] or [""]
    if "\0" in text:
        return f"a NUL byte in line {text.count(chr(10), 0, text.index(chr(0))) + 1}: this is UTF-16, or no text"
    if re.search(r"\r(?!\n)", text):
        return "lines end with CR alone: end them with LF"
    if odd := re.search(r"[\xa0\u2000-\u206f\ufeff]", written[0]):
        return f"{message}; column {odd.start() + 1} has U+{ord(odd[0]):04X}, {unicodedata.name(odd[0], 'invisible')}"
    if message.startswith("Cannot overwrite a value"):
        match = _KEY_ASSIGNMENT.match(written[0])
        return f"{match['key'].strip() if match else written[0].strip()} is set twice"
    if message.startswith(("Illegal character '\\n'", "Unterminated string")):
        return f"a string is not closed: {written[0].strip()}"
    return message


def parse_toml_value(text: str) -> Any:
    """The TOML value ``text``; the text itself where it is none, so that words need no quotes."""
    try:
        table = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def load_table(model: type[_M], path: Path) -> tuple[_M, TomlSource]:
    """A TOML file as ``model``, and its source. Raises ``ConfigErrors`` with everything that is wrong in it."""
    data, source = read_toml(path)
    return validate_table(model, data, source), source


def _index_key_lines(text: str) -> LineIndex:
    """The lines of the keys of TOML ``text``."""
    index: LineIndex = {}
    lengths: dict[KeyPath, int] = {}
    prefix: KeyPath = ()
    lines = text.replace("\r\n", "\n").split("\n")
    number = 0
    while number < len(lines):
        line = lines[number]
        header = _TABLE_HEADER.match(line)
        if header:
            is_array = line.lstrip().startswith("[[")
            prefix = _resolve_array_path(lengths, _split_key(header["path"]), is_array)
            for length in range(1, len(prefix) + 1):
                index.setdefault(prefix[:length], number + 1)
        elif match := _KEY_ASSIGNMENT.match(line):
            keys = _split_key(match["key"])
            for length in range(1, len(keys) + 1):
                index.setdefault((*prefix, *keys[:length]), number + 1)
            number = _find_value_end(lines, number)
        number += 1
    return index


def _split_key(dotted: str) -> tuple[str, ...]:
    try:
        node: Any = tomli.loads(f"{dotted} = 0")
    except tomli.TOMLDecodeError:
        return ()
    keys = []
    while isinstance(node, dict):
        key, node = next(iter(node.items()))
        keys.append(key)
    return tuple(keys)


def _resolve_array_path(lengths: dict[KeyPath, int], keys: tuple[str, ...], is_array: bool) -> KeyPath:
    """``keys`` with the position of the newest element after each array of tables on the way."""
    path: KeyPath = ()
    for depth, key in enumerate(keys):
        path = (*path, key)
        count = lengths.get(path, 0)
        if is_array and depth == len(keys) - 1:
            lengths[path] = count + 1
            return (*path, count)
        if count:
            path = (*path, count - 1)
    return path


_CLOSING_TOKENS = ("]", "}", '"""', "'''")


def _find_value_end(lines: list[str], first: int) -> int:
    """The last line of the value that begins on line ``first``: arrays and multi-line strings take several."""
    for last in range(first, len(lines)):
        if last > first and not any(end in lines[last] for end in _CLOSING_TOKENS):
            continue
        try:
            tomli.loads("\n".join(lines[first : last + 1]))
        except tomli.TOMLDecodeError:
            continue
        return last
    return first


class TomlSource:
    """The file that data came from, for messages; ``origins`` are keys that something else has set."""

    def __init__(self, path: Path, text: str, origins: Mapping[KeyPath, str] = MappingProxyType({})) -> None:
        self.path, self.text, self.origins = path, text, origins

    @cached_property
    def _lines(self) -> LineIndex:
        return _index_key_lines(self.text)

    def line(self, key_path: Sequence[str | int]) -> int | None:
        """The line (from 1) of the key ``key_path``, or of the nearest of its parents that has one.

        Integers are positions in an array of tables, or in a list: the latter has the line of its key.
        """
        prefixes = (tuple(key_path[:length]) for length in range(len(key_path), 0, -1))
        return next((self._lines[prefix] for prefix in prefixes if prefix in self._lines), None)

    def where(self, key_path: Sequence[str | int]) -> str:
        """Return ``file:line`` of a key, or its origin outside the file."""
        prefixes = (tuple(key_path[:length]) for length in range(len(key_path), 0, -1))
        if origin := next((self.origins[prefix] for prefix in prefixes if prefix in self.origins), None):
            return origin
        line = self.line(key_path)
        return f"{self.path}:{line}" if line else str(self.path)

    def error(self, message: str, *key_path: str | int, hint: str | None = None) -> ConfigError:
        """An error of the key ``key_path``."""
        return ConfigError(message, where=self.where(key_path), hint=hint)


def validate_table(
    model: type[_M], data: dict[str, Any], source: TomlSource, key_hint: KeyHint = lambda _path: None
) -> _M:
    """Convert ``data`` to ``model``; ``ConfigErrors`` with all wrong keys and values.

    ``key_hint`` returns the hint for an unknown key whose table takes names that the file itself declares.
    """
    wrong = ((path, number_problem(value)) for path, value in _leaves(data))
    if numbers := [source.error(f"{'.'.join(map(str, path))}: {why}", *path) for path, why in wrong if why]:
        raise ConfigErrors(numbers)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems: dict[KeyPath, HpcbenchError] = {}
        for detail in error.errors(include_url=False):
            key_path = strip_union_steps(data, detail["loc"], detail["type"])
            # One error per key; of the alternatives of a union only the first.
            problems.setdefault(key_path, _describe_problem(model, key_path, detail, source, key_hint))
        raise ConfigErrors(list(problems.values())) from None


def _leaves(node: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The values in ``node``, each with its place."""
    if isinstance(node, (dict, list)):
        for step, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(value, (*path, step))
    else:
        yield path, node


def number_problem(value: Any) -> str | None:
    """Why JSON, torch's integers or the scheduler cannot hold the number ``value``; ``None`` if they can."""
    if not isinstance(value, (int, float)) or abs(value) <= MAX_NUMBER:
        return None
    is_long = isinstance(value, int) and value.bit_length() > 200
    return f"a number from -{MAX_NUMBER} to {MAX_NUMBER} is needed, not {'thousands of digits' if is_long else value}"


def strip_union_steps(data: Any, location: Sequence[str | int], kind: str) -> KeyPath:
    """Return ``location`` without the steps that pydantic adds for unions: keys of the data, or the missing key."""
    path: list[str | int] = []
    node = data
    for step in location:
        if _has_step(node, step):
            node = node[step]
        elif kind != "missing" or step != location[-1]:
            break
        path.append(step)
    return tuple(path)


def _has_step(node: Any, step: str | int) -> bool:
    if isinstance(node, dict):
        return step in node
    return isinstance(node, list) and isinstance(step, int) and step < len(node)


def _describe_problem(
    model: type[BaseModel], key_path: KeyPath, detail: Any, source: TomlSource, key_hint: KeyHint
) -> HpcbenchError:
    name = ".".join(str(step) for step in key_path) or "the file"
    if detail["type"] == "extra_forbidden":
        parent, wrong = key_path[:-1], str(key_path[-1])
        table = ".".join(str(step) for step in parent)
        message = f"unknown key {wrong!r}" + (f" in [{table}]" if table else "")
        keys = known_keys(model, parent)
        hint = _other_place(model, wrong) or key_hint(key_path)
        if hint is None:
            hint = did_you_mean(wrong, keys)
            if "options" in keys and not hint.startswith("did"):
                hint += "; parameters of a single strategy belong in options = { ... }"
        return source.error(message, *key_path, hint=hint)
    if detail["type"] == "missing":
        return source.error(f"{name} is missing", *key_path[:-1])
    if detail["type"] == "string_pattern_mismatch" and (words := _PATTERN_WORDS.get(detail["ctx"]["pattern"])):
        return source.error(f"{name}: {words}, not {detail['input']!r:.80}", *key_path)
    if detail["type"] in ("model_type", "dict_type"):
        message = f"{name}: a table is needed, not {detail['input']!r:.80}"
        return source.error(message, *key_path, hint=_table_hint(model, key_path, detail["input"]))
    text = detail["msg"].removeprefix("Value error, ")
    if found := re.match(r"""((?:[\w.-]|"[^"\n]*")+) = """, text):
        # A rule about several keys begins with the first of them.
        return source.error(f"{name}: {text}" if key_path else text, *key_path, *_split_key(found[1]))
    if detail["type"] == "too_short" and not detail["input"]:
        return source.error(f"{name} is empty: at least one value is needed", *key_path)
    value = "" if detail["type"] == "value_error" else f", not {detail['input']!r:.80}"
    message = f"{name}: {text[:1].lower()}{text[1:]}{value}"
    return source.error(message, *key_path, hint=_notation_hint(model, key_path, detail))


def _table_hint(model: type[BaseModel], key_path: KeyPath, value: Any) -> str | None:
    """The notation of the table at ``key_path``, where ``value`` is none."""
    table, keys = ".".join(map(str, key_path)), known_keys(model, key_path)
    if isinstance(value, list) and key_path:
        named = not keys and known_keys(model, (*key_path, "NAME"))
        return f"one pair of brackets: [{table}{'.NAME' if named else ''}]"
    return f"its keys: {', '.join(keys)}" if keys else f"lines NAME = VALUE below [{table}]"


def _notation_hint(model: type[BaseModel], key_path: KeyPath, detail: Any) -> str | None:
    """The TOML notation of a value of the expected type; ``None`` where the message itself shows it."""
    kind, value = detail["type"], detail["input"]
    key = next((step for step in reversed(key_path) if isinstance(step, str)), "")
    if kind == "list_type" and isinstance(value, dict) and known_keys(model, (*key_path, 0)):
        return f"two pairs of brackets: [[{'.'.join(map(str, key_path))}]]"
    if kind == "list_type":
        example = "1, 2" if isinstance(value, (int, float, dict)) else '"a", "b"'
        return f"a list has brackets: {key} = [{example}]"
    if kind == "string_type" and isinstance(value, (int, float)):
        return f'a text has quotes: "{str(value).lower() if isinstance(value, bool) else value}"'
    if kind in ("int_type", "float_type") and isinstance(parse_toml_value(str(value)), (int, float)):
        return f"a number has no quotes: {value}" if isinstance(value, str) else None
    if kind == "bool_type" and value in ("true", "false"):
        return f"no quotes: {value}"
    if isinstance(value, list) and key_path[0] == "fixed" and "grid" in model.model_fields:
        return f"several values of {key} belong in [grid]"
    return None


def known_keys(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that the table at ``path`` takes."""
    kind: Any = model
    for step in path:
        kind = _type_at_step(kind, step)
    return [field.alias or name for name, field in kind.model_fields.items()] if _is_model(kind) else []


def _other_place(model: type[BaseModel], key: str) -> str | None:
    """Return where else in the file ``key`` can stand, as a hint; ``None`` if nowhere."""
    top = known_keys(model, ())
    tables = [name for name in top if key in known_keys(model, [name])]
    tables += [f"{name}.NAME" for name in top if key in known_keys(model, [name, "NAME"])]
    places = ["at the top of the file"] * (key in top) + [f"in [{table}]" for table in tables]
    return f"it belongs {' or '.join(places)}" if places else None


def _type_at_step(kind: Any, step: str | int) -> Any:
    """The type of what stands at ``step`` in a table, a dictionary or a list of type ``kind``."""
    if _is_model(kind):
        field = next((entry for name, entry in kind.model_fields.items() if (entry.alias or name) == step), None)
        return field.annotation if field is not None else None
    arguments = [argument for argument in get_args(kind) if argument is not type(None)]
    if get_origin(kind) in (dict, list):
        return arguments[-1]
    inner = (_type_at_step(argument, step) for argument in arguments)
    return next((annotation for annotation in inner if annotation is not None), None)


def _is_model(kind: Any) -> bool:
    # On Python 3.10 dict[str, int] is a type, too.
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel)


def _parse_unit(kind: str, unit: float = 1.0) -> BeforeValidator:
    def convert(value: Any) -> Any:
        return parse_quantity(value, kind) / unit if isinstance(value, str) else value

    return BeforeValidator(convert)


def _number_or_text_schema(example: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "examples": [example]}]})


def _possible(least: float, most: float, unit: str, example: str) -> AfterValidator:
    """Return the validator that refuses an amount that no machine has: its unit is missing or a wrong one."""

    def check(value: float) -> float:
        if not least <= value <= most:
            limits = f"{least:.2g} to {most:.2g}"
            raise ValueError(f"no machine has {value:.4g} {unit} ({limits}): write the unit, such as {example!r}")
        return value

    return AfterValidator(check)


Seconds = Annotated[float, Field(ge=0, le=MAX_TIME_S), _parse_unit("time"), _number_or_text_schema("1.5 us")]
Minutes = Annotated[float, Field(gt=0, le=MAX_TIME_S / 60), _parse_unit("time", 60.0), _number_or_text_schema("30 min")]
MemoryBytes = Annotated[
    float, _parse_unit("size"), _possible(2**30, 2**47, "B", "80 GB"), _number_or_text_schema("94 GiB")
]  # fmt: skip
MemoryBytesPerSecond = Annotated[
    float, Field(gt=0), _parse_unit("rate"), _possible(1e9, 1e14, "B/s", "2 TB/s"), _number_or_text_schema("2 TB/s")
]  # fmt: skip
BytesPerSecond = Annotated[
    float, Field(gt=0), _parse_unit("rate"), _possible(1e4, 1e15, "B/s", "200 Gbit/s"),
    _number_or_text_schema("200 Gbit/s"),
]  # fmt: skip
FlopsPerSecond = Annotated[
    float, Field(gt=0), _parse_unit("computing speed"), _possible(1e6, 1e17, "FLOP/s", "312 TFLOP/s"),
    _number_or_text_schema("312 TFLOP/s"),
]  # fmt: skip


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
FOLDER_PATTERN = r"^(run|/[^\x00]*)$"
SingleLineText = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]
NonSpaceText = Annotated[str, Field(pattern=r"^[^\x00-\x20\x7f]+$")]
VariableName = Annotated[str, Field(pattern=VARIABLE_PATTERN)]
_PATTERN_WORDS = {
    NAME_PATTERN: "letters, digits, '.', '_' and '-' are allowed, 64 at most, a letter or digit first",
    FOLDER_PATTERN: 'an absolute path or "run" is needed',
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$": "a host name of letters, digits, '.', '_' and '-' is needed",
    r"^[A-Za-z][A-Za-z0-9_]{0,63}$": "letters, digits and '_' are allowed, 64 at most, a letter first",
    VARIABLE_PATTERN: "letters, digits and '_' are allowed, no digit first",
    r"^[^\x00-\x1f\x7f]*$": "text of one line is needed, without control characters",
    r"^[^\x00-\x20\x7f]+$": "one word without blanks is needed",
    r"^[^\x00]*$": "text without NUL is needed",
}
EnvironmentVariables = dict[VariableName, str]
Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4"]
PositiveInt = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Directives = dict[str, SingleLineText | int | bool | list[SingleLineText]]


def _field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings below the fields of ``model`` and its base classes; models made at run time have none."""
    docstrings: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, TomlTable) and base.__qualname__ in vars(sys.modules[base.__module__]):
            (definition,) = ast.parse(inspect.getsource(base)).body
            assert isinstance(definition, ast.ClassDef)
            for field, docstring in pairwise(definition.body):
                match field, docstring:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        docstrings[name] = inspect.cleandoc(text)
    return docstrings


class TomlTable(BaseModel):
    """A TOML table: typed, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe keys by the docstrings below them; pydantic's own option reads the source on every import."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, text in _field_docstrings(cls).items():
            key_schema = properties[cls.model_fields[name].alias or name]
            if handler.resolve_ref_schema(key_schema).get("description") != text:
                key_schema.setdefault("description", text)
        return schema
