"""Planted trees whose right findings are known, and how often trees without any are believed to have some."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpcbench.cli.main import cli
from hpcbench.errors import ConfigError
from hpcbench.report.column_names import Condition
from hpcbench.report.findings.finding import OBSERVED, Finding
from hpcbench.report.findings.findings_report import Findings, derive_findings, suggested_measurements
from hpcbench.report.hypothesis_tests import (
    EQUIVALENT,
    INCONCLUSIVE,
    SIGNIFICANT,
    WinnerTest,
    judge_winners,
    launches_needed,
)
from hpcbench.results.schema import RunResult
from tests.report import planted
from tests.report.planted import launch, launches


def findings(results: list[RunResult], where: str | None = None) -> Findings:
    return derive_findings(planted.frame_of(results), Condition(where, "--where") if where else None)


def told(answers: list[Finding]) -> list[tuple[str, str, str]]:
    return [(one.subject, one.text, one.sure) for one in answers]


def test_a_crossover_of_two_strategies_is_a_significant_finding() -> None:
    found = findings(planted.crossover())
    assert [(one.devices, one.strategy, one.rival, one.sure) for one in found.of_kind("fastest")] == [
        (2, "ddp", "fsdp", SIGNIFICANT), (4, "fsdp", "ddp", SIGNIFICANT), (8, "fsdp", "ddp", SIGNIFICANT),
    ]  # fmt: skip
    (change,) = found.of_kind("crossover")
    assert (change.text, change.sure) == ("from 2 nodes to 4 nodes the fastest changes from ddp to fsdp", SIGNIFICANT)
    assert told(found.of_kind("efficiency")) == [
        ("vgg11 on mnist", "ddp falls below 80 % at 4 nodes: 71 %", SIGNIFICANT),
        ("vgg11 on mnist", "fsdp stays at 80 % or more up to 8 nodes: 82 %", SIGNIFICANT),
    ]
    (four,) = [one for one in found.of_kind("fastest") if one.nodes == 4]
    assert four.ratio == pytest.approx(140 / 120, rel=2e-3)
    assert (four.ratio_low or 0) < 140 / 120 < (four.ratio_high or 0)
    assert [(row.strategy, row.launches) for row in four.evidence] == [("fsdp", 5), ("ddp", 5)]
    assert [row.samples_per_s for row in four.evidence] == pytest.approx([32 / 0.12, 32 / 0.14])
    assert {one.kind for one in found.answers}.isdisjoint({"memory", "failure", "doubt"})
    assert INCONCLUSIVE not in {one.sure for one in found.answers}


def test_failed_runs_are_findings_with_cause_and_remedy() -> None:
    found = findings(planted.failure())
    assert [(one.text, one.why, one.sure) for one in found.of_kind("fastest") if one.nodes == 4] == [
        ("only fsdp ended well: 213 samples/s", "ddp (oom), zero1 (failed) and gpipe (timeout) did not", OBSERVED)
    ]
    assert [one.text for one in found.of_kind("memory")] == ["with batch 8 ddp ran out of memory; fsdp (3.0 GiB) fits"]
    assert [(one.subject, one.text, one.settle) for one in found.of_kind("failure")] == [
        ("failed: 3 runs: zero1 on 4 nodes", "PeerEnded: rank 3 ended without a word", "see its node's log"),
        ("timeout: 1 run: gpipe on 4 nodes", "Timeout: not done after 30 min", "a longer time_limit_min"),
    ]
    assert found.statuses == {"failed": 3, "ok": 10, "oom": 2, "timeout": 1}


def test_overlapping_intervals_are_inconclusive() -> None:
    (answer,) = findings(planted.overlapping()).of_kind("fastest")
    assert (answer.strategy, answer.rival, answer.sure) == ("ddp", "fsdp", INCONCLUSIVE)
    assert answer.text == (
        "inconclusive; ddp was measured the fastest: 320 samples/s, +1.0 % [-4.8 %, +7.2 %] over fsdp"
    )
    assert answer.settle.startswith("more than 100 launches each")


TWO_NODES = functools.partial(launches, nodes=2)
STOPPED = launch(None, status="cancelled", nodes=2, strategy="fsdp")


@pytest.mark.parametrize(
    ("results", "sure", "text", "why"),
    [
        ([*TWO_NODES(0.10, 2), *TWO_NODES(0.20, 2, strategy="fsdp")], INCONCLUSIVE, "x 2.0 over fsdp", "not enough repeats (2 launches each; at least 3 each)"),
        ([*TWO_NODES(0.10, 1), *TWO_NODES(0.20, 5, strategy="fsdp")], INCONCLUSIVE, "x 2.0 over fsdp", "not enough repeats (1 launch against 5; at least 3 each)"),
        # The winner must beat every rival: one with few launches leaves it open.
        ([*TWO_NODES(0.10), *TWO_NODES(0.12, strategy="fsdp"), *TWO_NODES(0.121, 2, strategy="zero1")], INCONCLUSIVE, "over fsdp", "not enough repeats (5 launches against 2; at least 3 each)"),
        ([*TWO_NODES(0.10, 3), *TWO_NODES(0.11, 3, strategy="fsdp")], SIGNIFICANT, "ddp is the fastest", "3 launches each, Welch's test"),
        ([*TWO_NODES(0.10), *TWO_NODES(0.1005, strategy="fsdp")], EQUIVALENT, "ddp and fsdp are equivalent", "within 2 %"),
        (TWO_NODES(0.10), INCONCLUSIVE, "only ddp was measured", "5 launches"),
        ([*TWO_NODES(0.10), STOPPED], INCONCLUSIVE, "only ddp ended well", "fsdp (cancelled) did not"),
        ([*TWO_NODES(0.10), *TWO_NODES(0.12, strategy="fsdp", digest="e2")], INCONCLUSIVE, "inconclusive", "fsdp: measured in another environment"),
        ([*TWO_NODES(0.10), *TWO_NODES(0.11, strategy="fsdp", digest="e2"), *TWO_NODES(0.12, strategy="fsdp")], SIGNIFICANT, "+20.0 %", "5 launches"),
    ],
)  # fmt: skip
def test_the_fastest_is_significant_only_with_enough_launches(
    results: list[RunResult], sure: str, text: str, why: str
) -> None:
    (answer,) = findings(results).of_kind("fastest")
    assert (answer.sure, text in answer.text, why in answer.why) == (sure, True, True), answer
    assert bool(answer.settle) == (sure == INCONCLUSIVE)


def test_findings_name_the_batch_where_a_strategy_was_measured_with_several() -> None:
    several = [*launches(0.20, nodes=1, batch_size=8), *launches(0.10, nodes=2, batch_size=4)]
    several += launches(0.40, nodes=2, batch_size=8)
    alone = findings(several)
    assert [one.text for one in alone.of_kind("fastest") if one.nodes == 2] == [
        "only ddp was measured: 80.0 samples/s with batch 4"
    ]
    rival = findings([*several, *launches(0.20, nodes=2, strategy="fsdp", batch_size=4)])
    (answer,) = [one for one in rival.of_kind("fastest") if one.nodes == 2]
    assert answer.text.startswith("ddp with batch 4 is the fastest: 80.0 samples/s")
    assert answer.text.endswith("over fsdp"), "it has one batch"
    assert answer.strategy == "ddp"


def test_a_finding_lists_its_caveats() -> None:
    warned = ["other processes used the cores: 12 %"]
    slow = launches(0.12, nodes=2, strategy="gpipe", pp_degree=2, dp_degree=1)
    gone = [launch(None, status="failed", nodes=2, repeat=number) for number in (7, 8)]
    found = findings([*launches(0.10, nodes=2, warnings=warned), *slow, *gone])
    (answer,) = found.of_kind("fastest")
    assert answer.doubts == (
        "a step takes 16 samples with ddp, 8 with gpipe",
        "other launches of ddp did not end well: 2 failed",
        "warning of ddp: other processes used the cores",
    )
    assert told(found.of_kind("doubt")) == [("warning, 1 configuration of 4", warned[0], OBSERVED)]


def test_spread_and_environments_are_doubts() -> None:
    wide = launches(0.1, noise=(0, 0.3), strategy="fsdp")
    found = findings([*launches(0.1), *launches(0.1, 1, digest="e2", optimizer="adam"), *wide])
    assert [(one.subject, one.text) for one in found.of_kind("doubt")] == [
        ("spread, 1 configuration of 3",
         "launches of one configuration differ by more than 10 %: fsdp on 1 node, 1 device by 30 %"),
        ("environments of c",
         "software or hardware changed between runs; configurations by environment: e1 (2) and e2 (1)"),
    ]  # fmt: skip


def test_memory_findings_name_the_largest_batch_that_fits() -> None:
    oom = [launch(None, status="oom", nodes=2, batch_size=size) for size in (32, 64)]
    found = findings(
        [*oom, *launches(0.1, nodes=2, batch_size=16), *launches(0.3, 1, nodes=2, batch_size=32, compile=True)]
    )
    assert [one.text for one in found.of_kind("memory")] == [
        "with batch 32 ddp ran out of memory with some settings or in some launches",
        "with batch 64 ddp ran out of memory; the largest batch that fits is 32, with ddp",
    ]


def test_efficiency_needs_one_device_and_one_environment() -> None:
    (answer,) = findings(launches(0.1, nodes=2)).of_kind("efficiency")
    assert (answer.sure, answer.text) == (
        INCONCLUSIVE, "inconclusive: there is no run on one device with the same batch"
    )  # fmt: skip
    found = findings([*launches(0.1, digest="e2"), *launches(0.2, nodes=2)])
    (answer,) = found.of_kind("efficiency")
    assert (answer.sure, answer.why) == (INCONCLUSIVE, "the run on one device was measured in another environment")
    (answer,) = findings([*launches(0.1), *launches(0.1249, noise=(0.02, -0.02, 0), nodes=2)]).of_kind("efficiency")
    assert (answer.sure, answer.text) == (
        INCONCLUSIVE,
        "inconclusive; as measured, ddp stays at 80 % or more up to 2 nodes: 80 %",
    )


def test_a_question_can_be_narrowed_and_keeps_its_baseline() -> None:
    found = findings(planted.crossover(), "nodes == 4")
    assert [(one.nodes, one.strategy) for one in found.of_kind("fastest")] == [(4, "fsdp")]
    assert [(one.strategy, one.nodes) for one in found.of_kind("efficiency")] == [("ddp", 4), ("fsdp", 4)]


def test_clusters_and_workloads_have_findings_of_their_own() -> None:
    both = [*launches(0.1, nodes=2), *launches(0.2, nodes=2, cluster="d"), *launches(0.3, nodes=2, precision="bf16")]
    assert [one.subject for one in findings(both).of_kind("fastest")] == [
        "vgg11 on mnist, precision bf16, 2 nodes, cluster c",
        "vgg11 on mnist, precision fp32, 2 nodes, cluster c",
        "vgg11 on mnist, precision fp32, 2 nodes, cluster d",
    ]


@pytest.mark.parametrize(("count", "strategies"), [(3, 2), (5, 2), (5, 4)])
def test_equal_strategies_are_seldom_reported_as_different(count: int, strategies: int) -> None:
    """At most 5 % of 120 trees with three scales each have a finding, although no strategy is the fastest."""
    source = random.Random(count * 10 + strategies)
    false = 0
    for _ in range(120):
        duels = []
        for _ in range(3):
            sides = [[source.lognormvariate(0, 0.03) for _ in range(count)] for _ in range(strategies)]
            sides.sort(key=lambda side: sorted(side)[count // 2], reverse=True)
            duels.append(WinnerTest(sides[0], sides[1:]))
        false += any(one.sure == SIGNIFICANT for one in judge_winners(duels, 0.02))
    assert false <= 6


def test_the_best_of_many_configurations_is_no_better_strategy() -> None:
    """One strategy was tried with 20 settings, the other with one; none is any faster."""
    source = random.Random(20)
    false = 0
    for _ in range(120):
        many = max(
            ([source.lognormvariate(0, 0.03) for _ in range(5)] for _ in range(20)), key=lambda side: sorted(side)[2]
        )
        one = [source.lognormvariate(0, 0.03) for _ in range(5)]
        false += any(
            found.sure == SIGNIFICANT
            for found in judge_winners([WinnerTest(many, [one], configurations_tried=20)], 0.02)
        )
    assert false <= 6


def test_settings_of_a_strategy_are_choices() -> None:
    """Five launches a side, 4 % apart: told of one configuration, not of the best of thirty alike."""
    noise = (0.0, 0.012, -0.011, 0.018, -0.02)
    ddp, fsdp = launches(0.100, noise=noise, nodes=2), launches(0.104, noise=noise, nodes=2, strategy="fsdp")
    (answer,) = findings([*ddp, *fsdp]).of_kind("fastest")
    assert answer.sure == SIGNIFICANT
    others = [one for rate in range(30) for one in launches(0.1001, noise=noise, nodes=2, learning_rate=0.1 + rate)]
    (answer,) = findings([*ddp, *others, *fsdp]).of_kind("fastest")
    assert answer.sure == INCONCLUSIVE


def test_a_planted_difference_of_5_percent_is_significant() -> None:
    """1 % between launches, three strategies, two scales, one tree in twenty with five launches may miss it."""
    source = random.Random(5)
    right = wrong = 0
    for _ in range(20):
        answers = findings(planted.alike(source, 5, 3, 3, slower=0.05), "nodes > 1").of_kind("fastest")
        right += sum(one.sure == SIGNIFICANT and one.strategy == "s0" for one in answers)
        wrong += sum(one.sure == SIGNIFICANT and one.strategy != "s0" for one in answers)
    assert (right >= 38, wrong) == (True, 0)


def test_needed_launches_are_those_of_power_tables() -> None:
    """Tables of power state 17 a side for a difference of one standard deviation, 64 for a half."""
    wide = [1.0, 1.01, 0.99, 1.02, 0.98]
    sd = 0.0158
    assert launches_needed(wide, [value * (1 + sd) for value in wide]) in (16, 17, 18)
    assert launches_needed(wide, [value * (1 + sd / 2) for value in wide]) in range(60, 70)
    assert launches_needed(wide, wide) is None


def test_remedies_of_inconclusive_findings_are_summed_up() -> None:
    noise = (0.0, 0.02, -0.02, 0.01, -0.01)
    pairs = [(0.10, 0.101, 2, 5), (0.10, 0.1005, 4, 5), (0.10, 0.12, 8, 1)]
    results = [
        one
        for ddp_s, fsdp_s, nodes, count in pairs
        for strategy, step_s in (("ddp", ddp_s), ("fsdp", fsdp_s))
        for one in launches(step_s, count, noise, nodes=nodes, strategy=strategy)
    ]
    found = [one for one in findings(results).of_kind("fastest") if one.sure == INCONCLUSIVE]
    numbers = [one.settle for one in found]
    assert numbers[0] == "about 41 launches each, if the difference is as measured"
    assert suggested_measurements(Findings(found, [], {}, None, None)) == [
        ("about 41 launches each, if the difference is as measured", 1),
        ("more than 100 launches each, if the difference is as measured: choose either", 1),
        ("set `repeats = 5` in the sweep", 1),
    ]
    closer = [replace(found[0], settle=numbers[0].replace("41", "9")), *found]
    assert suggested_measurements(Findings(closer, [], {}, None, None))[0] == (
        "about 9 to 41 launches each, if the difference is as measured", 2
    )  # fmt: skip


def call(tree: Path, *arguments: str) -> Result:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(cli, ["report", *arguments, "--results", str(tree)])
    if done.exception is not None:
        raise done.exception
    return done


def test_an_unfinished_sweep_is_reported(tmp_path: Path) -> None:
    results = planted.crossover()
    planted.write(results[5:], tmp_path)
    record = {"sweep": "s", "cluster": "c", "description": "", "run_ids": [one.run_id for one in results], "dropped": 0}
    (tmp_path / "c" / "sweeps").mkdir()
    (tmp_path / "c" / "sweeps" / "s.json").write_text(json.dumps({**record, "written_unix_s": 0}))
    found = json.loads(call(tmp_path, "s", "--json").stdout)["findings"]
    assert [(one["subject"], one["text"]) for one in found if one["kind"] == "doubt"] == [
        ("sweep s on c", "5 of 35 runs have no result yet")
    ]
    call(tmp_path, "s", "--out", str(tmp_path / "r.html"))
    assert "5 of 35 runs have no result yet" in (tmp_path / "r.html").read_text()


def test_the_command_report_prints_findings_and_json(tmp_path: Path) -> None:
    planted.write(planted.crossover(), tmp_path)
    lines = call(tmp_path, "--where", "nodes == 4").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    told = [line.strip() for line in lines]
    assert "fsdp is the fastest: 267 samples/s, +16.7 % [+15.9 %, +17.5 %] over ddp" in told
    document = json.loads(call(tmp_path, "--json").stdout)
    assert document["runs"] == {"ok": 35}
    fastest = [one["strategy"] for one in document["findings"] if one["kind"] == "fastest"]
    assert fastest == ["ddp", "fsdp", "fsdp"]
    assert call(tmp_path, "--where", "nodes == 3").stderr.startswith("none of the 35 runs in")
    with pytest.raises(ConfigError, match="no column 'nods'"):
        call(tmp_path, "--where", "nods == 4")
