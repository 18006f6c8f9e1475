"""Plots of collectives: bandwidth over size, and the matrix of pairs, in pictures and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.report.plots.plot_model import Plot, PlotRequest
from hpcbench.report.plots.plotting import draw_plot, encode_plot, plot_specification
from hpcbench.results.frame import results_frame
from hpcbench.results.probe_records import CollectiveProbe, ProbeResults
from hpcbench.results.schema import RankResult, RunResult
from hpcbench.worker.microbench.collective_metrics import collective_metrics
from tests.report.test_node_findings import result_of
from tests.report.test_terminal_plots import text


def collective(seconds: float, **given: Any) -> RunResult:
    """A launch whose readings are all the same."""
    spec = RunSpec(workload="collectives", strategy="collectives", **given)
    ranks = 2 if spec.operation == "pairs" else spec.ranks
    probe = CollectiveProbe(operation=spec.operation or "", ranks=ranks, nodes=spec.nodes, spread=0.0, repeats=3,
                            payload_bytes=spec.message_bytes or 0, seconds=seconds, readings_s=[seconds] * 3)  # fmt: skip
    result = result_of(spec, seconds, 3)
    result.probe = ProbeResults(collectives=[probe])
    rank = RankResult(rank=0, local_rank=0, node_rank=0, host="n0", pid=1, device="cpu", probe=result.probe)
    result.metrics, result.step_times_s = collective_metrics(result.probe, {0: rank}, [])
    result.units = {"bus_bandwidth": "bytes/s"}
    return result


def drawn(name: str, results: Sequence[RunResult]) -> Plot:
    return draw_plot(name, results_frame(results), PlotRequest(whole=lambda _: results))


def test_bandwidth_is_drawn_over_size_by_operation_and_group() -> None:
    found = drawn("bandwidth", [
        collective(seconds, operation=operation, message_bytes=size, tasks_per_node=4, nodes=nodes)
        for operation, nodes, size, seconds in (
            ("all_reduce", 1, 1000, 1e-3), ("all_reduce", 1, 4000, 2e-3), ("all_reduce", 2, 1000, 4e-3),
            ("broadcast", 1, 1000, 1e-3),
        )
    ])  # fmt: skip
    assert [(row["panel"], row["series"], row["x"], row["y"]) for row in found.rows] == [
        ("4 devices", "operation all_reduce", 1000, 1.5e6),
        ("4 devices", "operation all_reduce", 4000, 3e6),
        ("4 devices", "operation broadcast", 1000, 1e6),
        ("8 devices", "operation all_reduce", 1000, 437500),
    ]
    assert "4 devices: at message bytes 4000 operation all_reduce has 3.00 M bytes/s" in found.alt
    assert plot_specification(found)


def pairs() -> list[RunResult]:
    results = []
    for repeat, factor in enumerate((1.0, 3.0, 2.0)):
        result = collective(1.0, operation="pairs", message_bytes=1000, nodes=3, repeat=repeat)
        result.probe = ProbeResults(collectives=[
            CollectiveProbe(operation="send", ranks=2, nodes=2, payload_bytes=1000, spread=0.0, repeats=3,
                            pair=[*pair], seconds=factor * seconds)
            for pair, seconds in (((0, 1), 1e-3), ((0, 2), 1e-3), ((1, 2), 5e-3))
        ])  # fmt: skip
        results.append(result)
    return results


def test_pairs_are_a_matrix_with_medians_of_launches() -> None:
    found = drawn("pairs", pairs())
    fast, slow = 1000 / 2e-3, 1000 / 10e-3
    assert {(row["row"], row["column"]): row["value"] for row in found.rows} == pytest.approx({
        ("n0", "n1"): fast, ("n1", "n0"): fast, ("n0", "n2"): fast, ("n2", "n0"): fast,
        ("n1", "n2"): slow, ("n2", "n1"): slow,
    })  # fmt: skip
    assert "slowest pair: n1 - n2, 100 k bytes/s" in found.notes
    assert "slowest pair: n1 - n2, 100 k bytes/s" in found.alt
    assert encode_plot(found, ".svg").startswith(b"<svg")
    lines = [line.split("│")[1].split() for line in text(found, 60, "utf-8").splitlines() if "│" in line]
    assert lines == [["500", "500"], ["500", "100"], ["500", "100"]]
