"""``verify`` judges every strategy of the registry rightly with models of every kind (``model_kinds``), on real ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
import torch.distributed as dist

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.worker.data.feed import NO_FILES
from hpcbench.worker.distributed.process_groups import RankContext, TCPStore, to_timedelta
from hpcbench.worker.distributed.rendezvous import ControlChannel
from hpcbench.worker.shutdown import StopController
from hpcbench.worker.strategy import import_fairscale, resolve_runtime
from hpcbench.worker.verification import verify as verifying
from tests.conftest import absent, require_horovod
from tests.distributed.cases import CPU, short_epoch
from tests.distributed.model_kinds import KINDS
from tests.distributed.parity import parity_training
from tests.distributed.pool import Pool
from tests.distributed.test_rounding import Enlarged, enlarged_before_update
from tests.parity_cases import parity_cases

pytestmark = pytest.mark.slow

DECAYED = "unused, decayed"
"""As ``unused``, in a training with weight decay, which must leave alone what has no gradient."""
COLUMNS = (*KINDS, DECAYED)

NEEDS_GRADIENTS = "refused: DDP waits for the gradients of all parameters, but no output depends on 4.spare"
DECAYS_UNUSED = "wrong: weight of 4.spare after 5 steps"
ONE_WEIGHT = "refused: .* layers share a weight, 1.0.weight and 2.0.weight"
EXCEPTIONS: dict[str, dict[str, str]] = {
    "ddp": {"unused": NEEDS_GRADIENTS, DECAYED: NEEDS_GRADIENTS},
    "zero1": {"unused": NEEDS_GRADIENTS, DECAYED: NEEDS_GRADIENTS},
    "fsdp": {"strided": "refused: fully_shard takes contiguous parameters only, and 1.0.weight has the strides"},
    "fairscale_oss": {
        "unused": NEEDS_GRADIENTS,
        DECAYED: NEEDS_GRADIENTS,
        "strided": "refused: fairscale's OSS moves parameters into flat buffers, and 1.0.weight has the strides",
    },
    "fairscale_sddp": {DECAYED: DECAYS_UNUSED},
    "fairscale_fsdp": {
        "frozen": "refused: fairscale_fsdp flattens 2.0.weight and 2.0.bias into one parameter",
        DECAYED: DECAYS_UNUSED,
    },
    "horovod": {
        "strided": "refused: Horovod reduces contiguous tensors only, and 1.0.weight has the strides",
        DECAYED: DECAYS_UNUSED,
    },
    "filter": {"shared": ONE_WEIGHT},
    "channel": {"shared": ONE_WEIGHT},
    "tensor": {"shared": "refused: .* 1.mlp.up.weight and 3.mlp.up.weight are one weight"},
    "pipedream": {"shared": "refused: .* weights that two stages share, 1.0.weight"},
}
"""Verdicts other than ``right``, by strategy and column; a strategy that is not here is right with every model."""

SHARDED_EXCEPTIONS = {
    "bool buffer": "refused: .* addmm on a tensor whose channels are split, in 4",
    "int buffer": "refused: .* add on a tensor whose channels are split, in 4",
    "unused": "refused: .* addmm on a tensor whose channels are split, in 4",
    DECAYED: "refused: .* addmm on a tensor whose channels are split, in 4",
    "transposed": "refused: .* mm on a tensor whose channels are split, in 4",
    "shared": ONE_WEIGHT,
}
"""Those of ``filter`` and ``channel`` in their sharded form, which splits the input of the special layer."""


class KindRun(NamedTuple):
    """A verified run, one of whose ranks may train with gradients that are 1 % too large."""

    spec: RunSpec
    port: int
    is_wrong: bool


def spec_of(key: str, column: str, **more: Any) -> RunSpec:
    """The run of the strategy's last parity case, with a model of that kind."""
    if key.startswith("fairscale"):
        try:
            import_fairscale("nn.data_parallel")
        except WorkerError as error:
            absent("fairscale", str(error))
    spec = parity_training(key, parity_cases(key)[-1]).spec
    splits_transformers = key == "tensor" or (key == "1f1b" and "tp_degree" in more)
    options = {"kind": column.partition(",")[0], "tokens": splits_transformers}
    decay = 0.0 if column == "unused" else 0.01
    given: dict[str, Any] = {"model": "model_kinds:build", "dataset": "digits", "model_options": options}
    return msgspec.structs.replace(spec, **{**given, "weight_decay": decay, "warmup_steps": 1, "steps": 2, **more})


def verdict(run: KindRun, group: dist.ProcessGroup | None) -> str:
    """``right``, or ``wrong`` with the worst tensor, or ``refused`` with the message; called on every rank."""
    spec, rank = run.spec, 0 if group is None else dist.get_rank(group)
    store = TCPStore("127.0.0.1", run.port, None, False, to_timedelta(60), wait_for_workers=False)
    channel = ControlChannel(store, rank, spec.ranks) if spec.ranks > 1 else None
    train = verifying._train_like_run

    def train_wrongly(*arguments: Any) -> Any:
        with enlarged(spec):
            return train(*arguments)

    # Each rank of spatial computes the layers behind the cut part for itself, and only those of rank 0 are compared.
    is_wrong = run.is_wrong and rank == (0 if spec.sp_degree > 1 else spec.ranks - 1)
    inputs = verifying.VerificationInputs(NO_FILES, str(Path(__file__).parent))
    with (
        short_epoch(spec.dataset, 6 * spec.global_batch_size - 1),
        mock.patch.object(verifying, "_train_like_run", train_wrongly) if is_wrong else nullcontext(),
    ):
        try:
            found = verifying.verify_run(
                spec, RankContext(rank, spec.ranks, CPU, group), inputs, StopController(), channel, 60.0
            )
        except WorkerError as error:
            return f"refused: {error.message}"
    return "right" if found is None or found.passed else f"wrong: {found.worst}"


def enlarged(spec: RunSpec) -> AbstractContextManager[Any]:
    """Gradients of this process are too large: by a mode, or where the strategy does not see it, before the update.

    A mode ends with its thread, changes no split backward pass, and would change the order in which fairscale_sddp
    reduces gradients.
    """
    if spec.ranks == 1 or STRATEGIES[spec.strategy].pipeline.splits_backward or spec.strategy == "fairscale_sddp":
        return enlarged_before_update(last_half=spec.ranks == 1)
    return Enlarged()


def verdict_of(pool: Pool, spec: RunSpec, is_wrong: bool = False) -> str:
    store = TCPStore("127.0.0.1", 0, None, True, to_timedelta(60), wait_for_workers=False)
    run = KindRun(spec, store.port, is_wrong)
    return pool.call(spec.ranks, verdict, run)[0] if spec.ranks > 1 else verdict(run, None)


@pytest.fixture
def horovod_pool() -> Iterator[Pool]:
    """Processes of its own: Horovod starts once in a process, for one world, and keeps a core busy until they end."""
    require_horovod()
    ranks = Pool(2)
    yield ranks
    ranks.close()


def pool_of(request: pytest.FixtureRequest, key: str) -> Pool:
    return request.getfixturevalue("horovod_pool" if key == "horovod" else "pool")  # type: ignore[no-any-return]


def mismatches(found: dict[str, str], expected: dict[str, str]) -> dict[str, str]:
    return {column: text for column, text in found.items() if not re.match(expected.get(column, "right"), text)}


def half_of(columns: Sequence[str], key: str, half: int) -> list[str]:
    """Return every other kind of model for one strategy, the others for the next one."""
    return [column for place, column in enumerate(columns) if (place + list(STRATEGIES).index(key)) % 2 == half]


HALVES = pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.soak)])


@HALVES
@pytest.mark.parametrize("key", STRATEGIES)
def test_the_verdict_of_every_kind_of_model_is_right(request: pytest.FixtureRequest, key: str, half: int) -> None:
    columns = half_of(COLUMNS, key, half)
    found = {column: verdict_of(pool_of(request, key), spec_of(key, column)) for column in columns}
    assert not mismatches(found, EXCEPTIONS.get(key, {}))


@HALVES
@pytest.mark.parametrize("key", STRATEGIES)
def test_a_gradient_error_is_found_in_every_kind_of_model(request: pytest.FixtureRequest, key: str, half: int) -> None:
    trained = [kind for kind in half_of(KINDS, key, half) if "refused" not in EXCEPTIONS.get(key, {}).get(kind, "")]
    precision = resolve_runtime(key).widest
    found = {
        kind: verdict_of(pool_of(request, key), spec_of(key, kind, precision=precision), is_wrong=True)
        for kind in trained
    }
    assert not mismatches(found, dict.fromkeys(trained, "wrong: (gradient|loss|weight) of"))


@pytest.mark.parametrize("key", ["filter", "channel"])
def test_the_sharded_form_names_the_layer_that_it_cannot_split(pool: Pool, key: str) -> None:
    found = {column: verdict_of(pool, spec_of(key, column, options={"form": "sharded"})) for column in COLUMNS}
    assert not mismatches(found, SHARDED_EXCEPTIONS)


REPLICATED: dict[str, dict[str, Any]] = {
    "spatial": {"sp_degree": 2},
    "filter": {"tp_degree": 2},
    "tensor": {"tp_degree": 2},
    "1f1b": {"pp_degree": 2},
}


@pytest.mark.parametrize("key", REPLICATED)
@pytest.mark.parametrize("column", ["frozen", DECAYED])
def test_two_replicas_of_split_layers_leave_alone_what_has_no_gradient(pool: Pool, key: str, column: str) -> None:
    spec = spec_of(key, column, dp_degree=2, tasks_per_node=4, **REPLICATED[key])
    assert verdict_of(pool, spec) == "right"


@pytest.mark.parametrize(
    ("key", "kind", "options", "expected"),
    [
        ("zero1", "strided", {"parameters_as_bucket_view": True}, "refused: .* 1.0.weight has the strides"),
        ("fairscale_fsdp", "frozen", {"flatten_parameters": False}, "right"),
        # torch recomputes the passes of a checkpointed layer, and with them whatever they count.
        ("gpipe", "counter", {"recompute": "always"}, "wrong: weight of 4.passes"),
    ],
)
def test_an_option_changes_the_verdict(pool: Pool, key: str, kind: str, options: dict[str, Any], expected: str) -> None:
    assert re.match(expected, verdict_of(pool, spec_of(key, kind, options=options)))


def test_layers_of_two_stages_that_are_also_split_may_not_share_a_weight(pool: Pool) -> None:
    spec = spec_of("1f1b", "shared", dp_degree=1, tasks_per_node=4, pp_degree=2, tp_degree=2)
    assert "1.mlp.up.weight and 3.mlp.up.weight are one weight" in verdict_of(pool, spec)
