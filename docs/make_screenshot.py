"""Photograph a report of made-up results in Chromium; where there is none nothing is done. Run by ``make pictures``."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURES = Path(__file__).resolve().parent / "pictures"
ROOT = PICTURES.parents[1]
WINDOW = "1000,1130"
COLOURS = 64


def main() -> None:
    """Write ``docs/pictures/report.png``."""
    browser = shutil.which("chromium")
    if browser is None:
        print("no chromium: docs/pictures/report.png stays as it is", file=sys.stderr)  # noqa: T201
        return
    # Not part of the package.
    sys.path.insert(0, str(ROOT))
    from benchmarks.planted_results import write_planted

    with tempfile.TemporaryDirectory() as folder:
        write_planted(Path(folder, "made-up"))
        page = Path(folder, "report.html")
        # The folder's name is the page's title.
        command = [sys.executable, "-m", "hpcbench", "report", "made-up/", "--out", str(page)]
        subprocess.run(command, cwd=folder, check=True)
        switches = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--disable-gpu", f"--window-size={WINDOW}"]
        picture = PICTURES / "report.png"
        subprocess.run(
            [browser, *switches, f"--user-data-dir={folder}/profile", f"--screenshot={picture}", page.as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        # Text and flat colours: a palette looks the same in a third of the bytes.
        with Image.open(picture) as photograph:
            small = photograph.convert("RGB").quantize(
                COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
            )
        small.save(picture, optimize=True)


if __name__ == "__main__":
    main()
