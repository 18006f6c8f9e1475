"""The page as text: what stands in it, that nothing leads out of it, that values stay text, that it can be read."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars
import pytest
import tomli
from click.testing import CliRunner, Result

from hpcbench.cli.main import cli
from hpcbench.config.run_spec import RunSpec, run_id
from hpcbench.config.sweep_loader import ExcludedPoint, expand_sweep, load_sweep
from hpcbench.errors import ConfigError
from hpcbench.report.configurations import rows_from_frame
from hpcbench.report.html.page_elements import (
    MAX_HTML_ROWS,
    environments_view,
    page_view,
    plain_columns,
    reproducing_commands,
    reproducing_sweep_toml,
    results_view,
    runs_view,
    sample_runs,
    warnings_view,
)
from hpcbench.report.html.report_page import TEMPLATE_FOLDER, PageSection, ReportRequest, render_page
from hpcbench.report.html.report_page import report_html as page_of
from hpcbench.report.table_model import WarningFootnotes
from hpcbench.results.schema import FailureRecord
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from tests.report import planted
from tests.report.planted import launch, launches
from tests.report.test_theme import contrast

EVIL = "</script></style><script>window.hacked=1</script>\u202e\x1b[2J\"'><img src=x onerror=window.hacked=1> {{ 7*7 }}"


class Parts(HTMLParser):
    """Elements with their attributes, and the text of some."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        self.texts.setdefault(tag, []).append("")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open][-1] += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def made(tmp_path: Path, results: list[Any], *options: str) -> str:
    planted.write(results, tmp_path / "tree")
    call(tmp_path, *options, "--out", str(tmp_path / "report.html"))
    return (tmp_path / "report.html").read_text()


def call(tmp_path: Path, *arguments: str) -> Result:
    done = CliRunner().invoke(cli, ["report", f"{tmp_path / 'tree'}/", *arguments])
    if done.exception is not None:
        raise done.exception
    return done


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    elsewhere = planted.failure()
    for one in elsewhere:
        one.cluster = "d"
    return made(tmp_path_factory.mktemp("page"), [*planted.crossover(), *elsewhere])


def test_the_page_has_its_sections(page: str) -> None:
    parts = Parts(page)
    headings = [text.strip() for text in parts.texts["h2"]]
    last = ["Runs, hardware and software", "How to reproduce it"]
    assert headings == ["Findings", "Summary", "All results", "Plots", *last]
    assert "from 2 nodes to 4 nodes the fastest changes from ddp to fsdp" in page
    assert "PeerEnded: rank 3 ended without a word" in page
    captions = [text.strip() for text in parts.texts["caption"]]
    for caption in ("Every configuration", "Runs that did not end well", "Runs by cluster, sweep and environment"):
        assert caption in captions
    assert len(parts.named("figure")) >= 2


def test_the_summary_leads_with_the_interval() -> None:
    page = page_of(planted.frame_of(planted.overlapping()), ReportRequest("t", ["t"]))
    table = page.partition('<table id="glance">')[2].partition("</table>")[0]
    heads = [re.sub("<.*?>", "", cell) for cell in re.findall("<th .*?</th>", table)]
    assert heads == ["workload", "fastest strategy", "lead [95 %]", "certainty", "next", "samples/s"]
    lead = re.sub("<.*?>", "", re.findall("<td.*?</td>", table)[2])
    assert re.fullmatch(r"\+\d\.\d % \[-\d\.\d \+\d\.\d\]", lead), lead
    assert "all rows: nodes 4, devices 4, cluster c" in page
    assert "lead: samples/s" in page
    alone = planted.frame_of(planted.overlapping()).filter(polars.col("spec.strategy") == "ddp")
    page = page_of(alone, ReportRequest("t", ["t"]))
    assert ("lead: samples/s" in page, "fastest strategy" in page) == (False, True)


def test_the_summary_has_the_three_commonest_warnings() -> None:
    entries = [launch(0.1, batch_size=8 * 2**number) for number in range(4)]
    for number, kind in enumerate(("rare", "odd", "common", "usual")):
        for entry in entries[: number + 1]:
            entry.warnings = [*entry.warnings, f"{kind} warning"]
    parts = Parts(page_of(planted.frame_of(entries), ReportRequest("t", ["t"])))
    shown = [text for text in parts.texts["p"] if text.startswith(("Warning: ", "1 further"))]
    assert [text.split()[1] for text in shown[:3]] == ["usual", "common", "odd"]
    assert shown[3].startswith("1 further kind of warnings")


def test_equal_results_give_an_equal_page(page: str, tmp_path: Path) -> None:
    planted.write(planted.overlapping(), tmp_path / "tree")
    texts = []
    for name in ("one.html", "other.html"):
        call(tmp_path, "--out", str(tmp_path / name))
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]


def test_the_page_links_to_nothing_outside(page: str) -> None:
    parts = Parts(page)
    for tag, attributes in parts.elements:
        for name in ("src", "href", "action", "poster", "data", "srcset"):
            address = attributes.get(name)
            assert address is None or address.startswith(("#", "data:")), (tag, address)
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
    style = (TEMPLATE_FOLDER / "style.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_its_policy_allows_what_it_holds_and_no_more(page: str) -> None:
    parts = Parts(page)
    (policy,) = [
        one["content"] or "" for one in parts.named("meta") if one.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert (len(scripts), len(styles)) == (2, 1)
    for text in (*scripts, *styles):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    data = [one for one in parts.named("script") if one]
    assert {one.get("type") for one in data} == {"application/json"}


def test_the_page_has_roles_and_labels_for_screen_readers(page: str) -> None:
    parts = Parts(page)
    assert parts.named("html") == [{"lang": "en"}]
    assert [len(parts.named(tag)) for tag in ("header", "main", "nav", "footer", "h1", "title")] == [1] * 6
    assert all(len(one["alt"] or "") > 20 for one in parts.named("img"))
    assert all(one.get("scope") == "col" for one in parts.named("th"))
    assert len(parts.named("caption")) == len(parts.named("table"))
    idents = [one["id"] for _, one in parts.elements if "id" in one]
    assert len(idents) == len(set(idents))
    targets = {one["href"] for one in parts.named("a")}
    assert {target[1:] for target in targets if target} <= set(idents)
    scrolled = [one for _, one in parts.elements if one.get("role") == "region"]
    assert all(one.get("tabindex") == "0" and one.get("aria-label") for one in scrolled)


def test_all_text_has_enough_contrast() -> None:
    style = (TEMPLATE_FOLDER / "style.css").read_text()
    themes = [
        dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]
    assert len(themes) == 3
    for theme in themes:
        for text in ("ink", "faint", "link"):
            for ground in ("paper", "band"):
                assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground, theme)
        for ground in ("significant", "equivalent", "inconclusive", "observed"):
            assert contrast(theme["badge"], theme[ground]) >= 4.5, (ground, theme)


def test_hostile_strings_of_results_stay_text(tmp_path: Path) -> None:
    error = FailureRecord(type=EVIL, message=EVIL, hint=EVIL)
    results = [
        *launches(
            0.1, 2, strategy="single", model=EVIL, dataset=EVIL, warnings=[EVIL], digest=EVIL, options={EVIL: EVIL}
        ),
        *launches(0.1, 2, nodes=2, model=EVIL, dataset=EVIL),
        launch(None, status="failed", model=EVIL, dataset=EVIL, strategy=EVIL, error=error),
    ]
    for one in results:
        one.provenance = {"hosts": [EVIL], "packages": {EVIL: EVIL}, "torch": EVIL}
        one.sweep = EVIL
    text = made(tmp_path, results)
    parts = Parts(text)
    assert len(parts.named("script")) == len(parts.named("figure")) + 2
    assert not [one for one in parts.named("img") if not (one["src"] or "").startswith("data:image/svg+xml;base64,")]
    shown = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "<script>window" not in shown
    assert not re.findall("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", shown)
    for image in parts.named("img"):
        svg = base64.b64decode((image["src"] or "").partition(",")[2]).decode()
        assert "<script" not in svg
        assert "\u202e" not in svg


def test_warnings_are_letters_that_are_explained() -> None:
    noise = ["noise above 10 %: much", "drift above 5 %: more"]
    rows = rows_from_frame(
        planted.frame_of([*launches(0.1, 1, warnings=noise), *launches(0.1, 1, nodes=2, warnings=noise[1:])])
    )
    marks = WarningFootnotes(rows)
    found = results_view(rows, {}, marks)
    (place,) = [number for number, column in enumerate(found.columns) if column.name == "warnings"]
    assert [line[place] for line in found.cells] == ["a,b", "b"]
    explained = warnings_view(rows, marks)
    assert explained is not None
    assert [line[:3] for line in explained.cells] == [["a", "1", noise[0]], ["b", "2", noise[1]]]


def test_provenance_is_grouped_by_environment_on_the_page() -> None:
    results = [*launches(0.1, 2), *launches(0.1, 1, nodes=2, digest="e2"), launch(None, status="oom", nodes=4)]
    for number, one in enumerate(results[:2]):
        one.provenance = {"hosts": [f"n{number}", "n7"], "torch": "2.13.0", "memory_bytes": 2**34, "cores": 4}
    results[2].provenance = {"torch": "2.12.0", "job": {"partition": "gpu"}, "packages": {"numpy": "2.4"}}
    frame = planted.frame_of(results)
    assert runs_view(frame).cells == [
        ["c", "planted", "e1", "3", "2", "1 oom"], ["c", "planted", "e2", "1", "1", ""],
    ]  # fmt: skip
    found = environments_view(results, len(results))
    assert found is not None
    assert [column.heading for column in found.columns] == ["fact", "c e1", "c e2"]
    assert found.cells == [
        ["hosts", "n0, n7 and n1", ""], ["logical cores", "4", ""], ["memory of a host", "16.0 GiB", ""],
        ["partition", "", "gpu"], ["torch", "2.13.0", "2.12.0"], ["packages", "", "numpy 2.4"],
    ]  # fmt: skip
    assert len(sample_runs(frame)) == 4


def test_predictions_have_a_place() -> None:
    predicted = polars.DataFrame({"strategy": ["ddp"], "predicted": [0.09], "measured": [0.1]})
    frame = planted.frame_of(launches(0.1, 1))
    parts = Parts(page_of(frame, ReportRequest("t", ["t"], predicted=predicted)))
    assert "Predicted and measured" in [text.strip() for text in parts.texts["h2"]]
    cells = [text.strip() for text in parts.texts["td"]]
    place = cells.index("90.0 ms")
    assert cells[place - 1 : place + 2] == ["ddp", "90.0 ms", "100 ms"]
    assert "plot-predicted" in [one["id"] for one in parts.named("figure")]
    bounds = page_view("t", "c", plain_columns(["step_time_s.low", "step_time_s.high"]), [[0.08, 0.12]])
    assert bounds.cells[0] == ["80.0 ms", "120 ms"]
    assert "plot-predicted" not in page_of(frame, ReportRequest("t", ["t"]))


def test_without_the_plots_package_the_rest_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    planted.write(launches(0.1), tmp_path / "tree")
    done = call(tmp_path, "--out", str(tmp_path / "r.html"))
    assert "the page has no plots: pip install altair scipy vl-convert-python" in done.stderr
    text = (tmp_path / "r.html").read_text()
    assert "no plots: plots as files need the package vl-convert-python; install it with: pip install" in text
    parts = Parts(text)
    assert (len(parts.named("figure")), len(parts.named("script"))) == (0, 1)
    assert "Every configuration" in [caption.strip() for caption in parts.texts["caption"]]


def test_a_large_table_is_cut_with_a_note() -> None:
    rows = [[number, "x"] for number in range(MAX_HTML_ROWS + 5)]
    found = page_view("t", "many", plain_columns(["number", "word"]), rows)
    assert len(found.cells) == MAX_HTML_ROWS
    assert found.notes == [f"the first {MAX_HTML_ROWS} of {MAX_HTML_ROWS + 5} rows; `hpcbench table --out` writes all"]


def test_tables_show_units_and_sort_by_figures() -> None:
    rows: list[list[Any]] = [[4, 0.012, 3 * 2**30, None], [16, 0.0012, 2**20, None], [8, None, None, None]]
    names = ["spec.nodes", "metrics.step_time_s.median", "metrics.peak_memory_bytes", "metrics.mfu"]
    found = page_view("t", "c", plain_columns(names, keys=["spec.nodes"]), rows)
    assert [column.heading for column in found.columns] == ["nodes", "step time", "peak memory"]
    assert (found.choices(0), found.choices(1)) == (["4", "8", "16"], [])
    assert found.numeric == [True, True, True]
    page = render_page("t", "", None, [PageSection("s", "s", grids=[found])])
    cells = re.findall(r"<td([^>]*)>([^<]*)</td>", page)
    assert cells[:3] == [
        (' class="number" data-sort="4"', "4"), (' class="number" data-sort="0.012"', "12.0 ms"),
        (f' class="number" data-sort="{3 * 2**30}"', "3.0 GiB"),
    ]  # fmt: skip
    assert cells[7] == (' class="number"', "")
    assert "data-filters" in page


def test_the_sweep_of_a_page_has_its_very_runs(tmp_path: Path) -> None:
    specs = [
        RunSpec(model="resnet18", dataset="digits", strategy="ddp", batch_size=8, tasks_per_node=2, dp_degree=2, options={"bucket_cap_mb": 10.0}, repeat=1),
        RunSpec(model="resnet18", dataset="digits", strategy="ddp", batch_size=8, tasks_per_node=2, dp_degree=2),
        RunSpec(model="resnet18", dataset="digits", strategy="single", batch_size=8, env={"A": 'x "y" \\ \n'}, compile=True),
    ]  # fmt: skip
    text = reproducing_sweep_toml(specs, repeats=2)
    assert text is not None
    path = tmp_path / "again.toml"
    path.write_text(text)
    runs = {
        found.reason if isinstance(found, InfeasiblePoint) else run_id(found)
        for point in expand_sweep(load_sweep(path)) if not isinstance(point, ExcludedPoint)
        for found in [resolve_point(point, PartitionLimits("any"))]
    }  # fmt: skip
    assert {run_id(one) for one in specs} <= runs
    assert len(runs) == 6
    one = reproducing_sweep_toml(specs[:1], repeats=1)
    assert one is not None
    assert tomli.loads(one)["fixed"]["options"] == {"bucket_cap_mb": 10.0}
    assert reproducing_sweep_toml([], repeats=1) is None


def test_reproducing_commands_are_quoted_for_the_shell() -> None:
    assert reproducing_commands(["a b"], ["c"], "nodes == 4", has_sweep=True) == [
        "hpcbench report 'a b' --where 'nodes == 4' --out report.html",
        "hpcbench submit again.toml --cluster c",
        "hpcbench report again --where 'nodes == 4' --out report.html",
    ]


def test_other_endings_are_refused(tmp_path: Path) -> None:
    planted.write(launches(0.1, 1), tmp_path / "tree")
    with pytest.raises(ConfigError, match=r"a report is a page"):
        call(tmp_path, "--out", "report.pdf")


def test_a_tree_without_results_gives_a_page(tmp_path: Path) -> None:
    (tmp_path / "tree" / "c" / "runs").mkdir(parents=True)
    call(tmp_path, "--out", str(tmp_path / "report.html"))
    assert "There are no results." in (tmp_path / "report.html").read_text()
