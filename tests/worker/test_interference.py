from __future__ import annotations

from typing import Any

import pytest

from hpcbench.results.device_records import HostActivity
from hpcbench.results.schema import RankResult, StepPhases
from hpcbench.worker.measure.interference import interference_warnings
from tests.worker.helpers import make_rank, make_spec

PAIR = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2)


def watched(**values: Any) -> HostActivity:
    return HostActivity(**{"wall_s": 10.0, "busy_s": [10.0], "stolen_s": [0.0], "own_s": 9.9, **values})


def of(*ranks: dict[str, Any]) -> list[str]:
    """Warnings of a run whose ranks saw that: the same host and a core of its own, unless it says otherwise."""
    made = {
        number: make_rank(number, **{"host": "n1", "cpu_mask": [number], "watched": watched(), **values})
        for number, values in enumerate(ranks)
    }
    spec = make_spec(strategy="ddp", tasks_per_node=len(ranks), dp_degree=len(ranks))
    return interference_warnings(spec, made)


@pytest.mark.parametrize(
    ("cores", "busy_s", "own_s", "expected"),
    [
        (1, 10.0, 9.6, []),
        (1, 10.0, 9.4, ["6 % of the 1 core of rank 0 on n1"]),
        (2, 20.0, 10.0, ["50 % of the 2 cores of rank 0 on n1"]),
        # Half a core among many is enough: a step waits for its slowest thread.
        (64, 640.0, 634.0, ["1 % of the 64 cores of rank 0 on n1"]),
        (64, 640.0, 636.0, []),
        # Interrupts are counted to the process that they hit.
        (1, 9.0, 9.9, []),
    ],
)
def test_other_processes_on_the_cores_give_a_warning(
    cores: int, busy_s: float, own_s: float, expected: list[str]
) -> None:
    seen = watched(busy_s=[busy_s / cores] * cores, stolen_s=[0.0] * cores, own_s=own_s)
    found = of({"cpu_mask": list(range(cores)), "watched": seen})
    assert [text.removeprefix("other processes used the cores during the timed steps: ") for text in found] == expected


def test_ranks_that_share_cores_give_no_warning() -> None:
    shared = {"cpu_mask": [0, 1], "watched": watched(busy_s=[10.0, 10.0], own_s=9.9)}
    assert of(shared, shared) == []
    assert of(shared, {**shared, "host": "n2"})[0].startswith(
        "other processes used the cores during the timed steps: 50 % of the 2 cores of rank 0 on n1; 50 %"
    )
    chained = {"cpu_mask": [1, 2], "watched": watched(busy_s=[10.0, 0.0], own_s=4.0)}
    assert of({"cpu_mask": [0, 1], "watched": watched(busy_s=[9.9, 10.0], own_s=16.0)}, chained) == []


@pytest.mark.parametrize("hole", [{"watched": None}, {"watched": watched(own_s=None)}, {"watched": watched(busy_s=[])}])
def test_missing_observations_give_no_warning(hole: dict[str, Any]) -> None:
    strangers = {"cpu_mask": [0], "watched": watched(own_s=0.0)}
    assert len(of(strangers, {"cpu_mask": [1]})) == 1
    assert of(strangers, {"cpu_mask": [0], **hole}) == []
    assert interference_warnings(PAIR, {0: make_rank(0, cpu_mask=[0], watched=watched(own_s=0.0))}) == []


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (
            {"stolen_s": [0.6]},
            ["the hypervisor took time of the cores away (steal): 6 % of the 1 core of rank 0 on n1"],
        ),
        ({"stolen_s": [0.4]}, []),
        (
            {"throttled_s": 2.5, "cpu_quota_cores": 0.5},
            ["a control group's CPU quota held threads back: 2.5 s in 10 s on rank 0 on n1, quota 0.5 cores"],
        ),
        ({"throttled_s": 0.09, "cpu_quota_cores": 0.5}, []),
        ({"hot_events": 0}, []),
        ({"hot_events": 3}, ["cores lowered their clock for heat: 3 times on rank 0 on n1"]),
        ({"core_hz": [3.0e9, 2.5e9]}, []),
        (
            {"core_hz": [3.0e9, 2.0e9]},
            ["the cores' clock fell during the timed steps: from 3.00 to 2.00 GHz on rank 0 on n1"],
        ),
        ({"gpu_others": 0}, []),
        ({"gpu_others": 2}, ["other processes computed on the device: 2 on the GPU of rank 0 on n1"]),
        ({"gpu_reasons": ["power cap"]}, []),
        ({"gpu_held_s": {"power": 0.9, "thermal": 0.0}}, []),
        (
            {"gpu_reasons": ["power cap", "heat (driver)"], "gpu_held_s": {"power": 5.0, "thermal": 0.1}},
            [
                "the GPU's clock was held down: heat (driver), thermal limit for 1 % of the time, "
                "power limit for 50 % of the time on the GPU of rank 0 on n1"
            ],
        ),
        ({"gpu_sm_hz": [1.5e9, 1.98e9]}, []),
        (
            {"gpu_sm_hz": [1.2e9, 1.98e9]},
            ["the GPU ran far below its highest clock: 1.20 of 1.98 GHz on the GPU of rank 0 on n1"],
        ),
    ],
)
def test_interference_gives_a_warning_with_its_cause(seen: dict[str, Any], expected: list[str]) -> None:
    assert of({"watched": watched(**seen)}) == expected


def test_many_findings_of_a_kind_are_one_text_with_the_worst_first() -> None:
    (text,) = of(*({"watched": watched(hot_events=number)} for number in range(7)))
    assert text.startswith("cores lowered their clock for heat: 6 times on rank 6 on n1; 5 times")
    assert text.endswith("3 times on rank 3 on n1 and 2 more")


# Ranks that work longer than others


def working(step_s: float, exposed_s: float | None, **values: Any) -> dict[str, Any]:
    return {"phases": StepPhases(step_s=step_s, exposed_comm_s=exposed_s, **values)}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([working(1.0, 0.5), working(1.0, 0.0)], "a slow rank: rank 1 on n1 takes 2.00 x as long"),
        ([working(1.0, 0.0), working(1.0, 0.19)], None),
        ([working(1.0, 0.5)] * 3 + [working(1.0, 0.1)], "a slow rank: rank 3 on n1 takes 1.80 x as long"),
        ([working(1.0, None, compute_s=0.4), working(1.0, None, compute_s=0.2)], None),
        ([working(1.0, None), working(3.0, None)], None),
        ([{}, working(1.0, 0.5)], None),
        ([working(1.0, 0.0)], None),
    ],
)  # fmt: skip
def test_a_rank_with_more_own_work_gives_a_warning(ranks: list[dict[str, Any]], expected: str | None) -> None:
    found = of(*ranks)
    if expected is None:
        assert found == []
    else:
        assert found == [f"{expected} for its own work as the others"]


@pytest.mark.parametrize(
    ("exposed_s", "expected"),
    [
        # Rank 1 is the second stage of both replicas' pipelines, and the longer one.
        ([0.5, 0.1, 0.5, 0.1], 0),
        ([0.5, 0.1, 0.5, 0.5], 1),
    ],
)
def test_stages_of_a_pipeline_are_compared_with_their_likes(exposed_s: list[float], expected: int) -> None:
    spec = make_spec(strategy="1f1b", tasks_per_node=4, dp_degree=2, pp_degree=2)
    ranks: dict[int, RankResult] = {
        rank: make_rank(rank, replica=rank // 2, phases=StepPhases(step_s=1.0, exposed_comm_s=exposed))
        for rank, exposed in enumerate(exposed_s)
    }
    assert len(interference_warnings(spec, ranks)) == expected


# Hosts that are not alike


def test_hosts_of_another_kind_are_named_with_what_differs() -> None:
    common = {"cpu_model": "A", "kernel": "5.14", "packages": {"numpy": "2.0"}, "host": "x", "gpu": {"ecc": "on"}}
    alike = [{"host": f"n{number}", "provenance": {**common, "host": f"n{number}"}} for number in range(3)]
    assert of(*alike) == []
    other = {"host": "n9", "provenance": {**common, "cpu_model": "B", "packages": {"numpy": "1.0"}, "gpu": {}}}
    assert of(*alike, other) == [
        "the hosts of the run are not alike: cpu_model A on n0, n1, n2, B on n9; "
        "gpu.ecc on on n0, n1, n2, absent on n9; packages.numpy 2.0 on n0, n1, n2, 1.0 on n9"
    ]
