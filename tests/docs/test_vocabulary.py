"""The vocabulary check reads paragraphs of pages, comments, and strings, and names file and line."""

from __future__ import annotations

import re
from pathlib import Path

from tests.vocabulary import Phrase, comment_lines, numbered_blocks, page_lines, python_blocks, tighten

BROKEN = Phrase(re.compile(r"\bunder way\b"), "running", 0, False)
FRAGMENT = Phrase(re.compile("(Of|What)\\b"), "a subject and a verb", 0, True)


def test_phrase_over_two_lines_of_a_page_has_the_place_of_its_first_word() -> None:
    page = "# Title\n\n    under way in code\n\n* a run that is under\n    way in a list\n\n```\nunder way\n```\nunder\n\nway\n"
    places = [each.place for block in numbered_blocks("a.md", page_lines(page)) for each in block.matches(BROKEN)]
    assert places == ["a.md:5"]


def test_python_comments_and_parts_of_one_string_are_joined() -> None:
    code = '# a run under\n# way\nx = 1  # under\ny = f"{x} runs under " f"way"\n"""What runs.\n\nOf all."""\n'
    blocks = list(python_blocks("a.py", code))
    assert sorted(each.place for block in blocks for each in block.matches(BROKEN)) == ["a.py:1", "a.py:4"]
    assert [each.place for block in blocks for each in block.matches(FRAGMENT)] == ["a.py:5"]


def test_comments_of_templates_and_profiles_are_read_without_code() -> None:
    template = "{# a run is under\n   way #}\nunder way\nx = 1  # under way\n"
    places = [each.place for block in numbered_blocks("t", comment_lines(template)) for each in block.matches(BROKEN)]
    assert places == ["t:1", "t:4"]


def test_tighten_lowers_bounds_and_never_raises_them(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.toml"
    path.write_text("at_most = 5\n\nat_most = 2\n")
    tighten(path, [3, 4])
    assert path.read_text() == "at_most = 3\n\nat_most = 2\n"
