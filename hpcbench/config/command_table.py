"""The table ``[command]`` of a sweep: its keys, its types, and everything that is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from hpcbench.config.command import (
    LAUNCH_VARIABLES,
    PER_STEP_COUNTS,
    PLACEHOLDER,
    RUN_INTEGERS,
    Command,
    CommandLayout,
    CommandMetric,
    Recompute,
    Software,
)
from hpcbench.config.expression import Expression
from hpcbench.config.option import Option, toml_literal
from hpcbench.config.run_spec import PARAMETER_DEFAULTS, RunSpec
from hpcbench.config.toml_tables import KeyHint, KeyPath, SingleLineText, TomlSource, TomlTable
from hpcbench.errors import ConfigError, HpcbenchError, did_you_mean
from hpcbench.paths import resolve_beside
from hpcbench.units import check_unit

COMMAND_PARAMETERS = (
    "nodes", "tasks_per_node", "devices_per_task", "precision", "warmup_steps", "seed", "time_limit_min", "partition",
    "environment", "env", "node",
)  # fmt: skip
"""Parameters of every run that a sweep with ``[command]`` may set."""
_NAME = r"^[A-Za-z][A-Za-z0-9_]{0,63}$"
_RESERVED_NAMES = frozenset({*RunSpec.__struct_fields__, *RUN_INTEGERS, *LAUNCH_VARIABLES})
_KINDS = {"bool": bool, "int": int, "float": float, "text": str}


def _checked_unit(text: str) -> str:
    check_unit(text)
    return text


Unit = Annotated[SingleLineText, AfterValidator(_checked_unit)]
Word = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=100_000)]
Pattern = Annotated[str, Field(min_length=1, max_length=1000)]


class ParameterTable(TomlTable):
    """A parameter of the command."""

    type: Literal["bool", "int", "float", "text"]
    unit: Unit = ""
    """Unit of its values, for readers."""
    default: bool | int | float | str
    """Value of runs that do not set it."""
    description: SingleLineText = ""

    @model_validator(mode="after")
    def _default_fits(self) -> ParameterTable:
        if not self.option.accepts(self.default):
            raise ValueError(f"default: {self.option.expected()} expected, not {toml_literal(self.default)}")
        return self

    @property
    def option(self) -> Option:
        """The parameter as the option of a strategy: its type checks the values of a sweep."""
        kind = _KINDS[self.type]
        fits = type(self.default) is kind or (kind is float and type(self.default) is int)
        return Option(kind(self.default) if fits else kind(), self.description)


class MetricTable(TomlTable):
    """A figure that the command prints, or writes as JSON lines into the file ``$HPCBENCH_METRICS``."""

    name: Annotated[str, Field(pattern=_NAME)]
    unit: Unit = ""
    """``s``, ``ms``, ``bytes``, ``GB/s``, ``FLOP/s``, ``J``, ``%``, or a count: ``samples/s``."""
    better: Literal["lower", "higher"]
    per: Literal["step", "run"] = "run"
    """``step``: every value is one step's, and the first ``warmup_steps`` do not count. ``run``: the last value."""
    pattern: Pattern | None = None
    """A regular expression whose first group is the number, searched in every line of the output."""
    json_: Annotated[str | None, Field(alias="json", min_length=1)] = None
    """A key of the JSON objects in the lines of ``$HPCBENCH_METRICS``."""
    value: str = ""
    """An expression of the number that was read, ``value``, and of the parameters: ``value / 1000``."""


Quantity = Annotated[int, Field(ge=1)] | Annotated[str, Field(min_length=1)]
"""A whole number, or an expression over the parameters."""


class LayoutTable(TomlTable):
    """The decoder that the program trains and its layout over devices, for predictions; no part of a run's identity."""

    model: str
    """A shape by its name: ``llama_8b``. ``layers`` and the other dimensions replace its own."""
    layers: Quantity | None = None
    hidden: Quantity | None = None
    ffn: Quantity | None = None
    """Width of the MLP's inner state."""
    heads: Quantity | None = None
    kv_heads: Quantity | None = None
    vocabulary: Quantity | None = None
    """Entries of the embedding, with the program's padding."""
    software: Software
    """The training loop whose published runs price it."""
    sequence: Quantity
    """Tokens of a sample."""
    micro_batch: Quantity
    """Samples of one replica in one forward pass."""
    global_batch: Quantity
    """Samples of a step over all replicas."""
    dp: Quantity = 1
    """Replicas of the parameters."""
    shards: Quantity = 1
    """Devices over which parameters, gradients and optimizer are sharded fully (FSDP)."""
    zero: Annotated[int, Field(ge=0)] | str = 0
    """1: the optimizer is sharded over the replicas."""
    tp: Quantity = 1
    """Tensor parallel degree."""
    pp: Quantity = 1
    """Pipeline stages."""
    cp: Quantity = 1
    """Context parallel degree."""
    chunks: Quantity = 1
    """Virtual stages of each pipeline rank."""
    recompute: Annotated[str, Field(min_length=1)] = "none"
    """``none``, ``selective``, ``full``, or an expression with one of these as its value."""
    compiled: bool | str = False
    fused_attention: bool | str = True
    """Attention in one kernel (flash attention); else its scores are stored."""
    sequence_parallel: bool | str = True
    """Ranks of a tensor group normalise their own tokens, else each all of them."""
    overlap: bool | str = True
    """Messages are sent while kernels compute."""
    optimizer_shards: Annotated[int, Field(ge=0)] | str = 0
    """Replicas that share the optimizer state under ``zero = 1``; 0: all."""


class CommandTable(TomlTable):
    """A user's own program: its words, its parameters and its metrics."""

    argv: Annotated[list[Word], Field(min_length=1)]
    """The program and its arguments; ``{name}`` is a parameter, ``{{`` a brace. No shell reads them."""
    launch: Literal["rank", "node", "job"] = "rank"
    """``rank``: a process for each device. ``node``: one a node (torchrun, deepspeed). ``job``: one in all."""
    folder: Word = "run"
    """``run``: a new folder for each attempt. Or a path, which attempts share."""
    parameters: dict[Annotated[str, Field(pattern=_NAME)], ParameterTable] = {}
    must_match: list[Pattern] = []
    """Regular expressions; a run without a line that matches each has failed."""
    must_not_match: list[Pattern] = []
    """Regular expressions; a run with a line that matches one has failed."""
    outputs: list[Word] = []
    """Files of the run's folder that are kept beside the result, as patterns of names: ``profile/*.json``."""
    metrics: list[MetricTable] = []
    samples_per_step: str = ""
    """An expression over the parameters: with the metric ``step_time`` in seconds it gives samples/s."""
    tokens_per_step: str = ""
    flops_per_step: str = ""
    """FLOP of one step on all devices: with the profile's peak it gives MFU."""
    layout: LayoutTable | None = None
    """The layout of a decoder that the program trains: `plan` and `predict` then price the runs."""


def parse_command(table: CommandTable, source: TomlSource, problems: list[HpcbenchError]) -> Command:
    """Return the command of ``[command]``; the errors of its layout are appended to ``problems``."""
    per_step = {name: text for name in PER_STEP_COUNTS if (text := getattr(table, name))}
    return Command(
        argv=table.argv, launch=table.launch, folder=table.folder, must_match=table.must_match,
        must_not_match=table.must_not_match, outputs=table.outputs,
        metrics=[CommandMetric(**one.model_dump(by_alias=True)) for one in table.metrics], per_step=per_step,
        defaults={name: one.option.default for name, one in table.parameters.items()},
        sweep_folder=str(resolve_beside(source.path, ".")),
        layout=None if table.layout is None else _parse_layout(table.layout, table.parameters, source, problems),
    )  # fmt: skip


def _parse_layout(
    table: LayoutTable, parameters: Collection[str], source: TomlSource, problems: list[HpcbenchError]
) -> CommandLayout:
    terms: dict[str, int | bool | str] = table.model_dump(exclude_defaults=True, exclude={"model", "software"})
    if terms.get("recompute") in get_args(Recompute):
        terms["recompute"] = f"'{terms['recompute']}'"
    for name, term in terms.items():
        if isinstance(term, str):
            problems += _expression_problems(term, expression_names(parameters), source, "layout", name)
    where = source.where(("command", "layout"))
    return CommandLayout(model=table.model, software=table.software, terms=terms, where=where)


def expression_names(parameters: Collection[str]) -> list[str]:
    """Names that the expressions of a command may use: its parameters, and those of every run."""
    return [*parameters, *PARAMETER_DEFAULTS, "ranks", "devices", "devices_per_node"]


def _expression_problems(
    text: str, names: Collection[str], source: TomlSource, *key: str | int
) -> Iterator[HpcbenchError]:
    try:
        Expression(text, names, source.where(("command", *key)))
    except ConfigError as error:
        yield error


def declared_parameters(data: Mapping[str, Any]) -> Collection[str] | None:
    """Return the names below ``[command.parameters]`` of a sweep's decoded TOML; ``None`` without ``[command]``."""
    command = data.get("command")
    if not isinstance(command, dict):
        return None
    parameters = command.get("parameters")
    return parameters if isinstance(parameters, dict) else ()


def parameter_key_hint(data: Mapping[str, Any]) -> KeyHint:
    """Return the hints for unknown keys in those tables of a sweep that set parameters of its command."""
    declared = declared_parameters(data)

    def key_hint(path: KeyPath) -> str | None:
        sets_parameters = path[0] in ("fixed", "grid", "zip", "include", "exclude")
        return parameter_hint(str(path[-1]), declared) if sets_parameters and declared is not None else None

    return key_hint


def parameter_hint(name: str, declared: Collection[str] | None, choices: Iterable[str] = ()) -> str:
    """The hint for an unknown parameter of a command that has ``declared``, or without one of ``choices``."""
    if declared is None:
        return did_you_mean(name, choices)
    own = [one for one in declared if one not in _RESERVED_NAMES]
    hint = did_you_mean(name, own)
    if not hint.startswith("did"):
        hint = did_you_mean(name, [*own, *COMMAND_PARAMETERS])
    return f"{hint}; {_declare(name)}"


def _declare(name: str) -> str:
    if name in _RESERVED_NAMES:
        return f"or declare one of another name: [command.parameters.my_{name}]"
    return f"or declare it: [command.parameters.{name}]"


def command_problems(data: Mapping[str, Any], source: TomlSource) -> Iterator[HpcbenchError]:
    """Yield the errors of ``[command]`` besides keys and types; decoded TOML is read, so that none hides another."""
    declared = declared_parameters(data)
    if declared is None:
        return
    command: dict[str, Any] = data["command"]
    for name in declared:
        if name in _RESERVED_NAMES:
            message = f"command.parameters: {name!r} is a name that every run has"
            yield source.error(message, "command", "parameters", name, hint="choose another name")
    for number, word in enumerate(_texts(command.get("argv"))):
        yield from _word_problems(word, declared, source, "argv", number)
    for folder in _texts([command.get("folder")]):
        yield from _folder_problems(folder, declared, source)
    yield from _outputs_problems(_texts(command.get("outputs")), source)
    for key in ("must_match", "must_not_match"):
        yield from _pattern_problems(_texts(command.get(key)), 0, source, "command", key)
    metrics = command.get("metrics")
    yield from _metric_problems(metrics if isinstance(metrics, list) else [], declared, source)
    for name in PER_STEP_COUNTS:
        for text in filter(None, _texts([command.get(name)])):
            yield from _expression_problems(text, expression_names(declared), source, name)


def _texts(values: Any) -> list[str]:
    """The texts in a list; values of another type are errors of the schema."""
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _metric_problems(metrics: list[Any], declared: Collection[str], source: TomlSource) -> Iterator[HpcbenchError]:
    seen = set[str]()
    for number, metric in enumerate(metrics):
        if not isinstance(metric, dict):
            continue
        place = ("command", "metrics", number)
        if ("pattern" in metric) == ("json" in metric):
            given = "both are given" if "json" in metric else "neither is given"
            message = f"command.metrics.{number}: either pattern or json is needed, and {given}"
            yield source.error(message, *place)
        yield from _pattern_problems(_texts([metric.get("pattern")]), 1, source, *place, "pattern")
        for text in filter(None, _texts([metric.get("value")])):
            yield from _expression_problems(text, [*expression_names(declared), "value"], source, *place[1:], "value")
        for name in _texts([metric.get("name")]):
            if name in seen:
                yield source.error(f"two metrics have the name {name!r}", *place)
            seen.add(name)


def _folder_problems(folder: str, declared: Collection[str], source: TomlSource) -> Iterator[HpcbenchError]:
    yield from _word_problems(folder, declared, source, "folder")
    if folder != "run" and not folder.startswith("/"):
        yield source.error(f"folder: {folder!r:.80} is not an absolute path", "command", "folder", hint='or "run"')
    if "{HPCBENCH_RUN_FOLDER}" in folder:
        yield source.error("folder: it cannot contain itself", "command", "folder")


def _outputs_problems(patterns: list[str], source: TomlSource) -> Iterator[HpcbenchError]:
    for pattern in patterns:
        if pattern.startswith("/") or ".." in pattern.split("/") or not pattern:
            message = f"outputs: {pattern!r:.80} leads out of the run's folder"
            yield source.error(message, "command", "outputs", hint="name files below it: profile/*.json")


def _word_problems(
    word: str, parameters: Collection[str], source: TomlSource, *key: str | int
) -> Iterator[HpcbenchError]:
    known = list(dict.fromkeys([*parameters, *RUN_INTEGERS, *LAUNCH_VARIABLES]))
    for match in PLACEHOLDER.finditer(word):
        if match[0] in ("{", "}"):
            message, hint = f"{key[0]}: {word!r:.80} has a single {match[0]!r}", f"write {match[0] * 2} for a brace"
            yield source.error(message, "command", *key, hint=hint)
        elif match[1] is not None and match[1] not in known:
            message = f"{key[0]}: no parameter {match[1]!r} for the placeholder in {word!r:.80}"
            hint = f"{did_you_mean(match[1], known)}; {_declare(match[1])}"
            yield source.error(message, "command", *key, hint=hint)


def _pattern_problems(patterns: list[str], groups: int, source: TomlSource, *key: str | int) -> Iterator[HpcbenchError]:
    for pattern in patterns:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            yield source.error(f"{key[-1]}: {pattern!r:.80} is not a regular expression: {error}", *key)
            continue
        if compiled.groups < groups:
            message, hint = f"pattern: {pattern!r:.80} has no group", "put the number in brackets: 'elapsed ([0-9.]+)'"
            yield source.error(message, *key, hint=hint)
