"""Build the documentation as a site that needs no network: ``make docs``, into ``build/docs/site``.

Pages are copied to ``build/docs/pages`` with their links led to where things are on the site. zensical builds them and
takes a broken link, or an anchor that is not there, for an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SECTIONS = {
    "Begin": ["index", "tutorial", "recipes", "glossary"],
    "Use": ["sweeps", "your-own-command", "collectives", "life", "data", "results", "plots", "report", "cli"],
    "Choose": ["strategies", "pipelines", "horovod", "models", "catalog"],
    "Predict": ["oracle", "oracle-gpu", "calibration", "dry-run", "formulas"],
    "Trust": ["measurement", "verification", "gpu-check", "peers"],
    "Extend": [
        "add-a-cluster",
        "amd",
        "add-a-strategy",
        "add-a-scheduler",
        "add-a-model",
        "templates",
        "contributing",
        "tour",
    ],
    "Look up": ["schema-sweep", "schema-cluster", "schema-result", "results-tree", "changelog"],
    "Figures": [
        "benchmarks",
        "benchmarks-rerun",
        "benchmarks-oracle",
        "benchmarks-gpu",
        "benchmarks-megatron",
        "cuda-paths",
    ],
}
"""The order of the pages. One that is named here and does not exist is left out, one that is not comes under MORE."""
MORE = "More"
ELSEWHERE = {
    "templates/README.md": "templates.md",
    "results/README.md": "results-tree.md",
    "CONTRIBUTING.md": "contributing.md",
    "hpcbench/README.md": "tour.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/rerun/README.md": "benchmarks-rerun.md",
    "benchmarks/oracle/README.md": "benchmarks-oracle.md",
    "benchmarks/oracle/gpu.md": "benchmarks-gpu.md",
    "benchmarks/oracle/megatron.md": "benchmarks-megatron.md",
    "benchmarks/gpu_day/cuda-paths.md": "cuda-paths.md",
    "docs/decisions": "decisions/index.md",
}
"""What lies outside of ``docs/``, or is a folder, and is a page of the site."""
_CONFIGURATION = """[project]
site_name = "hpcbench"
site_description = "How should this model be parallelised on that cluster, and how sure are we?"
docs_dir = "pages"
site_dir = "site"
use_directory_urls = false
extra_css = ["site.css"]
nav = {nav}

[project.theme]
font = false
language = "en"
features = ["navigation.sections", "navigation.top", "toc.follow", "content.code.copy", "search.highlight"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Dark"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Light"

[project.plugins.search]

[project.plugins.offline]
"""
_STYLE = ".md-typeset table:not([class]) { font-size: 0.68rem; }\n.md-typeset td code { word-break: normal; }\n"
_FRAME_WORKER = """// A browser gives no worker to a page that was opened as a file: the search then runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.inside = this.frame.contentWindow;
      this.inside.postMessage = (data) => setTimeout(() => this.onmessage && this.onmessage({ data }));
      const script = this.inside.document.createElement("script");
      script.src = new URL(address, location.href).href;
      script.onload = () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      };
      script.onerror = (event) => this.onerror && this.onerror(event);
      this.inside.document.body.append(script);
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else setTimeout(() => this.inside.onmessage && this.inside.onmessage({ data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
"""
_SHIM = re.compile(r'<script src="https://unpkg\.com/iframe-worker/shim"[^>]*></script>')
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")


def stage(folder: Path) -> None:
    """Put everything that zensical builds from into ``folder``."""
    pages = folder / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    pages.mkdir(parents=True)
    shutil.copytree(DOCS / "pictures", pages / "pictures")
    for picture in (pages / "pictures").glob("*.svg"):
        picture.write_text(_FONTS.sub("", picture.read_text(encoding="utf-8")), encoding="utf-8")
    shutil.copytree(DOCS / "schemas", pages / "schemas")
    for source, target in sources().items():
        place = pages / target
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_led(source, target, pages), encoding="utf-8")
    (pages / "decisions" / "index.md").write_text(_decisions(pages), encoding="utf-8")
    (pages / "site.css").write_text(_STYLE, encoding="utf-8")
    (pages / "frame-worker.js").write_text(_FRAME_WORKER, encoding="utf-8")
    nav = json.dumps([*navigation(pages), {"Decisions": _names(pages, "decisions/*.md")}])
    (folder / "zensical.toml").write_text(_CONFIGURATION.replace("{nav}", nav.replace(": ", " = ")), encoding="utf-8")


def sources() -> dict[str, str]:
    """Every page: its file, and what it is called on the site."""
    found = {f"docs/{name}": name for name in [*_names(DOCS, "*.md"), *_names(DOCS, "decisions/*.md")]}
    for source, target in ELSEWHERE.items():
        if (ROOT / source).is_file() and target not in found.values():
            found[source] = target
    return found


def navigation(pages: Path) -> list[dict[str, list[str]]]:
    """The pages of ``pages`` by section, those that no section names at the end."""
    left = set(_names(pages, "*.md"))
    found = []
    for section, names in SECTIONS.items():
        there = [f"{name}.md" for name in names if f"{name}.md" in left]
        left.difference_update(there)
        found.append({section: there})
    return found + ([{MORE: sorted(left)}] if left else [])


def _names(folder: Path, pattern: str) -> list[str]:
    return [str(path.relative_to(folder)) for path in sorted(folder.glob(pattern))]


def _led(source: str, target: str, pages: Path) -> str:
    """The text of a page with its links led to pages of the site, or to copies of the files that they mean."""
    known = {**sources(), **ELSEWHERE}

    def lead(match: re.Match[str]) -> str:
        wanted = os.path.normpath(os.path.join(os.path.dirname(source), match[2]))  # noqa: PTH118, PTH120
        if wanted in known:
            place = known[wanted]
        elif wanted.startswith("docs/"):
            place = wanted.removeprefix("docs/")
        elif (ROOT / wanted).is_file():
            place = f"files/{wanted}"
            (pages / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / wanted, pages / place)
        else:
            return match[0]
        return f"{match[1]}{os.path.relpath(place, os.path.dirname(target) or '.')}{match[3]}"  # noqa: PTH120

    return _LINK.sub(lead, (ROOT / source).read_text(encoding="utf-8"))


def _decisions(pages: Path) -> str:
    """A list of all decisions by their titles."""
    lines = ["# Why it is so", "", "What was decided against the first design, or between two ways, and why.", ""]
    for path in sorted((pages / "decisions").glob("*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join([*lines, ""])


def build(folder: Path) -> Path:
    """Build the site from ``folder``; its first page. Raises ``CalledProcessError`` where there is a warning."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    subprocess.run(command, cwd=folder, check=True)
    for page in (folder / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        worker = os.path.relpath(folder / "site" / "frame-worker.js", page.parent)
        page.write_text(_SHIM.sub(f'<script src="{worker}"></script>', text), encoding="utf-8")
    return folder / "site" / "index.html"


def loaded_from_elsewhere(site: Path) -> Iterator[str]:
    """Yield the addresses that pages of the site would load over the network."""
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        for address in re.findall(
            r'<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)="?((?:https?:)?//[^" >]+)', text
        ):
            yield f"{page.relative_to(site)}: {address}"
    for picture in sorted(site.rglob("*.svg")):
        for address in re.findall(
            r"(?:href=|url\()[\"']?((?:https?:)?//[^\"')]+)", picture.read_text(encoding="utf-8")
        ):
            yield f"{picture.relative_to(site)}: {address}"


def main() -> None:
    """Build into ``build/docs``, or the folder that is named."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "docs").resolve()
    stage(folder)
    try:
        first = build(folder)
    except subprocess.CalledProcessError:
        sys.exit("the documentation has a broken link or another mistake: see above")
    print(f"open {first}")  # noqa: T201


if __name__ == "__main__":
    main()
