"""A sweep: what ``sweeps/<name>.toml`` may say. Its parameters are those of ``RunSpec``, defined there alone."""

from __future__ import annotations

import functools
import operator
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from pydantic import ConfigDict, Field, create_model, model_validator

from hpcbench.config.quantity import Minutes
from hpcbench.config.spec import RunSpec
from hpcbench.config.table import NAME, Table

_SET_BY_US = {"spec_version", "repeat"}
NESTED = ("options", "model_options", "env")
"""Parameters that are tables of their own."""


def parameter_types() -> dict[str, Any]:
    """Every parameter that a sweep may set, with its type in pydantic's words."""
    hints = get_type_hints(RunSpec, include_extras=True)
    kinds = {name: _pydantic_type(hint) for name, hint in hints.items() if name not in _SET_BY_US}
    kinds["global_batch_size"] = Annotated[int, Field(ge=1, description="of all replicas, instead of batch_size")]
    kinds["time_limit_min"] = Annotated[Minutes, Field(description="limit of one launch: 30 or '2 h'")]
    return kinds


def _pydantic_type(hint: Any) -> Any:
    """A msgspec annotation as a pydantic one: the constraints and descriptions of ``Meta`` become a ``Field``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        metas = [_field_of(meta) for meta in arguments[1:] if isinstance(meta, msgspec.Meta)]
        return functools.reduce(lambda kind, field: Annotated[kind, field], metas, _pydantic_type(arguments[0]))
    if origin in (Union, types.UnionType):
        members = [_pydantic_type(argument) for argument in arguments if argument is not type(None)]
        return functools.reduce(operator.or_, members)
    if origin is dict:
        return dict[_pydantic_type(arguments[0]), _pydantic_type(arguments[1])]  # type: ignore[misc]
    return hint


def _field_of(meta: msgspec.Meta) -> Any:
    names = ("ge", "gt", "le", "lt", "pattern", "max_length", "description")
    return Field(**{name: getattr(meta, name) for name in names if getattr(meta, name) is not None})


def _fixed_table() -> type[Table]:
    fields: dict[str, Any] = {name: (kind | None, None) for name, kind in _plain(parameter_types()).items()}
    return create_model("Fixed", __base__=Table, __doc__="Parameters that all runs share.", **fields)


def _grid_table() -> type[Table]:
    fields: dict[str, Any] = {}
    for name, kind in _plain(parameter_types()).items():
        if name in NESTED:
            key, value = get_args(kind)
            values: Any = dict[key, Annotated[list[value], Field(min_length=1)]]  # type: ignore[valid-type]
        else:
            values = Annotated[list[kind], Field(min_length=1)]  # type: ignore[valid-type]
        fields[name] = (values | None, None)
    return create_model("Grid", __base__=Table, __doc__="Lists whose product is run.", **fields)


def _plain(kinds: dict[str, Any]) -> dict[str, Any]:
    """Without the annotation around tables, so that their arguments can be read."""
    return {name: get_args(kind)[0] if name in NESTED else kind for name, kind in kinds.items()}


def _exclude_table() -> type[Table]:
    """Every parameter as one value, or as a list of values any of which matches; and a condition."""
    condition = Annotated[str, Field(description="an expression over parameters; true excludes the point")]
    fields: dict[str, Any] = {"when": (condition | None, None)}
    for name, kind in _plain(parameter_types()).items():
        if name in NESTED:
            key, value = get_args(kind)
            fields[name] = (dict[key, value | list[value]] | None, None)  # type: ignore[valid-type]
        else:
            fields[name] = (kind | list[kind] | None, None)  # type: ignore[valid-type]
    return create_model("Exclude", __base__=Table, __doc__="Points that match all of these are dropped.", **fields)


Fixed: Any = _fixed_table()
Grid: Any = _grid_table()
Exclude: Any = _exclude_table()


class Scaling(Table):
    """More nodes: with the same work for each replica (weak), or the same work in all (strong)."""

    kind: Literal["weak", "strong"]
    nodes: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    """Node counts: an axis of the sweep."""
    global_batch_size: Annotated[int, Field(ge=1)] | None = None
    """For strong scaling: samples of one step over all replicas."""

    @model_validator(mode="after")
    def _fits(self) -> Scaling:
        if (self.kind == "strong") != (self.global_batch_size is not None):
            raise ValueError(
                f"{self.kind} scaling {'needs' if self.kind == 'strong' else 'takes no'} global_batch_size"
            )
        return self


Along = str | Annotated[list[str], Field(min_length=1)]


class StopTable(Table):
    """Per status the parameters along which larger runs are skipped once a smaller one has ended so."""

    oom: Along | None = None
    """`"batch_size"`: what did not fit into memory does not fit with a larger batch."""
    timeout: Along | None = None
    """`["batch_size", "steps"]`: larger in one of them, and smaller in none."""
    unsupported: Along | None = None
    failed: Along | None = None


class SubmitTable(Table):
    """How the runs become jobs; it changes no run's identity."""

    pack: Annotated[int, Field(ge=1)] | None = None
    """Runs of equal shape that one job carries, one after another."""
    pack_minutes: Minutes | None = None
    """As many runs in one job as their time limits fit into this."""
    max_running_jobs: Annotated[int, Field(ge=1)] | None = None
    """Jobs of one submission that may run at the same time."""
    budget_node_hours: Annotated[float, Field(gt=0)] | None = None
    """The most that one submit may cost, at the runs' time limits, unless it is told `--yes`."""

    @model_validator(mode="after")
    def _one_kind_of_pack(self) -> SubmitTable:
        if self.pack is not None and self.pack_minutes is not None:
            raise ValueError("pack and pack_minutes exclude each other: keep one")
        return self


class SweepFile(Table):
    """A named set of runs."""

    model_config = ConfigDict(title="hpcbench sweep")

    name: Annotated[str, Field(pattern=NAME)]
    description: str = ""
    model_folder: Annotated[str, Field(min_length=1)] | None = None
    """Where `model = "module:function"` finds its module, from this file on; the profile's when absent."""
    fixed: Fixed = Fixed()
    """Parameters that all runs share."""
    grid: Grid = Grid()
    """Lists; every combination of their values is one run."""
    zip_: Annotated[list[Grid], Field(alias="zip")] = []
    """Lists of equal length that move together; each group is one axis of the grid."""
    scaling: Scaling | None = None
    """Weak or strong scaling over node counts."""
    derive: dict[str, str] = {}
    """Parameters computed from others: `micro_batches = "batch_size // 4"`, `"options.x" = "nodes * 2"`."""
    include: list[Fixed] = []
    """Further points: these parameters over the fixed ones."""
    exclude: list[Exclude] = []
    """Points to leave out: keys that match, and a condition that holds."""
    stop: StopTable = StopTable()
    """Runs that are not worth starting once a smaller one has ended badly: `oom = "batch_size"`."""
    submit: SubmitTable = SubmitTable()
    """How the runs become jobs: packing, limits, budget."""
    repeats: Annotated[int, Field(ge=1)] = 1
    """Launches of every configuration; each has its own seed."""
