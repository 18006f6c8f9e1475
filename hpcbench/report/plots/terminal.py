"""A picture in a terminal: title, drawing and notes, in characters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from hpcbench.report.plots.grid import cut

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from hpcbench.report.plots.picture import Picture

_WIDEST = 100
_NARROWEST = 24
_ASCII = str.maketrans({"µ": "u"})


@dataclass(frozen=True)
class TerminalPicture:
    """``picture`` as wide as the terminal, up to ``_WIDEST``; ASCII alone where the terminal's encoding is no UTF."""

    picture: Picture

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See the class."""
        plain = options.ascii_only
        width = max(_NARROWEST, min(options.max_width, _WIDEST))
        for line in self._lines(width, plain=plain):
            yield _ascii(line) if plain else line

    def _lines(self, width: int, *, plain: bool) -> list[Text]:
        one = self.picture
        lines = [Text(one.title, style="bold")]
        lines += [Text(one.subtitle, style="dim")] if one.subtitle else []
        if one.drawing is None or one.frame is None:
            lines.append(Text(f"nothing to draw: {one.nothing}"))
        else:
            lines += [cut("", width), *one.drawing.text(one.frame, width, plain=plain), Text("")]
        return [*lines, *(Text(note, style="dim") for note in one.notes)]


def _ascii(line: Text) -> Text:
    """``line`` for a terminal that would refuse or spoil anything else."""
    made = Text(line.plain.translate(_ASCII).encode("ascii", "replace").decode(), style=line.style)
    made.spans = line.spans
    return made
