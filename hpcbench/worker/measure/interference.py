"""Warnings about noise and interference, from the counters of all ranks of a run. This module does not import torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.schema import HostActivity, RankResult, StepPhases
from hpcbench.worker.failure import join_numbers

MAX_FOREIGN_SHARE = 0.05
"""Of the time of a rank's cores, used by processes that are not of the run ..."""
MAX_FOREIGN_CORES = 0.5
"""... or as many cores' worth of it, however many cores the rank has: every step waits for the slowest thread."""
MIN_FOREIGN_S = 0.1
"""The kernel counts in ticks of 10 ms: less than ten of them is no finding."""
MAX_THROTTLED_SHARE = 0.01
MAX_POWER_CAP_SHARE = 0.1
"""Of the timed steps: a GPU at its power limit for moments is nothing unusual."""
MIN_GPU_CLOCK_RATIO = 0.7
"""Of the most that a GPU's clock can be."""
MIN_CPU_CLOCK_RATIO = 0.8
"""Of the clock that the cores had at the first timed step."""
SLOW_RANK_FACTOR = 1.25

_COMPARED_HOST_FACTS = (
    "cpu_model",
    "cpu",
    "cores",
    "gpu_model",
    "gpu",
    "infiniband",
    "driver",
    "kernel",
    "os",
    "python",
    "torch",
    "torch_build",
    "cuda",
    "nccl",
    "cudnn",
    "packages",
    "hpcbench",
    "container",
)
_MAX_LISTED = 4


def interference_warnings(spec: RunSpec, ranks: Mapping[int, RankResult]) -> list[str]:
    """Warnings about the run whose ranks have all left what they saw; none where one is missing."""
    if len(ranks) != spec.ranks:
        return []
    checks: list[Callable[[Mapping[int, RankResult]], list[str]]] = [
        _foreign_cpu_use, _stolen_cpu_time, _cgroup_throttling, _thermal_throttling, _cpu_clock_drop,
        _other_gpu_processes, _gpu_throttling, _low_gpu_clock, _host_differences,
    ]  # fmt: skip
    return [text for check in checks for text in check(ranks)] + _slow_ranks(spec, ranks)


def _foreign_cpu_use(ranks: Mapping[int, RankResult]) -> list[str]:
    """Busy time of the cores that some ranks share, less what these ranks used themselves."""
    found = []
    for group in _ranks_sharing_cores(ranks):
        seen = [(ranks[rank].cpu_mask, ranks[rank].watched) for rank in group]
        cores = sorted({core for mask, _ in seen for core in mask})
        busy = [
            statistics.fmean(one.busy_s[mask.index(core)] for mask, one in seen if one and core in mask)
            for core in cores
        ]
        wall_s = max(one.wall_s for _, one in seen if one)
        foreign_s = sum(busy) - sum(one.own_s or 0.0 for _, one in seen if one)
        most = min(MAX_FOREIGN_SHARE * len(cores), MAX_FOREIGN_CORES) * wall_s
        if foreign_s > max(most, MIN_FOREIGN_S):
            share = foreign_s / (wall_s * len(cores))
            found.append(
                (share, f"{share:.0%} of the {_core_count_text(len(cores))} of {_describe_ranks(ranks, group)}")
            )
    return _worst_first_warning("other processes used the cores during the timed steps", found)


def _ranks_sharing_cores(ranks: Mapping[int, RankResult]) -> list[list[int]]:
    """Ranks of one host whose masks overlap, directly or through others; only where all of them were watched."""
    groups: list[tuple[str, set[int], list[int]]] = []
    for rank in sorted(ranks):
        one = ranks[rank]
        touched = [group for group in groups if group[0] == one.host and group[1] & set(one.cpu_mask)]
        cores = set(one.cpu_mask).union(*(group[1] for group in touched))
        members = [member for group in touched for member in group[2]]
        groups = [group for group in groups if group not in touched] + [(one.host, cores, [*members, rank])]
    return [members for _, _, members in groups if all(_has_core_times(ranks[member]) for member in members)]


def _has_core_times(one: RankResult) -> bool:
    watched = one.watched
    return bool(watched and watched.own_s is not None and watched.busy_s and len(watched.busy_s) == len(one.cpu_mask))


def _stolen_cpu_time(ranks: Mapping[int, RankResult]) -> list[str]:
    found = []
    for rank, watched in _watched_ranks(ranks):
        stolen_s, cores = sum(watched.stolen_s), len(watched.stolen_s)
        if stolen_s > max(MAX_FOREIGN_SHARE * cores * watched.wall_s, MIN_FOREIGN_S):
            share = stolen_s / (cores * watched.wall_s)
            found.append((share, f"{share:.0%} of the {_core_count_text(cores)} of {_describe_ranks(ranks, [rank])}"))
    return _worst_first_warning("the hypervisor took time of the cores away (steal)", found)


def _cgroup_throttling(ranks: Mapping[int, RankResult]) -> list[str]:
    found = []
    for rank, watched in _watched_ranks(ranks):
        held_s = watched.throttled_s or 0.0
        if held_s > MAX_THROTTLED_SHARE * watched.wall_s:
            quota = f", quota {watched.cpu_quota_cores:.3g} cores" if watched.cpu_quota_cores else ""
            figure = f"{held_s:.3g} s in {watched.wall_s:.3g} s on {_describe_ranks(ranks, [rank])}{quota}"
            found.append((held_s / watched.wall_s, figure))
    return _worst_first_warning("a control group's CPU quota held threads back", found)


def _thermal_throttling(ranks: Mapping[int, RankResult]) -> list[str]:
    found = [
        (float(watched.hot_events), f"{watched.hot_events} times on {_describe_ranks(ranks, [rank])}")
        for rank, watched in _watched_ranks(ranks)
        if watched.hot_events
    ]
    return _worst_first_warning("cores lowered their clock for heat", found)


def _cpu_clock_drop(ranks: Mapping[int, RankResult]) -> list[str]:
    found = []
    for rank, watched in _watched_ranks(ranks):
        before, after = [*watched.core_hz, 0.0, 0.0][:2]
        if before and after < MIN_CPU_CLOCK_RATIO * before:
            figure = f"from {before / 1e9:.2f} to {after / 1e9:.2f} GHz on {_describe_ranks(ranks, [rank])}"
            found.append((1 - after / before, figure))
    return _worst_first_warning("the cores' clock fell during the timed steps", found)


def _other_gpu_processes(ranks: Mapping[int, RankResult]) -> list[str]:
    found = [
        (float(watched.gpu_others), f"{watched.gpu_others} on the GPU of {_describe_ranks(ranks, [rank])}")
        for rank, watched in _watched_ranks(ranks)
        if watched.gpu_others
    ]
    return _worst_first_warning("other processes computed on the device", found)


def _gpu_throttling(ranks: Mapping[int, RankResult]) -> list[str]:
    found = []
    for rank, watched in _watched_ranks(ranks):
        reasons = [reason for reason in watched.gpu_reasons if reason != "power cap"]
        for name, least in (("thermal", 0.0), ("power", MAX_POWER_CAP_SHARE)):
            share = watched.gpu_held_s.get(name, 0.0) / watched.wall_s if watched.wall_s else 0.0
            if share > least:
                reasons.append(f"{name} limit for {share:.0%} of the time")
        if reasons:
            found.append((float(len(reasons)), f"{', '.join(reasons)} on the GPU of {_describe_ranks(ranks, [rank])}"))
    return _worst_first_warning("the GPU's clock was held down", found)


def _low_gpu_clock(ranks: Mapping[int, RankResult]) -> list[str]:
    found = []
    for rank, watched in _watched_ranks(ranks):
        now, most = [*watched.gpu_sm_hz, 0.0, 0.0][:2]
        if most and now < MIN_GPU_CLOCK_RATIO * most:
            figure = f"{now / 1e9:.2f} of {most / 1e9:.2f} GHz on the GPU of {_describe_ranks(ranks, [rank])}"
            found.append((1 - now / most, figure))
    return _worst_first_warning("the GPU ran far below its highest clock", found)


def _host_differences(ranks: Mapping[int, RankResult]) -> list[str]:
    """Hosts by what the first rank of each said of it."""
    facts: dict[str, dict[str, str]] = {}
    for rank in sorted(ranks):
        one = ranks[rank]
        if one.provenance and one.host not in facts:
            facts[one.host] = _flatten({key: one.provenance.get(key) for key in _COMPARED_HOST_FACTS})
    found = []
    for key in sorted({key for of_host in facts.values() for key in of_host}):
        by_value: dict[str, list[str]] = {}
        for host, of_host in facts.items():
            by_value.setdefault(of_host.get(key, "absent"), []).append(host)
        if len(by_value) > 1:
            found.append(f"{key} {', '.join(f'{value} on {_join_some(hosts)}' for value, hosts in by_value.items())}")
    return [f"the hosts of the run are not alike: {_join_some(found, '; ')}"] if found else []


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            found[prefix + key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return found


def _slow_ranks(spec: RunSpec, ranks: Mapping[int, RankResult]) -> list[str]:
    """Ranks whose own work takes longer than that of the others that do the same."""
    own = {rank: work for rank, one in ranks.items() if (work := _own_work_s(one.phases)) is not None}
    found = []
    for rank, work in own.items():
        others = [own[other] for other in own if other != rank and _has_same_work(spec, ranks, rank, other)]
        usual = statistics.median(others) if others else 0.0
        if usual > 0 and work > SLOW_RANK_FACTOR * usual:
            figure = (
                f"{_describe_ranks(ranks, [rank])} takes {work / usual:.2f} x as long for its own work as the others"
            )
            found.append((work / usual, figure))
    return _worst_first_warning("a slow rank", found)


def _own_work_s(phases: StepPhases | None) -> float | None:
    """What a rank did not wait for others in; unknown where the profiler saw no communication (Horovod's)."""
    if phases is None or phases.exposed_comm_s is None:
        return None
    return phases.step_s - phases.exposed_comm_s


def _has_same_work(spec: RunSpec, ranks: Mapping[int, RankResult], rank: int, other: int) -> bool:
    """Whether two ranks have the same to do: stages of a pipeline have not, but those of its replicas."""

    def place(one: int) -> int:
        return sum(1 for each in ranks if each < one and ranks[each].replica == ranks[one].replica)

    return spec.pp_degree == 1 or place(rank) == place(other)


def _watched_ranks(ranks: Mapping[int, RankResult]) -> Iterable[tuple[int, HostActivity]]:
    for rank in sorted(ranks):
        watched = ranks[rank].watched
        if watched is not None and watched.wall_s > 0:
            yield rank, watched


def _worst_first_warning(what: str, found: list[tuple[float, str]]) -> list[str]:
    """One text for all findings of a kind, the worst first."""
    figures = [figure for _, figure in sorted(found, key=lambda one: -one[0])]
    return [f"{what}: {_join_some(figures, '; ')}"] if figures else []


def _join_some(texts: list[str], between: str = ", ") -> str:
    shown = between.join(texts[:_MAX_LISTED])
    return shown if len(texts) <= _MAX_LISTED else f"{shown} and {len(texts) - _MAX_LISTED} more"


def _describe_ranks(ranks: Mapping[int, RankResult], group: list[int]) -> str:
    return f"rank{'s' * (len(group) > 1)} {join_numbers(group)} on {ranks[group[0]].host}"


def _core_count_text(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"
