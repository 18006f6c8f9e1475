"""Find phrases that ``vocabulary.toml`` replaces by a term of the glossary.

It reads the pages, and the strings and comments of the package, paragraph by paragraph. The exit code is 1 where a phrase
occurs more or less often than its bound. ``--tighten`` lowers the bounds to the counts.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import tomli

ROOT = Path(__file__).resolve().parent.parent
BOUNDS = ROOT / "tests" / "vocabulary.toml"
PAGES = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "results/README.md", "templates/README.md", "hpcbench/README.md")


class Paragraph(NamedTuple):
    """Lines that are read as one text."""

    place: str
    words: str
    is_docstring: bool = False


def paragraphs(name: str, lines: Iterable[tuple[int, str]], is_docstring: bool = False) -> Iterator[Paragraph]:
    """Yield the paragraphs of numbered lines; an empty line ends one. The first may be the one of a docstring."""
    for is_empty, group in groupby(lines, key=lambda line: not line[1].strip()):
        if not is_empty:
            numbers, texts = zip(*group, strict=True)
            yield Paragraph(f"{name}:{numbers[0]}", " ".join(" ".join(texts).split()), is_docstring)
            is_docstring = False


def page_paragraphs(name: str, text: str) -> Iterator[Paragraph]:
    """Yield the paragraphs of a Markdown page without its code; each row of a table is one."""
    prose = re.sub(r"^```.*?^```$", lambda code: re.sub("[^\n]", "", code[0]), text, flags=re.S | re.M)
    lines = [*enumerate(prose.splitlines(), 1)]
    for row in lines:
        if row[1].startswith("|"):
            yield from paragraphs(name, [row])
    yield from paragraphs(name, [(number, re.sub(r"^(    |\|).*", "", line)) for number, line in lines])


def python_paragraphs(name: str, text: str) -> Iterator[Paragraph]:
    """Yield the docstrings, strings and comments of a module."""
    nodes = [*ast.walk(ast.parse(text))]
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from paragraphs(name, enumerate(node.value.splitlines(), node.lineno), id(node) in documentation)
    comments = dict.fromkeys(range(1, text.count("\n") + 2), "")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
    yield from paragraphs(name, comments.items())


def all_paragraphs() -> Iterator[Paragraph]:
    """Yield every text of the project that a person reads."""
    for patterns, read in ((PAGES, page_paragraphs), (("hpcbench/**/*.py",), python_paragraphs)):
        for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
            yield from read(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def find(entry: dict[str, str], is_first_word: bool, texts: list[Paragraph]) -> list[str]:
    """Return the places of a phrase; of a first word only those that begin a docstring."""
    pattern = re.compile(f"^{entry['find']}" if is_first_word else entry["find"], 0 if is_first_word else re.I)
    return [
        f"  {text.place}: {text.words[max(0, one.start() - 60) : one.end() + 60]}"
        for text in texts
        if text.is_docstring or not is_first_word
        for one in pattern.finditer(text.words)
    ]


def main() -> int:
    """Print the phrases whose count differs from the bound; ``--tighten`` lowers the bounds first."""
    texts, text = list(all_paragraphs()), BOUNDS.read_text(encoding="utf-8")
    entries = [(entry, kind == "first_word") for kind, group in tomli.loads(text).items() for entry in group]
    found = [find(entry, is_first_word, texts) for entry, is_first_word in entries]
    bounds = [entry["at_most"] for entry, _ in entries]
    if "--tighten" in sys.argv:
        bounds = [min(bound, len(places)) for bound, places in zip(bounds, found, strict=True)]
        lowered = iter(bounds)
        text = re.sub(r"^at_most = \d+$", lambda _: f"at_most = {next(lowered)}", text, flags=re.M)
        BOUNDS.write_text(text, encoding="utf-8")
    wrong = [one for one in zip(entries, found, bounds, strict=True) if len(one[1]) != one[2]]
    for (entry, _), places, bound in wrong:
        print(f"{entry['find']!r}: {len(places)} times, bound {bound} (--tighten lowers it); use {entry['use']}")
        print(*(places if len(places) > bound else []), sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
