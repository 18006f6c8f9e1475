from __future__ import annotations

import pytest

from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.report.oracle_validation import measured_configurations
from hpcbench.results.frame import results_frame
from hpcbench.results.schema import RunMetrics, RunResult
from tests.worker.helpers import make_spec

DDP = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2)
PIPELINE = make_spec(strategy="1f1b", tasks_per_node=2, pp_degree=2, micro_batches=4)


def result(spec: RunSpec, wire_s: float | None) -> RunResult:
    metrics = RunMetrics(compute_s=2.0, comm_s=1.0, exposed_comm_s=0.5, wire_s=wire_s)
    return RunResult(
        run_id=run_id(spec), config_id=config_id(spec), attempt=1, sweep="s", cluster="c", status="ok", spec=spec,
        metrics=metrics,
    )  # fmt: skip


@pytest.mark.parametrize(("spec", "wire_s", "expected"), [(DDP, 0.75, 0.75), (DDP, None, 1.0), (PIPELINE, None, None)])
def test_communication_is_scored_by_its_time_on_the_wire(
    spec: RunSpec, wire_s: float | None, expected: float | None
) -> None:
    frame = results_frame([result(spec, wire_s)])
    (measured,) = measured_configurations(frame)
    assert measured.figures.get("comm_s") == expected
    assert measured.figures["compute_s"] == 2.0
    (earlier,) = measured_configurations(frame.drop("metrics.wire_s"))
    assert earlier.figures.get("comm_s") == (None if spec is PIPELINE else 1.0), "an export of an earlier version"
