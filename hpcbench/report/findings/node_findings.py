"""Findings about nodes that did the same: which are slower than the others, and which links between them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean, median, median_low
from typing import NamedTuple

import msgspec
import polars as pl

from hpcbench.config.run_spec import RunSpec, config_id, run_label
from hpcbench.fileio import printable_excerpt
from hpcbench.report.configurations import STEP_TIME, ok_results, run_spec_of
from hpcbench.report.findings.finding import OBSERVED, Certainty, Finding
from hpcbench.report.findings.throughput_findings import MIN_DIFFERENCE
from hpcbench.report.hypothesis_tests import (
    INCONCLUSIVE,
    MIN_LAUNCHES_RANK_TEST,
    MIN_LAUNCHES_T_TEST,
    SIGNIFICANT,
    adjusted_p_values,
    estimate_log_ratio,
)
from hpcbench.report.plots.plot_model import ReadFullResults
from hpcbench.results.schema import RunResult
from hpcbench.units import format_percent, join_words, pluralize

OUTLIER_LEVEL = 0.01
"""Probability that any of the nodes or links of one finding is named although all are equal."""


class Outlier(NamedTuple):
    """A node, or a link, that is slower than the others."""

    name: str
    ratio: float
    """Its time over that of the others."""
    p_value: float
    """The one-sided p-value, adjusted for all nodes by Holm's correction."""


def find_slow(readings_s: Mapping[str, Sequence[float]]) -> list[Outlier]:
    """Return those whose launches took longer than the launches of the others, the slowest first.

    Args:
        readings_s: seconds of each launch, by node; nodes with fewer than ``MIN_LAUNCHES_T_TEST`` are not tested.
    """
    found: list[Outlier] = []
    while True:
        # Others that are known to be slow would hide one that is less slow.
        rest_s = {name: own for name, own in readings_s.items() if name not in {outlier.name for outlier in found}}
        more = _slower_than_others(rest_s)
        if not more:
            return sorted(found, key=lambda outlier: -outlier.ratio)
        found += more


def _slower_than_others(readings_s: Mapping[str, Sequence[float]]) -> list[Outlier]:
    testable = [name for name, own in readings_s.items() if len(own) >= MIN_LAUNCHES_T_TEST]
    if len(readings_s) < 2:
        return []
    # A test reads the launches of all nodes: only those above the usual time are worth one, and all of them count.
    least_s = median_low(median(own) for own in readings_s.values()) * (1 + 0.75 * MIN_DIFFERENCE)
    tested = [name for name in testable if _middle_s(readings_s[name]) >= least_s]
    shifts = []
    for name in tested:
        others = [*chain.from_iterable(own for other, own in readings_s.items() if other != name)]
        shifts.append(estimate_log_ratio(others, readings_s[name]))
    return [
        Outlier(name, math.exp(shift.estimate), p_value)
        for name, shift, p_value in zip(
            tested, shifts, adjusted_p_values(shifts, greater=True, among=len(testable)), strict=True
        )
        if p_value <= OUTLIER_LEVEL and shift.estimate >= math.log1p(MIN_DIFFERENCE)
    ]


def _middle_s(readings_s: Sequence[float]) -> float:
    """Return the median, or the mean of so few that their means are tested."""
    return median(readings_s) if len(readings_s) >= MIN_LAUNCHES_RANK_TEST else fmean(readings_s)


def node_findings(frame: pl.DataFrame, whole: ReadFullResults | None) -> list[Finding]:
    """Return a finding for each configuration that ran on several nodes, and for each matrix of pairs.

    Args:
        frame: results with all columns.
        whole: reads the results of ``pairs``; without it, links are not judged.
    """
    readings_s: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    labels: dict[tuple[str, str], str] = {}
    ended = ok_results(frame)
    pinned = ended.filter(pl.col("spec.node").is_not_null() & (pl.col(STEP_TIME) > 0))
    for row in pinned.iter_rows(named=True):
        spec = msgspec.structs.replace(run_spec_of(row), node=None)
        key = row["cluster"], config_id(spec)
        labels[key] = run_label(msgspec.structs.replace(spec, repeat=0))
        readings_s[key][row["spec.node"]].append(row[STEP_TIME])
    found = [_nodes_finding(key[0], labels[key], nodes) for key, nodes in readings_s.items() if len(nodes) > 1]
    pairs = ended.filter(pl.col("spec.operation") == "pairs").select("cluster", "run_id").rows()
    return [*found, *(_pairs_findings(whole(pairs)) if whole is not None and pairs else ())]


def _nodes_finding(cluster: str, what: str, readings_s: Mapping[str, Sequence[float]]) -> Finding:
    slow = find_slow(readings_s)
    return _finding(cluster, what, "node", readings_s, _texts(slow), tuple(outlier.name for outlier in slow))


def _texts(slow: Iterable[Outlier]) -> list[str]:
    return [f"{one.name} ({format_percent(one.ratio - 1)} more time, p = {one.p_value:.1g})" for one in slow]


def _pairs_findings(results: Iterable[RunResult]) -> list[Finding]:
    """A node is slow if most links of it are; the slow links of other nodes are named themselves."""
    groups: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    specs: dict[tuple[str, str], RunSpec] = {}
    ends: dict[str, tuple[str, str]] = {}
    for result in results:
        key = result.cluster, result.config_id
        specs[key] = msgspec.structs.replace(result.spec, repeat=0)
        for (first, second), seconds in pair_times_s(result).items():
            link = f"{first} - {second}"
            ends[link] = (first, second)
            groups[key][link].append(seconds)
    findings = []
    for key, readings_s in groups.items():
        if len(readings_s) < 2:
            continue
        slow, spec = find_slow(readings_s), specs[key]
        counts = Counter(end for outlier in slow for end in ends[outlier.name])
        links = Counter(end for link in readings_s for end in ends[link])
        nodes = tuple(sorted(name for name, count in counts.items() if count > 1 and 2 * count > links[name]))
        alone = [outlier for outlier in slow if not {*nodes} & {*ends[outlier.name]}]
        texts = [f"{name} ({counts[name]} of its {links[name]} links)" for name in nodes] + _texts(alone)
        # The ranks of one node are no nodes.
        own = nodes if spec.nodes > 1 else ()
        findings.append(_finding(key[0], run_label(spec), "link", readings_s, texts, own))
    return findings


def pair_times_s(result: RunResult) -> dict[tuple[str, str], float]:
    """Return the seconds of a message by the two nodes that it was between; on one node by its ranks."""
    pairs = {}
    for one in result.probe.collectives if result.probe is not None else ():
        # A file may hold anything.
        if len(one.pair) == 2 and min(one.pair) >= 0 and max(one.pair) < len(result.ranks) and one.seconds > 0:
            first, second = (result.ranks[rank].get("host") if one.nodes > 1 else f"rank {rank}" for rank in one.pair)
            pairs[printable_excerpt(str(first)), printable_excerpt(str(second))] = one.seconds
    return pairs


def _finding(
    cluster: str, what: str, kind: str, readings_s: Mapping[str, Sequence[float]], slow: Sequence[str],
    slow_nodes: tuple[str, ...],
) -> Finding:  # fmt: skip
    counts = [len(own) for own in readings_s.values()]
    measured = f"{pluralize(len(readings_s), kind)}, {pluralize(min(counts), 'launch', 'launches')} each or more"
    correction = f"Holm's correction, family-wise level {format_percent(OUTLIER_LEVEL)}"
    why = f"{measured}, one-sided tests against all others, {correction}"
    sure: Certainty = SIGNIFICANT if slow else OBSERVED
    text, settle = f"no {kind} is slower than the others", ""
    if slow:
        text = f"slower than the other {kind}s: {join_words(slow)}"
    elif min(counts) < MIN_LAUNCHES_T_TEST:
        sure, why, settle = INCONCLUSIVE, measured, "set `repeats = 5` in the sweep"
        text = f"not enough launches to name slow {kind}s"
    return Finding(
        "node", printable_excerpt(f"{what} on {cluster}"), printable_excerpt(text), sure, why, settle, cluster=cluster,
        slow_nodes=slow_nodes,
    )  # fmt: skip
