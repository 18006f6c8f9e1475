"""The training with which a strategy of the registry is compared with one device."""

from __future__ import annotations

from typing import Any

from hpcbench.config.run_spec import DEGREE_NAMES
from hpcbench.strategies.catalog import STRATEGIES, exclusion_reason
from tests.distributed.cases import Case, make_case
from tests.parity_cases import ParityCase, parity_cases


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


def takes_bf16_params(key: str) -> bool:
    """Whether the strategy trains with ``precision = "bf16_params"``."""
    spec = parity_training(key, parity_cases(key)[-1], precision="bf16_params").spec
    return exclusion_reason(spec) is None
