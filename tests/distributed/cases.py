"""Cases of the parity tests: a run by a strategy on real ranks, and its reference by one process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.schema import ReferenceComparison, StepPhases
from hpcbench.worker.data.feed import NO_FILES, DataFeed, DataSource
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.measure.step_profiler import run_profiled_steps
from hpcbench.worker.model_execution import MixedPrecision, summed_loss, wrap_blocks
from hpcbench.worker.models.build import build_model
from hpcbench.worker.shutdown import StopController
from hpcbench.worker.strategy import Strategy, make_optimizer, resolve_runtime
from hpcbench.worker.verification.reference import (
    TrainingRecord,
    VerificationCheck,
    compare_training,
    train_reference,
)
from hpcbench.worker.verification.reference_pipelines import resolve_reference_trainer
from hpcbench.worker.verification.rounding import AS_IT_IS, ORDERS, UNIT, Distances, bounds, distances
from hpcbench.worker.verification.verify import MAX_SEEDS, train_strategy
from hpcbench.workloads.datasets import DATASETS
from tests.distributed.narrow import WORDS, build_narrow
from tests.distributed.rounding import Excess, excesses

CPU = torch.device("cpu")

EXACT = 1e-9
"""In fp64. Adam divides by the root of a squared gradient: where that is tiny, rounding shows at once."""

BATCH = 8


@dataclass(frozen=True)
class Case:
    """``samples`` makes the epoch so short that it ends within the steps.

    ``narrow``: networks with an eighth of their channels, and few words, where what is proved is not about their size.
    ``late_s``: after the steps others are profiled, in which rank 1 comes so much later to every all_reduce.
    ``replicated``: every rank holds all parameters, so they must be alike; not so where the state is sharded.
    """

    spec: RunSpec
    samples: int
    steps: int = 5
    source: DataSource = NO_FILES
    late_s: float | None = None
    replicated: bool = True
    narrow: bool = False


def case_id(case: Case) -> str:
    """The words of a case in the name of its test."""
    spec = case.spec
    options = "-".join(f"{name}={value}" for name, value in spec.options.items())
    return f"{spec.strategy}-{spec.ranks}-{spec.model}-{spec.precision}-{options}".rstrip("-")


@dataclass
class OfRank:
    """The result of one rank of the pool; tensors from rank 0 alone."""

    trained: TrainingRecord
    counts: list[int]
    differs_from_rank_0: float
    profiled: tuple[StepPhases | None, list[str]] | None = None


def make_case(ranks: int, model: str, dataset: str, model_options: Any = None, steps: int = 5, **more: Any) -> Case:
    """A case of ddp, or of ``strategy`` with its degrees and options in ``more``.

    Epochs have three steps, whose last batch lacks one sample: the last replica takes one fewer than the others.
    """
    given: dict[str, Any] = {"strategy": "ddp", "dp_degree": ranks, "batch_size": BATCH}
    kept = {name: more.pop(name) for name in ("replicated", "narrow") if name in more}
    spec = RunSpec(
        model=model, dataset=dataset, learning_rate=0.01, momentum=0.9, model_options=model_options or {},
        **{"tasks_per_node": ranks, **given, **more},
    )  # fmt: skip
    return Case(spec, samples=3 * spec.global_batch_size - 1, steps=steps, **kept)


def build(case: Case) -> nn.Sequential:
    """The case's model, the same on every rank."""
    return build_narrow(case.spec) if case.narrow else build_model(case.spec)


def check(ranks: list[OfRank], expected: TrainingRecord, tolerance: float) -> ReferenceComparison:
    """Whether what the ranks have trained is what was expected, and the same on all of them.

    In fp64, or with a bound of the strategy's own; in a run's own precision ``check_rounding`` knows the bound.
    """
    found = compare_training(ranks[0].trained, expected, VerificationCheck("as run", len(expected.losses), tolerance))
    assert found.passed, found
    assert all(one.differs_from_rank_0 == 0 for one in ranks)
    return found


def check_rounding(
    run: Callable[[Case], list[OfRank]], case: Case, *references: Callable[[Case], OneDevice]
) -> list[OfRank]:
    """Whether ranks train ``case`` as one device does, as far as one device's own rounding allows.

    Returns what they have trained. ``references`` are what one device trains, ``one_device`` where none is given.

    One ReLU or max pool that decides otherwise for rounding moves a gradient by some hundredths, on one device as well,
    and no bound foresees which run has one. So another seed may decide. A mistake shows with every seed, and the first
    loss, on which such a decision has no influence, must be right with each.
    """
    for seed in range(case.spec.seed, case.spec.seed + MAX_SEEDS):
        one = replace(case, spec=msgspec.structs.replace(case.spec, seed=seed))
        found = run(one)
        assert all(rank.differs_from_rank_0 == 0 for rank in found), "ranks hold different weights"
        excess = [each for train in references or (one_device,) for each in _excess(one, found[0].trained, train)]
        assert ("loss", "step 1") not in [(each.kind, each.name) for each in excess], excess[:5]
        if not excess:
            return found
    raise AssertionError(f"with {MAX_SEEDS} seeds, of the last one: {excess[:5]}")


def check_training(run: Callable[[Case], list[OfRank]], case: Case) -> list[OfRank]:
    """Whether ranks train ``case`` as one device does: to ``EXACT`` in fp64, else within rounding; return what they trained."""
    if case.spec.precision != "fp64":
        return check_rounding(run, case)
    found = run(case)
    check(found, run_reference(case), EXACT)
    return found


def _excess(case: Case, ours: TrainingRecord, reference: Callable[[Case], OneDevice]) -> list[Excess]:
    shares_layers = case.spec.tp_degree > 1 or case.spec.sp_degree > 1
    with short_epoch(case.spec.dataset, case.samples, case.narrow):
        one = reference(case)
        expected = _trained(one)
        if max(distances(ours, expected).values()) <= UNIT["fp32"]:
            return []
        return excesses(ours, expected, _bounds(one, tuple(ORDERS) if shares_layers else (AS_IT_IS,)))


def distance(a: Tensor, b: Tensor) -> float:
    """max|a - b| / max|b|. Of what is nothing but rounding (a key's bias changes no softmax) the difference itself."""
    assert a.shape == b.shape
    scale = b.abs().max().item()
    return (a - b).abs().max().item() / (scale if scale > 1e-9 else 1.0)


def check_exactly(found: list[OfRank], expected: TrainingRecord, bound: float = 1e-10) -> None:
    """Losses, first and last gradients and weights, each by its own size: gradients here are far smaller than one."""
    ours = found[0].trained
    losses = [torch.tensor(one.losses, dtype=torch.float64) for one in (ours, expected)]
    assert distance(*losses) <= bound
    for kind in ("first_gradients", "gradients", "state"):
        mine, theirs = getattr(ours, kind), getattr(expected, kind)
        assert mine.keys() == theirs.keys() != set()
        worst = {name: distance(mine[name], theirs[name]) for name in theirs}
        assert max(worst.values()) <= bound, (kind, max(worst.items(), key=lambda item: item[1]))


@contextlib.contextmanager
def short_epoch(dataset: str, samples: int, narrow: bool = False) -> Iterator[None]:
    """Make an epoch of ``dataset`` that many samples long; ``narrow``: with few words."""
    whole = DATASETS[dataset]
    outputs = min(WORDS, whole.outputs) if narrow and dataset == "tokens" else whole.outputs
    DATASETS[dataset] = whole._replace(samples=samples, outputs=outputs)
    try:
        yield
    finally:
        DATASETS[dataset] = whole


def run_parallel(case: Case, group: dist.ProcessGroup | None) -> OfRank:
    """Train as the case's strategy does; called on every rank of ``group`` (``None``: one rank)."""
    place = RankContext(0 if group is None else dist.get_rank(group), case.spec.ranks, CPU, group)
    with short_epoch(case.spec.dataset, case.samples, case.narrow):
        feed = make_feed(case.spec, CPU, case.source)
        strategy = resolve_runtime(case.spec.strategy)()
        strategy.setup(wrap_blocks(build(case), case.spec), case.spec, place)
        trained = train_strategy(strategy, feed, tuple(range(case.steps)), place)
        counts = [feed.replica_count(step, strategy.replica) for step in range(case.steps)]
        profiled = None if case.late_s is None or group is None else profile_late(case, strategy, group, case.late_s)
    return OfRank(
        trained, counts, _distance(strategy, group) if case.replicated and group is not None else 0.0, profiled
    )


def _distance(strategy: Strategy, group: dist.ProcessGroup) -> float:
    """Return the distance of a rank's parameters from rank 0's. Running statistics are its own until the next forward pass."""
    worst = 0.0
    for parameter in strategy.module.parameters():
        of_rank_0 = parameter.detach().clone()
        dist.broadcast(of_rank_0, src=dist.get_global_rank(group, 0), group=group)
        worst = max(worst, (of_rank_0 - parameter.detach()).abs().max().item())
    return worst


def profile_late(
    case: Case, strategy: Any, group: dist.ProcessGroup, late_s: float
) -> tuple[StepPhases | None, list[str]]:
    """The split of further steps, rank 1 being late."""

    def all_reduce(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
        if dist.get_rank(state) == 1:
            time.sleep(late_s)
        work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size(state))

    def any_rank(flag: bool) -> bool:
        said = torch.tensor(int(flag))
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=group)
        return bool(said.item())

    strategy.runner.register_comm_hook(group, all_reduce)
    warnings: list[str] = []
    feed = make_feed(case.spec, CPU)
    profiled = run_profiled_steps(strategy, feed, case.spec, CPU, StopController(), any_rank, case.steps, warnings)
    return profiled.phases, warnings


class OneDevice(NamedTuple):
    """A training in one process; whatever a test may have patched is a field of it."""

    train: Callable[..., TrainingRecord]
    build: Callable[..., Any]
    dataset: object
    spec: bytes
    """As JSON, since a ``RunSpec`` has no hash."""
    steps: int
    source: DataSource

    @property
    def run(self) -> RunSpec:
        return msgspec.json.decode(self.spec, type=RunSpec)


def run_reference(case: Case) -> TrainingRecord:
    """The same training in this process, each replica's share by itself.

    Data-parallel strategies are compared with one and the same, which knows nothing of theirs.
    """
    with short_epoch(case.spec.dataset, case.samples, case.narrow):
        return _trained(one_device(case))


def one_device(case: Case) -> OneDevice:
    """The reference of the case's strategy."""
    train: Callable[..., TrainingRecord] = resolve_reference_trainer(case.spec.strategy)
    if train is train_reference:
        return _one_device(_alone(case), train)
    return _one_device(case, train)


def train_full_batch(model: nn.Module, spec: RunSpec, feed: DataFeed, steps: Iterable[int]) -> TrainingRecord:
    """The plain single-device run on the global batch: equal to the above only for a model without BatchNorm."""
    model.to(feed.device).train()
    optimizer = make_optimizer(spec, model)
    arithmetic = MixedPrecision(spec.precision, feed.device)
    trained = TrainingRecord()
    for step in steps:
        batches = [feed.batch(step, replica) for replica in range(feed.replicas)]
        inputs, labels = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        optimizer.zero_grad(set_to_none=True)
        with arithmetic.autocast():
            outputs = model(inputs)
        loss = summed_loss(outputs, labels) / len(labels)
        arithmetic.backward(loss)
        arithmetic.update(optimizer)
        trained.add_step(loss.item(), model)
    return trained.finish(model)


def full_batch(case: Case) -> OneDevice:
    """The plain run on the whole global batch."""
    return _one_device(_alone(case), train_full_batch)


def _alone(case: Case) -> Case:
    """Without what only changes who computes."""
    spec = msgspec.structs.replace(
        case.spec, strategy="single", options={}, nodes=1, tasks_per_node=1, tp_degree=1, compile=False,
        activation_checkpointing=False,
    )  # fmt: skip
    return replace(case, spec=spec)


def _one_device(case: Case, train: Callable[..., TrainingRecord]) -> OneDevice:
    build = build_narrow if case.narrow else build_model
    encoded = msgspec.json.encode(case.spec)
    return OneDevice(train, build, DATASETS[case.spec.dataset], encoded, case.steps, case.source)


def _backwards(model: nn.Module, spec: RunSpec, feed: DataFeed, steps: range) -> TrainingRecord:
    return train_reference(model, spec, feed, steps, backwards=True)


@lru_cache(maxsize=4)
def _trained(one: OneDevice) -> TrainingRecord:
    """TrainingRecord once for all tests in a row that ask for the very same."""
    return _train(one)


def _train(one: OneDevice, order: str = AS_IT_IS, precision: str | None = None) -> TrainingRecord:
    spec = msgspec.structs.replace(one.run, precision=precision or one.run.precision)
    with ORDERS[order]():
        return one.train(one.build(spec), spec, make_feed(spec, CPU, one.source), range(one.steps))


@lru_cache(maxsize=64)
def _bounds(one: OneDevice, orders: tuple[str, ...]) -> Distances:
    """Return the bounds from one device's rounding, see ``rounding``."""
    again = [one] if one.train is not train_reference else [one, one._replace(train=_backwards)]
    exact = _train(one, precision="fp64")
    samples = [distances(_train(each, order), exact) for order in orders for each in again]
    return bounds(samples, UNIT[one.run.precision])


def forget() -> None:
    """Free what is kept of references."""
    _trained.cache_clear()
