"""The file for ``compare --reference``: reference values of metrics and the accepted deviation from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from hpcbench.config.toml_tables import TomlSource, TomlTable, read_toml, validate_table
from hpcbench.units import parse_quantity

_QUANTITY_KINDS = {"_bytes": "size", "_per_s": "", "_s": "time"}
"""What text with a unit is, by the end of a metric's name; a rate per second has none of its own."""


class ReferenceBand(TomlTable):
    """The band of a metric, for the configurations that ``where`` fits."""

    where: Annotated[str, Field(description="an expression over parameters and cluster")]
    metric: Annotated[str, Field(description="as in --metric of table")] = "step_time_s"
    value: Annotated[float | str, Field(description="in SI units, or '12.5 ms', '8 GiB'")]
    low: Annotated[float | None, Field(le=0, description="-0.05: at most 5 % below; without it no bound")] = None
    high: Annotated[float | None, Field(ge=0, description="0.1: at most 10 % above; without it no bound")] = None

    @model_validator(mode="after")
    def _checked(self) -> ReferenceBand:
        if self.low is None and self.high is None:
            raise ValueError("low, high or both are needed")
        if self.si_value <= 0:
            raise ValueError(f"value is {self.value!r}, and has to be above 0")
        return self

    @property
    def si_value(self) -> float:
        """``value`` in SI units. Raises ``ValueError`` where its unit is none of the metric's."""
        if not isinstance(self.value, str):
            return self.value
        kind = next((kind for end, kind in _QUANTITY_KINDS.items() if self.metric.partition(".")[0].endswith(end)), "")
        if not kind:
            raise ValueError(f"value is {self.value!r}: {self.metric} is a plain number")
        return parse_quantity(self.value, kind)


class ReferenceBandsFile(TomlTable):
    """The whole file."""

    reference: Annotated[list[ReferenceBand], Field(min_length=1)]


def load_reference_bands(path: Path) -> tuple[list[ReferenceBand], TomlSource]:
    """The references of a TOML file. Raises ``ConfigErrors`` with everything that is wrong in it."""
    data, text = read_toml(path)
    source = TomlSource(path, text)
    return validate_table(ReferenceBandsFile, data, source).reference, source
