"""One run of a tree, for tests of what lies in trees and archives."""

from __future__ import annotations

from typing import Any

from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.results.schema import RunMetrics, RunResult

SPEC = RunSpec(model="resnet18", dataset="digits", strategy="single", batch_size=8)
ID = run_id(SPEC)


def result(attempt: int = 1, status: str = "ok", spec: RunSpec = SPEC, **more: Any) -> RunResult:
    given: dict[str, Any] = {"metrics": RunMetrics(samples_per_s=1.5), **more}
    return RunResult(
        run_id=run_id(spec), config_id=config_id(spec), attempt=attempt, sweep="s", cluster="c", status=status, spec=spec,
        **given,
    )  # fmt: skip
