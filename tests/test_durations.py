"""The table of durations lists the tests that exist."""

from __future__ import annotations

from pathlib import Path

from tests.durations import HEAD, UNMEASURED, Cost, defined_tests, read_table, write_table


def test_durations_list_every_test_function_and_no_other() -> None:
    listed, defined = set(read_table()), defined_tests()
    assert sorted(defined - listed) == [], "python -m tests.durations adds rows for them"
    assert sorted(listed - defined) == [], "these tests do not exist"


def test_a_written_table_drops_absent_tests_and_marks_unmeasured_ones(tmp_path: Path) -> None:
    table = tmp_path / "durations.tsv"
    table.write_text(f"{HEAD}\n1.00\t2.00\t3\ttests/test_units.py::test_that_does_not_exist\n")
    measured, unmeasured = sorted(defined_tests())[:2]
    write_table({measured: Cost(1.0, 2.0, 3)}, table)
    rows = read_table(table)
    assert set(rows) == defined_tests()
    assert rows[measured] == Cost(1.0, 2.0, 3)
    assert rows[unmeasured].cases == UNMEASURED.cases == 0
