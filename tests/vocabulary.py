"""Find phrases that ``vocabulary.toml`` replaces by a term of the glossary.

It reads the pages, the strings and comments of the package, and the comments of
templates, profiles, sweeps and the Makefile. A phrase that is broken over two lines counts. The exit code is 1 if a
phrase occurs more often than its bound, or less often, since the bound is then too high.

``--counts`` prints how often each phrase occurs. ``--tighten`` lowers the bounds in ``vocabulary.toml`` to the counts.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import tomli

ROOT = Path(__file__).resolve().parent.parent
BOUNDS = ROOT / "tests" / "vocabulary.toml"
EXCLUDED = ("docs/schemas/",)
PAGES = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "results/README.md", "templates/README.md")
COMMENTED = ("Makefile", "templates/*.j2", "clusters/*.toml", "sweeps/*.toml")
NEW_BLOCK = re.compile(r"\s*(\||#|[*+-] |\d+\. )")
LIST_ITEM = re.compile(r"\s*([*+-] |\d+\. )")


class Phrase(NamedTuple):
    """One entry of ``vocabulary.toml``."""

    pattern: re.Pattern[str]
    use: str
    at_most: int
    is_first_word: bool
    """Whether only beginnings of docstrings count."""


class Occurrence(NamedTuple):
    """The place of a phrase."""

    place: str
    text: str


class Block(NamedTuple):
    """Lines of one file that are read as one text: a paragraph, a string or a comment."""

    name: str
    lines: list[tuple[int, str]]
    is_docstring: bool = False

    def matches(self, phrase: Phrase) -> Iterator[Occurrence]:
        """The places of a phrase in the lines, joined by spaces."""
        if phrase.is_first_word and not self.is_docstring:
            return
        starts, text = [], ""
        for _, line in self.lines:
            starts.append(len(text))
            text += " ".join(line.split()) + " "
        matches = [phrase.pattern.match(text)] if phrase.is_first_word else phrase.pattern.finditer(text)
        for match in filter(None, matches):
            number = max(index for index, start in enumerate(starts) if start <= match.start())
            yield Occurrence(
                f"{self.name}:{self.lines[number][0]}", text[max(0, match.start() - 60) : match.end() + 60]
            )


def read_phrases(path: Path) -> list[Phrase]:
    """The entries of ``vocabulary.toml``: a regular expression, its replacement, how often it may stand."""
    entries = tomli.loads(path.read_text(encoding="utf-8"))
    return [
        *(Phrase(re.compile(each["find"], re.I), each["use"], each["at_most"], False) for each in entries["phrase"]),
        *(Phrase(re.compile(each["find"]), each["use"], each["at_most"], True) for each in entries["first_word"]),
    ]


def numbered_blocks(name: str, lines: Iterable[tuple[int, str]], is_docstring: bool = False) -> Iterator[Block]:
    """The paragraphs of numbered lines; list items, table rows and headings begin a new one."""
    block: list[tuple[int, str]] = []
    for number, line in lines:
        if block and (not line.strip() or NEW_BLOCK.match(line)):
            yield Block(name, block, is_docstring)
            block, is_docstring = [], False
        if line.strip():
            block.append((number, line))
    if block:
        yield Block(name, block, is_docstring)


def page_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a Markdown page, with those of code blocks left empty."""
    is_fenced = in_paragraph = in_list = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_fenced, in_paragraph = not is_fenced, False
            yield number, ""
            continue
        is_indented = line.startswith("    ") and not in_paragraph and not (in_list and not line.startswith(" " * 8))
        if line.strip() and not line.startswith(" "):
            in_list = bool(LIST_ITEM.match(line)) or (in_list and in_paragraph)
        in_paragraph = bool(line.strip()) and not is_fenced and not is_indented
        yield number, line if in_paragraph else ""


def comment_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of comments of a template, a Makefile or a TOML file; other lines are left empty."""
    in_comment = False
    for number, line in enumerate(text.splitlines(), 1):
        if in_comment or "{#" in line:
            in_comment = "#}" not in line.rpartition("{#")[2]
            yield number, line.strip("{#}- ")
        else:
            yield number, line.partition("#")[2].lstrip("# ")


def python_blocks(name: str, text: str) -> Iterator[Block]:
    """The docstrings, strings and comments of a module."""
    tree = ast.parse(text)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            value = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            value = node.value
        else:
            continue
        if " " in value:
            yield from numbered_blocks(name, enumerate(value.splitlines(), node.lineno), id(node) in documentation)
    previous, comments = 0, []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            number = token.start[0]
            if number != previous + 1 or token.line[: token.start[1]].strip():
                comments.append((0, ""))
            comments.append((number, token.string.lstrip("# ")))
            previous = number
    yield from numbered_blocks(name, comments)


def blocks() -> Iterator[Block]:
    """Every text of the project that a person reads."""
    for path in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        if not (name := path.relative_to(ROOT).as_posix()).startswith(EXCLUDED):
            yield from numbered_blocks(name, page_lines(path.read_text(encoding="utf-8")))
    for path in sorted(path for pattern in COMMENTED for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        yield from numbered_blocks(name, comment_lines(path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "hpcbench").rglob("*.py")):
        yield from python_blocks(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def find_phrases(phrases: list[Phrase]) -> dict[Phrase, list[Occurrence]]:
    """Every phrase with the places that use it."""
    places: dict[Phrase, list[Occurrence]] = defaultdict(list)
    for block in blocks():
        for phrase in phrases:
            places[phrase] += block.matches(phrase)
    return places


def tighten(path: Path, counts: list[int]) -> None:
    """Lower every bound that is above its count."""
    remaining = iter(counts)

    def lowered(bound: re.Match[str]) -> str:
        return f"at_most = {min(int(bound[1]), next(remaining))}"

    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r"^at_most = (\d+)$", lowered, text, flags=re.M), encoding="utf-8")


def main() -> int:
    """Print the phrases whose count differs from the bound, or the counts; lower the bounds."""
    phrases = read_phrases(BOUNDS)
    places = find_phrases(phrases)
    counts = [len(places[phrase]) for phrase in phrases]
    if "--counts" in sys.argv:
        for phrase, count in zip(phrases, counts, strict=True):
            print(f"{count:>5}  {phrase.pattern.pattern}")
        return 0
    if "--tighten" in sys.argv:
        tighten(BOUNDS, counts)
        phrases = read_phrases(BOUNDS)
    is_wrong = False
    for phrase, count in zip(phrases, counts, strict=True):
        if count > phrase.at_most:
            print(f"{phrase.pattern.pattern!r}: {count} times, at most {phrase.at_most}; use {phrase.use}")
            for place, text in places[phrase]:
                print(f"  {place}: {text}")
        elif count < phrase.at_most:
            print(
                f"{phrase.pattern.pattern!r}: {count} times; tighten its bound of {phrase.at_most} to {count} (--tighten)"
            )
        is_wrong |= count != phrase.at_most
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
