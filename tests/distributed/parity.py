"""The training with which a strategy of the registry is compared with one device."""

from __future__ import annotations

from typing import Any

from hpcbench.config.run_spec import DEGREE_NAMES
from hpcbench.parallel.catalog import STRATEGIES
from hpcbench.parallel.strategy_entry import ParityCase
from tests.distributed.cases import Case, make_case


def parity_training(key: str, case: ParityCase, **more: Any) -> Case:
    """Return the training of ``case``; its epochs end with a batch that lacks a sample."""
    own_degree = STRATEGIES[key].own_degree
    degrees = dict.fromkeys(DEGREE_NAMES, 1)
    if own_degree is not None:
        degrees[own_degree] = case.ranks * case.devices_per_task
    return make_case(
        case.ranks, case.model, case.dataset, dict(case.model_options), strategy=key, replicated=False,
        options=dict(case.options), micro_batches=case.micro_batches, devices_per_task=case.devices_per_task,
        **{**degrees, **case.degrees}, **more,
    )  # fmt: skip
