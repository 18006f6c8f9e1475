"""Find phrases that ``vocabulary.toml`` replaces by a term of the glossary; exits 1 where one is found too often.

It reads README, CONTRIBUTING, docs (without decisions and the output of the reruns), and every string of the package:
docstrings, messages and help.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tomli

ROOT = Path(__file__).resolve().parent.parent
EXCLUDED = ("docs/decisions", "docs/reruns", "docs/schemas")


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


def read_phrases(path: Path) -> list[Phrase]:
    """The entries of ``vocabulary.toml``: a regular expression, its replacement, how often it may stand."""
    entries = tomli.loads(path.read_text(encoding="utf-8"))
    return [
        *(
            Phrase(re.compile(each["find"], re.I), each["use"], each.get("at_most", 0), False)
            for each in entries["phrase"]
        ),
        *(
            Phrase(re.compile(each["find"]), each["use"], each.get("at_most", 0), True)
            for each in entries["first_word"]
        ),
    ]


def texts() -> Iterator[tuple[str, str, bool]]:
    """``file:line``, text, and whether a docstring begins there, of everything that a person reads."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in pages:
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(EXCLUDED):
            is_code = False
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if line.startswith("```"):
                    is_code = not is_code
                elif not is_code and not line.startswith("    "):
                    yield f"{name}:{number}", line, False
    for path in sorted((ROOT / "hpcbench").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                for offset, line in enumerate(node.value.splitlines()):
                    yield f"{name}:{node.lineno + offset}", line, offset == 0 and id(node) in documentation


def find_phrases(phrases: list[Phrase]) -> dict[Phrase, list[Occurrence]]:
    """Every phrase with the places that use it."""
    places: dict[Phrase, list[Occurrence]] = defaultdict(list)
    for place, text, begins_docstring in texts():
        for phrase in phrases:
            if phrase.is_first_word:
                is_found = begins_docstring and phrase.pattern.match(text)
            else:
                is_found = phrase.pattern.search(text)
            if is_found:
                places[phrase].append(Occurrence(place, text.strip()))
    return places


def main() -> int:
    """Print the phrases that stand more often than allowed, or with ``--counts`` how often each stands."""
    phrases = read_phrases(ROOT / "tests" / "vocabulary.toml")
    places = find_phrases(phrases)
    if "--counts" in sys.argv:
        for phrase in phrases:
            print(f"{len(places[phrase]):>5}  {phrase.pattern.pattern}")
        return 0
    exceeded = [phrase for phrase in phrases if len(places[phrase]) > phrase.at_most]
    for phrase in exceeded:
        print(f"{phrase.pattern.pattern!r}: {len(places[phrase])} times, at most {phrase.at_most}; use {phrase.use}")
        for place, text in places[phrase]:
            print(f"  {place}: {text[:140]}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
