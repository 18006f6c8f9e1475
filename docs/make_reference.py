"""Write the pages that are generated from the code: commands, strategies, fields of the three file formats.

Run by ``make reference`` and ``make docs``. The pages are kept in the tree, so that they can be read without a build;
``tests/docs/test_site.py`` compares them with the output of this script.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from hpcbench.cli.main import COMMANDS, cli
from hpcbench.config.option import Option
from hpcbench.site.project_setup import make_json_schema
from hpcbench.strategies.catalog import ALIASES, STRATEGIES
from hpcbench.strategies.layer_table import read_shipped_table
from hpcbench.workloads.datasets import DATASETS
from hpcbench.workloads.models import MODELS

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "hpcbench"
_WRITTEN_BY = "<!-- Written by docs/make_reference.py: make reference -->\n"
_ONLY_IN_SCHEMA = {
    "BlockProbe", "CollectiveProbe", "LossSummary", "OverlapProbe", "PipelinePrediction", "PipelineTimeline",
    "ProbeResults", "RankTimeline", "RankTraffic", "TimelineSpan", "Traffic", "UpdateProbe",
}  # fmt: skip
"""Records that other pages describe, and those of calibrations, which only the oracle reads."""
_EXTENDS = {
    "RunSpec": ("Fixed", "[Fixed](schema-sweep.md#fixed), the parameters of a sweep, with every degree filled in"),
    "VerificationResult": ("ReferenceComparison", "[ReferenceComparison](#referencecomparison)"),
}
"""Records that have all fields of another one, which the page describes once."""
COUNTED_ON = {"images": "imagenet", "volumes": "cosmoflow", "tokens": "tokens"}
_COMMON = 6
"""An option that this many commands have is described once."""
_FIELD_SOURCES = ("results/schema.py", "results/probe_records.py", "config/run_spec.py", "strategies/traffic.py")


_ABOUT = {
    "sweep": "A sweep is a TOML file; [sweeps.md](sweeps.md) describes how to write one.",
    "cluster": "A profile is a TOML file; [add a cluster](add-a-cluster.md) describes how to write one.",
    "result": "A run leaves one `result.json`; [how every number is measured](measurement.md) defines its figures. "
    "Figures that were not measured are absent. Values are in SI units and bytes. The JSON Schema also has the records "
    "of [`traffic`](measurement.md#traffic), of a pipeline's [`timeline`](measurement.md#where-a-steps-time-goes) and "
    "[`predicted`](pipelines.md#predicted-step-time) step, and of calibrations (`probe`).",
}


def pages() -> dict[str, str]:
    """Return the text of every page, by its name in ``docs/``."""
    return {
        "cli.md": _page("Commands", _commands()),
        "catalog.md": _page("Strategies, models and data sets at a glance", _catalog()),
        "schema-sweep.md": _page("Keys of a sweep", _schema("sweep")),
        "schema-cluster.md": _page("Keys of a cluster profile", _schema("cluster")),
        "schema-result.md": _page("Fields of a result", _schema("result")),
    }


def _page(title: str, parts: Iterable[str]) -> str:
    return "\n".join([_WRITTEN_BY, f"# {title}\n", *parts]).rstrip() + "\n"


def _commands() -> Iterator[str]:
    yield "Exit codes: 0 success; 1 some runs did not end well, or `compare` found a regression; 2 an invalid argument"
    yield "or file; 3 the scheduler or the file system refused. Options may stand anywhere after the command. `--help`"
    yield "of a command has details and examples.\n"
    listed = list(_listed_commands(cli, click.Context(cli, info_name="hpcbench")))
    counts = Counter(row for command, context in listed for row in _option_rows(command, context))
    common = [row for row, count in counts.most_common() if count >= _COMMON]
    yield "## Common options\n"
    yield from _table(("option", "meaning"), ((f"`{names}`", text) for names, text in common))
    for command, context in listed:
        pieces = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
        yield f"## `{' '.join([context.command_path, *pieces])}`\n"
        yield f"{_summary(command.help or '')}\n"
        rows = _option_rows(command, context)
        if own := [row for row in rows if row not in common]:
            yield from _table(("option", "meaning"), ((f"`{names}`", text) for names, text in own))
        if shared := [f"`{row[0]}`" for row in rows if row in common]:
            yield f"Common options: {', '.join(shared)}.\n"


def _listed_commands(group: click.Group, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """Yield every command with its context; a group stands for the commands in it."""
    for name in COMMANDS if group is cli else group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        inner = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from _listed_commands(command, inner)
        else:
            yield command, inner


def _option_rows(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    records = (parameter.get_help_record(context) for parameter in command.params)
    return [record for record in records if record is not None and record[1]]


def _catalog() -> Iterator[str]:
    yield "## Strategies\n"
    yield "The pages on [strategies](strategies.md) and [pipelines](pipelines.md) describe each in detail."
    yield "`options` are written as `[fixed.options]` in a [sweep](sweeps.md).\n"
    strategies = (
        (f"`{key}`", one.description, _names(filter(None, [one.own_degree])), _names(one.hybrid), _options(one.options))
        for key, one in STRATEGIES.items()
    )
    yield from _table(("strategy", "description", "degree", "hybrid with", "options (default)"), strategies)
    named = (f"`{name}` for `{alias.strategy}`" for name, alias in ALIASES.items())
    yield f"Aliases, for strategies that become hybrids with several degrees above 1: {', '.join(named)}.\n"
    yield "## Models\n"
    yield "[The shipped models](models.md) has their sources and forms. Parameters are those on ImageNet, CosmoFlow or"
    yield "tokens; `hpcbench models` prints those of all data sets.\n"
    shipped = (
        (f"`{name}`", one.description, _parameters(name), f"{one.kind} from {one.min_size}", _options(one.options))
        for name, one in MODELS.items()
    )
    yield from _table(("model", "description", "parameters", "smallest input", "options (default)"), shipped)
    yield "## Data sets\n"
    yield "[Data sets and samples](data.md) describes where samples come from. Real files lie in the data folder.\n"
    sets = (
        (
            f"`{name}`",
            one.description,
            f"{one.kind}, {' x '.join(map(str, one.shape))}",
            one.target
            if one.target == "tokens"
            else f"{one.outputs:,} {'classes' if one.target == 'class' else one.target}",
            f"{one.samples:,} ({one.held_out:,})",
            "yes" if one.synthetic else "no",
            one.real or "",
        )
        for name, one in DATASETS.items()
    )
    head = (
        "data set",
        "description",
        "one sample",
        "target",
        "samples per epoch (held out)",
        "synthetic",
        "real files",
    )
    yield from _table(head, sets)


def _parameters(model: str) -> str:
    table = read_shipped_table(model, COUNTED_ON[MODELS[model].kind])
    return f"{table.totals().parameters:,}" if table else ""


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _options(options: Mapping[str, Option]) -> str:
    return ", ".join(f"`{name}` ({_value(one.default) or 'none'})" for name, one in options.items())


def _schema(kind: str) -> Iterator[str]:
    document = make_json_schema(kind)
    definitions = document.get("$defs", {})
    yield _ABOUT[kind]
    yield "The same as JSON Schema, for editors and scripts: "
    yield f"`hpcbench schema {kind}`, [{kind}.json](schemas/{kind}.json).\n"
    docstrings = _field_docstrings() if kind == "result" else {}
    if "properties" in document:
        yield "## The file\n"
        yield from _fields(document, {})
    first = document.get("$ref", "").rpartition("/")[2]
    for name in sorted(definitions.keys() - _ONLY_IN_SCHEMA, key=lambda name: (name != first, name)):
        found = definitions[name]
        yield f"## {name}\n"
        yield f"{_summary(found.get('description', ''))}\n"
        if "prefixItems" in found:
            yield f"An array of {len(found['prefixItems'])} values.\n"
        elif kind == "sweep" and name in ("Grid", "Exclude"):
            shared = definitions["Fixed"]["properties"]
            yield f"The parameters of `Fixed`{', each with the list of its values' if name == 'Grid' else ''}.\n"
            own = {key: value for key, value in found["properties"].items() if key not in shared}
            yield from _fields({**found, "properties": own}, {})
        elif name in _EXTENDS:
            first, link = _EXTENDS[name]
            yield f"The fields of {link}, and:\n"
            yield from _fields(_without(found, first), docstrings.get(name, {}))
        elif name == "Fixed":
            yield from _fields(_with_defaults(found), {})
        else:
            yield from _fields(found, docstrings.get(name, {}))


def _without(found: dict[str, Any], first: str) -> dict[str, Any]:
    """Return the record without the fields that ``first`` also has."""
    kind = "sweep" if first == "Fixed" else "result"
    shared = make_json_schema(kind)["$defs"][first]["properties"]
    return {**found, "properties": {name: entry for name, entry in found["properties"].items() if name not in shared}}


def _with_defaults(fixed: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a sweep with the defaults of a run, except degrees, and values that stand for none."""
    run = make_json_schema("result")["$defs"]["RunSpec"]["properties"]
    entries = {}
    for name, entry in fixed["properties"].items():
        own = run.get(name, {})
        default = None if name.endswith("_degree") else own.get("default")
        is_none = default is not None and "minimum" in own and default < own["minimum"]
        entries[name] = {**entry, "default": None if is_none else default}
    return {**fixed, "properties": entries}


def _fields(found: dict[str, Any], docstrings: dict[str, str]) -> Iterator[str]:
    required = set(found.get("required", ()))
    rows = []
    for name, entry in found.get("properties", {}).items():
        default = "required" if name in required else _value(entry.get("default"))
        rows.append((f"`{name}`", _kind(entry), default, docstrings.get(name) or _description(entry)))
    if rows:
        yield from _table(("key", "type", "default", "meaning"), rows)


def _description(entry: dict[str, Any]) -> str:
    """Return the description of the value, or of the first of its alternatives that has one."""
    if own := str(entry.get("description", "")):
        return own
    return next(filter(None, map(_description, entry.get("anyOf", ()))), "")


def _kind(entry: dict[str, Any]) -> str:
    if "$ref" in entry:
        name = entry["$ref"].rpartition("/")[2]
        return f"`{name}`" if name in _ONLY_IN_SCHEMA else f"[{name}](#{name.lower()})"
    if "enum" in entry:
        values = [f"`{value}`" for value in entry["enum"]]
        return ", ".join(values) if len(values) < 8 else "a name"
    if "const" in entry:
        return f"`{entry['const']}`"
    if "anyOf" in entry:
        kinds = dict.fromkeys(_kind(part) for part in entry["anyOf"] if part.get("type") != "null")
        return " or ".join(kinds)
    if entry.get("type") == "array":
        return f"list of {_kind(entry['items'])}" if entry.get("items") else "list"
    name = str(entry.get("type", "any"))
    return {"object": "table", "string": "text", "boolean": "true or false"}.get(name, name)


def _value(default: Any) -> str:
    if default is None or default in ("", [], {}):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return "its own defaults" if isinstance(default, dict) else f"{default}"


def _field_docstrings() -> dict[str, dict[str, str]]:
    """Return the docstrings below the fields of the record classes, which JSON Schema does not contain."""
    found: dict[str, dict[str, str]] = {}
    for source in _FIELD_SOURCES:
        for node in ast.parse((PACKAGE / source).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                pairs = zip(node.body, node.body[1:], strict=False)
                found[node.name] = {
                    field.target.id: str(after.value.value)
                    for field, after in pairs
                    if isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                }
    return found


def _table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(_cell(str(value)) for value in row) + " |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(_text(text).split()).replace("|", "\\|")


def _summary(text: str) -> str:
    """Return the first paragraph of a docstring."""
    return _text(inspect.cleandoc(text).partition("\n\n")[0])


def _text(text: str) -> str:
    """Turn the double backticks of docstrings into those of Markdown, and escape all other markup."""
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    parts = re.split(r"(`[^`]*`|\[\w+\]\(#\w+\))", text)
    return "".join(part if number % 2 else re.sub(r"([*<>\[\]])", r"\\\1", part) for number, part in enumerate(parts))


def main() -> None:
    """Write all pages, and the schemas."""
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
    for kind in ("cluster", "sweep", "result"):
        (DOCS / "schemas" / f"{kind}.json").write_bytes(_schema_file(make_json_schema(kind)))


def _schema_file(document: dict[str, Any]) -> bytes:
    """Return JSON with a line for each definition: programs read it, and a diff shows which definition changed."""
    lines = [
        b"%b:%b" % (msgspec.json.encode(name), msgspec.json.encode(found)) for name, found in document["$defs"].items()
    ]
    others = msgspec.json.encode({name: found for name, found in document.items() if name != "$defs"})
    return b'{"$defs":{\n' + b",\n".join(lines) + b"\n},\n" + others[1:] + b"\n"


if __name__ == "__main__":
    main()
