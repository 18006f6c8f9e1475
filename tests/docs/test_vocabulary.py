"""The vocabulary check reads paragraphs of pages, comments, and strings, and names file and line."""

from __future__ import annotations

from collections.abc import Iterable

from tests.vocabulary import Paragraph, comment_paragraphs, find, page_paragraphs, python_paragraphs

BROKEN = {"find": r"\bunder way\b"}
FRAGMENT = {"find": "(Of|What)\\b"}


def places(texts: Iterable[Paragraph], entry: dict[str, str], *, is_first_word: bool = False) -> list[str]:
    return sorted(found.split(":")[1] for found in find(entry, is_first_word, list(texts)))


def test_a_phrase_over_two_lines_of_a_page_has_the_line_of_its_paragraph() -> None:
    page = "# Title\n\n    under way in code\n\n* a run that is under\n  way in a list\n\n```\nunder way\n```\nunder\n\nway\n"
    assert places(page_paragraphs("a.md", page), BROKEN) == ["5"]


def test_rows_of_a_table_are_read_by_themselves() -> None:
    page = "| under |\n| way |\n| is under way |\n"
    assert places(page_paragraphs("a.md", page), BROKEN) == ["3"]


def test_python_comments_and_parts_of_one_string_are_joined() -> None:
    code = '# a run under\n# way\nx = 1\ny = f"{x} runs under " f"way"\n"""What runs.\n\nOf all."""\n'
    texts = list(python_paragraphs("a.py", code))
    assert places(texts, BROKEN) == ["1", "4"]
    assert places(texts, FRAGMENT, is_first_word=True) == ["5"]


def test_comments_of_templates_and_profiles_are_read_without_code() -> None:
    template = "{# a run is under\n   way #}\nunder way\nx = 1  # under way\n"
    assert places(comment_paragraphs("t", template), BROKEN) == ["1", "4"]
