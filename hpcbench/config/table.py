"""What the tables of a cluster's profile and of a sweep are made of: the base of all tables, names, lines of text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
OneLine = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]
Word = Annotated[str, Field(pattern=r"^[^\x00-\x20\x7f]+$")]
Variable = Annotated[str, Field(pattern=VARIABLE)]
Variables = dict[Variable, str]
Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
Count = Annotated[int, Field(ge=1)]
Directives = dict[str, str | int | bool | list[str]]


class Table(BaseModel):
    """A TOML table: typed, and closed to keys that nobody knows."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)
