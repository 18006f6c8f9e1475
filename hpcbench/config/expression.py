"""The one expression language: arithmetic, comparison, boolean and a few named functions over parameters.

``when``, ``derive``, ``--where`` and their like are written in it. It is parsed with Python's own grammar and then
walked over a closed list of nodes: nothing in it can reach Python, and nothing in it can take long.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hpcbench.errors import ConfigError, did_you_mean

Value = Any
"""A bool, int, float, str or None."""

MAX_LENGTH = 1000
_MAX_EXPONENT = 64
_MAX_MAGNITUDE = 1e300

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_COMPARISON: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "ceil": math.ceil, "floor": math.floor, "log2": math.log2, "max": max, "min": min, "round": round,
    "sqrt": math.sqrt,
}  # fmt: skip


class Expression:
    """A parsed expression. ``names`` are the parameters it reads, with dots for those in tables (``options.x``)."""

    def __init__(self, text: str, known: Collection[str] | None = None, where: str | None = None) -> None:
        """Parse ``text``. Raises ``ConfigError`` for what is no expression, and for names outside ``known``."""
        self.text = text
        self.where = where
        self._known = known
        self.names: set[str] = set()
        if len(text) > MAX_LENGTH:
            raise self._error(f"an expression of {len(text)} characters; at most {MAX_LENGTH} are read")
        try:
            with warnings.catch_warnings():
                # Python has things to say about its own future; what is wrong here is said by us.
                warnings.simplefilter("ignore")
                self._body = ast.parse(text.strip(), mode="eval").body
            self._check(self._body)
        except (SyntaxError, ValueError, MemoryError) as error:
            raise self._error(f"no expression: {getattr(error, 'msg', error)}") from error
        except RecursionError as error:
            raise self._error("nested too deeply") from error

    def __call__(self, values: Mapping[str, Value]) -> Value:
        """The value over ``values``; a parameter that is absent there is ``None``.

        Raises ``ConfigError`` where it cannot be computed (a division by zero, text plus a number).
        """
        try:
            return self._value(self._body, values)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise self._error(f"cannot be computed: {error}") from error

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Whether it is true; ``ConfigError`` where its value is neither true nor false."""
        value = self(values)
        if not isinstance(value, bool):
            raise self._error(f"is {value!r}, where true or false is needed", hint="compare it with something")
        return value

    def _error(self, message: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"expression {self.text!r:.120}: {message}", where=self.where, hint=hint)

    def _check(self, node: ast.expr) -> None:
        """Refuse every node that is not on the list; note the names."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                children: list[ast.expr] = []
            case ast.Name() | ast.Attribute():
                self._check_name(node)
                children = []
            case ast.BoolOp(values=children):
                pass
            case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd(), operand=operand):
                children = [operand]
            case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _ARITHMETIC:
                children = [left, right]
            case ast.Compare(left=left, ops=kinds, comparators=others) if all(
                type(kind) in _COMPARISON for kind in kinds
            ):
                children = [left, *others]
            case ast.IfExp(test=test, body=body, orelse=orelse):
                children = [test, body, orelse]
            case ast.List(elts=children) | ast.Tuple(elts=children):
                pass
            case ast.Call(func=ast.Name(id=name), args=children, keywords=[]):
                if name not in FUNCTIONS:
                    raise self._error(f"no function {name!r}", hint=did_you_mean(name, FUNCTIONS))
            case _:
                raise self._error(f"{ast.unparse(node)!r:.60} is not part of the language")
        for child in children:
            self._check(child)

    def _check_name(self, node: ast.Name | ast.Attribute) -> None:
        name = _dotted(node)
        if name is None or "__" in name:
            raise self._error(f"{ast.unparse(node)!r:.60} is not part of the language")
        if self._known is not None and name.partition(".")[0] not in self._known:
            raise self._error(f"unknown name {name!r}", hint=did_you_mean(name, self._known))
        self.names.add(name)

    def _value(self, node: ast.expr, values: Mapping[str, Value]) -> Value:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name() | ast.Attribute():
                return _lookup(values, _dotted(node) or "")
            case ast.BoolOp(op=kind, values=parts):
                return self._boolean(isinstance(kind, ast.And), parts, values)
            case ast.UnaryOp(op=kind, operand=operand):
                value = self._value(operand, values)
                return not value if isinstance(kind, ast.Not) else -value if isinstance(kind, ast.USub) else +value
            case ast.BinOp(left=left, op=kind, right=right):
                return _compute(type(kind), self._value(left, values), self._value(right, values))
            case ast.Compare(left=left, ops=kinds, comparators=others):
                return self._compare(left, kinds, others, values)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._value(body if self._value(test, values) else orelse, values)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._value(part, values) for part in parts]
            case ast.Call(func=ast.Name(id=name), args=parts):
                return FUNCTIONS[name](*(self._value(part, values) for part in parts))
        raise AssertionError(f"a node that was not checked: {ast.dump(node)}")

    def _boolean(self, is_and: bool, parts: list[ast.expr], values: Mapping[str, Value]) -> Value:
        value: Value = is_and
        for part in parts:
            value = self._value(part, values)
            if bool(value) != is_and:
                break
        return value

    def _compare(
        self, left: ast.expr, kinds: list[ast.cmpop], others: list[ast.expr], values: Mapping[str, Value]
    ) -> bool:
        one = self._value(left, values)
        for kind, other in zip(kinds, others, strict=True):
            two = self._value(other, values)
            ordered = not isinstance(kind, (ast.Eq, ast.NotEq, ast.In, ast.NotIn))
            # A parameter that is not set is neither below nor above anything.
            if ordered and (one is None or two is None):
                return False
            if not _COMPARISON[type(kind)](one, two):
                return False
            one = two
        return True


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        parent = _dotted(node.value)
        return f"{parent}.{node.attr}" if parent else None
    return None


def _lookup(values: Mapping[str, Value], name: str) -> Value:
    node: Any = values
    for key in name.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _compute(kind: type[ast.operator], left: Value, right: Value) -> Value:
    if not all(isinstance(value, (int, float)) for value in (left, right)):
        raise TypeError(f"{left!r:.40} and {right!r:.40} are not both numbers")
    if kind is ast.Pow and abs(right) > _MAX_EXPONENT:
        raise ValueError(f"an exponent of {right}; at most {_MAX_EXPONENT}")
    result = _ARITHMETIC[kind](left, right)
    if isinstance(result, complex) or abs(result) > _MAX_MAGNITUDE:
        raise ValueError("the result is not a finite real number")
    return result
