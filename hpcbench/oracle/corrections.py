"""Measured collectives laid over the formulas: what a call of this operation among so many ranks takes on its links."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

from hpcbench.oracle.collectives import Span, Wire
from hpcbench.oracle.machine import CollectiveSample


def corrected(
    span: Span, operation: str, samples: Sequence[CollectiveSample], payload_bytes: float = float("inf")
) -> Span:
    """``span`` with the latency and the time per byte that were measured for ``operation`` on links of that kind.

    Of several measured for the same ranks, each for its own sizes, the one for ``payload_bytes`` counts.

    Between two measured numbers of ranks both go in proportion to the logarithms; beyond them the nearest holds. An
    operation that was not measured is taken to be as all_reduce.
    """
    crosses = span.nodes > 1
    there = [one for one in samples if (one.nodes > 1) == crosses]
    known = [one for one in there if one.operation == operation] or [
        one for one in there if one.operation == "all_reduce"
    ]
    known = _in_band(known, payload_bytes)
    if not known:
        return span
    latency_s, ratio = _between(sorted(known, key=lambda one: one.ranks), span.ranks)
    wire = span.inter_node if crosses else span.intra_node
    measured = Wire(latency_s, wire.beta_s_per_byte * ratio)
    # What was measured is a step's latency, whichever link it crosses.
    return span._replace(inter_node=measured, by_hop=False) if crosses else span._replace(intra_node=measured)


def _in_band(known: Sequence[CollectiveSample], payload_bytes: float) -> list[CollectiveSample]:
    chosen: dict[int, CollectiveSample] = {}
    for one in sorted(known, key=lambda one: one.from_bytes):
        if one.from_bytes <= payload_bytes or one.ranks not in chosen:
            chosen[one.ranks] = one
    return list(chosen.values())


def _between(known: Sequence[CollectiveSample], ranks: int) -> tuple[float, float]:
    below = [one for one in known if one.ranks <= ranks]
    above = [one for one in known if one.ranks >= ranks]
    if not below or not above or below[-1].ranks == above[0].ranks:
        one = below[-1] if below else above[0]
        return one.latency_s, one.beta_ratio
    low, high = below[-1], above[0]
    part = log(ranks / low.ranks) / log(high.ranks / low.ranks)
    latency_s = low.latency_s + (high.latency_s - low.latency_s) * part
    return latency_s, exp(log(low.beta_ratio) * (1 - part) + log(high.beta_ratio) * part)
