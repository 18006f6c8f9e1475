"""What every rank did when: bars over time, a row for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from hpcbench.report.plots import theme
from hpcbench.report.plots.grid import cut, flowed, tick_line
from hpcbench.report.plots.rows import STEP_PX
from hpcbench.report.plots.scales import Axis, figures

if TYPE_CHECKING:
    import polars

COLUMNS = ("panel", "source", "rank", "kind", "name", "chunk", "micro_batch", "begin_s", "end_s")
"""``panel`` is the run, ``source`` whether a span was measured or planned, ``name`` the action and its micro-batch."""
_WIDTH = 620
_ROOM_PX = 7.0
"""A name is written into a bar that has so much room for each of its characters."""


class Kind(NamedTuple):
    """How an action is called and drawn."""

    title: str
    colour: str
    ink: str


KINDS = {
    "F": Kind("forward", theme.SKY, "#000000"), "B": Kind("backward", theme.BLUE, "#FFFFFF"),
    "I": Kind("backward of inputs", theme.GREEN, "#000000"), "W": Kind("backward of weights", theme.ORANGE, "#000000"),
}  # fmt: skip
_OTHER = Kind("other", theme.LIGHT, "#000000")


@dataclass(frozen=True)
class Spans:
    """Rows of ``COLUMNS``; every run has a time axis of its own."""

    axes: dict[str, Axis]
    """Of each run."""

    def vega(self, frame: polars.DataFrame) -> dict[str, Any]:
        """As ``Drawing``."""
        there = {KINDS.get(kind, _OTHER) for kind in frame["kind"].to_list()}
        # The same for all runs: their scales become one.
        kinds = [one for one in (*KINDS.values(), _OTHER) if one in there]
        runs = [self._run(run, frame.filter(frame["panel"] == run), kinds) for run in self.axes]
        return runs[0] if len(runs) == 1 else {"vconcat": runs}

    def _run(self, run: str, frame: polars.DataFrame, kinds: list[Kind]) -> dict[str, Any]:
        axis = self.axes[run]
        longest = max(figures(frame, "end_s"))
        values = [
            {
                "source": row["source"], "rank": f"rank {row['rank']}", "action": KINDS.get(row["kind"], _OTHER).title,
                "chunk": row["chunk"], "micro_batch": row["micro_batch"], "begin": axis.shown(row["begin_s"]),
                "end": axis.shown(row["end_s"]), "middle": axis.shown((row["begin_s"] + row["end_s"]) / 2),
                "name": row["name"] if _fits(row, longest) else "", "ink": KINDS.get(row["kind"], _OTHER).ink,
            }
            for row in frame.iter_rows(named=True)
        ]  # fmt: skip
        colour = {"domain": [one.title for one in kinds], "range": [one.colour for one in kinds]}
        ranks = list(dict.fromkeys(row["rank"] for row in sorted(values, key=lambda row: int(row["rank"][5:]))))
        x = {"type": "quantitative", "title": axis.heading}
        y = {"field": "rank", "type": "nominal", "sort": ranks, "title": None, "axis": {"grid": False}}
        action = {"field": "action", "type": "nominal", "title": None}
        tooltip = [{"field": name, "type": "nominal"} for name in ("rank", "action", "chunk", "micro_batch")]
        tooltip += [{"field": name, "type": "quantitative", "format": "~g"} for name in ("begin", "end")]
        layers = [
            {"mark": {"type": "bar", "stroke": "#000000", "strokeWidth": 0.5, "height": {"band": 0.85}, "aria": False},
             "encoding": {"x": {"field": "begin", **x}, "x2": {"field": "end"}, "tooltip": tooltip,
                          "color": {**action, "scale": colour}}},
            {"mark": {"type": "text", "fontSize": 10, "aria": False},
             "encoding": {"x": {"field": "middle", **x}, "text": {"field": "name", "type": "nominal"},
                          "fill": {"field": "ink", "type": "nominal", "scale": None}}},
        ]  # fmt: skip
        return {
            "data": {"values": values},
            **({"title": {"text": run, "fontSize": 13, "anchor": "start"}} if len(self.axes) > 1 else {}),
            "facet": {"row": {"field": "source", "type": "nominal", "sort": ["measured", "planned"], "title": None}},
            "spec": {
                "width": _WIDTH, "height": {"step": STEP_PX}, "layer": layers, "encoding": {"y": y},
            },
        }  # fmt: skip

    def text(self, frame: polars.DataFrame, width: int, *, plain: bool) -> list[Text]:
        """As ``Drawing``."""
        left = len("rank ") + max(len(str(rank)) for rank in frame["rank"].to_list()) + 1
        cells = max(8, width - left - 1)
        lines: list[Text] = []
        for run, axis in self.axes.items():
            inside = frame.filter(frame["panel"] == run)
            longest = max(figures(inside, "end_s"))
            if len(self.axes) > 1:
                lines += [*([Text("")] if lines else []), cut(run, width, "bold")]
            for (source,), half in inside.group_by(["source"], maintain_order=True):
                lines.append(cut(str(source), width, "dim"))
                for (rank,), spans in half.group_by(["rank"], maintain_order=True):
                    name = Text(f"{f'rank {rank}':<{left}}{'|' if plain else '│'}")
                    lines.append(name.append_text(_line(spans, longest, cells)))
            ticks, labels = tick_line(0.0, longest / axis.factor, cells, plain=plain)
            blank = " " * (left + 1)
            lines += [Text(blank + ticks, style="dim"), Text(blank + labels, style="dim")]
            lines.append(cut(axis.heading.rjust(width), width, "dim"))
        there = set(frame["kind"].to_list())
        entries = [Text.assemble((kind, one.colour), f" {one.title}") for kind, one in KINDS.items() if kind in there]
        return [*lines, Text(""), *flowed([*entries, Text("and its micro-batch")], width)]


def _fits(row: dict[str, Any], longest: float) -> bool:
    return bool((row["end_s"] - row["begin_s"]) / longest * _WIDTH >= _ROOM_PX * len(row["name"]))


def _line(spans: polars.DataFrame, longest: float, cells: int) -> Text:
    """Names where actions begin, dots while they go on, blanks while the rank waits."""
    line: list[tuple[str, str]] = [(" ", "")] * cells
    for name, kind, begin, end in spans["name", "kind", "begin_s", "end_s"].iter_rows():
        first = min(round(begin / longest * cells), cells - 1)
        count = max(1, round(end / longest * cells) - first)
        shown = name if len(name) <= count else name[:1]
        colour = theme.terminal_colour(KINDS.get(kind, _OTHER).colour)
        for place, character in enumerate(shown.ljust(count, ".")[: cells - first]):
            line[first + place] = (character, colour)
    text = Text()
    for character, colour in line:
        text.append(character, colour)
    text.rstrip()
    return text
