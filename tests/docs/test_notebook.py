"""The example notebook, executed cell by cell on a tree of planted results."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import polars
import pytest

from benchmarks.planted_results import write_planted
from hpcbench.report.plots.plotting import PLOTS

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "results.ipynb"


def code_cells() -> dict[str, str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}


def execute(source: str, namespace: dict[str, Any]) -> Any:
    """Execute a cell; return the value of its last expression, which a notebook shows."""
    body = ast.parse(source).body
    end = body[-1]
    last = end if isinstance(end, ast.Expr) else None
    body = body[:-1] if last else body
    exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), namespace)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), namespace)


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each cell shows, by its id."""
    write_planted(tmp_path / "results" / "planted")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCBENCH_RESULTS", str(tmp_path / "results"))
    namespace: dict[str, Any] = {}
    return {name: execute(source, namespace) for name, source in code_cells().items()}


def test_every_cell_shows_something(shown: dict[str, Any]) -> None:
    frames = {name: frame for name, frame in shown.items() if isinstance(frame, polars.DataFrame)}
    assert all(frame.height for frame in frames.values())
    assert dict(frames["load"].iter_rows())["oom"] == 1
    assert set(frames["fastest"]["devices"]) == {1, 2, 4, 8, 16}
    assert frames["launches"]["launches"].to_list() == [3] * frames["launches"].height
    charts = {name: chart.to_dict() for name, chart in shown.items() if name in PLOTS}
    assert set(charts) == {"scaling", "memory"}
    assert set(shown) == {"import", *frames, *charts}


def test_the_notebook_is_stored_without_output() -> None:
    document = json.loads(NOTEBOOK.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    cells = document["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)
