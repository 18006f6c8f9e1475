"""Plots in terminals, as golden text: 80 columns with every character, 40 columns of ASCII."""

from __future__ import annotations

import io
import os
from pathlib import Path

import polars
import pytest
from rich.console import Console

from hpcbench.report.plots.plot_model import Plot, PlotRequest
from hpcbench.report.plots.plotting import PLOTS, draw_plot
from hpcbench.report.plots.terminal_plots import print_plot
from hpcbench.report.plots.theme import format_tick, make_axis
from hpcbench.results.frame import collected_frame
from hpcbench.results.results_tree import ResultsTree
from tests.report.test_pivot_table import entry, planted
from tests.report.test_plotting import picture as draw_of

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
SHOWN = {
    "throughput": "strategy in ['ddp', 'fsdp', 'single']", "efficiency": "strategy in ['ddp', 'fsdp', 'single']",
    "scaling": "strategy in ['ddp', 'fsdp']", "parts": "nodes == 1 and strategy != 'gpipe'",
    "memory": "strategy in ['1f1b', 'filter']", "distribution": "strategy == 'ddp'",
    "timeline": "strategy == '1f1b' and pp_degree == 4", "predicted": "pp_degree > 1", "mfu": "strategy in ['ddp', 'fsdp']",
    "energy": "strategy == 'ddp'",
}  # fmt: skip


@pytest.fixture(scope="module")
def pictures(planted_tree: Path) -> list[Plot]:
    return [draw_of(ResultsTree(planted_tree), name, where) for name, where in SHOWN.items()]


def text(picture: Plot, width: int, encoding: str) -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_plot(picture, Console(file=out, width=width, highlight=False, markup=False))
    out.flush()
    written = out.buffer.getvalue().decode(encoding)
    return "\n".join(line.rstrip() for line in written.splitlines()) + "\n"


@pytest.mark.parametrize(("width", "encoding"), [(80, "utf-8"), (40, "ascii")])
def test_every_terminal_plot_equals_its_golden_text(pictures: list[Plot], width: int, encoding: str) -> None:
    assert set(SHOWN) == {name for name, kind in PLOTS.items() if kind.on_page and kind.workload is None}
    shown = "\n".join(text(one, width, encoding) for one in pictures)
    path = GOLDEN / f"plots-{width}.txt"
    if os.environ.get("HPCBENCH_GOLDEN") == "write":
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8"), "make golden, then review the diff"
    assert max(map(len, shown.splitlines())) <= width


def test_the_narrowest_terminal_shows_a_plot(pictures: list[Plot]) -> None:
    for one in pictures:
        assert len(text(one, 24, "ascii").splitlines()) > 8


def test_panels_follow_each_other_with_the_same_scales() -> None:
    same = planted().filter((polars.col("spec.batch_size") == 8) & (polars.col("spec.nodes") < 4))
    lines = text(draw_plot("throughput", same), 80, "utf-8").splitlines()
    headings = [place for place, line in enumerate(lines) if line.startswith(("vgg11", "resnet18"))]
    assert [lines[place] for place in headings] == ["resnet18", "vgg11"]
    margins = [[line.partition("│")[0] for line in lines[place + 2 : place + 16]] for place in headings]
    assert all(one == margins[0] for one in margins)


def test_bars_of_an_ordinary_sweep() -> None:
    entries = [entry(ms, model=model, strategy=name, nodes=2)
               for model, name, ms in (("resnet18", "ddp", 10), ("resnet18", "fsdp", 16), ("vit", "ddp", 250))]  # fmt: skip
    assert text(draw_plot("throughput", collected_frame(entries)), 60, "utf-8") == (
        "Throughput by strategy\n"
        "mnist, batch 8 per replica, 2 devices, on c\n"
        "\n"
        "resnet18\n"
        " ddp 1600│████████████████████████████████████████▒▒▒▒▒▒▒▒▒▒\n"
        "fsdp 1000│█████████████████████████▒▒▒▒▒▒▒\n"
        "         └┬─────────────┬─────────────┬────────────┬────────\n"
        "          0            500          1,000        1,500\n"
        "                                                   samples/s\n"
        "\n"
        "vit\n"
        "ddp 64│███████████████████████████████████████████▒▒▒▒▒▒▒▒▒▒\n"
        "      └┬──────────────┬─────────────┬──────────────┬────────\n"
        "       0              20            40             60\n"
        "                                                   samples/s\n"
        "\n"
        "number: median   ▒ 95 % of the median within one launch\n"
        "\n"
        "whiskers: 95 % of the median within one launch\n"
        "each panel has its own scale\n"
    )


def test_labels_of_an_axis_do_not_touch() -> None:
    entries = [entry(100, nodes=nodes) for nodes in (1000, 1001, 1002, 1003, 1004, 2000)]
    shown = text(draw_plot("throughput", collected_frame(entries)), 80, "ascii")
    (ticks,) = [line.split() for line in shown.splitlines() if line.strip().startswith("1,000 ")]
    assert ticks == ["1,000", "2,000"]


def test_a_line_that_is_only_predicted_has_marks() -> None:
    times = {"step_time_s": [0.1, 0.2], "step_time_low_s": [0.1, 0.2], "step_time_high_s": [0.1, 0.2]}
    rows = polars.DataFrame({"strategy": ["ddp", "ddp"], "devices": [1, 2], **times})
    shown = text(draw_plot("scaling", collected_frame([]), PlotRequest(predicted=rows)), 60, "ascii")
    assert len([line for line in shown.splitlines() if "o" in line.partition("|")[2]]) == 2


def test_an_empty_terminal_plot_gives_the_reason() -> None:
    assert text(draw_plot("energy", collected_frame([entry(100)])), 80, "utf-8") == (
        "Energy per sample over devices\nnothing to draw: 1 configuration ended well, but none has a measured energy\n"
    )


def test_units_suit_the_figures() -> None:
    assert make_axis("step time", "s", [0.0012, 0.4, None, 0.5]).heading == "step time (ms)"
    assert make_axis("{}samples/s", "/s", [5e3, 7e6, 8e6], log=True) == ("M samples/s", 1e6, "", 10)
    assert make_axis("{}samples/s", "/s", [50.0]).heading == "samples/s"
    assert make_axis("memory", "B", [2.0**31]).heading == "memory (GiB)"
    assert make_axis("memory", "B", []).shown(1536.0) == 1536
    assert [format_tick(value) for value in (0.1 + 0.2, 12345, 1.5e7)] == ["0.3", "12,345", "1.5e+07"]


def test_hostile_names_are_neither_codes_nor_markup(pictures: list[Plot]) -> None:
    rows = [entry(100, model="[red]m\x1b[31m\x07[/red]"), entry(60, model="[red]m\x1b[31m\x07[/red]", nodes=2)]
    shown = text(draw_plot("throughput", collected_frame(rows)), 80, "utf-8")
    assert "[red]m" in shown
    assert not set(shown) & set(map(chr, [*range(10), *range(11, 32), 127]))
