"""``compile = true`` where layers are split: the compiler traces the collectives between them, and the training is equal."""

from __future__ import annotations

import pytest

from tests.distributed.cases import EXACT, check, make_case, run_reference
from tests.distributed.compiled import run_traced
from tests.distributed.pool import Pool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("key", "model"), [("tensor", "vit"), ("filter", "resnet18"), ("channel", "resnet18")])
def test_split_layers_become_one_graph(pool: Pool, key: str, model: str) -> None:
    case = make_case(
        2, model, "digits", steps=2, strategy=key, tp_degree=2, dp_degree=1, precision="fp64", compile=True,
        replicated=False, narrow=model == "resnet18",
    )  # fmt: skip
    ranks = pool.call(2, run_traced, case)
    assert [(rank.graphs, rank.breaks) for rank in ranks] == [(1, {})] * 2
    check([rank.trained for rank in ranks], run_reference(case), EXACT)
