"""Shipped layer tables, as the tests of prices take them."""

from __future__ import annotations

from typing import Any

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.calibrate import NO_MODEL
from hpcbench.strategies.layer_table import LayerRow, LayerTable, read_shipped_table


def table_of(model: str = "resnet18", dataset: str = "cifar10") -> LayerTable:
    """The table of a model at the data set's own size."""
    found = read_shipped_table(model, dataset)
    assert found is not None, f"{model} on {dataset} has no shipped table"
    return found


def table_of_run(spec: RunSpec) -> LayerTable:
    """The table of the run's model; collectives have an empty one."""
    if spec.workload == "collectives":
        return NO_MODEL
    return table_of(spec.model, spec.dataset)


def layer(name: str, block: int = 0, kind: str = "Linear", **values: Any) -> LayerRow:
    """A layer whose figures are 0 but for ``values``."""
    given: dict[str, Any] = {
        "input_shape": [3], "output_shape": [2], "parameters": 0, "forward_flops": 0, "backward_flops": 0,
        "activation_bytes": 0, "activation_fixed_bytes": 0, "output_bytes": 0, "forward_moved_bytes": 0,
        "backward_moved_bytes": 0,
    }  # fmt: skip
    return LayerRow(name=name, block=block, kind=kind, **{**given, **values})
