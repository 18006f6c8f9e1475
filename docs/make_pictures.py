"""Draw what the documentation shows: the quickstart's table, from its results in the tree, and plots of planted ones.

Run by ``make pictures``.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hpcbench.paths import results_folder
from hpcbench.report.rows import make_rows
from hpcbench.report.select import select_sweeps
from hpcbench.report.tables import ResultsTable
from hpcbench.results.collect import collect
from hpcbench.results.schema import RunResult
from hpcbench.results.store import ResultsTree

PICTURES = Path(__file__).resolve().parent / "pictures"


PLOTTED = {
    "throughput": "strategy != 'gpipe'", "efficiency": "strategy in ['single', 'ddp', 'fsdp']",
    "scaling": "strategy in ['ddp', 'fsdp', '1f1b']", "parts": "tasks_per_node == 4 and nodes < 4",
    "memory": "strategy in ['fsdp', 'gpipe', '1f1b', 'filter'] and tasks_per_node * nodes in [2, 4, 8]",
    "distribution": "strategy in ['ddp', 'fsdp'] and nodes > 1", "timeline": "strategy == '1f1b' and pp_degree == 4",
    "predicted": "pp_degree > 1", "energy": "strategy in ['ddp', 'fsdp', '1f1b']",
}  # fmt: skip
"""What of the planted results each kind of plot shows."""
MOST_BYTES = 60_000


def main() -> None:
    """Write ``docs/pictures/*.svg``, and the screenshots where there is a browser."""
    quickstart()
    plots()
    subprocess.run([sys.executable, PICTURES.parent / "make_screenshot.py"], check=True)


def plots() -> None:
    """``docs/pictures/plot-*.svg`` and ``plot-terminal.svg``, of results that nobody measured."""
    # Not part of the package.
    sys.path.insert(0, str(PICTURES.parents[1]))
    from benchmarks.planted_results import write_planted
    from hpcbench.report.groups import chosen
    from hpcbench.report.load import gather
    from hpcbench.report.names import Condition
    from hpcbench.report.plots.catalog import draw
    from hpcbench.report.plots.picture import Asked
    from hpcbench.report.plots.save import save
    from hpcbench.report.plots.terminal import TerminalPicture
    from hpcbench.report.whole import whole_results

    with tempfile.TemporaryDirectory() as folder:
        write_planted(Path(folder, "made-up"))
        tree = ResultsTree(Path(folder))

        def whole(wanted: Sequence[tuple[str, str]]) -> list[RunResult]:
            return whole_results(tree, [], None, wanted)

        for name, where in PLOTTED.items():
            picture = draw(name, chosen(gather(tree, []), Condition(where, "")), Asked((), whole))
            path = PICTURES / f"plot-{name}.svg"
            save(picture, path)
            assert path.stat().st_size < MOST_BYTES, f"{path} has {path.stat().st_size} bytes"
            if name == "scaling":
                console = recorder()
                console.print(TerminalPicture(picture))
                write_terminal(console, "plot-terminal", "hpcbench plot scaling")


def write_terminal(console: Console, name: str, title: str) -> None:
    """What ``console`` recorded as a picture, without the fonts that it would fetch."""
    drawn = console.export_svg(title=title, unique_id=name)
    (PICTURES / f"{name}.svg").write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL), encoding="utf-8"
    )


def recorder() -> Console:
    """A terminal of 80 columns that is drawn."""
    return Console(width=80, record=True, file=io.StringIO(), force_terminal=True, highlight=False, markup=False)


def quickstart() -> None:
    """``docs/pictures/quickstart.svg``."""
    tree = ResultsTree(results_folder())
    ((cluster, record),) = select_sweeps(tree, ["quickstart"], "local")
    rows = make_rows(collect(tree.cluster(cluster), record.run_ids))
    console = recorder()
    console.print(ResultsTable(rows, "quickstart on local"))
    PICTURES.mkdir(exist_ok=True)
    write_terminal(console, "quickstart", "make quickstart")


if __name__ == "__main__":
    main()
