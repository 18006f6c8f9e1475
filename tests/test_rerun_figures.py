"""The tables that a rerun writes into its page."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.rerun import pages


def row(strategy: str, samples_per_s: float | None, devices: int = 1, **more: Any) -> dict[str, Any]:
    """A row of the data table, which leaves out degrees that no row sets."""
    return {
        "model": "vgg11", "dataset": "mnist", "strategy": strategy, "nodes": devices, "tasks_per_node": 1,
        "status": "ok", "samples_per_s": samples_per_s, "peak_memory_bytes": 100, **more,
    }  # fmt: skip


TWO = [
    row("single", 10.0),
    row("ddp", 18.0, 2),
    row("horovod", 15.0, 2),
    row("model", 9.0, 2, peak_memory_bytes=60),
    row("gpipe", 12.0, 2),
    row("1f1b", 13.0, 2),
    row("fairscale_pipe", None, status="oom", devices_per_task=2),
    row("pipedream", 16.0, 2),
    row("single", 10.0, dataset="cifar10"),
    row("ddp", 14.0, 2, dataset="cifar10"),
    row("model", 11.0, 2, dataset="cifar10"),
    row("gpipe", 10.0, 2, dataset="cifar10"),
    row("pipedream", 20.0, 2, dataset="cifar10"),
]


def summary(mean: float, signed: float, count: int = 4) -> dict[str, Any]:
    return {"mean": mean, "signed": signed, "count": count}


def document(ours: float) -> dict[str, Any]:
    ranking = {"groups": 2, "regret": 0.1, "worst_regret": 0.2}
    parts = {"peak_memory_bytes": summary(0.9, -0.1)}
    return {
        "scores": [
            {"predictor": "hpcbench", "total": summary(ours, 0.1), "strategies": {"ddp": summary(ours, 0.1)},
             "parts": parts, "ranking": ranking, "other": None},
            {"predictor": "paradl", "total": summary(0.5, -0.5, 3), "strategies": {}, "parts": {}, "ranking": ranking,
             "other": 0.75},
        ],
        "choices": [
            {"best": "ddp", "hpcbench": "ddp", "paradl": "horovod"},
            {"best": "ddp", "hpcbench": "ddp", "paradl": "ddp"},
        ],
    }  # fmt: skip


def test_only_marked_blocks_of_a_page_are_replaced() -> None:
    page = "a\n\n<!-- figures: one -->\n\nold\n\n<!-- end of figures -->\n\nb <!-- figures: two -->\n\nkept\n\n<!-- end of figures -->"
    filled = pages.filled(page, {"one": "| new |"})
    assert filled == page.replace("old", "| new |")
    with pytest.raises(AssertionError, match="no place for three"):
        pages.filled(page, {"three": ""})


@pytest.mark.parametrize("sweep", ["ddlbench-small", "paradl-small"])
def test_the_pages_have_a_place_for_every_table(sweep: str) -> None:
    rows = TWO if sweep == "ddlbench-small" else [row("single", 10.0), row("filter", 8.0, 2)]
    assert pages.filled(pages.PAGE.read_text(), pages.measured_blocks(sweep, rows))
    oracle_page = pages.ROOT / "benchmarks" / "oracle" / "README.md"
    assert pages.filled(oracle_page.read_text(), pages.score_blocks(sweep, {"before": document(0.7)}))
