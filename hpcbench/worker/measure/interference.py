"""Warnings about noise and interference, from the counters of all ranks of a run. This module does not import torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.device_records import HostActivity
from hpcbench.results.schema import RankResult
from hpcbench.units import format_percent
from hpcbench.worker.failure import join_numbers

MAX_FOREIGN_SHARE = 0.05
"""Maximum fraction of the time of a rank's cores that processes outside of the run may use ..."""
MAX_FOREIGN_CORES = 0.5
"""... and the maximum in cores, however many cores the rank has: every step waits for the slowest thread."""
MIN_FOREIGN_S = 0.1
"""The kernel counts in ticks of 10 ms: less than ten of them is no finding."""
MAX_THROTTLED_SHARE = 0.01
MAX_POWER_CAP_SHARE = 0.1
"""Maximum fraction of the timed steps with the GPU at its power limit: short periods are usual."""
MIN_GPU_CLOCK_RATIO = 0.7
"""Minimum of a GPU's clock, relative to its maximum."""
MIN_CPU_CLOCK_RATIO = 0.8
"""Minimum clock of the cores after the timed steps, relative to the clock at the first timed step."""
SLOW_RANK_FACTOR = 1.25

_COMPARED_HOST_FACTS = (
    "cpu_model", "cpu", "cores", "gpu_model", "gpu", "infiniband", "driver", "kernel", "os", "python", "torch",
    "torch_build", "cuda", "nccl", "cudnn", "hip", "rccl", "miopen", "packages", "hpcbench", "container",
)  # fmt: skip
_MAX_LISTED = 4


Finding = tuple[float, str]
"""Severity, and the figure with its place."""


def interference_warnings(spec: RunSpec, ranks: Mapping[int, RankResult]) -> list[str]:
    """Return warnings about noise during the timed steps; none unless every rank left its result."""
    if len(ranks) != spec.ranks:
        return []
    findings = {"other processes used the cores during the timed steps": _foreign_cpu_use(ranks)}
    for title, measure in _RANK_CHECKS:
        findings[title] = [
            (finding[0], finding[1].format(ranks=_describe_ranks(ranks, [rank])))
            for rank in sorted(ranks)
            if (watched := ranks[rank].watched) is not None and watched.wall_s > 0 and (finding := measure(watched))
        ]
    return [
        *_one_warning_each(findings),
        *_host_differences(ranks),
        *_one_warning_each({"a slow rank": _slow_ranks(spec, ranks)}),
    ]


def _one_warning_each(findings: Mapping[str, list[Finding]]) -> list[str]:
    """Return one text per title with findings, the most severe first."""
    return [
        f"{title}: {_join_some([figure for _, figure in sorted(ranked, key=lambda finding: -finding[0])], '; ')}"
        for title, ranked in findings.items()
        if ranked
    ]


def _foreign_cpu_use(ranks: Mapping[int, RankResult]) -> list[Finding]:
    """Compare the busy time of the cores that some ranks share with what these ranks used themselves."""
    findings = []
    for group in _ranks_sharing_cores(ranks):
        activities = [(ranks[rank].cpu_mask, watched) for rank in group if (watched := ranks[rank].watched)]
        cores = sorted({core for mask, _ in activities for core in mask})
        busy = [
            statistics.fmean(watched.busy_s[mask.index(core)] for mask, watched in activities if core in mask)
            for core in cores
        ]
        wall_s = max(watched.wall_s for _, watched in activities)
        foreign_s = sum(busy) - sum(watched.own_s or 0.0 for _, watched in activities)
        limit_s = min(MAX_FOREIGN_SHARE * len(cores), MAX_FOREIGN_CORES) * wall_s
        if foreign_s > max(limit_s, MIN_FOREIGN_S):
            share = foreign_s / (wall_s * len(cores))
            findings.append((share, f"{_share_of_cores(share, len(cores))} of {_describe_ranks(ranks, group)}"))
    return findings


def _ranks_sharing_cores(ranks: Mapping[int, RankResult]) -> list[list[int]]:
    """Ranks of one host whose masks overlap, directly or through others; only where all of them were watched."""
    groups: list[tuple[str, set[int], list[int]]] = []
    for rank in sorted(ranks):
        result = ranks[rank]
        touched = [group for group in groups if group[0] == result.host and group[1] & set(result.cpu_mask)]
        cores = set(result.cpu_mask).union(*(group[1] for group in touched))
        members = [member for group in touched for member in group[2]]
        groups = [group for group in groups if group not in touched] + [(result.host, cores, [*members, rank])]
    return [members for _, _, members in groups if all(_has_core_times(ranks[member]) for member in members)]


def _has_core_times(result: RankResult) -> bool:
    watched = result.watched
    return bool(watched and watched.own_s is not None and 0 < len(watched.busy_s) == len(result.cpu_mask))


def _stolen_cpu_time(watched: HostActivity) -> Finding | None:
    stolen_s, cores = sum(watched.stolen_s), len(watched.stolen_s)
    if stolen_s <= max(MAX_FOREIGN_SHARE * cores * watched.wall_s, MIN_FOREIGN_S):
        return None
    share = stolen_s / (cores * watched.wall_s)
    return share, f"{_share_of_cores(share, cores)} of {{ranks}}"


def _cgroup_throttling(watched: HostActivity) -> Finding | None:
    held_s = watched.throttled_s or 0.0
    if held_s <= MAX_THROTTLED_SHARE * watched.wall_s:
        return None
    quota = f", quota {watched.cpu_quota_cores:.3g} cores" if watched.cpu_quota_cores else ""
    return held_s / watched.wall_s, f"{held_s:.3g} s in {watched.wall_s:.3g} s on {{ranks}}{quota}"


def _thermal_throttling(watched: HostActivity) -> Finding | None:
    return (watched.hot_events, f"{watched.hot_events} times on {{ranks}}") if watched.hot_events else None


def _cpu_clock_drop(watched: HostActivity) -> Finding | None:
    before, after = [*watched.core_hz, 0.0, 0.0][:2]
    if after >= MIN_CPU_CLOCK_RATIO * before:
        return None
    return 1 - after / before, f"from {before / 1e9:.2f} to {after / 1e9:.2f} GHz on {{ranks}}"


def _other_gpu_processes(watched: HostActivity) -> Finding | None:
    return (watched.gpu_others, f"{watched.gpu_others} on the GPU of {{ranks}}") if watched.gpu_others else None


def _gpu_throttling(watched: HostActivity) -> Finding | None:
    reasons = [reason for reason in watched.gpu_reasons if reason != "power cap"]
    for name, limit in (("thermal", 0.0), ("power", MAX_POWER_CAP_SHARE)):
        share = watched.gpu_held_s.get(name, 0.0) / watched.wall_s
        if share > limit:
            reasons.append(f"{name} limit for {format_percent(share)} of the time")
    return (len(reasons), f"{', '.join(reasons)} on the GPU of {{ranks}}") if reasons else None


def _low_gpu_clock(watched: HostActivity) -> Finding | None:
    clock_hz, max_hz = [*watched.gpu_sm_hz, 0.0, 0.0][:2]
    if clock_hz >= MIN_GPU_CLOCK_RATIO * max_hz:
        return None
    return 1 - clock_hz / max_hz, f"{clock_hz / 1e9:.2f} of {max_hz / 1e9:.2f} GHz on the GPU of {{ranks}}"


_RANK_CHECKS: tuple[tuple[str, Callable[[HostActivity], Finding | None]], ...] = (
    ("the hypervisor took time of the cores away (steal)", _stolen_cpu_time),
    ("a control group's CPU quota held threads back", _cgroup_throttling),
    ("cores lowered their clock for heat", _thermal_throttling),
    ("the cores' clock fell during the timed steps", _cpu_clock_drop),
    ("other processes computed on the device", _other_gpu_processes),
    ("the GPU's clock was held down", _gpu_throttling),
    ("the GPU ran far below its highest clock", _low_gpu_clock),
)
"""Title of the warning, and the finding of one rank; ``{ranks}`` in its text becomes the rank and its host."""


def _host_differences(ranks: Mapping[int, RankResult]) -> list[str]:
    """Compare the facts of the hosts, from the first rank of each."""
    facts: dict[str, dict[str, str]] = {}
    for rank in sorted(ranks):
        result = ranks[rank]
        if result.provenance and result.host not in facts:
            facts[result.host] = _flatten({key: result.provenance.get(key) for key in _COMPARED_HOST_FACTS})
    differences = []
    for key in sorted(set().union(*facts.values())):
        by_value: dict[str, list[str]] = {}
        for host, host_facts in facts.items():
            by_value.setdefault(host_facts.get(key, "absent"), []).append(host)
        if len(by_value) > 1:
            values = ", ".join(f"{value} on {_join_some(hosts)}" for value, hosts in by_value.items())
            differences.append(f"{key} {values}")
    return [f"the hosts of the run are not alike: {_join_some(differences, '; ')}"] if differences else []


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return flat


def _slow_ranks(spec: RunSpec, ranks: Mapping[int, RankResult]) -> list[Finding]:
    """Find ranks whose own work takes longer than that of the others that do the same."""
    # Time in which a rank did not wait for others; unknown where the profiler saw no communication (Horovod's).
    work_s = {
        rank: result.phases.step_s - result.phases.exposed_comm_s
        for rank, result in ranks.items()
        if result.phases is not None and result.phases.exposed_comm_s is not None
    }
    findings = []
    for rank, work in work_s.items():
        others = [work_s[other] for other in work_s if other != rank and _has_same_work(spec, ranks, rank, other)]
        usual = statistics.median(others) if others else 0.0
        if usual > 0 and work > SLOW_RANK_FACTOR * usual:
            text = f"takes {work / usual:.2f} x as long for its own work as the others"
            findings.append((work / usual, f"{_describe_ranks(ranks, [rank])} {text}"))
    return findings


def _has_same_work(spec: RunSpec, ranks: Mapping[int, RankResult], rank: int, other: int) -> bool:
    """Whether two ranks have the same to do: stages of a pipeline have not, but those of its replicas."""

    def index_in_replica(member: int) -> int:
        return sum(1 for each in ranks if each < member and ranks[each].replica == ranks[member].replica)

    return spec.pp_degree == 1 or index_in_replica(rank) == index_in_replica(other)


def _join_some(texts: list[str], between: str = ", ") -> str:
    shown = between.join(texts[:_MAX_LISTED])
    return shown if len(texts) <= _MAX_LISTED else f"{shown} and {len(texts) - _MAX_LISTED} more"


def _describe_ranks(ranks: Mapping[int, RankResult], group: list[int]) -> str:
    return f"rank{'s' * (len(group) > 1)} {join_numbers(group)} on {ranks[group[0]].host}"


def _share_of_cores(share: float, count: int) -> str:
    return f"{format_percent(share)} of the {count} core{'s' * (count != 1)}"
