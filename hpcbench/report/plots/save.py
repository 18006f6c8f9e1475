"""Pictures as files: an image for a paper, a page that can be explored, or the specification itself. All offline."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.fileio import ascii_escapes, write_atomic

if TYPE_CHECKING:
    from types import ModuleType

    from hpcbench.report.plots.picture import Picture

ENDINGS = (".html", ".json", ".pdf", ".png", ".svg")
_PIXELS_PER_INCH = 200
_INSTALL = "install it with: pip install 'hpcbench[report]'"


def check_ending(path: Path) -> None:
    """Raises ``ConfigError`` where a picture cannot be written as a file called ``path``."""
    if path.suffix not in ENDINGS:
        raise ConfigError(
            f"cannot draw {path}: unknown ending {path.suffix!r}", hint=did_you_mean(path.suffix, ENDINGS)
        )


def save(picture: Picture, path: Path) -> None:
    """Write ``picture`` in the format that the file's ending names.

    Raises ``ConfigError`` for another ending, for a picture of nothing, and where altair or vl-convert is missing.
    """
    check_ending(path)
    if picture.drawing is None:
        raise ConfigError(f"{picture.name}: nothing to draw: {picture.nothing}")
    write_atomic(path, encoded(picture, path.suffix))


def encoded(picture: Picture, ending: str) -> bytes:
    """The bytes of a file with ``ending``."""
    specification = validated(picture.specification)
    if ending == ".json":
        text = msgspec.json.format(msgspec.json.encode(specification), indent=1).decode()
        return ascii_escapes(text).encode() + b"\n"
    convert = _package("vl_convert", "vl-convert-python")
    if ending == ".html":
        return _page(picture, convert.javascript_bundle()).encode()
    # Without addresses nothing can be fetched, whatever a specification says.
    options: dict[str, Any] = {"allowed_base_urls": []}
    if ending == ".svg":
        return str(convert.vegalite_to_svg(specification, **options)).encode()
    if ending == ".png":
        return bytes(convert.vegalite_to_png(specification, ppi=_PIXELS_PER_INCH, **options))
    return bytes(convert.vegalite_to_pdf(specification, **options))


def validated(specification: dict[str, Any]) -> dict[str, Any]:
    """``specification`` with the version of the schema that altair has found it to follow."""
    altair = _package("altair", "altair")
    # Looking at each row costs seconds, and any row is valid.
    found: dict[str, Any] = altair.Chart.from_dict(_without_rows(specification)).to_dict()
    return {"$schema": found["$schema"], **specification}


def _without_rows(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_rows(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: {"values": []} if key == "data" else _without_rows(one) for key, one in value.items()}


def _package(module: str, name: str) -> ModuleType:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"plots as files need the package {name}", hint=_INSTALL) from None


def _page(picture: Picture, scripts: str) -> str:
    data = msgspec.json.encode(picture.specification).decode()
    # Within a script's text only this could end it.
    data = ascii_escapes(data).replace("<", "\\u003c")
    title, alt = html.escape(picture.title), html.escape(picture.alt)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in picture.notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{title}</title>
<style>body {{ font: 14px sans-serif; margin: 2em; color: #222; }} li {{ color: #444; }}</style>
<script>{scripts}</script>
</head>
<body>
<div id="plot" role="img" aria-label="{alt}"></div>
<ul>{notes}</ul>
<script>vegaEmbed("#plot", {data}, {{mode: "vega-lite", renderer: "svg", actions: {{export: true, source: false, \
compiled: false, editor: false}}}});</script>
</body>
</html>
"""


_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
