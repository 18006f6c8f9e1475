"""Checks, tolerances and waiting of verification; real ranks are in tests/distributed."""

from __future__ import annotations

import dataclasses
import re
import threading
from typing import Any

import pytest
import torch
from torch import nn

from hpcbench.config.option import Option
from hpcbench.errors import WorkerError
from hpcbench.results.schema import ReferenceComparison, VerificationResult
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.worker.data.feed import NO_FILES
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext, TCPStore, clone_connection, to_timedelta
from hpcbench.worker.distributed.rendezvous import ControlChannel
from hpcbench.worker.failure import decide_outcome
from hpcbench.worker.shutdown import StopController, Stopped
from hpcbench.worker.verification import verify as verifying
from hpcbench.worker.verification.reference import (
    TrainingRecord,
    VerificationCheck,
    compare_training,
    verification_checks,
)
from hpcbench.worker.verification.rounding import AS_IT_IS, ORDERS, distances, result_tolerances
from hpcbench.worker.verification.verify import (
    ReferenceComparer,
    compare_with_notes,
    compared_steps,
    comparison_spec,
    disable_dropout,
)
from tests.distributed.wrong import build_small
from tests.worker.helpers import make_rank, make_spec

CPU = torch.device("cpu")


INFINITE = float("inf")


def with_buffer(buffer: torch.Tensor) -> TrainingRecord:
    record = trained()
    return dataclasses.replace(record, state={**record.state, "buffer": buffer})


@pytest.mark.parametrize(
    ("buffer", "other"),
    [
        (torch.tensor([True, False]), torch.tensor([True, True])),
        (torch.tensor([3, 4]), torch.tensor([3, 5])),
        # Two integers that are one number in fp64.
        (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
        (torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([0, 254], dtype=torch.uint8)),
        (torch.tensor([0.0, -INFINITE]), torch.tensor([0.0, INFINITE])),
        (torch.tensor([0.0, -INFINITE]), torch.tensor([-INFINITE, 0.0])),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
    ],
)
def test_buffers_that_are_equal_pass_and_others_do_not(buffer: torch.Tensor, other: torch.Tensor) -> None:
    for check in (CHECK, OWN):
        rounding = result_tolerances(distances(with_buffer(buffer), with_buffer(buffer)), with_buffer(buffer))
        assert compare_training(with_buffer(buffer.clone()), with_buffer(buffer), check, rounding).passed
        assert not compare_training(with_buffer(other), with_buffer(buffer), check, rounding).passed


@pytest.mark.parametrize(("gradient", "passes"), [(0.0, True), (1e-3, False), (INFINITE, False)])
def test_a_gradient_that_one_side_lacks_is_zero(gradient: float, passes: bool) -> None:
    lacking, record = trained(), trained()
    for gradients in (record.first_gradients, record.gradients):
        gradients["spare"] = torch.tensor([gradient])
    assert compare_training(record, lacking, CHECK).passed is passes
    assert compare_training(lacking, record, CHECK).passed is passes


def trained(
    loss: float = 2.0, first: float = 0.5, last: float = 0.5, weight: float = 1.0, **more: float
) -> TrainingRecord:
    def one(value: float) -> dict[str, torch.Tensor]:
        return {"w": torch.tensor([value, 0.0]), **{name: torch.tensor([found]) for name, found in more.items()}}

    return TrainingRecord([loss, 2.0], one(first), one(last), one(weight))


CHECK = VerificationCheck("fp64", 2, 1e-3, 1e-6)


@pytest.mark.parametrize(
    ("ours", "passed", "worst"),
    [
        ({}, True, "loss of step 1"),
        ({"loss": 2.0 + 1e-4}, False, "loss of step 1"),
        ({"weight": 1.0 + 5e-4}, True, "weight of w after 2 steps"),
        ({"weight": 1.0 + 2e-3}, False, "weight of w after 2 steps"),
        # Of the last gradients a hundredth counts, since as much of them enters the weights.
        ({"last": 0.55}, True, "gradient of w in step 2"),
        ({"last": 0.65}, False, "gradient of w in step 2"),
        # What is wrong in the first step is named, whatever has become of it by the last.
        ({"first": 0.51, "weight": 3.0}, False, "gradient of w in step 1"),
        ({"extra": 1.0}, False, "gradient of extra in step 1"),
        ({"weight": float("nan")}, False, "weight of w after 2 steps"),
    ],
)
def test_training_is_compared_value_by_value_with_the_tolerance(
    ours: dict[str, float], passed: bool, worst: str
) -> None:
    found = compare_training(trained(**ours), trained(), CHECK)
    assert (found.passed, found.worst) == (passed, worst)


OWN = VerificationCheck("fp32", 1, 0.0, by_rounding=True)


def test_a_tensor_may_differ_by_what_rounding_makes_of_it() -> None:
    rounding = {
        ("loss", "step 1"): 1e-3,
        ("loss", "step 2"): 1e-6,
        ("first gradient", "w"): 1e-4,
        ("weight", "w"): 1e-2,
    }
    ours = trained(loss=2.001, first=0.50005, weight=1.005)
    found = compare_training(ours, trained(), OWN, rounding)
    assert (found.passed, found.tolerance, found.gradient_tolerance) == (True, 1e-2, 1e-4)
    wrong = compare_training(trained(first=0.5002), trained(), OWN, rounding)
    assert (wrong.passed, wrong.worst, wrong.worst_tolerance) == (False, "gradient of w in step 1", 1e-4)
    # No bound of rounding stands for a tensor that the reference lacks, or for a number that is not finite.
    assert compare_training(trained(extra=1.0), trained(), OWN, rounding).worst_rel is None
    boundless = dict.fromkeys(rounding, float("inf"))
    assert not compare_training(trained(first=float("nan")), trained(), OWN, boundless).passed


@pytest.mark.parametrize("strategy", ["single", "fairscale_fsdp"])
def test_orders_are_trained_until_the_run_is_within_the_bound(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fairscale_fsdp is decided by its five steps in fp32."""
    monkeypatch.setattr(verifying, "build_model", build_small)
    spec = make_spec(strategy=strategy, batch_size=4)
    comparer = ReferenceComparer(spec, CPU, verifying.VerificationInputs(NO_FILES, None), lambda: None)
    check = next(check for check in verification_checks(spec) if check.by_rounding)
    right = comparer._train(check)
    assert comparer.compare(right, check).orders == [AS_IT_IS]
    scaled = {name: 1.01 * tensor for name, tensor in right.first_gradients.items()}
    wrong = comparer.compare(dataclasses.replace(right, first_gradients=scaled, gradients=scaled), check)
    assert (wrong.passed, wrong.orders) == (False, list(ORDERS))
    assert wrong.worst is not None
    assert re.match("gradient of .* in step 1", wrong.worst)


def test_another_seed_may_pass_where_the_first_loss_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "build_model", build_small)
    spec = make_spec(batch_size=4)
    checks = verification_checks(spec)

    def tried(**changes: Any) -> tuple[bool, bool]:
        comparer = ReferenceComparer(spec, CPU, verifying.VerificationInputs(NO_FILES, None), lambda: None)
        wide, own = (comparer._train(check) for check in checks)
        records = {"wide": wide, "own": own}
        for of, change in changes.items():
            records[of] = dataclasses.replace(records[of], **change(records[of]))
        return comparer.compare_all(spec, checks, list(records.values())), comparer.result().passed

    def gradients(record: TrainingRecord) -> dict[str, Any]:
        return {"first_gradients": {name: 1.1 * one for name, one in record.first_gradients.items()}}

    assert tried() == (False, True)
    assert tried(own=gradients) == (True, False)
    assert tried(wide=gradients) == (False, False)
    assert tried(own=lambda record: {**gradients(record), "losses": [1.01 * record.losses[0]]}) == (False, False)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, [VerificationCheck("fp64", 5, 1e-7, 1e-9), OWN]),
        ({"precision": "fp64"}, [VerificationCheck("fp64", 5, 1e-7, 1e-9)]),
        ({"precision": "bf16"}, [VerificationCheck("fp64", 5, 1e-7, 1e-9), OWN._replace(precision="bf16")]),
        (
            {"optimizer": "adam"},
            [VerificationCheck("fp64", 5, 1e-7, 1e-9), OWN._replace(weights=False)],
        ),
        (
            {"options": {"compression": "fp16"}},
            [VerificationCheck("fp64", 1, 1e-3), OWN._replace(tolerance=1e-3)],
        ),
        (
            {"options": {"compression": "none"}},
            [VerificationCheck("fp64", 5, 1e-7, 1e-9), OWN],
        ),
    ],
)
def test_verification_checks_follow_from_the_run(
    spec: dict[str, Any], expected: list[VerificationCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    compression = Option("none", "of gradients", ("none", "fp16"), lossy={"fp16": 1e-3})
    with_option = STRATEGIES["ddp"]._replace(options={"compression": compression})
    monkeypatch.setitem(STRATEGIES, "ddp", with_option)
    assert verification_checks(make_spec(strategy="ddp", **spec)) == expected


@pytest.mark.parametrize(
    ("batch_size", "warmup", "timed", "steps"),
    [
        (8, 5, 20, (0, 1, 2, 3, 4)),  # 188 steps an epoch, the run does not get there
        (200, 2, 6, (0, 1, 2, 3, 7)),  # the eighth step of the epoch takes the last hundred
        (200, 2, 5, (0, 1, 2, 3, 4)),
        (400, 2, 4, (0, 1, 2, 3, 4)),  # step 3 is partial anyway
        (250, 2, 20, (0, 1, 2, 3, 4)),  # even
    ],
)
def test_the_partial_batch_is_among_the_steps(batch_size: int, warmup: int, timed: int, steps: tuple[int, ...]) -> None:
    spec = make_spec(batch_size=batch_size, warmup_steps=warmup, steps=timed)
    assert compared_steps(spec, make_feed(spec, CPU), 5) == steps


def test_verification_disables_every_kind_of_dropout() -> None:
    attention = nn.MultiheadAttention(8, 2, dropout=0.2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.1)), attention)
    assert disable_dropout(model)
    assert [one.p for one in model.modules() if isinstance(one, nn.Dropout | nn.Dropout2d)] == [0.0, 0.0]
    assert attention.dropout == 0.0
    assert not disable_dropout(model)
    spec = make_spec(model="vgg11", model_options={"dropout": 0.3, "batch_norm": False})
    assert comparison_spec(spec, "fp64").model_options == {"dropout": 0.0, "batch_norm": False}


OVERFLOWED = {"w": torch.tensor([float("inf"), 0.0])}


def test_fp16_that_overflows_in_the_first_step_is_judged_by_its_losses() -> None:
    notes: list[str] = []
    ours = dataclasses.replace(trained(), gradients=OVERFLOWED, first_gradients=OVERFLOWED)
    found = compare_with_notes(ours, trained(), VerificationCheck("fp16", 1, 1e-2), notes)
    assert (found.passed, found.gradient_max_rel, found.weight_max_rel) == (True, None, None)
    assert "overflowed" in notes[0]
    assert not compare_with_notes(
        dataclasses.replace(ours, losses=[2.1, 2.0]), trained(), VerificationCheck("fp16", 1, 1e-2), notes
    ).passed
    assert not compare_with_notes(ours, trained(), VerificationCheck("bf16", 1, 1e-2), notes).passed


def test_a_reference_that_diverges_proves_nothing() -> None:
    notes: list[str] = []
    both = trained(weight=float("nan"))
    assert not compare_with_notes(both, both, CHECK, notes).passed
    assert "the reference itself is not finite" in notes[0]


def test_an_out_of_memory_error_of_verification_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")

    monkeypatch.setattr(verifying, "make_feed", starved)
    with pytest.raises(WorkerError, match="the run was measured, but verifying it needs more memory") as raised:
        verifying.verify_run(
            make_spec(),
            RankContext(0, 1, CPU),
            verifying.VerificationInputs(NO_FILES, None),
            StopController(),
            None,
            1.0,
        )
    assert raised.value.status == "failed"


PASSED = ReferenceComparison(passed=True, precision="fp64", tolerance=1e-7, steps=5, worst="loss of step 1", worst_rel=0.0,
                    worst_tolerance=1e-9)  # fmt: skip
TOO_FAR = ReferenceComparison(passed=False, precision="bf16", tolerance=0.06, steps=1, worst="gradient of w in step 1",
                     worst_rel=0.5, worst_tolerance=0.06)  # fmt: skip


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        ({}, "ok", ""),
        (
            {"passed": False, "worst_rel": 1e-3},
            "failed",
            "in fp64, the loss of step 1 differs by 1.0e-03; allowed: 1.0e-09",
        ),
        ({"passed": False, "worst_rel": None}, "failed", "the loss of step 1 is missing, or not finite"),
        (
            {"passed": False, "own_precision": TOO_FAR},
            "failed",
            "in bf16, the gradient of w in step 1 differs by 5.0e-01",
        ),
    ],
)
def test_the_status_of_a_run_follows_its_verification(found: dict[str, Any], status: str, words: str) -> None:
    given = {name: getattr(PASSED, name) for name in PASSED.__struct_fields__}
    ranks = {0: make_rank(0, verification=VerificationResult(**{**given, **found})), 1: make_rank(1)}
    said = decide_outcome(2, ranks, cause=None, only_follows=False, launcher="srun", oom_kills_before=None)
    assert said.status == status
    assert words in (said.error.message if said.error else "")
    assert said.error is None or said.error.type == "VerificationFailed"


@pytest.fixture
def links() -> list[ControlChannel]:
    store = TCPStore("127.0.0.1", 0, None, True, to_timedelta(30), wait_for_workers=False)
    return [ControlChannel(store, 0, 2), ControlChannel(clone_connection(store), 1, 2)]


def go_on() -> None:
    """Nothing wants the wait to end."""


def test_waiting_ends_when_it_is_done(links: list[ControlChannel]) -> None:
    told = threading.Event()
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            links[0].publish("progress", "one")
        if looks == 5:
            links[0].publish("done", "1")
            told.set()

    links[1].wait_while_progressing("progress", "done", 30.0, look, "something")
    assert told.is_set()


def test_a_wait_beyond_its_limit_names_what_it_waits_for(links: list[ControlChannel]) -> None:
    links[0].publish("progress", "7 shares of a step are done")
    with pytest.raises(
        WorkerError, match=r"rank 1 waited 0.2 s for rank 0 to train .*; last heard: 7 shares of a step"
    ):
        links[1].wait_while_progressing("progress", "done", 0.2, go_on, "rank 0 to train the reference")


@pytest.mark.parametrize("by_trial", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_cudnn_tries_no_algorithms_while_a_run_is_verified(
    by_trial: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainings of one device would take other kernels by chance; the run's own choice is back afterwards."""
    seen: list[bool] = []

    def train(*_: object) -> None:
        seen.append(torch.backends.cudnn.benchmark)
        raise Stopped("timeout", "no time") if fails else RuntimeError("enough")

    monkeypatch.setattr(verifying, "_train_like_run", train)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", by_trial)
    context = RankContext(0, 1, torch.device("cuda"))
    inputs = verifying.VerificationInputs(NO_FILES, None)
    with pytest.raises(Stopped if fails else RuntimeError):
        verifying.verify_run(make_spec(), context, inputs, StopController(), None, 1.0)
    assert seen == [False]
    assert torch.backends.cudnn.benchmark is by_trial


def test_on_a_gpu_other_kernels_are_the_first_other_order() -> None:
    inputs = verifying.VerificationInputs(NO_FILES, None)
    spec = make_spec(strategy="ddp", batch_size=4, dp_degree=2, tasks_per_node=2)
    orders = {
        name: ReferenceComparer(spec, torch.device(name), inputs, lambda: None)._other_orders()
        for name in ("cpu", "cuda")
    }
    assert orders["cuda"][0] == "other kernels"
    assert sorted(orders["cuda"]) == sorted(orders["cpu"])
