"""The declaration of one option of a strategy or a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hpcbench.config.run_spec import OptionValue


class Option(NamedTuple):
    """The declaration of one key of a strategy's ``options`` or a model's ``model_options``.

    The type of the default is the type of all values: bool, int, float or str.

    Example:
        >>> form = Option("gathered", "layout of activations", choices=("gathered", "sharded"))
        >>> form.accepts("sharded"), form.accepts(1), form.expected()
        (True, False, '"gathered" or "sharded"')
    """

    default: OptionValue
    description: str
    choices: tuple[OptionValue, ...] = ()
    lossy: Mapping[OptionValue, float] = MappingProxyType({})
    """Values with which gradients are inexact, each with the largest difference that ``verify`` accepts."""

    @property
    def kind(self) -> type:
        """Type of the default, which is that of all values."""
        return type(self.default)

    def accepts(self, value: Any) -> bool:
        """Whether a sweep may set the option to ``value``; an integer is valid where a number is expected."""
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            return True
        return type(value) is self.kind and (not self.choices or value in self.choices)

    def expected(self) -> str:
        """Describe the valid values."""
        if self.choices:
            return " or ".join(toml_literal(choice) for choice in self.choices)
        return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.kind]


def toml_literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
