"""Every strategy of the registry: training as one device does and predicted traffic on real ranks, predicted memory.

The cases are those of the registry entries, so that a new strategy is tested without a new test file.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.strategies.traffic import total_payload_bytes
from hpcbench.worker.strategy import import_fairscale, resolve_runtime
from tests.conftest import absent
from tests.distributed.cases import EXACT, Case, OfRank, check, check_rounding, run_parallel, run_reference
from tests.distributed.parity import parity_training, takes_bf16_params
from tests.distributed.pool import Pool
from tests.distributed.test_live_memory import bytes_beside_samples, peak_bytes
from tests.distributed.test_traffic import expected, steady, table_of
from tests.parity_cases import ParityCase, parity_cases

CASES = [
    pytest.param(key, case, id=f"{key}-{case.model}-{number}")
    for key in STRATEGIES
    if key != "horovod"  # its library needs processes of its own: tests/distributed/test_horovod.py
    for number, case in enumerate(parity_cases(key))
]


def training(key: str, case: ParityCase, **more: Any) -> Case:
    """The training of ``case``; its epochs end with a batch that lacks a sample."""
    if key.startswith("fairscale"):
        try:
            import_fairscale("nn.data_parallel")
        except WorkerError as error:
            absent("fairscale", str(error))
    return parity_training(key, case, **more)


@pytest.mark.parametrize(("key", "parity"), CASES)
def test_a_strategy_trains_what_its_reference_does(pool: Pool, key: str, parity: ParityCase) -> None:
    widest = resolve_runtime(key).widest
    case = training(key, parity, precision=widest, steps=4, narrow=parity.model in ("vgg11", "resnet18"))

    def run(chosen: Case) -> list[OfRank]:
        return pool.run(chosen) if parity.ranks > 1 else [run_parallel(chosen, None)]

    if widest == "fp64":
        check(run(case), run_reference(case), EXACT)
    else:
        check_rounding(run, case)


@pytest.mark.parametrize(("key", "parity"), CASES)
def test_a_strategy_passes_what_its_cost_predicts(pool: Pool, key: str, parity: ParityCase) -> None:
    spec: RunSpec = training(key, parity).spec
    recorded = pool.call(spec.ranks, steady, spec) if spec.ranks > 1 else [steady(spec, None)]
    predicted = [expected(spec, rank) for rank in range(spec.ranks)]
    if resolve_cost(key).exact_traffic:
        assert recorded == predicted
    else:
        assert [total_payload_bytes(calls) for calls in recorded] == [total_payload_bytes(calls) for calls in predicted]


BF16_CASES = [pytest.param(key, parity_cases(key)[-1], id=key) for key in STRATEGIES if takes_bf16_params(key)]
"""One case of every strategy that has them; of data parallelism the network with BatchNorm."""


@pytest.mark.parametrize(("key", "parity"), BF16_CASES)
def test_bf16_parameters_train_what_one_device_does(pool: Pool, key: str, parity: ParityCase) -> None:
    # In a small CNN, rounding to bf16 switches ReLUs and max pools: its gradients differ by more than their size.
    smooth = parity._replace(model="vit", dataset="digits", model_options={})
    case = training(key, smooth, precision="bf16_params", steps=2)
    check_rounding(lambda one: pool.run(one) if parity.ranks > 1 else [run_parallel(one, None)], case)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "parity"), BF16_CASES)
def test_bf16_parameters_pass_what_the_cost_predicts(pool: Pool, key: str, parity: ParityCase) -> None:
    # Few samples: convolutions in bf16 are slow on a CPU, and what is sent does not depend on them.
    spec = training(key, parity, precision="bf16_params", batch_size=4).spec
    recorded = pool.call(spec.ranks, steady, spec) if spec.ranks > 1 else [steady(spec, None)]
    assert recorded == [expected(spec, rank) for rank in range(spec.ranks)]


@pytest.mark.parametrize(
    ("key", "parity"),
    # On a cpu the process of fairscale_pipe holds the parts of all devices.
    [case for case in BF16_CASES if not STRATEGIES[str(case.values[0])].drives_several_devices],
)
def test_bf16_parameters_hold_the_memory_that_the_cost_predicts(key: str, parity: ParityCase) -> None:
    spec = msgspec.structs.replace(memory_spec(key, parity), precision="bf16_params", optimizer="adam")
    predicted_bytes = bytes_beside_samples(resolve_cost(key).memory(spec, table_of(spec), spec.ranks - 1))
    measured_bytes = peak_bytes(spec, spec.ranks - 1)
    assert 0.9 * measured_bytes <= predicted_bytes <= 1.2 * measured_bytes


MEMORY_BATCH = 64
"""Samples a replica: activations count beside weights."""


def memory_spec(key: str, case: ParityCase) -> RunSpec:
    """``vit`` where the strategy splits transformers, else the model of ``case``.

    oneDNN takes weights of its own for convolutions of small images (tests/distributed/test_live_memory.py).
    """
    spec = msgspec.structs.replace(training(key, case).spec, batch_size=MEMORY_BATCH)
    transformer = msgspec.structs.replace(spec, model="vit", dataset="digits", model_options={})
    parameters = {name: value for name, value in msgspec.to_builtins(transformer).items() if name != "spec_version"}
    infeasible = isinstance(resolve_point(parameters, PartitionLimits("memory")), InfeasiblePoint)
    return spec if infeasible else transformer


@pytest.mark.parametrize(("key", "parity"), CASES)
def test_a_strategy_holds_the_memory_that_its_cost_predicts(key: str, parity: ParityCase) -> None:
    """The bytes of torch's allocator at their peak; a prediction that is too low would let a run end out of memory."""
    spec = memory_spec(key, parity)
    rank = spec.ranks - 1
    predicted_bytes = bytes_beside_samples(resolve_cost(key).memory(spec, table_of(spec), rank))
    measured_bytes = peak_bytes(spec, rank)
    assert 0.9 * measured_bytes <= predicted_bytes <= 1.2 * measured_bytes
