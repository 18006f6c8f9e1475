from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcbench.results.decode import BrokenFileError, decode_result, doubts_of
from hpcbench.results.schema import RunResult, result_document
from hpcbench.worker.summary import summarize_run
from tests.worker.helpers import make_header, make_rank, make_spec, make_task

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


def test_impossible_results_are_marked() -> None:
    result = measured()
    assert result.metrics.step_time_s is not None
    result.metrics.step_time_s.median = -5.0
    assert doubts_of(result) == ["an impossible result: negative step_time_s"]
    other = measured()
    other.spec = msgspec.structs.replace(PAIR, batch_size=9)
    (doubt,) = doubts_of(other)
    assert doubt.startswith("the spec is not the one of the run_id: it is that of run ")


@pytest.mark.parametrize("version", [0, 2, "1", None])
@pytest.mark.parametrize("changed", [{}, {"spec": None}, {"run_id": None, "name": "x"}])
def test_a_result_of_another_schema_version_names_both(version: object, changed: dict[str, object]) -> None:
    result = measured()
    document = {**result_document(result), "schema_version": version, **changed}
    with pytest.raises(BrokenFileError, match=f"it has schema_version {version!r}, and this hpcbench reads 1"):
        decode_result(msgspec.json.encode(document), result.run_id)


def test_a_broken_result_of_this_schema_version_names_the_field() -> None:
    result = measured()
    document = {**result_document(result), "spec": None}
    with pytest.raises(msgspec.ValidationError, match=r"\$\.spec"):
        decode_result(msgspec.json.encode(document), result.run_id)
