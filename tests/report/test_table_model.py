"""Footnotes of tables: the letters of kinds of warnings."""

from __future__ import annotations

from types import SimpleNamespace

from hpcbench.report.table_model import WarningFootnotes


def test_letters_are_consecutive_beside_a_warning_that_all_rows_have() -> None:
    rows = [SimpleNamespace(warnings=texts) for texts in (["slow disk", "busy host"], ["busy host", "hot device"])]
    footnotes = WarningFootnotes(rows, shared=True)
    assert [footnotes.marks(row) for row in rows] == ["*a", "*b"]
    assert footnotes.footnotes() == ["*a: slow disk", "all 2 rows: busy host", "*b: hot device"]


def test_a_shared_warning_leaves_26_letters_to_the_others() -> None:
    others = [f"fault {chr(97 + number) * 3}" for number in range(27)]
    rows = [SimpleNamespace(warnings=["busy host", other]) for other in others]
    footnotes = WarningFootnotes(rows, shared=True)
    assert [footnotes.marks(row) for row in rows[-2:]] == ["*z", "*+"]
    assert footnotes.footnotes()[-1] == "*+: 1 more kinds of warnings: see `hpcbench collect`"


def test_only_a_row_with_a_plus_has_a_note_of_it() -> None:
    kinds = ["slow disk", "hot device", "noise", "drift"]
    for own, mark, has_note in ((kinds[:3], "*a,b,c", False), (kinds, "*a,b,c,+", True)):
        rows = [SimpleNamespace(warnings=["busy host", *own]), SimpleNamespace(warnings=["busy host"])]
        footnotes = WarningFootnotes(rows, shared=True)
        assert footnotes.marks(rows[0]) == mark
        assert any(note.startswith("*+: more than 3 kinds") for note in footnotes.footnotes()) == has_note
