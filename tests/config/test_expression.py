from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcbench.config.expression import MAX_LENGTH, Expression
from hpcbench.errors import ConfigError

VALUES: dict[str, Any] = {
    "nodes": 4,
    "batch_size": 16,
    "model": "resnet18",
    "input_size": None,
    "options": {"bucket_cap_mb": 25.0},
    "channels_last": True,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("nodes * 2 + 1", 9),
        ("batch_size // 3 % 4", 1),
        ("2 ** 10", 1024),
        ("-nodes", -4),
        ("nodes == 4 and model != 'vgg11'", True),
        ("1 < nodes <= 4", True),
        ("4 < nodes <= 8", False),
        ("model in ['resnet18', 'vgg11']", True),
        ("nodes not in (1, 2)", True),
        ("not channels_last or nodes > 8", False),
        ("options.bucket_cap_mb > 10", True),
        ("options.other == None", True),
        ("input_size > 3", False),
        ("input_size < 3", False),
        ("ceil(batch_size / 3)", 6),
        ("max(1, min(nodes, 3), log2(8))", 3),
        ("batch_size if nodes > 2 else 1", 16),
        ("nodes / 8", 0.5),
        ("round(nodes / 3, 2)", 1.33),
        ("round(nodes / 3)", 1),
    ],
)
def test_expressions_evaluate_to_the_value_of_python(text: str, value: Any) -> None:
    assert Expression(text, VALUES)(VALUES) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "nodes.__class__", "().__class__", "open('/etc/passwd')", "[x for x in (1,)]", "lambda: 1",
        "f'{nodes}'", "nodes[0]", "'a' 'b'.upper()", "max(*[1])", "max(1, key=abs)", "(nodes := 3)", "{1: 2}", "{1}", "...",
        "b'x'", "1j", "nodes if", "", "a b", "await x", "nodes @ nodes", "nodes is None", "~nodes", "nodes << 3", "yield",
    ],
)  # fmt: skip
def test_constructs_outside_the_language_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expression"):
        Expression(text)


@pytest.mark.parametrize(
    "text", ["(" * 400 + "1" + ")" * 400, "-" * 900 + "1", "1" * (MAX_LENGTH + 1), "not " * 240 + "x", "\x00"]
)
def test_too_long_or_too_deep_expressions_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Expression(text)({"x": True}) if len(text) > MAX_LENGTH or "(" in text or "\x00" in text else Expression(
            text + "("
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "division by zero"),
        ("model + 1", "are not both numbers"),
        ("model * 1000000000", "are not both numbers"),
        ("9 ** 9 ** 9", "an exponent of 387420489"),
        ("10.0 ** 64 ** 2", "an exponent"),
        ("(0 - 8) ** 0.5", "finite real"),
        ("sqrt(0 - 1)", "math domain"),
        ("nodes < model", "have no order: one is a text"),
        ("round(nodes, -1000000000)", "round to -1000000000 digits"),
        ("1e999 - 1e999", "finite real"),
    ],
)
def test_an_expression_that_fails_names_the_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Expression(text, where="f:3")(VALUES)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"f.toml:3: .*unknown name 'nodse'\n  did you mean 'nodes'\?"):
        Expression("nodse > 1", VALUES, "f.toml:3")
    with pytest.raises(ConfigError, match=r"no function 'cel'\n  did you mean 'ceil'"):
        Expression("cel(nodes)", VALUES)


def test_a_condition_must_be_true_or_false() -> None:
    assert Expression("nodes > 1").holds(VALUES)
    with pytest.raises(ConfigError, match="is 4, where true or false is needed"):
        Expression("nodes").holds(VALUES)


TOKENS = [
    "nodes", "model", "options.bucket_cap_mb", "options.__class__", "input_size", "channels_last", "__builtins__", "print",
    "__import__", "abs", "max", "round", "log2", "sqrt", "1", "0", "2.5", "1e308", "1e999", "99999999999", "'text'", "'__class__'",
    "True", "None", "(", ")", "[", "]", ",", "+", "-", "*", "**", "/", "//", "%", "<", "<=", "==", "!=", "in", "not", "not in",
    "and", "or", "if", "else", "lambda", "for", ".", ":", "{", "}", "f''",
]  # fmt: skip


def is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(is_plain(one) for one in value)
    return value is None or type(value) in (bool, int, float, str)


LEAVES = st.sampled_from(["nodes", "model", "input_size", "0", "3", "2.5", "1e308", "'a'", "True", "None", "options.x"])
GRAMMAR = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(
            inner, st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "<", "==", "in", "and", "or"]), inner
        ).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(st.sampled_from(["abs", "ceil", "floor", "log2", "max", "min", "round", "sqrt"]), inner, inner).map(
            lambda parts: f"{parts[0]}({parts[1]}, {parts[2]})"
        ),
        st.tuples(st.sampled_from(["abs", "ceil", "floor", "log2", "round", "sqrt", "not ", "-"]), inner).map(
            lambda parts: f"{parts[0]}({parts[1]})"
        ),
        st.tuples(inner, inner, inner).map(lambda parts: "({} if {} else {})".format(*parts)),
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
    ),
    max_leaves=12,
)


@given(st.one_of(st.lists(st.sampled_from(TOKENS), max_size=12).map(" ".join), GRAMMAR, st.text(max_size=40)))
@settings(max_examples=1000)
def test_any_text_gives_a_plain_value_or_a_config_error(text: str) -> None:
    try:
        value = Expression(text)(VALUES)
    except ConfigError:
        return
    assert is_plain(value), (text, value)
