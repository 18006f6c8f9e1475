"""Shipped layer tables, as the tests of prices take them."""

from __future__ import annotations

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.layer_table import LayerTable, read_shipped_table


def table_of(model: str = "resnet18", dataset: str = "cifar10") -> LayerTable:
    """The table of a model at the data set's own size."""
    found = read_shipped_table(model, dataset)
    assert found is not None, f"{model} on {dataset} has no shipped table"
    return found


def table_of_run(spec: RunSpec) -> LayerTable:
    """The table of the run's model."""
    return table_of(spec.model, spec.dataset)
