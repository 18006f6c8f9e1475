"""The memory of a rank falls with the world size as the stages of ZeRO state."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hpcbench.errors import WorkerError
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.layer_table import LayerRow, LayerTable, TensorShape
from hpcbench.worker.strategy import import_fairscale
from tests.conftest import absent
from tests.distributed.memory import BLOCKS, STRATEGIES, WIDTH, P, measure, promised, row, spec_of
from tests.distributed.pool import Pool

pytestmark = pytest.mark.slow

BLOCK = P // BLOCKS


def blocks_table() -> LayerTable:
    """Return the layer table of ``memory.build_blocks``, as far as the formulas read it."""
    rows = [
        LayerRow(
            name=f"{number + 2}", block=number + 2, kind="Linear", input_shape=[WIDTH], output_shape=[WIDTH],
            parameters=WIDTH * WIDTH, forward_flops=0, backward_flops=0, activation_bytes=4 * WIDTH,
            activation_fixed_bytes=0, output_bytes=4 * WIDTH, forward_moved_bytes=0, backward_moved_bytes=0,
        )
        for number in range(BLOCKS)
    ]  # fmt: skip
    tensors = [TensorShape(f"{row.name}.weight", [WIDTH, WIDTH]) for row in rows]
    return LayerTable(
        model="blocks", dataset="digits", input_size=8, blocks=BLOCKS + 2, parameter_tensors=tensors, buffers=[],
        layers=rows,
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _fairscale() -> None:
    try:
        import_fairscale("nn.data_parallel")
    except WorkerError as error:
        absent("fairscale", str(error))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("key", STRATEGIES)
def test_state_is_as_small_as_promised(pool: Pool, key: str, ranks: int) -> None:
    """Before the update and after it; every tensor is counted, so nothing is kept elsewhere."""
    for one in pool.call(ranks, measure, spec_of(key, ranks)):
        print(row(key, ranks, one))
        expected = promised(STRATEGIES[key], ranks)
        assert one.parameters + one.gradients + one.optimizer == pytest.approx(expected, rel=0.1)
        assert one.all_before == pytest.approx(expected, rel=0.1)
        assert one.all_after == pytest.approx(expected, rel=0.1)
        formula = resolve_cost(key).memory(spec_of(key, ranks), blocks_table(), 0)
        assert one.parameters == pytest.approx(formula.parameters_bytes, rel=0.1)
        # Adam's temporaries are those of one block.
        assert one.optimizer == pytest.approx(formula.optimizer_bytes, rel=0.1, abs=2 * BLOCK)
        if STRATEGIES[key] == 3:
            assert BLOCK <= one.gathered <= 2 * BLOCK
        else:
            assert one.gathered == P


def test_fairscales_buckets_keep_all_gradients(pool: Pool) -> None:
    """ShardedDataParallel's buckets keep all gradients: these are views of the buckets."""
    options: dict[str, Any] = {"reduce_buffer_mb": 32.0}
    for one in pool.call(4, measure, msgspec.structs.replace(spec_of("fairscale_sddp", 4), options=options)):
        assert one.gradients == pytest.approx(P, rel=0.1)
        assert one.all_before == pytest.approx(promised(1, 4), rel=0.1)
