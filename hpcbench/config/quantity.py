"""Pydantic types for keys that end in a unit: a bare number in that unit, or a string that says its own."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from hpcbench.units import parse_quantity


def _parsed(kind: str, unit: float = 1.0) -> BeforeValidator:
    def convert(value: Any) -> Any:
        return parse_quantity(value, kind) / unit if isinstance(value, str) else value

    return BeforeValidator(convert)


def _schema(example: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "examples": [example]}]})


Seconds = Annotated[float, Field(ge=0), _parsed("time"), _schema("1.5 us")]
Minutes = Annotated[float, Field(gt=0), _parsed("time", 60.0), _schema("30 min")]
Bytes = Annotated[float, Field(ge=0), _parsed("size"), _schema("94 GiB")]
BytesPerSecond = Annotated[float, Field(gt=0), _parsed("rate"), _schema("200 Gbit/s")]
FlopsPerSecond = Annotated[float, Field(gt=0), _parsed("computing speed"), _schema("312 TFLOP/s")]
