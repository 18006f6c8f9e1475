"""A user's own training command as jobs read it, and its words for one run.

``argv`` is a list of words, never a shell line. ``{name}`` in a word stands for a parameter of the command, an integer
of the run (``{nodes}``) or a variable of the launch (``{MASTER_ADDR}``); ``{{`` and ``}}`` are braces. The worker reads
this module, so it imports no package of the login node."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from hpcbench.config.expression import Expression
from hpcbench.config.run_spec import PARAMETER_DEFAULTS, OptionValue, RunSpec, sorted_json
from hpcbench.units import time_unit_s

LAUNCH_VARIABLES = (
    "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK",
    "HPCBENCH_RUN_FOLDER", "HPCBENCH_SWEEP_FOLDER", "HPCBENCH_METRICS", "HPCBENCH_NODES", "HPCBENCH_DEVICES_PER_NODE",
)  # fmt: skip
"""Variables that every process of a command has, and placeholders of the same names."""
RUN_INTEGERS = ("nodes", "devices_per_node", "devices", "seed", "repeat")
"""Placeholders that are integers of the run."""
COMMAND_PARAMETERS = (
    "nodes", "tasks_per_node", "devices_per_task", "precision", "warmup_steps", "seed", "time_limit_min", "partition",
    "environment", "env", "node",
)  # fmt: skip
"""Parameters of every run that a sweep with ``[command]`` may set."""
STEP_TIME = "step_time"
"""A metric per step of this name, in a unit of time, has the treatment of hpcbench's own step times."""
PER_STEP_COUNTS = ("samples_per_step", "tokens_per_step", "flops_per_step")
PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class CommandMetric(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A metric, as a job reads it; see ``command_table.MetricTable``."""

    name: str
    better: Literal["lower", "higher"]
    unit: str = ""
    per: Literal["step", "run"] = "run"
    pattern: str | None = None
    json: str | None = None
    value: str = ""
    """An expression of the number that was read, ``value``, and of the parameters; empty: the number itself."""


Software = Literal["nanotron", "megatron", "fsdp", "torchtitan", "megatron_deepspeed", "other"]
"""Conventions of a training loop: splitting of stages, buckets, precision of gradients."""
Recompute = Literal["none", "selective", "full"]
"""Activations that the backward pass computes again."""
LayerPrecision = Literal["bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"]
"""Precision of the layers' linear products, with the recipe that scales it."""


class CommandLayout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The layout of the decoder that a command trains, as it was declared; see ``command_table.LayoutTable``."""

    model: str
    software: Software
    terms: dict[str, int | float | bool | str]
    """Value or expression of each quantity; the absent ones have their defaults."""
    where: str = ""
    """``file:line`` of the declaration."""


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The command of all runs of a sweep, as their jobs read it; see ``command_table.CommandTable``."""

    argv: list[str]
    launch: Literal["rank", "node", "job"] = "rank"
    folder: str = "run"
    must_match: list[str] = []
    must_not_match: list[str] = []
    outputs: list[str] = []
    metrics: list[CommandMetric] = []
    per_step: dict[str, str] = {}
    """Expressions of ``PER_STEP_COUNTS``, by name."""
    defaults: dict[str, OptionValue] = {}
    """Default of every parameter."""
    sweep_folder: str = ""
    """Folder of the sweep's file, where programs of its own may lie."""
    layout: CommandLayout | None = None

    @property
    def digest(self) -> str:
        """16 hex digits of all that determines a run: runs of another command are other runs.

        The folder of the sweep is left out: a project that moved has the same runs. The layout describes the program
        and does not start it: to declare or to correct it changes no run.
        """
        determining = msgspec.structs.replace(self, sweep_folder="", layout=None)
        return hashlib.sha256(sorted_json(msgspec.to_builtins(determining)).encode()).hexdigest()[:16]


def command_warnings(command: Command) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the key and the text of each warning about a valid command."""
    used = {match[1] for word in (*command.argv, command.folder) for match in PLACEHOLDER.finditer(word)}
    expressions = [*command.per_step.values(), *(metric.value for metric in command.metrics if metric.value)]
    if command.layout is not None:
        expressions += [term for term in command.layout.terms.values() if isinstance(term, str)]
    for text in expressions:
        used |= Expression(text).names
    for name in sorted(command.defaults.keys() - used):
        yield ("command", "parameters", name), f"no word and no expression of [command] uses the parameter {name!r}"
    for word in command.argv if command.folder == "run" else ():
        if not word.startswith("/") and (Path(command.sweep_folder) / word).is_file():
            text = f"{word!r} lies beside the sweep, and each run begins in a folder of its own"
            yield ("command", "argv"), f"{text}: write {{HPCBENCH_SWEEP_FOLDER}}/{word}"
    for number, metric in enumerate(command.metrics):
        if metric.name == STEP_TIME and (time_unit_s(metric.unit) is None or metric.better != "lower"):
            text = (
                f"{STEP_TIME} in {metric.unit!r}, {metric.better} is better: only a time, lower is better, gives rates"
            )
            yield ("command", "metrics", number, "unit"), f"{text}, MFU and plots of step times"


def fill_words(argv: list[str], values: Mapping[str, Any]) -> list[str]:
    """Return the words of ``argv`` with their placeholders replaced.

    A word that is one placeholder alone is left out where its value is empty text: so a flag is switched off.

    >>> fill_words(["train", "{debug}", "--name={debug}"], {"debug": ""})
    ['train', '--name=']
    """
    filled = [(word, fill_word(word, values)) for word in argv]
    return [text for word, text in filled if text or not PLACEHOLDER.fullmatch(word)]


def fill_word(word: str, values: Mapping[str, Any]) -> str:
    """Return ``word`` with its placeholders replaced.

    >>> fill_word("--lr={lr} {{x}}", {"lr": 0.001})
    '--lr=0.001 {x}'
    """

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        found = values[match[1]]
        return str(found).lower() if isinstance(found, bool) else str(found)

    return PLACEHOLDER.sub(value, word)


def command_values(spec: RunSpec, command: Command) -> dict[str, Any]:
    """Return the parameters of a run with their defaults, and the integers of the run, for words and expressions."""
    devices_per_node = spec.tasks_per_node * spec.devices_per_task
    return {
        **PARAMETER_DEFAULTS, **{name: getattr(spec, name) for name in RunSpec.__struct_fields__},
        "ranks": spec.ranks, "devices": spec.devices, "devices_per_node": devices_per_node,
        **command.defaults, **spec.parameters,
    }  # fmt: skip
