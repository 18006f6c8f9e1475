"""Horovod's rank numbers and learning rates: pure functions, no Horovod needed."""

from __future__ import annotations

import sys

import pytest

from hpcbench.strategies.catalog import options_with_defaults
from hpcbench.strategies.horovod.train import assign_slots, horovod_variables, warmup_learning_rate
from hpcbench.worker.__main__ import _check_module
from hpcbench.worker.failure import is_peer_lost
from tests.worker.helpers import make_spec


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["a"], [(0, 1, 0, 1)]),
        (["a", "a", "b", "b"], [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
        # Ranks dealt out one node after another, and nodes with different numbers of them.
        (["a", "b", "a", "b"], [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
        (["a", "b", "b"], [(0, 1, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1)]),
    ],
)
def test_slots_of_ranks_follow_their_hosts(hosts: list[str], expected: list[tuple[int, int, int, int]]) -> None:
    found = assign_slots(hosts)
    assert [(one.local_rank, one.local_size, one.cross_rank, one.cross_size) for one in found] == expected
    assert [(one.hostname, one.rank, one.size) for one in found] == [
        (host, rank, len(hosts)) for rank, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("warmup_epochs", "expected"),
    [(0.0, [0.4, 0.4, 0.4]), (1.0, [0.1, 0.1 + 0.3 / 47, 0.1 + 0.6 / 47]), (2 / 47, [0.1, 0.25, 0.4])],
)
def test_rates_grow_to_the_number_of_replicas(warmup_epochs: float, expected: list[float]) -> None:
    spec = make_spec(strategy="horovod", dp_degree=4, tasks_per_node=4, learning_rate=0.1, batch_size=8,
                     options={"lr_scaling": True, "lr_warmup_epochs": warmup_epochs})  # fmt: skip
    options = options_with_defaults(spec)
    assert [warmup_learning_rate(spec, options, step) for step in range(3)] == pytest.approx(expected)
    assert warmup_learning_rate(spec, options, 10_000) == pytest.approx(0.4)


def test_horovod_options_become_environment_variables() -> None:
    options = options_with_defaults(make_spec(strategy="horovod", options={"fusion_threshold_mb": 0.5}))
    assert horovod_variables(options) == {
        "HOROVOD_FUSION_THRESHOLD": "524288", "HOROVOD_CYCLE_TIME": "1.0", "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
    }  # fmt: skip


class HorovodInternalError(RuntimeError):
    """The error of Horovod's operations, under its name."""


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt", True),
        ("[pair.cc:589] Read error [127.0.0.1]:11671: Connection reset by peer", True),
        ("Mismatched allreduce tensor shapes: One rank sent [2], but another one [3]", False),
    ],
)
def test_horovods_errors_about_a_lost_peer_are_recognised(message: str, lost: bool) -> None:
    assert is_peer_lost(HorovodInternalError(message)) is lost


def test_the_check_of_a_machine_states_why_horovod_is_absent_without_the_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    found = _check_module("horovod.torch")
    assert (found["works"], "has no Horovod that works with torch" in found["error"]) == (False, True)
    assert "\n" not in found["error"]
    assert "build_horovod" in found["hint"]
