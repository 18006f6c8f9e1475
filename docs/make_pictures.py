"""Draw what the README shows: the table of the quickstart, from its results in the tree. Run by ``make pictures``."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from hpcbench.paths import results_folder
from hpcbench.report.rows import make_rows
from hpcbench.report.select import select_sweeps
from hpcbench.report.tables import ResultsTable
from hpcbench.results.collect import collect
from hpcbench.results.store import ResultsTree

PICTURES = Path(__file__).resolve().parent / "pictures"


def main() -> None:
    """Write ``docs/pictures/quickstart.svg``."""
    tree = ResultsTree(results_folder())
    ((cluster, record),) = select_sweeps(tree, ["quickstart"], "local")
    rows = make_rows(collect(tree.cluster(cluster), record.run_ids))
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True, highlight=False, markup=False)
    console.print(ResultsTable(rows, "quickstart on local"))
    PICTURES.mkdir(exist_ok=True)
    console.save_svg(str(PICTURES / "quickstart.svg"), title="make quickstart", unique_id="quickstart")


if __name__ == "__main__":
    main()
