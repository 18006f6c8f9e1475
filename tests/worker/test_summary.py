from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcbench.results.device_records import DevicePower, HostActivity
from hpcbench.results.schema import (
    EvaluationPoint,
    HostSyncs,
    RankResult,
    RankTraffic,
    RunResult,
    StepPhases,
)
from hpcbench.results.timing_statistics import slowest_rank_times_s
from hpcbench.strategies.traffic import Traffic
from hpcbench.worker.energy import global_step_samples
from hpcbench.worker.summary import summarize_run
from tests.worker.helpers import failure, make_header, make_rank, make_spec, make_task

PAIR = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2, steps=3)


def two_ranks(**second: Any) -> dict[int, RankResult]:
    common: dict[str, Any] = {"steps_done": 3, "step_samples": [8, 8, 8]}
    return {
        0: make_rank(0, step_times_s=[0.1, 0.5, 0.2], losses=[1.0, 0.5, 0.4, 0.3, 0.2], peak_memory_bytes=10,
                     time_to_first_step_s=2.0, accuracy=0.75, provenance={"threads": 1, "environment_digest": "d"},
                     **common),
        1: make_rank(1, **{"step_times_s": [0.2, 0.4, 0.1], "losses": [1.5, 0.5, 0.4, 0.3, 0.1],
                           "peak_memory_bytes": 30, "time_to_first_step_s": 3.0, **common, **second}),
    }  # fmt: skip


def summary(ranks: dict[int, RankResult], spec: Any = PAIR, status: str = "ok") -> RunResult:
    return summarize_run(make_header(Path("/tree")), make_task(spec), 1, ranks, status, failure())


def test_each_step_takes_the_time_of_its_slowest_rank_and_rates_are_global() -> None:
    began_s = time.time()
    result = summary(two_ranks())
    assert result.ended_at_s is not None
    assert began_s <= result.ended_at_s <= time.time()
    assert result.step_times_s == [0.2, 0.5, 0.2]
    metrics = result.metrics
    assert metrics.timed_s == pytest.approx(0.8), "rank 0's whole interval; the sum of the slowest steps is 0.9"
    assert [entry["timed_s"] for entry in result.ranks] == pytest.approx([0.8, 0.7])
    assert metrics.samples_per_s == pytest.approx(48 / 0.8)
    assert metrics.epoch_time_s == pytest.approx(1500 / (48 / 0.8))
    assert metrics.step_time_s is not None
    assert (metrics.step_time_s.median, metrics.step_time_s.max) == (0.2, 0.5)
    assert metrics.loss is not None
    assert metrics.loss.first == 2.5
    assert metrics.loss.last == pytest.approx(0.3)
    assert (metrics.peak_memory_bytes, metrics.time_to_first_step_s, metrics.accuracy) == (30, 3.0, 0.75)
    assert metrics.peak_reserved_bytes is None
    assert (result.environment_digest, result.provenance["hosts"]) == ("d", ["n0", "n1"])
    assert "environment_digest" not in result.provenance
    assert result.error is None, "an ok run has none"


@pytest.mark.parametrize(
    ("peak", "precision", "mfu"),
    [
        ({"fp32": 1e4}, "fp32", 48 / 0.8 * 60 / 2e4),
        ({"fp32": 1e4}, "bf16", None),
        ({"fp32": 1e4, "bf16": 1e5}, "bf16", 48 / 0.8 * 60 / 2e5),
        ({}, "fp32", None),
    ],
)
def test_mfu_is_of_all_devices_at_the_peak_of_the_precision(
    peak: dict[str, float], precision: str, mfu: float | None
) -> None:
    spec = msgspec.structs.replace(PAIR, precision=precision)
    ranks = two_ranks()
    ranks[0].flops_per_sample = 60.0
    result = summarize_run(make_header(Path("/tree"), peak_flops_per_s=peak), make_task(spec), 1, ranks, "ok")
    assert result.metrics.flops_per_s == pytest.approx(48 / 0.8 * 60)
    assert result.metrics.mfu == (None if mfu is None else pytest.approx(mfu))


@pytest.mark.parametrize(("recomputed", "hfu"), [(0.0, 1.0), (20.0, 4 / 3), (None, None)])
def test_hfu_counts_what_is_computed_again(recomputed: float | None, hfu: float | None) -> None:
    ranks = two_ranks()
    ranks[0].flops_per_sample, ranks[0].recomputed_flops_per_sample = 60.0, recomputed
    header = make_header(Path("/tree"), peak_flops_per_s={"fp32": 1e4})
    metrics = summarize_run(header, make_task(PAIR), 1, ranks, "ok").metrics
    assert metrics.mfu is not None
    assert metrics.hfu == (None if hfu is None else pytest.approx(hfu * metrics.mfu))


def test_tokens_are_counted_where_samples_are_sequences() -> None:
    assert summary(two_ranks()).metrics.tokens_per_s is None
    spec = msgspec.structs.replace(PAIR, model="gpt", dataset="tokens", input_size=32)
    metrics = summary(two_ranks(), spec).metrics
    assert metrics.samples_per_s is not None
    assert metrics.tokens_per_s == pytest.approx(32 * metrics.samples_per_s)
    assert metrics.tokens_per_s_per_device == pytest.approx(16 * metrics.samples_per_s)


def test_energy_is_that_of_all_devices_or_none() -> None:
    ranks = two_ranks(energy_j=2.5, energy_source="nvml")
    assert summary(ranks).metrics.energy_j is None, "one GPU's is not the run's"
    ranks[0].energy_j, ranks[0].energy_source = 1.5, "nvml"
    assert (summary(ranks).metrics.energy_j, summary(ranks).metrics.energy_source) == (4.0, "nvml")


@pytest.mark.parametrize(("wall_s", "evaluations", "error"), [(0.5, 0, "20 %"), (4.0, 0, None), (4.0, 4, "10 %")])
def test_energy_of_a_short_run_is_doubted(wall_s: float, evaluations: int, error: str | None) -> None:
    ranks = two_ranks()
    for rank in ranks.values():
        rank.energy_j, rank.energy_source, rank.watched = 9.0, "nvml", HostActivity(wall_s=wall_s)
        rank.evaluations = [EvaluationPoint(step=step, train_time_s=1.0, accuracy=0.5) for step in range(evaluations)]
    coarse = [text for text in summary(ranks).warnings if text.startswith("the energy is coarse")]
    assert [text.rpartition("by ")[2] for text in coarse] == ([error] if error else [])
    ranks[0].energy_source = ranks[1].energy_source = "rapl package, whole node"
    assert not [text for text in summary(ranks).warnings if "coarse" in text]


@pytest.mark.parametrize(
    ("launches", "exposed_comm_s", "is_bound"), [(1001, None, True), (999, None, False), (1001, 0.001, False)]
)
def test_launch_bound_steps_are_marked(launches: int, exposed_comm_s: float | None, is_bound: bool) -> None:
    ranks = two_ranks()
    for rank in ranks.values():
        rank.phases = StepPhases(step_s=0.02, compute_s=0.005, exposed_comm_s=exposed_comm_s)
    ranks[1].host_syncs = HostSyncs(per_step=0, launches=launches)
    found = [text for text in summary(ranks).warnings if text.startswith("launch-bound")]
    assert found == is_bound * [
        "launch-bound steps: rank 1 starts 1,001 kernels and copies a step, about 5.01 ms of its host's time, and its "
        "device works for 5.00 ms; so for 1 of 2 ranks"
    ]


def test_energy_per_sample_is_over_all_timed_samples_and_states_what_it_includes() -> None:
    counter: dict[str, Any] = {"energy_j": 96.0, "energy_source": "rapl package, whole node"}
    ranks = two_ranks()
    ranks[0].energy_j, ranks[0].energy_source = counter.values()
    metrics = summary(ranks).metrics
    assert metrics.energy_per_sample_j == pytest.approx(96 / 48)
    assert metrics.energy_includes == "the processors of whole nodes, with all that runs there"


def powered(*levels: dict[str, DevicePower], hosts: str = "aa", source: str = "amdsmi package") -> dict[int, Any]:
    """Two ranks of the pair with the counters of their devices."""
    ranks = two_ranks()
    for rank, level, host in zip(ranks.values(), levels, hosts, strict=True):
        rank.device_power, rank.host, rank.energy_source = level, host, source
        rank.energy_j = sum(one.energy_j or 0.0 for one in level.values())
    return ranks


def level(energy_j: float | None = 96.0, idle_w: float | None = 90.0, cap_w: float | None = 560.0) -> DevicePower:
    return DevicePower(energy_j=energy_j, idle_power_w=idle_w, power_cap_w=cap_w)


@pytest.mark.parametrize(
    ("levels", "hosts", "energy_j", "idle_w"),
    [
        # Two dies of one package, whose counter the second rank reads a moment later.
        (({"p0": level(96.0)}, {"p0": level(97.0)}), "aa", 97.0, 90.0),
        (({"p0": level()}, {"p1": level()}), "aa", 192.0, 180.0),
        (({"p0": level()}, {"p0": level()}), "ab", 192.0, 180.0),
        (({"p0": level(), "p1": level()}, {"p1": level(), "p2": level()}), "aa", 288.0, 270.0),
        (({"p0": level(idle_w=None)}, {"p1": level()}), "aa", 192.0, None),
        (({"p0": level(energy_j=None)}, {"p1": level()}), "aa", None, 180.0),
    ],
)
def test_a_counter_that_two_ranks_read_counts_once(
    levels: Any, hosts: str, energy_j: float | None, idle_w: float | None
) -> None:
    metrics = summary(powered(*levels, hosts=hosts)).metrics
    assert (metrics.energy_j, metrics.idle_power_w) == (energy_j, idle_w)
    if energy_j is not None:
        assert metrics.energy_includes == "packages of two GPUs each, both dies, also one that the run does not use"


def test_energy_of_tokens_and_the_lowest_power_cap() -> None:
    ranks = powered({"a": level(cap_w=700.0)}, {"b": level(cap_w=650.0)}, source="nvml")
    assert summary(ranks).metrics.energy_per_token_j is None, "samples are no sequences"
    spec = msgspec.structs.replace(PAIR, model="gpt", dataset="tokens", input_size=32)
    result = summary(ranks, spec)
    assert result.metrics.energy_per_sample_j == pytest.approx(192 / 48)
    assert result.metrics.energy_per_token_j == pytest.approx(192 / 48 / 32)
    assert result.metrics.power_cap_w == 650.0
    assert [rank["device_power"] for rank in result.ranks] == [
        {"a": {"energy_j": 96.0, "idle_power_w": 90.0, "power_cap_w": 700.0}},
        {"b": {"energy_j": 96.0, "idle_power_w": 90.0, "power_cap_w": 650.0}},
    ]
    del ranks[1]
    assert summary(ranks, spec).metrics.power_cap_w is None, "a rank left no file"


def test_the_slowest_rank_and_how_often() -> None:
    metrics = summary(two_ranks()).metrics
    # Rank 0 is the slowest in the second and the third step; the median of two ranks is their mean.
    assert [metrics.slowest_rank, metrics.slowest_rank_share] == pytest.approx([0, 2 / 3])
    assert metrics.rank_max_over_median == pytest.approx(0.2 / 0.15)
    assert lone([0.1] * 3).metrics.slowest_rank is None


def test_one_rank_per_node_reports_its_energy() -> None:
    counter = {"energy_j": 100.0, "energy_source": "rapl package, whole node"}
    spec = make_spec(strategy="ddp", nodes=2, tasks_per_node=2, dp_degree=4)
    ranks = {rank: make_rank(rank, local_rank=rank % 2, **(counter if rank % 2 == 0 else {})) for rank in range(4)}
    metrics = summary(ranks, spec).metrics
    assert (metrics.energy_j, metrics.energy_source) == (200.0, "rapl package, whole node")
    ranks[2].energy_j = None
    assert summary(ranks, spec).metrics.energy_j is None


def test_the_provenance_is_of_a_rank_that_spoke_for_its_host() -> None:
    ranks = two_ranks(provenance={"threads": 2, "environment_digest": "d"})
    ranks[0].provenance = {"threads": 1}
    assert (summary(ranks).provenance["threads"], summary(ranks).environment_digest) == (2, "d")


def test_ranks_that_share_a_replica_count_once() -> None:
    ranks = {rank: make_rank(rank, replica=rank // 2, step_samples=[4, 3]) for rank in range(4)}
    assert global_step_samples(ranks) == [8, 6]


def test_only_steps_that_all_ranks_have_ended_count() -> None:
    assert slowest_rank_times_s(two_ranks(step_times_s=[0.2])) == [0.2]


def test_a_diverged_loss_is_null_and_a_warning() -> None:
    result = summary(two_ranks(losses=[1.0, 0.5, None, None, None]))
    assert result.metrics.loss is not None
    assert (result.metrics.loss.first, result.metrics.loss.last) == (2.0, None)
    assert "the loss diverged: it is not finite from step 2 on (0 is the first)" in result.warnings


@pytest.mark.parametrize(
    ("batch", "warmup", "steps", "expected"),
    [
        (28, 0, 60, ["the last batch of an epoch holds 16 of 28 samples; counted as 16"]),
        (28, 50, 3, []),
        (28, 50, 4, ["the last batch of an epoch holds 16 of 28 samples; counted as 16"]),
        (28, 0, 53, []),
        (1499, 0, 1, ["1 of 1500 samples of an epoch are left out: the last batch would give a replica fewer than 2"]),
        (50, 0, 90, []),
    ],
)
def test_partial_batches_give_a_warning_with_their_size(
    batch: int, warmup: int, steps: int, expected: list[str]
) -> None:
    spec = make_spec(batch_size=batch, warmup_steps=warmup, steps=steps)
    times = [0.1] * steps
    result = summary({0: make_rank(0, step_times_s=times, step_samples=[batch] * steps)}, spec)
    assert result.warnings == expected


def test_drop_last_warns_of_the_samples_left_out() -> None:
    spec = make_spec(batch_size=28, warmup_steps=0, steps=60, drop_last=True)
    result = summary({0: make_rank(0, step_times_s=[0.1] * 60, step_samples=[28] * 60)}, spec)
    assert result.warnings == ["16 of 1500 samples of an epoch are left out: drop_last"]
    assert result.metrics.epoch_time_s == pytest.approx(1484 / 280)


def test_an_epoch_is_as_long_as_the_files_that_were_found() -> None:
    rank = make_rank(0, step_times_s=[0.1], step_samples=[8], provenance={"data": {"epoch_samples": 800}})
    assert summary({0: rank}, make_spec(steps=1)).metrics.epoch_time_s == pytest.approx(10)


def test_a_warning_of_some_ranks_names_them_and_of_all_stands_once() -> None:
    assert summary(two_ranks(warnings=["hot"])).warnings == ["hot (ranks 1)"]
    ranks = two_ranks(warnings=["hot"])
    ranks[0].warnings = ["hot"]
    assert summary(ranks).warnings == ["hot"]


def test_a_pipelines_communication_is_mostly_waiting_and_has_no_wire_time() -> None:
    spec = make_spec(strategy="1f1b", tasks_per_node=2, pp_degree=2, micro_batches=4, steps=3)
    ranks = two_ranks(phases=StepPhases(step_s=0.3, compute_s=0.2, comm_s=0.1, exposed_comm_s=0.05))
    ranks[0].phases = StepPhases(step_s=0.4, compute_s=0.1, comm_s=0.3, exposed_comm_s=0.25)
    metrics = summary(ranks, spec).metrics
    assert (metrics.comm_s, metrics.wire_s, metrics.wait_s) == (0.1, None, None)


def test_without_ranks_there_are_no_metrics() -> None:
    result = summary({}, status="failed")
    assert result.metrics.step_time_s is None
    assert result.metrics.peak_memory_bytes is None
    assert result.error == failure()
    assert [entry["left_file"] for entry in result.ranks] == [False, False]


def test_the_loss_of_a_part_of_the_ranks_is_no_loss() -> None:
    ranks = two_ranks()
    del ranks[0]
    result = summary(ranks, status="failed")
    assert result.metrics.loss is None
    assert result.step_times_s == [0.2, 0.4, 0.1]
    assert (result.metrics.timed_s, result.ranks[1]["timed_s"]) == (None, pytest.approx(0.7))
    assert math.isclose(result.metrics.peak_memory_bytes or 0, 30)


def lone(times: list[float], **values: Any) -> RunResult:
    spec = make_spec(batch_size=50, steps=len(times), **values)
    return summary({0: make_rank(0, step_times_s=times, step_samples=[50] * len(times))}, spec)


def test_timed_steps_that_were_still_slower_are_in_no_figure() -> None:
    result = lone([1.0, 0.5, *[0.1] * 10])
    metrics = result.metrics
    assert metrics.warmup_found_steps == 2
    assert metrics.step_time_s is not None
    assert metrics.step_time_s.max == 0.1
    assert [metrics.samples_per_s, metrics.timed_s] == pytest.approx([500, 1.0])
    assert result.step_times_s == [1.0, 0.5, *[0.1] * 10], "what was measured is kept whole"
    assert result.ranks[0]["step_time_median_s"] == 0.1
    assert [warning for warning in result.warnings if "set warmup_steps = 4" in warning]
    assert (metrics.drift, metrics.outlier_steps) == (0.0, 0)


def test_few_steps_give_neither_warm_up_nor_drift() -> None:
    metrics = lone([1.0, 0.1, 0.1]).metrics
    assert (metrics.warmup_found_steps, metrics.drift, metrics.outlier_steps) == (None, None, None)
    assert metrics.step_time_s is not None
    assert metrics.step_time_s.max == 1.0


def test_the_split_is_that_of_the_rank_that_computes_longest() -> None:
    ranks = two_ranks(phases=StepPhases(step_s=0.3, compute_s=0.2, comm_s=0.1, exposed_comm_s=0.05))
    ranks[0].phases = StepPhases(step_s=0.4, compute_s=0.1, comm_s=0.3, exposed_comm_s=0.25, forward_s=0.1)
    metrics = summary(ranks).metrics
    assert (metrics.compute_s, metrics.comm_s, metrics.exposed_comm_s, metrics.forward_s) == (0.2, 0.1, 0.05, None)
    assert metrics.phases_rank == 1
    assert [metrics.wire_s, metrics.wait_s] == pytest.approx([0.1, 0.1]), "rank 0 waits for 0.2 s, rank 1 not at all"
    assert summary(ranks).ranks[0]["phases"]["comm_s"] == 0.3
    assert summary(two_ranks()).metrics.compute_s is None


@pytest.mark.parametrize(
    ("target", "time_s", "steps"), [(0.5, 4.0, 8), (0.25, 2.0, 4), (0.9, None, None), (None, None, None)]
)
def test_the_time_to_an_accuracy_is_that_of_the_first_evaluation_at_it(
    target: float | None, time_s: float | None, steps: int | None
) -> None:
    ranks = two_ranks()
    ranks[0].evaluations = [
        EvaluationPoint(step=4 * number, train_time_s=2.0 * number, wall_s=5.0 * number, accuracy=0.25 * number)
        for number in (1, 2, 3)
    ]
    spec = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2, steps=3, target_accuracy=target)
    metrics = summary(ranks, spec).metrics
    assert (metrics.time_to_accuracy_s, metrics.steps_to_accuracy) == (time_s, steps)
    assert metrics.time_to_accuracy_with_evaluation_s == (None if time_s is None else 2.5 * time_s)


def test_the_traffic_is_that_of_the_rank_that_passes_most_bytes() -> None:
    few, many = passed(10, 3), passed(40, 1)
    ranks = two_ranks(traffic=[many])
    assert summary(ranks).traffic == RankTraffic(rank=1, calls=[many])
    ranks[0].traffic = [few, few]
    assert summary(ranks).traffic == RankTraffic(rank=0, calls=[few, few])
    assert summary(two_ranks()).traffic is None


def passed(payload_bytes: int, count: int) -> Traffic:
    return Traffic(operation="all_reduce", group_size=2, payload_bytes=payload_bytes, count=count)


def test_partial_steps_count_as_what_they_hold() -> None:
    result = summary(two_ranks(step_samples=[8, 8, 5]))
    assert result.metrics.samples_per_s == pytest.approx((16 + 16 + 13) / 0.8)
