"""Find phrases that ``vocabulary.toml`` replaces by a term of the glossary.

It reads the pages, the strings and comments of the package, and the comments of templates, profiles, sweeps and the
Makefile, paragraph by paragraph. The exit code is 1 where a phrase occurs more or less often than its bound.
``--tighten`` lowers the bounds to the counts.
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
PAGES = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "results/README.md", "templates/README.md")
COMMENTED = ("Makefile", "templates/*.j2", "clusters/*.toml", "sweeps/*.toml")


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
    """Yield the paragraphs of a Markdown page without its code. A row of a table and an item of a list are by themselves."""
    prose = re.sub(r"^```.*?^```$", lambda code: re.sub("[^\n]", "", code[0]), text, flags=re.S | re.M)
    for number, line in enumerate(prose.splitlines(), 1):
        if line.startswith("|"):
            yield Paragraph(f"{name}:{number}", line)
    prose = re.sub(r"^(    .*|\|.*)$", "", prose, flags=re.M)
    yield from paragraphs(name, enumerate(prose.splitlines(), 1))


def comment_paragraphs(name: str, text: str) -> Iterator[Paragraph]:
    """Yield the comments of a template, a Makefile or a TOML file."""
    for block in re.finditer(r"\{#(.*?)#\}", text, re.S):
        yield from paragraphs(name, enumerate(block[1].splitlines(), text.count("\n", 0, block.start()) + 1))
    rest = re.sub(r"\{#.*?#\}", lambda block: "\n" * block[0].count("\n"), text, flags=re.S)
    yield from paragraphs(name, ((number, line.partition("#")[2]) for number, line in enumerate(rest.splitlines(), 1)))


def python_paragraphs(name: str, text: str) -> Iterator[Paragraph]:
    """Yield the docstrings, strings and comments of a module."""
    tree = ast.parse(text)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        value = ""
        if isinstance(node, ast.JoinedStr):
            value = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            value = node.value
        if " " in value:
            assert isinstance(node, ast.expr)
            yield from paragraphs(name, enumerate(value.splitlines(), node.lineno), id(node) in documentation)
    comments = dict.fromkeys(range(1, text.count("\n") + 2), "")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
    yield from paragraphs(name, comments.items())


def all_paragraphs() -> Iterator[Paragraph]:
    """Yield every text of the project that a person reads."""
    for patterns, read in (
        (PAGES, page_paragraphs),
        (COMMENTED, comment_paragraphs),
        (("hpcbench/**/*.py",), python_paragraphs),
    ):
        for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
            yield from read(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def find(entry: dict[str, str], is_first_word: bool, texts: list[Paragraph]) -> list[str]:
    """Return the places of a phrase; of a first word only those that begin a docstring."""
    pattern = re.compile(entry["find"], 0 if is_first_word else re.I)
    found = []
    for text in texts:
        matches = [pattern.match(text.words)] if is_first_word else [*pattern.finditer(text.words)]
        if text.is_docstring or not is_first_word:
            found += [
                f"  {text.place}: {text.words[max(0, one.start() - 60) : one.end() + 60]}" for one in matches if one
            ]
    return found


def main() -> int:
    """Print the phrases whose count differs from the bound; ``--tighten`` lowers the bounds first."""
    texts, text = list(all_paragraphs()), BOUNDS.read_text(encoding="utf-8")
    entries = [(entry, kind == "first_word") for kind, group in tomli.loads(text).items() for entry in group]
    found = [find(entry, is_first_word, texts) for entry, is_first_word in entries]
    if "--tighten" in sys.argv:
        counts = map(len, found)
        text = re.sub(
            r"^at_most = (\d+)$", lambda line: f"at_most = {min(int(line[1]), next(counts))}", text, flags=re.M
        )
        BOUNDS.write_text(text, encoding="utf-8")
        entries = [(entry, False) for group in tomli.loads(text).values() for entry in group]
    wrong = [
        (entry, places) for (entry, _), places in zip(entries, found, strict=True) if len(places) != entry["at_most"]
    ]
    for entry, places in wrong:
        print(
            f"{entry['find']!r}: {len(places)} times, bound {entry['at_most']} (--tighten lowers it); use {entry['use']}"
        )
        print(*(places if len(places) > entry["at_most"] else []), sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
