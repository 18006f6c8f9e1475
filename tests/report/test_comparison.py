"""Comparisons of planted launches: what is slower is found, what is alike raises no alarm."""

from __future__ import annotations

import json
import os
import random
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner, Result

from hpcbench.cli.main import cli
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, HpcbenchError
from hpcbench.report.comparison import (
    ConfigurationPair,
    comparison_metric,
    is_larger_better,
    judge_pairs,
    pair_configurations,
    separating_parameters,
)
from hpcbench.report.comparison_view import ComparisonRow, comparison_text_view, junit_xml, rows_from_pairs
from hpcbench.report.load_results import load_frame
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.results.schema import RunResult
from tests.report.planted import frame_of, launch, write

STEP = "metrics.step_time_s.median"
SPEC = RunSpec(model="resnet18", dataset="digits", strategy="ddp", batch_size=8)


def launches(source: random.Random, count: int, step_s: float, disturbed: float) -> list[float]:
    """Return launches with 1 % of noise, of which a share is disturbed by up to 10 %."""
    neighbours = (1 + 0.1 * source.random() * (source.random() < disturbed) for _ in range(count))
    return [step_s * source.lognormvariate(0, 0.01) * more for more in neighbours]


def a_tree(
    source: random.Random, count: int, disturbed: float = 0.0, slower: int | None = None
) -> list[ConfigurationPair]:
    pairs = []
    for number in range(12):
        step_s = 10 ** source.uniform(-3, 0)
        after = step_s * (1.05 if number == slower else 1)
        base, new = (launches(source, count, one, disturbed) for one in (step_s, after))
        pairs.append(ConfigurationPair("c", str(number), SPEC, base, new))
    judge_pairs(pairs, False, 0.02)
    return pairs


@pytest.mark.parametrize("disturbed", [0.0, 0.1])
@pytest.mark.parametrize("count", [3, 5])
def test_equal_trees_raise_few_alarms(count: int, disturbed: float) -> None:
    source = random.Random(count)
    trees = [{one.verdict for one in a_tree(source, count, disturbed)} for _ in range(100)]
    assert sum("worse" in verdicts for verdicts in trees) <= 5
    assert sum("better" in verdicts for verdicts in trees) <= 5


@pytest.mark.parametrize(("count", "disturbed", "least"), [(4, 0.0, 27), (5, 0.0, 29), (8, 0.1, 20)])
def test_a_planted_slow_down_of_5_percent_is_found(count: int, disturbed: float, least: int) -> None:
    source = random.Random(count)
    found = Counter(
        one.config_id for _ in range(30) for one in a_tree(source, count, disturbed, 7) if one.verdict == "worse"
    )
    assert found["7"] >= least
    assert sum(found.values()) - found["7"] <= 2


def pair(base: list[float], new: list[float], **ends: int) -> ConfigurationPair:
    return ConfigurationPair("c", "0", SPEC, base, new, Counter(ends))


FIVE, SLOWER = [1.00, 1.01, 1.02, 1.03, 1.04], [1.10, 1.11, 1.12, 1.13, 1.14]


@pytest.mark.parametrize(
    ("one", "column", "verdict"),
    [
        (pair(FIVE, SLOWER), STEP, "worse"),
        (pair(SLOWER, FIVE), STEP, "better"),
        (pair(FIVE, SLOWER), "metrics.samples_per_s", "better"),
        (pair(FIVE[:3], SLOWER[:3]), STEP, "worse"),
        (pair(FIVE[:2], SLOWER), STEP, "inconclusive"),
        (pair(FIVE, []), STEP, "inconclusive"),
        (pair(FIVE, [], oom=2), STEP, "fails"),
        (pair(FIVE, [], cancelled=2), STEP, "inconclusive"),
        (pair([], [], oom=2), STEP, "inconclusive"),
        (pair(FIVE, [1.005, 1.015, 1.02, 1.03, 1.045]), STEP, "inconclusive"),
        # A single launch that is far off moves the mean, and no rank.
        (pair([1.0, 1.001, 1.002, 1.003, 1.004], [1.0005, 1.0015, 1.0025, 1.0035, 9.0]), STEP, "inconclusive"),
        (pair([1.0, 1.001, 1.002, 0.999, 0.998], [1.003, 1.0, 1.001, 0.997, 1.002]), STEP, "equivalent"),
        (pair([1.0, 1.0001, 1.0002, 1.0003, 1.0004], [1.01, 1.0101, 1.0102, 1.0103, 1.0104]), STEP, "equivalent"),
        (pair([2.0**30] * 3, [2.0**30] * 3), "metrics.peak_memory_bytes", "equivalent"),
        (pair([2.0**30] * 3, [2.0**31] * 3), "metrics.peak_memory_bytes", "worse"),
    ],
)
def test_a_pair_of_configurations_gets_the_expected_verdict(one: ConfigurationPair, column: str, verdict: str) -> None:
    judge_pairs([one], is_larger_better(column, pl.DataFrame()), 0.02)
    assert one.verdict == verdict
    assert bool(one.reason) == (verdict in ("inconclusive", "fails"))


def side(step_s: list[float], cluster: str = "c", **changes: Any) -> list[RunResult]:
    return [launch(one, cluster=cluster, repeat=number, **changes) for number, one in enumerate(step_s)]


def test_pairs_are_of_one_configuration_and_cluster() -> None:
    base = frame_of([*side(FIVE), *side(FIVE, "d"), *side(FIVE, nodes=2)])
    new = frame_of([*side(SLOWER), *side(SLOWER, nodes=4), launch(None, status="oom", repeat=9)])
    pairs, notes = pair_configurations(base, new, STEP)
    assert [(one.cluster, one.spec.nodes, one.base, one.new, one.ends["oom"]) for one in pairs] == [
        ("c", 1, FIVE, SLOWER, 1)
    ]
    assert notes == ["2 configurations only in base", "1 configuration only in new"]


def test_other_clusters_are_compared_by_configuration() -> None:
    pairs, notes = pair_configurations(frame_of(side(FIVE)), frame_of(side(SLOWER, "d")), STEP)
    assert [(one.cluster, one.base, one.new) for one in pairs] == [("d", FIVE, SLOWER)]
    assert notes == ["c is compared with d"]


def test_a_launch_is_not_compared_with_itself() -> None:
    frame = frame_of(side(FIVE))
    pairs, notes = pair_configurations(frame, frame, STEP)
    assert pairs == []
    assert notes == ["5 launches are in both inputs and were ignored"]


def test_only_figures_have_ratios() -> None:
    assert comparison_metric("step_time_s") == STEP
    for name in ("drift", "status", "bubble_fraction"):
        with pytest.raises(ConfigError, match="not a figure to compare"):
            comparison_metric(name)


def findings() -> list[ComparisonRow]:
    pairs = [
        ConfigurationPair("c", "a" * 12, SPEC, [0.1, 0.101, 0.102, 0.103, 0.104], [0.11, 0.111, 0.112, 0.113, 0.114]),
        ConfigurationPair("c", "b" * 12, RunSpec(model="resnet18", dataset="digits", strategy="<&\x1b", batch_size=8), [1.0], [1.0]),
        ConfigurationPair("c", "d" * 12, RunSpec(model="resnet18", dataset="digits", strategy="fsdp", batch_size=8), [1.0], [], Counter(oom=1)),
    ]  # fmt: skip
    judge_pairs(pairs, False, 0.02)
    return rows_from_pairs(pairs, STEP)


def test_the_table_has_the_worst_first() -> None:
    view = comparison_text_view(findings(), "old -> new", ["1 configuration only in new"], 0.02)
    assert view.title == "old -> new, step_time_s: 1 fails, 1 slower, 1 inconclusive"
    assert [row[:1] + row[2:] for row in view.cells] == [
        ["fsdp", "1.00 s", "", "", "fails", "1:-"],
        ["ddp", "102 ms", "112 ms", "+9.8 % [+6.8 +12.9]", "slower", "5:5"],
        ["<&\x1b", "1.00 s", "1.00 s", "+0.0 %", "inconclusive", "1:1"],
    ]
    assert view.notes[-1] == "inconclusive, 1 row: at least 3 launches per side are needed, better 5"
    assert view.warnings == [f"fsdp on 1 rank, resnet18, batch 8 ({'d' * 12}): fails: 1 oom"]


def test_junit_is_xml_whatever_names_are() -> None:
    suite = ET.fromstring(junit_xml(findings(), 'a "&<\uffff -> b'))[0]
    assert suite.attrib == {"name": 'a "&<\ufffd -> b', "tests": "3", "failures": "2", "skipped": "1", "errors": "0"}
    cases = [(case.attrib["classname"], [child.tag for child in case]) for case in suite]
    assert cases == [("hpcbench.compare.c", [tag]) for tag in ("failure", "failure", "skipped")]
    assert suite[1][0].attrib["message"] == "slower +9.8 % [+6.8 +12.9]"


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    for name, step_s in (("old", FIVE), ("new", SLOWER)):
        write(side(step_s), tmp_path / name)
    return tmp_path


def call(*arguments: str | Path) -> Result:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(cli, ["compare", *map(str, arguments)])
    if isinstance(done.exception, HpcbenchError):
        raise done.exception
    return done


def test_the_command_compare_exits_with_1_where_slower(trees: Path) -> None:
    old, new = trees / "old", trees / "new"
    done = call(old, new, "--out", trees / "c.md", "--junit", trees / "c.xml")
    assert done.exit_code == 1
    assert "1 slower" in " ".join(done.stdout.split())
    assert "| ddp | 1 | 1.02 s | 1.12 s | +9.8 % \\[+6.8 +12.9\\] | slower | 5:5 |" in (trees / "c.md").read_text()
    assert ET.parse(trees / "c.xml").getroot()[0].attrib["failures"] == "1"
    assert call(new, old).exit_code == 0
    document = json.loads(call(old, new, "--threshold", "20", "--json").stdout)
    (row,) = document["rows"]
    assert (row["verdict"], row["launches_base"]) == ("equivalent", 5)
    assert row["ratio"] == pytest.approx(1.12 / 1.02, rel=1e-3)
    with pytest.raises(ConfigError, match="no configuration of base and new can be compared"):
        call(old, old)
    done = call(old, new, "--where", "nodes == 2", "--allow-empty")
    assert done.stderr.startswith("none of the 5 runs in ")
    assert "--where 'nodes == 2'" in done.stderr
    assert "nothing to compare\nbase has no runs\nnew has no runs" in done.stderr


def test_parameters_that_keep_pairs_apart_are_named(trees: Path) -> None:
    """A gate whose baseline was renamed or measured otherwise must not stay green."""
    others: dict[str, dict[str, Any]] = {"longer": {"steps": 60}, "both": {"model": "resnet50", "steps": 60}}
    for name, changes in others.items():
        write(side(FIVE, **changes), trees / name)
    done = CliRunner().invoke(cli, ["compare", str(trees / "old"), str(trees / "longer"), "--junit", str(trees / "j")])
    assert isinstance(done.exception, ConfigError)
    assert "1 configuration only in base\n1 configuration only in new\nsteps: 20 in base, 60 in new" in done.stderr
    mixed = [frame_of(side(FIVE)), load_frame(ResultsTree(trees / "both"), [])]
    assert separating_parameters(*mixed) == ["model: vgg11 in base, resnet50 in new", "steps: 20 in base, 60 in new"]


def test_option_since_splits_launches_at_a_date(trees: Path) -> None:
    for number, path in enumerate(sorted((trees / "old").glob("c/runs/*/*/result.json"))):
        os.utime(path, (1.6e9 + number * 1e7,) * 2)
    done = call(trees / "old", "--since", "2021-02-01", "--json")
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["launches_base"], row["launches_new"]) == (2, 3)
    with pytest.raises(ConfigError, match="no date"):
        call(trees / "old", "--since", "yesterday")


@pytest.mark.parametrize("written", [1.6e9, "an hour", -5.0, 1e300, None])
def test_the_date_of_a_result_is_its_own_where_it_has_one(trees: Path, tmp_path: Path, written: object) -> None:
    """A copy has new times of files; impossible dates are those of the files."""
    tree = ClusterTree(tmp_path / "copy" / "c")
    for number, path in enumerate(sorted((trees / "old").glob("c/runs/*/*/result.json"))):
        document = json.loads(path.read_text())
        copy = tree.result_path(document["run_id"])
        copy.parent.mkdir(parents=True)
        copy.write_text(json.dumps({**document, "ended_at_s": written if number < 2 else 1.7e9}))
        os.utime(copy, (1.65e9,) * 2)
    frame = load_frame(ResultsTree(tree.root.parent), [])
    broken = written == "an hour"
    dates = frame.filter(frame["status"] != "broken").sort("ended_at_s")["ended_at_s"].to_list()
    early = [] if broken else [1.6e9 if written == 1.6e9 else 1.65e9] * 2
    assert dates == early + [1.7e9] * 3


BAND = """[[band]]
where = 'strategy == "ddp" and cluster == "c"'
value = "{}"
low = -0.1
high = 0.05
"""


@pytest.mark.parametrize(
    ("text", "code", "verdicts"),
    [
        (BAND.format("1100 ms"), 0, ["within"]),
        (BAND.format("1 s"), 1, ["outside"]),
        (BAND.format("1.3 s"), 1, ["outside"]),
        (BAND.format("1 s").replace("ddp", "fsdp"), 1, ["nothing fits"]),
        (BAND.format("1 s") + BAND.format("7").replace('"7"', '7\nmetric = "samples_per_s"'), 1, ["outside", "within"]),
    ],
)
def test_measurements_outside_a_band_fail(trees: Path, text: str, code: int, verdicts: list[str]) -> None:
    bands = trees / "bands.toml"
    bands.write_text(text)
    done = call(trees / "new", "--bands", bands, "--json")
    assert [row["verdict"] for row in json.loads(done.stdout)["rows"]] == verdicts
    assert done.exit_code == code


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BAND.format("1 GiB"), r"bands.toml:1: band.0: '1 GiB' is not a duration"),
        (BAND.format("1 s").replace("low = -0.1\nhigh = 0.05\n", ""), "low, high or both are needed"),
        (BAND.format("1 s").replace("strategy ==", "stratgy =="), r"bands.toml:2: .*no column 'stratgy'"),
        (BAND.format("1").replace('"1"', "1") + 'metric = "fast"', r"bands.toml:6: no column 'fast'"),
        (BAND.format("1 s").replace("-0.1", "0.1"), "less than or equal to 0"),
    ],
)
def test_an_invalid_band_is_reported_with_its_place(trees: Path, text: str, message: str) -> None:
    bands = trees / "bands.toml"
    bands.write_text(text)
    with pytest.raises(HpcbenchError, match=message):
        call(trees / "new", "--bands", bands)


def test_a_wrong_number_of_sources_is_refused(trees: Path) -> None:
    with pytest.raises(ConfigError, match="1 source given, 2 needed"):
        call(trees / "new")
    with pytest.raises(ConfigError, match="2 sources given, 1 needed"):
        call(trees / "new", trees / "old", "--since", "2021-01-01")
