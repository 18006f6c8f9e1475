"""The cost of every test: a plugin that measures it, and the script that writes tests/durations.tsv.

``make durations`` runs all tests with the plugin; the script also reads logs of pytest. Processor seconds, of the test's process and of all that it started,
are the measure by which tests are marked ``slow``: other programs on the machine make a test last longer, but hardly
cost more. They leave out what a daemon computes that was there before, as those of the SLURM box are.

The table has a row for every test function outside of ``tests/cuda``, whose tests no run of ``make durations`` collects.
A test that was never measured (``soak`` and ``faults`` are not part of ``make test-all``) has no seconds (``nan``) and no
cases. ``tests/test_durations.py`` compares the rows with the functions.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

FOLDER = "HPCBENCH_DURATIONS"
"""The variable that names the folder for measurements; nothing is measured without it."""
TESTS = Path(__file__).resolve().parent
TABLE = TESTS / "durations.tsv"
_DURATION = re.compile(r"^ *(\d+\.\d+)s (?:setup|call|teardown) +(\S.*)$", re.MULTILINE)
HEAD = "cpu_s\twall_s\tcases\ttest"


class Cost(NamedTuple):
    """The cost of all cases of one test function, with their fixtures."""

    cpu_s: float
    wall_s: float
    cases: int


UNMEASURED = Cost(math.nan, math.nan, 0)


@cache
def defined_tests() -> set[str]:
    """Return the id of every test function outside of ``tests/cuda``, as pytest writes it."""
    return {
        f"{path.relative_to(TESTS.parent).as_posix()}::{node.name}"
        for path in TESTS.rglob("test_*.py")
        if TESTS / "cuda" not in path.parents
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure a test with its fixtures."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return (yield)
    wall_s, cpu_s = time.monotonic(), _cpu_s()
    result = yield
    line = json.dumps({"test": item.nodeid, "wall_s": time.monotonic() - wall_s, "cpu_s": max(_cpu_s() - cpu_s, 0.0)})
    with (Path(folder) / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    return result


def _cpu_s() -> float:
    """Return the processor seconds of this process and its descendants, ended ones included."""
    total = 0.0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def read_costs(paths: Iterable[Path]) -> dict[str, Cost]:
    """Return the costs by test function; the last measurement of a case counts.

    ``paths`` are files of the plugin, and logs of ``pytest --durations 0`` (with ``-vv``, or quick tests are missing).
    """
    cases: dict[str, tuple[float, float]] = {}
    for path in sorted(paths, key=_written):
        cases |= _read_plugin(path) if path.suffix == ".jsonl" else _read_log(path)
    costs: dict[str, Cost] = {}
    for name, (cpu_s, wall_s) in cases.items():
        function = name.partition("[")[0]
        before = costs.get(function, Cost(0.0, 0.0, 0))
        costs[function] = Cost(before.cpu_s + cpu_s, before.wall_s + wall_s, before.cases + 1)
    return costs


def _read_plugin(path: Path) -> dict[str, tuple[float, float]]:
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {one["test"]: (one["cpu_s"], one["wall_s"]) for one in lines}


def _read_log(path: Path) -> dict[str, tuple[float, float]]:
    """A log knows no processor seconds: they are ``nan``."""
    cases: dict[str, tuple[float, float]] = {}
    for seconds, name in _DURATION.findall(path.read_text(encoding="utf-8", errors="replace")):
        cases[name] = (math.nan, cases.get(name, (0.0, 0.0))[1] + float(seconds))
    return cases


def _written(path: Path) -> float:
    return path.stat().st_mtime


def _weight(cost: Cost) -> float:
    """Return the sort key of a test."""
    if cost.cases == 0:
        return -1.0
    return cost.wall_s if math.isnan(cost.cpu_s) else cost.cpu_s


def read_table(path: Path = TABLE) -> dict[str, Cost]:
    """The committed table."""
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:])
    return {test: Cost(float(cpu_s), float(wall_s), int(cases)) for cpu_s, wall_s, cases, test in rows}


def write_table(costs: dict[str, Cost], path: Path = TABLE) -> None:
    """The costliest first; a test that was not measured this time keeps its row as long as it exists."""
    known = {**(read_table(path) if path.exists() else {}), **costs}
    rows = {test: known.get(test, UNMEASURED) for test in defined_tests()}
    ordered = sorted(rows.items(), key=lambda item: (-_weight(item[1]), item[0]))
    lines = (f"{cost.cpu_s:.2f}\t{cost.wall_s:.2f}\t{cost.cases}\t{test}" for test, cost in ordered)
    path.write_text("\n".join([HEAD, *lines]) + "\n", encoding="utf-8")


def by_file(costs: dict[str, Cost]) -> Iterable[tuple[str, Cost]]:
    """Sums over files, the costliest first."""
    files: dict[str, Cost] = {}
    for test, cost in costs.items():
        name = test.partition("::")[0]
        before = files.get(name, Cost(0.0, 0.0, 0))
        files[name] = Cost(before.cpu_s + cost.cpu_s, before.wall_s + cost.wall_s, before.cases + cost.cases)
    return sorted(files.items(), key=lambda item: -item[1].wall_s)


def main(arguments: list[str]) -> None:
    """Write the table of what the files ``arguments`` hold, and print sums."""
    write_table(read_costs(map(Path, arguments)))
    table = {test: cost for test, cost in read_table().items() if cost.cases}
    for name, cost in by_file(table):
        print(f"{cost.cpu_s:8.1f} s {cost.wall_s:8.1f} s {cost.cases:5d}  {name}")
    known = sum(cost.cpu_s for cost in table.values() if not math.isnan(cost.cpu_s))
    print(f"{known:8.1f} s of a processor, {sum(cost.wall_s for cost in table.values()):8.1f} s, {len(table)} tests")


if __name__ == "__main__":
    main(sys.argv[1:])
