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
from hpcbench.report.configurations import rows_from_frame
from hpcbench.report.plots.plotting import PlotOptions, draw_plot, plot_results, save_plot
from hpcbench.report.results_table import results_text_view
from hpcbench.report.table_output import PrintedView
from hpcbench.results.frame import collected_frame
from hpcbench.results.results_tree import ResultsTree, collect_results
from hpcbench.results.schema import RunResult
from hpcbench.submit.submission_record import select_sweeps

PICTURES = Path(__file__).resolve().parent / "pictures"


PLOTTED = {
    "throughput": "strategy != 'gpipe'", "efficiency": "strategy in ['single', 'ddp', 'fsdp']",
    "scaling": "strategy in ['ddp', 'fsdp', '1f1b']", "parts": "tasks_per_node == 4 and nodes < 4",
    "memory": "strategy in ['fsdp', 'gpipe', '1f1b', 'filter'] and tasks_per_node * nodes in [2, 4, 8]",
    "distribution": "strategy in ['ddp', 'fsdp'] and nodes > 1", "timeline": "strategy == '1f1b' and pp_degree == 4",
    "predicted": "pp_degree > 1", "mfu": "strategy in ['ddp', 'fsdp', '1f1b']",
    "energy": "strategy in ['ddp', 'fsdp', '1f1b']",
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
    from hpcbench.report.column_names import Condition
    from hpcbench.report.configurations import filter_launches
    from hpcbench.report.load_results import full_results, load_frame
    from hpcbench.report.plots.plot_model import PlotRequest
    from hpcbench.report.plots.terminal_plots import print_plot

    with tempfile.TemporaryDirectory() as folder:
        write_planted(Path(folder, "made-up"))
        tree = ResultsTree(Path(folder))

        def whole(wanted: Sequence[tuple[str, str]]) -> list[RunResult]:
            return full_results(tree, [], None, wanted)

        for name, where in PLOTTED.items():
            picture = draw_plot(
                name, filter_launches(load_frame(tree, []), Condition(where, "")), PlotRequest((), whole)
            )
            path = PICTURES / f"plot-{name}.svg"
            save_plot(picture, path)
            assert path.stat().st_size < MOST_BYTES, f"{path} has {path.stat().st_size} bytes"
            if name == "scaling":
                console = recorder()
                print_plot(picture, console)
                write_terminal(console, "plot-terminal", "hpcbench plot scaling")


def write_terminal(console: Console, name: str, title: str) -> None:
    """Write the recording of ``console`` as a picture, without the fonts that it would fetch."""
    drawn = console.export_svg(title=title, unique_id=name)
    (PICTURES / f"{name}.svg").write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL), encoding="utf-8"
    )


def recorder() -> Console:
    """A terminal of 80 columns that is drawn."""
    return Console(width=80, record=True, file=io.StringIO(), force_terminal=True, highlight=False, markup=False)


def quickstart() -> None:
    """``docs/pictures/quickstart.svg`` and ``quickstart-throughput.svg``."""
    tree = ResultsTree(results_folder())
    ((cluster, record),) = select_sweeps(tree, ["quickstart"], "local")
    rows = rows_from_frame(collected_frame(collect_results(tree.cluster(cluster), record.run_ids)))
    console = recorder()
    console.print(PrintedView(results_text_view(rows, "quickstart on local")))
    PICTURES.mkdir(exist_ok=True)
    write_terminal(console, "quickstart", "make quickstart")
    drawn = plot_results("throughput", tree, ["quickstart"], ["local"], PlotOptions())
    save_plot(drawn, PICTURES / "quickstart-throughput.svg")


if __name__ == "__main__":
    main()
