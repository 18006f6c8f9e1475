from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from hpcbench.cli.main import cli
from hpcbench.results.decode import OLD_RATE_WARNING, doubts_of
from hpcbench.results.frame import results_frame
from hpcbench.results.schema import RunResult
from hpcbench.worker.summary import summarize_run
from tests.worker.helpers import make_header, make_rank, make_spec, make_task, start_attempt, tree_of

PAIR = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2, steps=3)
TIMES = ([0.1, 0.5, 0.2], [0.2, 0.4, 0.1])


def measured(**values: Any) -> RunResult:
    """A result of two ranks as this version writes it."""
    ranks = {
        rank: make_rank(rank, step_times_s=times, step_samples=[8, 8, 8], flops_per_sample=60.0, **values)
        for rank, times in enumerate(TIMES)
    }
    header = make_header(Path("/tree"), peak_flops_per_s={"fp32": 1e4})
    return summarize_run(header, make_task(PAIR), 1, ranks, "ok")


def with_old_rates(result: RunResult) -> RunResult:
    """The result as earlier versions wrote it: over the sum of the slowest ranks' steps, 0.9 s."""
    metrics = result.metrics
    metrics.samples_per_s, metrics.timed_s = 48 / 0.9, None
    metrics.flops_per_s, metrics.mfu, metrics.epoch_time_s = 48 / 0.9 * 60, 48 / 0.9 * 60 / 2e4, 1500 / (48 / 0.9)
    for entry in result.ranks:
        del entry["timed_s"]
    return result


def upgrade(folder: Path) -> dict[str, int]:
    done = CliRunner().invoke(cli, ["results", "upgrade", "--json", "--results", str(folder / "results")])
    assert done.exit_code == 0, done.output
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def test_old_rates_become_those_of_this_version(tmp_path: Path) -> None:
    tree, expected = tree_of(tmp_path), measured()
    attempt = start_attempt(tmp_path, PAIR)
    for rank, times in enumerate(TIMES):
        attempt.write_rank(make_rank(rank, step_times_s=times, step_samples=[8, 8, 8]))
    tree.write_result(with_old_rates(measured()))
    assert upgrade(tmp_path) == {"upgraded": 1, "current": 0, "left": 0}
    result = tree.read_result(expected.run_id)
    assert result is not None
    for name in ("samples_per_s", "timed_s", "epoch_time_s", "flops_per_s", "mfu"):
        assert getattr(result.metrics, name) == pytest.approx(getattr(expected.metrics, name)), name
    assert [entry["timed_s"] for entry in result.ranks] == pytest.approx([0.8, 0.7])
    assert upgrade(tmp_path) == {"upgraded": 0, "current": 1, "left": 0}


@pytest.mark.parametrize("first_times", [None, [0.1, 0.1, 0.1]])
def test_a_result_whose_rank_files_are_gone_or_others_stays(tmp_path: Path, first_times: list[float] | None) -> None:
    tree, attempt = tree_of(tmp_path), start_attempt(tmp_path, PAIR)
    attempt.write_rank(make_rank(1, step_times_s=TIMES[1], step_samples=[8, 8, 8]))
    if first_times:
        attempt.write_rank(make_rank(0, step_times_s=first_times, step_samples=[8, 8, 8]))
    old = with_old_rates(measured())
    tree.write_result(old)
    before = tree.result_path(old.run_id).read_bytes()
    assert upgrade(tmp_path) == {"upgraded": 0, "current": 0, "left": 1}
    assert tree.result_path(old.run_id).read_bytes() == before


def test_only_old_rates_of_several_ranks_have_a_warning() -> None:
    old = with_old_rates(measured())
    assert OLD_RATE_WARNING in results_frame([old])["warnings"][0]
    assert doubts_of(measured()) == []
    old.ranks = old.ranks[:1]
    assert doubts_of(old) == [], "of one rank both definitions are one"


def test_impossible_results_are_marked() -> None:
    result = measured()
    assert result.metrics.step_time_s is not None
    result.metrics.step_time_s.median = -5.0
    assert doubts_of(result) == ["an impossible result: negative step_time_s"]
    other = measured()
    other.spec = msgspec.structs.replace(PAIR, batch_size=9)
    (doubt,) = doubts_of(other)
    assert doubt.startswith("the spec is not the one of the run_id: it is that of run ")
