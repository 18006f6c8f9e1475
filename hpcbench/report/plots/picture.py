"""What is drawn: the plotted figures, and a drawing that turns them into Vega-Lite or into a terminal's lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hpcbench.report.plots import theme
from hpcbench.results.schema import RunResult

if TYPE_CHECKING:
    import polars
    from rich.text import Text

Whole = Callable[[Sequence[tuple[str, str]]], Iterable[RunResult]]
"""Gives the whole results of (cluster, run_id) pairs: what is in files alone, such as single steps."""


@dataclass(frozen=True)
class Asked:
    """What a picture may be asked for beside its results."""

    by: tuple[str, ...] = ()
    """Columns that tell the lines from each other; without any it is the strategy."""
    whole: Whole | None = None
    predicted: polars.DataFrame | None = None
    """Rows of an oracle: columns as the kind that reads them says."""


class Drawing(Protocol):
    """A form of picture, over the columns that it names."""

    def vega(self, frame: polars.DataFrame) -> dict[str, Any]:
        """Data, marks and scales in Vega-Lite, without title and ``config``."""
        ...

    def text(self, frame: polars.DataFrame, width: int, *, plain: bool) -> list[Text]:
        """Lines of at most ``width`` characters, of ASCII alone where ``plain``."""
        ...


@dataclass(frozen=True)
class Picture:
    """One plot. Where there is nothing to draw, ``nothing`` says why and ``drawing`` is ``None``."""

    name: str
    title: str
    subtitle: str = ""
    """What all points have in common."""
    alt: str = ""
    """What the plot shows, in words and numbers computed from ``frame``."""
    drawing: Drawing | None = None
    frame: polars.DataFrame | None = None
    """The plotted rows, in SI units."""
    notes: list[str] = field(default_factory=list)
    """What spreads are, and what was left out."""
    nothing: str = ""

    @property
    def specification(self) -> dict[str, Any]:
        """Vega-Lite with its data inside; nothing in it is fetched. Empty where there is nothing to draw."""
        if self.drawing is None or self.frame is None:
            return {}
        title: dict[str, Any] = {"text": self.title}
        if self.subtitle:
            title["subtitle"] = _folded(self.subtitle)
        return {
            "description": self.alt, "title": title, "config": theme.config(), "padding": 8,
            **self.drawing.vega(self.frame),
        }  # fmt: skip

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The plotted rows as plain data, in SI units."""
        return [] if self.frame is None else self.frame.to_dicts()


_SUBTITLE_WIDTH = 90


def _folded(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, _SUBTITLE_WIDTH, max_lines=3, placeholder=" ...")
