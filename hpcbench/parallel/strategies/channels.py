"""Layers shared by their channels, alone and within replicas."""

from __future__ import annotations

from hpcbench.parallel.entry import Option, Strategy

_OPTIONS = {
    "form": Option(
        str,
        "sharded",
        "between layers: activations split by channels, or whole on every rank",
        ("sharded", "gathered"),
    ),
    "split_last": Option(bool, False, "the last layer is split, too"),
}

STRATEGIES = {
    "filter": Strategy(
        own_degree="tp_degree",
        runtime="hpcbench.worker.strategies.channels:Filter",
        description="every layer's output channels shared by the ranks: each computes some filters",
        options=_OPTIONS,
        limit="hpcbench.parallel.channel_limits:excluded",
        hybrid=("dp_degree",),
        cost="hpcbench.oracle.strategies.channels:Filter",
    ),
    "channel": Strategy(
        own_degree="tp_degree",
        runtime="hpcbench.worker.strategies.channels:Channel",
        description="every layer's input channels shared by the ranks: each adds its part to every output",
        options=_OPTIONS,
        limit="hpcbench.parallel.channel_limits:excluded",
        hybrid=("dp_degree",),
        cost="hpcbench.oracle.strategies.channels:Channel",
    ),
}

ALIASES = {"data_filter": "filter", "data_channel": "channel"}
