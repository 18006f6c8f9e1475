"""Draw the pictures of the documentation. Run by ``make pictures``.

The table of the quickstart is drawn from its results in the tree, the live screen from a sweep that is made up here.
"""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console, Group, RenderableType

from hpcbench.paths import results_folder
from hpcbench.report.live import live_lines
from hpcbench.report.rows import make_rows
from hpcbench.report.select import select_sweeps
from hpcbench.report.tables import ResultsTable
from hpcbench.results.collect import collect
from hpcbench.results.store import ResultsTree
from hpcbench.submit.watch import ArrayLook, FailedRun, Shape, Snapshot, Timed

PICTURES = Path(__file__).resolve().parent / "pictures"


def main() -> None:
    """Write ``docs/pictures/*.svg``."""
    PICTURES.mkdir(exist_ok=True)
    _save("live", "hpcbench status --watch", 88, Group(*live_lines([_under_way()], 88)))
    tree = ResultsTree(results_folder())
    ((cluster, record),) = select_sweeps(tree, ["quickstart"], "local")
    rows = make_rows(collect(tree.cluster(cluster), record.run_ids))
    _save("quickstart", "make quickstart", 80, ResultsTable(rows, "quickstart on local"))


def _save(name: str, title: str, width: int, shown: RenderableType) -> None:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True, highlight=False, markup=False)
    console.print(shown)
    console.save_svg(str(PICTURES / f"{name}.svg"), title=title, unique_id=name)


def _under_way() -> Snapshot:
    """A sweep over 1, 2 and 4 nodes in the middle of its second array."""
    now_s = 1_800_000_000.0

    def timed(runs: int, took_s: float, last_s: float) -> tuple[Timed, ...]:
        ends = [last_s - 75.0 * back for back in reversed(range(runs))]
        return tuple(Timed(end_s - took_s - 6 * (number % 4), end_s) for number, end_s in enumerate(ends))

    shapes = [Shape(nodes, 4 * nodes, "gpu") for nodes in (1, 2, 4)]
    return Snapshot(
        sweep="scaling",
        cluster="my-cluster",
        now_unix_s=now_s,
        arrays=(
            ArrayLook(
                name="scaling-0001/0", job_id="81234", shape=shapes[0], counts={"ok": 24},
                timed=timed(24, 110, now_s - 900),
            ),
            ArrayLook(
                name="scaling-0001/1",
                job_id="81235",
                shape=shapes[1],
                counts={"ok": 10, "oom": 1, "running": 3, "pending": 10},
                timed=timed(11, 130, now_s - 20),
                running_since_unix_s=(now_s - 20, now_s - 60, now_s - 110),
            ),
            ArrayLook(name="scaling-0001/2", job_id="81236", shape=shapes[2], counts={"pending": 24}),
        ),
        failures=(
            FailedRun(
                "8ed186a7785cdcbe", "oom", "ddp on 8 ranks, vgg16, batch 512",
                "rank 3 asked for 2.0 GiB of 40 GiB, 38.9 GiB were in use", now_s - 480,
            ),
        ),
        failed=1,
    )  # fmt: skip


if __name__ == "__main__":
    main()
