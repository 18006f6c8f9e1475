"""Which models go with which data sets: what ``resolve`` would accept of one device."""

from __future__ import annotations

from typing import Any

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.catalog import models
from hpcbench.parallel.datasets import DATASETS
from hpcbench.parallel.resolve import Dropped, Limits, resolve


def pair(
    model: str, dataset: str, input_size: int | None = None, model_options: dict[str, Any] | None = None
) -> RunSpec | Dropped:
    """A run of a sample on one device, or why there is none."""
    point: dict[str, Any] = {"model": model, "dataset": dataset, "strategy": "single", "batch_size": 1}
    if input_size is not None:
        point["input_size"] = input_size
    if model_options:
        point["model_options"] = dict(model_options)
    return resolve(point, Limits("any"))


def shipped_pairs() -> list[tuple[str, str]]:
    """Every shipped model with every data set that it takes, in the catalog's order."""
    return [
        (model, dataset) for model in models() for dataset in DATASETS if not isinstance(pair(model, dataset), Dropped)
    ]
