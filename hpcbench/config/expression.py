"""The expression language of ``when``, ``derive`` and ``--where``: arithmetic, comparison, boolean logic and a few
functions over parameters.
An expression is parsed with Python's grammar and compiled from a closed list of nodes, so it cannot execute Python
code or run for long.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hpcbench.errors import ConfigError, did_you_mean

ExpressionValue = Any
"""A bool, int, float, str or None."""
ParameterValues = Mapping[str, ExpressionValue]
_Evaluator = Callable[[ParameterValues], ExpressionValue]

MAX_LENGTH = 1000
_MAX_EXPONENT = 64
_MAX_DIGITS = 30
_MAX_MAGNITUDE = 1e300

_ARITHMETIC_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_COMPARISON_OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda value, many: value in many, ast.NotIn: lambda value, many: value not in many,
}  # fmt: skip
_ORDERING_OPERATORS = frozenset({ast.Lt, ast.LtE, ast.Gt, ast.GtE})
_UNARY_OPERATORS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


def _round_limited(value: Any, digits: Any = 0) -> Any:
    if abs(digits) > _MAX_DIGITS:
        raise ValueError(f"round to {digits} digits; at most {_MAX_DIGITS}")
    return round(value, digits) if digits else round(value)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "ceil": math.ceil, "floor": math.floor, "log2": math.log2, "max": max, "min": min,
    "round": _round_limited,
    "sqrt": math.sqrt,
}  # fmt: skip


class Expression:
    """A parsed expression. ``names`` are the parameters it reads, with dots for those in tables (``options.x``)."""

    def __init__(self, text: str, allowed_names: Collection[str] | None = None, where: str | None = None) -> None:
        """Parse ``text``. Raises ``ConfigError`` if it is invalid, and for names outside ``allowed_names``."""
        self.text = text
        self.where = where
        self._allowed_names = allowed_names
        self.names: set[str] = set()
        if len(text) > MAX_LENGTH:
            raise self._error(f"an expression of {len(text)} characters; at most {MAX_LENGTH} are read")
        try:
            with warnings.catch_warnings():
                # Python's warnings about its future syntax are hidden; errors of the expression are raised below.
                warnings.simplefilter("ignore")
                body = ast.parse(text.strip(), mode="eval").body
            self._evaluate = self._compiled(body)
        except SyntaxError as error:
            raise self._error(*_syntax_problem(text.strip(), error)) from error
        except (ValueError, MemoryError) as error:
            raise self._error(f"not a valid expression: {error}") from error
        except RecursionError as error:
            raise self._error("nested too deeply") from error

    def __call__(self, values: ParameterValues) -> ExpressionValue:
        """The value over ``values``; a parameter that is absent there is ``None``.

        ``a.b`` is the value of that whole name, else the entry ``b`` of the table ``a``.

        Raises ``ConfigError`` where it cannot be computed (a division by zero, text plus a number).
        """
        try:
            return self._evaluate(values)
        except ZeroDivisionError as error:
            raise self._error("cannot be computed: a division by zero") from error
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise self._error(f"cannot be computed: {error}") from error

    def holds(self, values: ParameterValues) -> bool:
        """Whether it is true; ``ConfigError`` where its value is neither true nor false."""
        value = self(values)
        if not isinstance(value, bool):
            raise self._error(f"is {value!r}, where true or false is needed", hint="compare it with something")
        return value

    def _error(self, message: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"expression {self.text!r:.120}: {message}", where=self.where, hint=hint)

    def _compiled(self, node: ast.expr) -> _Evaluator:
        """The function that computes ``node``. Refuses every node that is not on the list, and notes the names."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return lambda _: value
            case ast.Name() | ast.Attribute():
                return self._parameter(node)
            case ast.BoolOp(op=kind, values=parts):
                return _make_boolean(isinstance(kind, ast.And), self._all(parts))
            case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY_OPERATORS:
                return _make_call(_UNARY_OPERATORS[type(sign)], self._all([operand]))
            case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _ARITHMETIC_OPERATORS:
                return _make_call(functools.partial(_compute_checked, type(symbol)), self._all([left, right]))
            case ast.Compare(left=left, ops=kinds, comparators=others) if _COMPARISON_OPERATORS.keys() >= set(
                map(type, kinds)
            ):
                return _make_comparison([type(kind) for kind in kinds], self._all([left, *others]))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                condition, if_true, if_false = self._all([test, body, orelse])
                return lambda values: if_true(values) if condition(values) else if_false(values)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                elements = self._all(parts)
                return lambda values: [element(values) for element in elements]
            case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]):
                if name not in FUNCTIONS:
                    raise self._error(f"no function {name!r}", hint=did_you_mean(name, FUNCTIONS))
                return _make_call(FUNCTIONS[name], self._all(parts))
        raise self._error(f"{ast.unparse(node)!r:.60} is not part of the language")

    def _all(self, nodes: list[ast.expr]) -> list[_Evaluator]:
        return [self._compiled(node) for node in nodes]

    def _parameter(self, node: ast.Name | ast.Attribute) -> _Evaluator:
        name = ast.unparse(node)
        if "__" in name or not all(map(str.isidentifier, name.split("."))):
            raise self._error(f"{name!r:.60} is not part of the language")
        if self._allowed_names is not None and name.partition(".")[0] not in self._allowed_names:
            raise self._error(f"unknown name {name!r}", hint=did_you_mean(name, self._allowed_names))
        self.names.add(name)
        if "." not in name:
            return lambda values: values.get(name)
        return lambda values: _look_up_dotted(values, name)


_MISTAKEN_OPERATORS = {"=!": "!=", "=<": "<=", "=>": ">=", "&&": "and", "||": "or", "<>": "!="}


def _syntax_problem(text: str, error: SyntaxError) -> tuple[str, str | None]:
    """Return the problem of ``text`` with its position, and the operator that was probably meant."""
    position = min(max(error.offset or 1, 1), len(text) + 1)
    rest = text[position - 1 :]
    at = f"at character {position}, {rest!r:.20}" if rest else "at its end"
    mistaken = next((wrong for wrong in _MISTAKEN_OPERATORS if wrong in text), None)
    if mistaken is not None:
        return f"not a valid expression: {error.msg} {at}", f"did you mean {_MISTAKEN_OPERATORS[mistaken]!r}?"
    compares = re.search(r"(?<![=!<>])=(?!=)", text) is not None
    return f"not a valid expression: {error.msg} {at}", "did you mean '=='?" if compares else None


def _make_call(function: Callable[..., ExpressionValue], parts: list[_Evaluator]) -> _Evaluator:
    if len(parts) == 1:
        (only,) = parts
        return lambda values: function(only(values))
    return lambda values: function(*[part(values) for part in parts])


def _make_boolean(is_and: bool, parts: list[_Evaluator]) -> _Evaluator:
    def evaluate(values: ParameterValues) -> ExpressionValue:
        value: ExpressionValue = is_and
        for part in parts:
            value = part(values)
            if bool(value) != is_and:
                break
        return value

    return evaluate


def _make_comparison(kinds: list[type[ast.cmpop]], parts: list[_Evaluator]) -> _Evaluator:
    first, *others = parts
    # A parameter that is not set is neither below nor above anything.
    links = [
        (_COMPARISON_OPERATORS[kind], kind in _ORDERING_OPERATORS, other)
        for kind, other in zip(kinds, others, strict=True)
    ]

    def evaluate(values: ParameterValues) -> bool:
        left = first(values)
        for compare, is_order, other in links:
            right = other(values)
            if is_order and isinstance(left, str) != isinstance(right, str) and None not in (left, right):
                raise TypeError(f"{left!r:.40} and {right!r:.40} have no order: one is a text")
            if (is_order and (left is None or right is None)) or not compare(left, right):
                return False
            left = right
        return True

    return evaluate


def _look_up_dotted(values: ParameterValues, name: str) -> ExpressionValue:
    if name in values:
        return values[name]
    node: Any = values
    for key in name.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _compute_checked(kind: type[ast.operator], left: ExpressionValue, right: ExpressionValue) -> ExpressionValue:
    if not all(isinstance(value, (int, float)) for value in (left, right)):
        raise TypeError(f"{left!r:.40} and {right!r:.40} are not both numbers")
    if kind is ast.Pow and abs(right) > _MAX_EXPONENT:
        raise ValueError(f"an exponent of {right}; at most {_MAX_EXPONENT}")
    result = _ARITHMETIC_OPERATORS[kind](left, right)
    if isinstance(result, complex) or not abs(result) <= _MAX_MAGNITUDE:
        raise ValueError("the result is not a finite real number")
    return result
