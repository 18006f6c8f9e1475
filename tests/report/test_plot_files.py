"""Plots as files and through the command: formats, what is missing, and names that somebody else has chosen."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpcbench.cli.main import cli
from hpcbench.config.run_spec import config_id, run_id, spec_document
from hpcbench.errors import ConfigError
from hpcbench.report.plots.plotting import PLOTS, draw_plot, encode_plot, save_plot
from hpcbench.results.frame import collected_frame
from tests.cli.test_hostile_tree import CONTROL, EVIL, SPEC, STRANGE
from tests.report.test_pivot_table import entry

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def tree(planted_tree: Path) -> Path:
    return planted_tree


def call(tree: Path, *arguments: str) -> Result:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(cli, [*arguments, "--results", str(tree)])
    if done.exception is not None:
        raise done.exception
    return done


def test_a_plot_file_has_the_format_of_its_ending(tree: Path, tmp_path: Path) -> None:
    asked = ["plot", "throughput", "--where", "strategy in ['ddp', 'fsdp']"]
    for ending in ("png", "svg", "pdf", "json"):
        done = call(tree, *asked, "--out", str(tmp_path / f"t.{ending}"))
        assert done.stdout == ""
        assert f"Throughput over devices written to {tmp_path / f't.{ending}'}" in done.stderr
    assert (tmp_path / "t.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "t.pdf").read_bytes()[:5] == b"%PDF-"
    image = xml.etree.ElementTree.parse(tmp_path / "t.svg").getroot()
    words = [one.text for one in image.iter(f"{SVG}text")]
    assert {"Throughput over devices", "k samples/s", "devices", "ddp", "fsdp", "16"} <= set(words)
    specification = json.loads((tmp_path / "t.json").read_bytes())
    assert specification["$schema"].startswith("https://vega.github.io/schema/vega-lite/")
    assert len(specification["data"]["values"]) == 9 + 2


def test_a_page_needs_no_network(tree: Path, tmp_path: Path) -> None:
    call(tree, "plot", "efficiency", "--out", str(tmp_path / "e.html"))
    page = (tmp_path / "e.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    head, _, rest = page.partition("<script>")
    body = rest.rpartition("</head>")[2]
    assert "http" not in head.replace("http-equiv", "")
    assert "http" not in body
    assert " src=" not in head + body
    assert 'aria-label="Efficiency over 1 to 16 devices, 3 lines.' in body


def test_plot_json_has_specification_rows_and_reason(tree: Path) -> None:
    (one,) = json.loads(call(tree, "plot", "energy", "--json").stdout)["plots"]
    assert list(one) == ["name", "title", "alt", "notes", "nothing", "specification", "rows"]
    assert (one["name"], one["nothing"], len(one["rows"])) == ("energy", None, 16)
    assert one["specification"]["description"] == one["alt"]
    (none,) = json.loads(call(tree, "plot", "energy", "--json", "--where", "nodes == 99").stdout)["plots"]
    assert (none["specification"], none["rows"], none["nothing"]) == ({}, [], "there are no results")


def test_kinds_are_listed_and_drawn_in_the_terminal(tree: Path) -> None:
    listed = call(tree, "plot").stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(PLOTS)
    for name in ("timeline", "memory"):
        assert max(map(len, call(tree, "plot", name).stdout.splitlines())) <= 80
    shown = call(tree, "plot", "scaling", str(tree / "made-up"), "--by", "nodes,strategy").stdout
    assert "nodes 1, ddp" in shown


def test_only_drawn_results_are_read_for_step_times(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcbench.results.results_tree import ClusterTree

    read: list[str] = []
    real = ClusterTree.read_result

    def counted(self: ClusterTree, run: str) -> Any:
        read.append(run)
        return real(self, run)

    monkeypatch.setattr(ClusterTree, "read_result", counted)
    call(tree, "plot", "distribution", "--where", "strategy == 'single'")
    assert len(read) == 3


def test_an_impossible_plot_names_the_reason(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no plot 'efficency'") as wrong:
        call(tree, "plot", "efficency")
    assert "did you mean 'efficiency'" in str(wrong.value)
    # Every kind has a line with what it shows.
    assert [line.split()[0] for line in str(wrong.value).splitlines()[2:]] == list(PLOTS)
    assert "\n    memory        peak memory of every rank\n" in str(wrong.value)
    with pytest.raises(ConfigError, match="no plot 'quickstart'\n  a kind comes before sweeps, trees and bundles"):
        call(tree, "plot", "quickstart")
    with pytest.raises(ConfigError, match="unknown ending '.gif'"):
        call(tree, "plot", "energy", "--out", str(tmp_path / "x.gif"))
    with pytest.raises(ConfigError, match="energy: nothing to draw: there are no results"):
        call(tree, "plot", "energy", "--where", "nodes == 99", "--out", str(tmp_path / "x.png"))
    with pytest.raises(ConfigError, match="^energy: nothing to draw: the one run did not end well: 1 oom$"):
        call(tree, "plot", "energy", "--where", "status == 'oom'", "--out", str(tmp_path / "x.png"))
    with pytest.raises(ConfigError, match="--x batch: no parameter that differs between the results") as wrong:
        call(tree, "plot", "energy", "--x", "batch")
    assert "choices: batch_size, " in str(wrong.value)
    assert "repeat" not in str(wrong.value)
    with pytest.raises(ConfigError, match="--x: the plot parts has its own axis\n  choices: throughput, efficiency"):
        call(tree, "plot", "parts", "--x", "nodes")
    with pytest.raises(ConfigError, match="--x: predictions are lines over devices"):
        call(tree, "plot", "scaling", "--x", "nodes", "--predict")
    with pytest.raises(ConfigError, match="no column 'nods'"):
        call(tree, "plot", "energy", "--by", "nods")
    for module in ("altair", "vl_convert"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)
            with pytest.raises(ConfigError, match="plots as files need the package") as missing:
                call(tree, "plot", "energy", "--out", str(tmp_path / "x.png"))
            assert "pip install altair scipy vl-convert-python" in str(missing.value)
            assert "devices" in call(tree, "plot", "energy").stdout
    assert list(tmp_path.iterdir()) == []


NAMES = [
    "</script><script>window.hacked = 1</script>", '"]+alert(1)//', "datum.x; alert(1)", "&lt;b&gt;", EVIL,
    "{{7*7}}", "x" * 10_000,
]  # fmt: skip


def test_names_come_out_as_text(tmp_path: Path) -> None:
    entries = [entry(100 + place, model=name, strategy=name) for place, name in enumerate(NAMES)]
    picture = draw_plot("throughput", collected_frame(entries))
    save_plot(picture, tmp_path / "x.svg")
    drawn = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert CONTROL.findall(drawn) == []
    image = xml.etree.ElementTree.fromstring(drawn)
    assert {one.tag.removeprefix(SVG) for one in image.iter()} <= {
        "svg",
        "g",
        "path",
        "text",
        "rect",
        "line",
        "defs",
        "tspan",
    }
    words = [one.text or "" for one in image.iter(f"{SVG}text")]
    for name in NAMES[:4]:
        assert name in words
    assert max(map(len, words)) < 200
    page = encode_plot(picture, ".html").decode()
    assert page.count("</script>") == 2
    assert "window.hacked = 1\\u003c/script>" in page
    assert CONTROL.findall(page.rpartition("<script>")[2]) == []


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE.keys())
def test_strange_results_end_no_plot(data: dict[str, Any], tmp_path: Path) -> None:
    other = {**data, "run_id": run_id(SPEC), "config_id": config_id(SPEC), "status": "ok", "attempt": 1}
    ident = run_id(SPEC)
    extra = {
        "timeline": {"ranks": [{"rank": 10**12, "measured": [["F", 0, 10**12, 0.0, 1e300], ["\x1b", -1, 0, -1.0, 2.0]]}]},
        "step_times_s": [-1.0, 1e308, 0.0], "predicted": {"step_time_s": 1e308, "bubble_fraction": -5.0},
        "ranks": [{"rank": 0, "peak_memory_bytes": EVIL, "phases": {"compute_s": EVIL}}, {EVIL: EVIL, "phases": EVIL}],
    }  # fmt: skip
    metrics = {
        "compute_s": 1e308, "comm_s": -1.0, "exposed_comm_s": 1e308, "bubble_fraction": 7.0, "energy_j": -1.0,
        "energy_source": EVIL, **other.get("metrics", {}),
    }  # fmt: skip
    spec = {**spec_document(SPEC), **other["spec"], "options": {"balance": "measured", EVIL: EVIL}}
    path = tmp_path / "results" / "local" / "runs" / ident[:2] / ident / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**other, **extra, "metrics": metrics, "spec": spec}))
    for name in PLOTS:
        shown = call(tmp_path / "results", "plot", name).stdout
        assert CONTROL.findall(shown) == []
        document = json.loads(call(tmp_path / "results", "plot", name, "--json").stdout)
        assert document["plots"][0]["name"] == name
