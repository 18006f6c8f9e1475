"""Every block of code on every page, what kind it is, and what the page says where the tests cannot run it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tomli

ROOT = Path(__file__).resolve().parents[2]
_COMMAND = re.compile(
    r"(?:hpcbench|make|pip|python3?|\.venv/bin/\S+|sudo|cd|cp|mkdir|echo|export|git|s?bash|srun|sbatch|qsub)\s"
)
_EXCUSE = re.compile(r"<!-- Not run by the tests: (.+?) -->", re.DOTALL)


class Block(NamedTuple):
    """A fenced or an indented block. ``line`` is its first line's number on the page."""

    page: str
    line: int
    fence: str
    text: str
    excuse: str
    """Why the tests do not run it, as the comment before it says; empty where they do."""

    @property
    def kind(self) -> str:
        """``console``, ``toml``, ``python``, or ``text``: output, a formula, a layout of files."""
        if self.fence in ("toml", "python", "console", "text"):
            return self.fence
        if _COMMAND.match(self.text):
            return "console"
        try:
            return "toml" if tomli.loads(self.text) else "text"
        except tomli.TOMLDecodeError:
            return "python" if self.text.startswith("import ") else "text"

    def commands(self) -> list[str]:
        """The command lines, those that go on with a backslash as one."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]


def pages() -> list[Path]:
    """Every page that is kept in the tree."""
    folders = [
        ROOT,
        ROOT / "docs",
        ROOT / "docs" / "decisions",
        ROOT / "templates",
        ROOT / "results",
        ROOT / "clusters",
        ROOT / "benchmarks",
        ROOT / "benchmarks" / "oracle",
        ROOT / "hpcbench",
    ]
    return [path for folder in folders for path in sorted(folder.glob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of ``page``, from top to bottom."""
    lines = page.read_text(encoding="utf-8").splitlines()
    name = str(page.relative_to(ROOT))
    number, paragraph = 0, ""
    while number < len(lines):
        line = lines[number]
        fenced = re.fullmatch(r"```(\w*)", line)
        if not fenced and not (line.startswith("    ") and not lines[number - 1].strip()):
            # A paragraph ends with an empty line; the block may follow that.
            starts_anew = number and not lines[number - 1].strip()
            paragraph = (f"{line}" if starts_anew else f"{paragraph}\n{line}") if line.strip() else paragraph
            number += 1
            continue
        first = number + 1
        if fenced:
            end = next(later for later in range(first, len(lines)) if lines[later] == "```")
            text, number = "\n".join(lines[first:end]), end + 1
        else:
            end = next((later for later in range(number, len(lines)) if lines[later][:4].strip()), len(lines))
            text, number = "\n".join(one[4:] for one in lines[number:end]).rstrip(), end
        excuse = _EXCUSE.search(paragraph)
        yield Block(
            name, first, fenced[1] if fenced else "", text + "\n", " ".join(excuse[1].split()) if excuse else ""
        )
        paragraph = ""


def make_targets() -> set[str]:
    """Return the targets of ``make``."""
    rules = re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {name for names in rules for name in names.split()}
