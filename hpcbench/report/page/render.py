"""Sections to one HTML file. Every value is escaped, only what the package itself brings runs, nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import hpcbench
from hpcbench.fileio import printable
from hpcbench.report.page.figures import Figure, script_json
from hpcbench.report.page.grid import Grid

TEMPLATES = Path(__file__).resolve().parent / "template"


@dataclass(frozen=True)
class Item:
    """A finding."""

    subject: str
    text: str
    sure: str
    grounds: list[str] = field(default_factory=list)
    evidence: Grid | None = None


@dataclass(frozen=True)
class Group:
    """Findings of one kind; ``more`` says what is left out."""

    heading: str
    items: list[Item]
    more: str = ""


@dataclass(frozen=True)
class Block:
    """Text that keeps its lines."""

    heading: str
    text: str


@dataclass(frozen=True)
class Section:
    """A part of the page with an address of its own."""

    ident: str
    heading: str
    texts: list[str] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def render(title: str, overview: str, where: str | None, sections: Sequence[Section], library: str = "") -> str:
    """The page; ``library`` is what makes plots explorable."""
    style = _file("style.css")
    scripts = [*([library] if library else []), _file("page.js")]
    return _environment().get_template("page.html.j2").render(
        title=title, overview=overview, where=where or "", sections=sections, version=hpcbench.__version__,
        style=_own(style), scripts=[_own(one) for one in scripts], policy=policy(style, scripts),
    )  # fmt: skip


def policy(style: str, scripts: Sequence[str]) -> str:
    """A Content-Security-Policy under which these very texts run and style, pictures are in the page, and no more."""
    hashes = " ".join(_hash(one) for one in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    # A browser hashes what stands between the tags, with its line ends as they are.
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _file(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _own(text: str) -> Markup:
    assert "</script" not in text.lower(), "the element would end within"
    assert "</style" not in text.lower(), "the element would end within"
    return Markup(text)  # noqa: S704 - a file of this package, or the library that was made for it


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(TEMPLATES)), undefined=jinja2.StrictUndefined, autoescape=True,
        finalize=_harmless, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.filters["script_json"] = script_json
    made.filters["script_text"] = _script_text
    return made


def _harmless(value: Any) -> Any:
    """Text without characters that hide or reorder what stands there."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _script_text(text: str) -> Markup:
    assert "<" not in text, "only JSON of script_json can stand in a script element"
    return Markup(text)  # noqa: S704
