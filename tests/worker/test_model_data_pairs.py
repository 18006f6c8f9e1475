"""The table of models and data sets: each cell trains as the worker trains it, or is dropped for the stated reason."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import resolve_runtime
from hpcbench.worker.verification.reference import train_reference
from hpcbench.workloads.datasets import DATASETS
from hpcbench.workloads.models import MODELS
from tests.worker.cells import CELLS, COUNTED_ONLY, Cell
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")
TRAINED = [cell for cell in CELLS if cell[-1] is None and cell[0] not in COUNTED_ONLY]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread, as a rank of a test does: more are slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cell_id(cell: Cell) -> str:
    return f"{cell[0]}-{cell[1]}"


def test_the_table_is_whole() -> None:
    assert [cell[:2] for cell in CELLS] == list(itertools.product(MODELS, DATASETS))


@pytest.mark.parametrize("cell", CELLS, ids=cell_id)
def test_infeasible_cells_have_the_stated_reason(cell: Cell) -> None:
    model, dataset, input_size, batch_size, reason = cell
    point = {"model": model, "dataset": dataset, "strategy": "single", "batch_size": batch_size}
    resolved = resolve_point(point | ({"input_size": input_size} if input_size else {}), PartitionLimits("here"))
    assert (resolved.reason if isinstance(resolved, InfeasiblePoint) else None) == reason


@pytest.mark.slow
@pytest.mark.parametrize("cell", TRAINED, ids=cell_id)
def test_every_other_model_and_data_set_trains(cell: Cell) -> None:
    model, dataset, input_size, batch_size, _ = cell
    spec = make_spec(model=model, dataset=dataset, input_size=input_size, batch_size=batch_size)
    strategy = resolve_runtime(spec.strategy)()
    feed = make_feed(spec, CPU)
    strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))
    named = dict(strategy.module.named_parameters())
    ends = {name: named[name].detach().clone() for name in (next(iter(named)), next(reversed(named)))}
    losses = [strategy.step(feed, step).item() for step in range(2)]
    assert all(math.isfinite(loss) for loss in losses)
    assert set(strategy.gradients()) == set(named), "every parameter takes part"
    for name, before in ends.items():
        assert not torch.equal(before, named[name]), name


# One model of each family: data, options, optimizer, learning rate, steps, and what is left of the loss.
FAMILIES = [
    ("resnet18", "digits", {}, "sgd", 0.01, 20, 0.5),
    ("vgg11", "digits", {}, "sgd", 0.01, 20, 0.5),
    ("mobilenetv2", "digits", {}, "sgd", 0.05, 30, 0.7),
    ("vit", "digits", {}, "adam", 0.001, 30, 0.5),
    ("cosmoflow", "cosmoflow", {"dropout": 0.0}, "adam", 0.0003, 40, 0.5),
    ("gpt", "tokens", {}, "adam", 0.003, 15, 0.7),
    ("llama", "tokens", {}, "adam", 0.003, 15, 0.7),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dataset", "options", "optimizer", "rate", "steps", "left"), FAMILIES)
def test_the_loss_falls_for_every_model_family(
    model: str, dataset: str, options: dict[str, float], optimizer: Any, rate: float, steps: int, left: float
) -> None:
    size = None if dataset == "digits" else 16
    spec = make_spec(
        model=model, dataset=dataset, input_size=size, model_options=options, batch_size=32 if size is None else 8,
        optimizer=optimizer, learning_rate=rate,
    )  # fmt: skip
    feed = make_feed(spec, CPU)
    losses = train_reference(build_model(spec), spec, feed, range(steps)).losses
    assert sum(losses[-4:]) / 4 < left * losses[0], losses
