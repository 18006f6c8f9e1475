"""The documentation as a site: it builds, every page is found, nothing comes over the network, no page is stale."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from docs import make_reference, make_site

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "docs"
    make_site.stage(folder)
    return make_site.build(folder).parent


@pytest.mark.slow
def test_every_page_has_its_place(built: Path) -> None:
    pages = built.parent / "pages"
    sections = {name: there for section in make_site.navigation(pages) for name, there in section.items()}
    assert sections.get(make_site.MORE, []) == [], "name them in SECTIONS of docs/make_site.py"
    listed = [name for there in sections.values() for name in there]
    assert len(listed) == len(set(listed))
    text = html.unescape((built / "index.html").read_text(encoding="utf-8"))
    linked = set(re.findall(r'href="(?:\./)?([^"#]+\.html)', text))
    wanted = {str(path.relative_to(pages).with_suffix(".html")) for path in pages.rglob("*.md")}
    assert wanted - linked <= {"index.html"}


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(built: Path) -> None:
    assert list(make_site.loaded_from_elsewhere(built)) == []
    assert (built / "frame-worker.js").exists()
    assert 'src="../frame-worker.js"' in (built / "decisions" / "index.html").read_text(encoding="utf-8")
    (built / "page.html").write_text('<img src="//cdn.example/x.png"><script src=https://cdn.example/x.js></script>')
    (built / "drawn.svg").write_text('<style>@font-face { src: url("https://cdn.example/x.woff") }</style>')
    assert len(list(make_site.loaded_from_elsewhere(built))) == 3
    (built / "page.html").unlink()
    (built / "drawn.svg").unlink()


@pytest.mark.slow
def test_links_out_of_the_pages_lead_to_copies(built: Path) -> None:
    text = (built / "add-a-cluster.html").read_text(encoding="utf-8")
    assert "files/clusters/lumi-g.toml" in text
    assert (built / "files" / "clusters" / "lumi-g.toml").read_bytes() == (
        ROOT / "clusters" / "lumi-g.toml"
    ).read_bytes()


@pytest.mark.parametrize("name", make_reference.pages())
def test_pages_that_follow_from_the_code_are_not_stale(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == make_reference.pages()[name], "run make reference"
