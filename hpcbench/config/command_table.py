"""The table ``[command]`` of a sweep: its keys, its types, and everything that is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from pydantic import AfterValidator, Field, model_validator

from hpcbench.config.command import (
    COMMAND_PARAMETERS,
    LAUNCH_VARIABLES,
    PER_STEP_COUNTS,
    PLACEHOLDER,
    RUN_INTEGERS,
    Command,
    LayerPrecision,
    Recompute,
    Software,
)
from hpcbench.config.expression import Expression
from hpcbench.config.option import Option, toml_literal
from hpcbench.config.run_spec import PARAMETER_DEFAULTS, RunSpec
from hpcbench.config.toml_tables import FOLDER_PATTERN, KeyHint, KeyPath, SingleLineText, TomlSource, TomlTable
from hpcbench.errors import ConfigError, HpcbenchError, did_you_mean
from hpcbench.paths import resolve_beside
from hpcbench.units import check_unit

_NAME = r"^[A-Za-z][A-Za-z0-9_]{0,63}$"
_RESERVED_NAMES = frozenset({*RunSpec.__struct_fields__, *RUN_INTEGERS, *LAUNCH_VARIABLES})
_KINDS = {"bool": bool, "int": int, "float": float, "text": str}


def _checked_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r:.80} is not a regular expression: {error}") from error
    return text


def _with_group(text: str) -> str:
    if not re.compile(text).groups:
        raise ValueError(f"{text!r:.80} has no group: put the number in brackets: 'elapsed ([0-9.]+)'")
    return text


def _free_name(name: str) -> str:
    if name in _RESERVED_NAMES:
        raise ValueError(f"{name!r} is a name that every run has: choose another")
    return name


def _inside_folder(pattern: str) -> str:
    if pattern.startswith("/") or ".." in pattern.split("/") or not pattern:
        raise ValueError(f"{pattern!r:.80} leads out of the run's folder: name files below it, as profile/*.json")
    return pattern


Unit = Annotated[SingleLineText, AfterValidator(check_unit)]
Word = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=100_000)]
Pattern = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_checked_pattern)]


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
    pattern: Annotated[Pattern, AfterValidator(_with_group)] | None = None
    """A regular expression whose first group is the number, searched in every line of the output."""
    json_: Annotated[str | None, Field(alias="json", min_length=1)] = None
    """A key of the JSON objects in the lines of ``$HPCBENCH_METRICS``."""
    value: str = ""
    """An expression of the number that was read, ``value``, and of the parameters: ``value / 1000``."""

    @model_validator(mode="after")
    def _one_source(self) -> MetricTable:
        if (self.pattern is None) == (self.json_ is None):
            given = "neither is given" if self.pattern is None else "both are given"
            raise ValueError(f"either pattern or json is needed, and {given}")
        return self


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
    ep: Quantity = 1
    """Expert parallel degree: neighbouring devices of a stage that share the experts, whole ones each."""
    expert_imbalance: Annotated[float, Field(ge=1)] | str = 1.0
    """Tokens of the device whose experts have most, over the mean; 1: routing is balanced."""
    precision: Annotated[str, Field(min_length=1)] = "bf16"
    """Precision of the layers' products: ``bf16``, ``fp8_delayed``, ``fp8_current``, ``fp8_block``, ``mxfp8`` or
    ``nvfp4``, or an expression with one of these as its value."""


class CommandTable(TomlTable):
    """A user's own program: its words, its parameters and its metrics."""

    argv: Annotated[list[Word], Field(min_length=1)]
    """The program and its arguments; ``{name}`` is a parameter, ``{{`` a brace. No shell reads them."""
    launch: Literal["rank", "node", "job"] = "rank"
    """``rank``: a process for each device. ``node``: one a node (torchrun, deepspeed). ``job``: one in all."""
    folder: Annotated[Word, Field(pattern=FOLDER_PATTERN)] = "run"
    """``run``: a new folder for each attempt. Or a path, which attempts share."""
    parameters: dict[Annotated[str, Field(pattern=_NAME), AfterValidator(_free_name)], ParameterTable] = {}
    must_match: list[Pattern] = []
    """Regular expressions; a run without a line that matches each has failed."""
    must_not_match: list[Pattern] = []
    """Regular expressions; a run with a line that matches one has failed."""
    outputs: list[Annotated[Word, AfterValidator(_inside_folder)]] = []
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
    """Return the command of ``[command]``; its errors are appended to ``problems``."""
    known = list(dict.fromkeys([*table.parameters, *RUN_INTEGERS, *LAUNCH_VARIABLES]))
    for number, word in enumerate(table.argv):
        problems += _word_problems(word, known, source, "argv", number)
    of_folder = [name for name in known if name != "HPCBENCH_RUN_FOLDER"]
    problems += _word_problems(table.folder, of_folder, source, "folder")
    names = [*table.parameters, *PARAMETER_DEFAULTS, "ranks", "devices", "devices_per_node"]
    metrics = [metric.name for metric in table.metrics]
    for number, metric in enumerate(table.metrics):
        if metrics.index(metric.name) < number:
            problems.append(source.error(f"two metrics have the name {metric.name!r}", "command", "metrics", number))
        if metric.value:
            problems += _expression_problems(metric.value, [*names, "value"], source, "metrics", number, "value")
    per_step = {name: text for name in PER_STEP_COUNTS if (text := getattr(table, name))}
    for name, text in per_step.items():
        problems += _expression_problems(text, names, source, name)
    values = table.model_dump(by_alias=True, exclude={"parameters", "layout", *PER_STEP_COUNTS})
    return msgspec.convert({
        **values, "per_step": per_step, "sweep_folder": str(resolve_beside(source.path, ".")),
        "defaults": {name: one.option.default for name, one in table.parameters.items()},
        "layout": None if table.layout is None else _parse_layout(table.layout, names, source, problems),
    }, Command)  # fmt: skip


def _parse_layout(
    table: LayoutTable, names: Collection[str], source: TomlSource, problems: list[HpcbenchError]
) -> dict[str, Any]:
    terms: dict[str, int | float | bool | str] = table.model_dump(exclude_defaults=True, exclude={"model", "software"})
    for name, words in (("recompute", Recompute), ("precision", LayerPrecision)):
        text = str(terms.get(name, ""))
        if text in get_args(words):
            terms[name] = f"'{text}'"
        elif text.isidentifier() and text not in names:
            hint = did_you_mean(text, get_args(words))
            problems.append(source.error(f"layout: unknown {name} {text!r}", "command", "layout", name, hint=hint))
            del terms[name]
    for name, term in terms.items():
        if isinstance(term, str):
            problems += _expression_problems(term, names, source, "layout", name)
    where = source.where(("command", "layout"))
    return {"model": table.model, "software": table.software, "terms": terms, "where": where}


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


def _word_problems(word: str, known: Collection[str], source: TomlSource, *key: str | int) -> Iterator[HpcbenchError]:
    for match in PLACEHOLDER.finditer(word):
        if match[0] in ("{", "}"):
            message, hint = f"{key[0]}: {word!r:.80} has a single {match[0]!r}", f"write {match[0] * 2} for a brace"
            yield source.error(message, "command", *key, hint=hint)
        elif match[1] is not None and match[1] not in known:
            message = f"{key[0]}: no parameter {match[1]!r} for the placeholder in {word!r:.80}"
            hint = f"{did_you_mean(match[1], known)}; {_declare(match[1])}"
            yield source.error(message, "command", *key, hint=hint)
