"""Slow nodes and links are named, equal ones are not, and a profile without the slow ones can be written."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.errors import ConfigError
from hpcbench.report.findings import node_findings as judged
from hpcbench.report.findings.finding import Finding
from hpcbench.report.findings.findings_report import derive_findings
from hpcbench.report.findings.node_exclusions import write_exclusions
from hpcbench.report.findings.node_findings import find_slow, node_findings
from hpcbench.report.hypothesis_tests import LogRatioEstimate, estimate_log_ratio
from hpcbench.results.frame import results_frame
from hpcbench.results.probe_records import CollectiveProbe, ProbeResults
from hpcbench.results.schema import RunMetrics, RunResult, StepTimeStatistics


def launches(rng: random.Random, count: int, factor: float = 1.0) -> list[float]:
    """Seconds of launches: 1.5 % of noise, and one of twenty is up to a fifth slower."""
    late = (rng.uniform(1.0, 1.2) if rng.random() < 0.05 else 1.0 for _ in range(count))
    return [factor * one * rng.lognormvariate(0.0, 0.015) for one in late]


@pytest.mark.parametrize(("nodes", "repeats"), [(4, 3), (4, 5), (16, 5), (64, 10)])
def test_equal_nodes_are_not_named(nodes: int, repeats: int) -> None:
    """Twenty sweeps over equal nodes, at most one false name."""
    rng = random.Random(nodes)
    sweeps = [{f"n{node}": launches(rng, repeats) for node in range(nodes)} for _ in range(20)]
    assert sum(len(find_slow(sweep)) for sweep in sweeps) <= 1


@pytest.mark.parametrize(("nodes", "repeats", "factor"), [(4, 5, 1.1), (16, 5, 1.15), (64, 10, 1.1)])
def test_a_slowed_node_is_named(nodes: int, repeats: int, factor: float) -> None:
    rng = random.Random(nodes)
    for _ in range(20):
        sweep = {f"n{node}": launches(rng, repeats, factor if node == 2 else 1.0) for node in range(nodes)}
        named = find_slow(sweep)
        assert [one.name for one in named][:1] == ["n2"]
        assert named[0].ratio == pytest.approx(factor, abs=0.06)
        assert named[0].p_value <= 0.01


def test_many_nodes_take_few_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test reads the launches of all nodes."""
    tests: list[int] = []

    def counted(base: list[float], new: list[float]) -> LogRatioEstimate:
        tests.append(len(base))
        return estimate_log_ratio(base, new)

    monkeypatch.setattr(judged, "estimate_log_ratio", counted)
    rng = random.Random(0)
    sweep = {f"n{node}": launches(rng, 10, 1.1 if node == 2 else 1.0) for node in range(200)}
    assert [one.name for one in find_slow(sweep)] == ["n2"]
    assert len(tests) < 60


@pytest.mark.parametrize(
    ("readings_s", "names"),
    [
        ({}, []),
        ({"a": [1.0] * 9}, []),
        # Two launches are too few, and 1 % is too little.
        ({"a": [1.0, 1.01, 1.02], "b": [2.0, 2.0]}, []),
        ({"a": [1.0, 1.0, 1.0], "b": [1.01, 1.01, 1.01]}, []),
        ({"a": [1.0, 1.0, 1.0], "b": [1.03, 1.03, 1.03]}, ["b"]),
        ({"a": [1.0] * 5, "b": [1.5] * 5, "c": [1.0] * 5, "d": [2.0] * 5}, ["d", "b"]),
    ],
)
def test_names_of_literal_readings(readings_s: dict[str, list[float]], names: list[str]) -> None:
    assert [one.name for one in find_slow(readings_s)] == names


def result_of(spec: RunSpec, seconds: float, hosts: int = 1, pairs: list[CollectiveProbe] | None = None) -> RunResult:
    times = StepTimeStatistics(**{**dict.fromkeys(StepTimeStatistics.__struct_fields__, seconds), "std": 0.0})
    return RunResult(
        run_id=run_id(spec), config_id=config_id(spec), attempt=1, sweep="s", cluster="slurmbox", status="ok",
        spec=spec, metrics=RunMetrics(step_time_s=times), probe=ProbeResults(collectives=pairs) if pairs else None,
        ranks=[{"rank": rank, "host": f"n{rank}"} for rank in range(hosts)],
    )  # fmt: skip


def pinned(slow: float) -> list[RunResult]:
    rng = random.Random(1)
    given: dict[str, Any] = {"model": "vit", "dataset": "digits", "strategy": "single", "batch_size": 4}
    return [
        result_of(RunSpec(node=f"n{node}", repeat=repeat, **given), seconds)
        for node in range(4)
        for repeat, seconds in enumerate(launches(rng, 5, slow if node == 2 else 1.0))
    ]


def matrix(slow: dict[tuple[int, int], float]) -> list[RunResult]:
    """Five launches of all pairs of four nodes; ``slow`` are factors of pairs."""
    rng, results = random.Random(2), []
    for repeat in range(5):
        spec = RunSpec(workload="collectives", strategy="collectives", operation="pairs", message_bytes=1000, nodes=4,
                       repeat=repeat)  # fmt: skip
        pairs = [
            CollectiveProbe(operation="send", ranks=2, nodes=2, payload_bytes=1000, spread=0.0, repeats=3,
                            pair=[a, b], seconds=launches(rng, 1, slow.get((a, b), 1.0))[0])
            for a in range(4) for b in range(a + 1, 4)
        ]  # fmt: skip
        results.append(result_of(spec, 1.0, 4, pairs))
    return results


def the_finding(results: list[RunResult]) -> Finding:
    (finding,) = node_findings(results_frame(results), lambda wanted: [
        one for one in results if (one.cluster, one.run_id) in wanted
    ])  # fmt: skip
    assert finding.kind == "node"
    return finding


@pytest.mark.parametrize(
    ("results", "sure", "text", "slow_nodes"),
    [
        (pinned(1.0), "observed", "no node is slower than the others", ()),
        (pinned(1.3), "significant", "slower than the other nodes: n2 (29 % more time, p = ", ("n2",)),
        (
            [one for one in pinned(1.3) if one.spec.repeat < 2],
            "inconclusive",
            "not enough launches to name slow nodes",
            (),
        ),
        (matrix({}), "observed", "no link is slower than the others", ()),
        (matrix({(1, 3): 4.0}), "significant", "slower than the other links: n1 - n3 (", ()),
        (
            matrix({(0, 2): 3.0, (1, 2): 3.0, (2, 3): 3.0}),
            "significant",
            "slower than the other links: n2 (3 of its 3 links)",
            ("n2",),
        ),
    ],
)
def test_findings_name_nodes_and_links(
    results: list[RunResult], sure: str, text: str, slow_nodes: tuple[str, ...]
) -> None:
    finding = the_finding(results)
    assert (finding.sure, finding.slow_nodes) == (sure, slow_nodes)
    assert finding.text.startswith(text), finding.text


def test_pairs_that_cannot_be_are_left_out() -> None:
    results = matrix({(1, 3): 4.0})
    for result in results:
        assert result.probe is not None
        first = result.probe.collectives[0]
        for pair, seconds in (([0], 1.0), ([0, 9], 1.0), ([-1, 0], 1.0), ([0, 1, 2], 1.0), ([0, 1], 0.0)):
            result.probe.collectives.append(msgspec.structs.replace(first, pair=pair, seconds=seconds))
        result.ranks[2]["host"] = "n2\x1b[31m"
    finding = the_finding(results)
    assert finding.text.startswith("slower than the other links: n1 - n3 (")
    assert "6 links, 5 launches" in finding.why


def test_a_profile_without_the_slow_nodes_is_written(tmp_path: Path) -> None:
    path = tmp_path / "slurmbox.toml"
    quiet, slow = (derive_findings(results_frame(pinned(factor))) for factor in (1.0, 1.3))
    assert "was not written" in write_exclusions(quiet, path, "s")
    assert not path.exists()
    for _ in range(2):
        assert "1 of the nodes of slurmbox excluded" in write_exclusions(slow, path, "s\n[x]")
    profile, _ = load_cluster(str(path))
    assert (profile.name, profile.request.exclude_nodes, profile.launcher) == ("slurmbox", ["n2"], "srun")
    path.write_text('name = "slurmbox"\n')
    with pytest.raises(ConfigError, match="the file exists and is another profile"):
        write_exclusions(slow, path, "s")
