"""Values are data: whatever they hold, they come out of bash as they went in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcbench.errors import RenderError
from hpcbench.render.template_engine import TemplateEngine

HOSTILE = [
    "$(touch /tmp/owned)", "`id`", "a; rm -rf ~", "it's", 'say "x"', "two\nlines", "#SBATCH --x", "{{ 7*7 }}",
    "\u202eevil", "-n", "", " ", "*", "\\", "é ü",
]  # fmt: skip


def engine(folder: Path, **templates: str) -> TemplateEngine:
    for name, text in templates.items():
        (folder / f"{name}.j2").write_text(text, encoding="utf-8")
    return TemplateEngine([folder])


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_value_is_one_shell_word(tmp_path: Path, value: str) -> None:
    script = engine(tmp_path, a="printf %s {{ value }}").render("a.j2", {"value": value})
    assert subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout.decode() == value


@given(st.text(alphabet=st.characters(exclude_characters="\x00", exclude_categories=["Cs"])))
def test_any_text_is_one_shell_word(value: str) -> None:
    import shlex

    script = TemplateEngine([])._environment.from_string("{{ value }}").render(value=value)
    assert shlex.split(script) == [value]


def test_blocks_macros_and_raw_text_stay_script(tmp_path: Path) -> None:
    made = engine(
        tmp_path,
        base="{% block a %}echo {{ x }}{% endblock %}",
        child="{% extends 'base.j2' %}{% macro m(y) %}[{{ y }}]{% endmacro %}{% block a %}{{ super() }}; {{ m(x) }} {{ x | raw }}{% endblock %}",
    )
    assert made.render("child.j2", {"x": "a b"}) == "echo 'a b'; ['a b'] a b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\n{{ clustr }}", r"a.j2:2: 'clustr' is undefined\n  did you mean 'cluster'\?"),
        ("one\n{% if %}", r"a.j2:2: "),
        ("{% include 'none.j2' %}", "no template 'none.j2'"),
        ("{{ two_lines | directive }}", r"a.j2:1: .*control character"),
        ("{{ two_lines | variable }}", r"a.j2:1: .*is not a name of an environment variable"),
        ("{{ nul }}", "a.j2:1: .*NUL"),
    ],
)
def test_mistakes_in_templates_have_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        engine(tmp_path, a=text).render("a.j2", {"cluster": "c", "two_lines": "a\n#SBATCH --x", "nul": "\x00"})


def test_the_first_folder_overrides_by_name(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.j2").write_text(name)
    assert TemplateEngine([tmp_path / "mine", tmp_path / "theirs"]).render("a.j2", {}) == "mine"
